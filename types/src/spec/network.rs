//! The requested network interfaces of an instance.

use serde_json::Value;

use super::fields::{Fields, ValidationFindings};
use crate::address::MacAddress;
use crate::{Error, Result};

/// A requested network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkSpec {
    /// The id or name of the network.
    pub network: String,
    pub mac: Option<MacAddress>,
    pub address: AddressSpec,
    pub model: String,
    pub float: bool,
}

/// The requested address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressSpec {
    Any,
    None,
    /// The caller's text, which is parsed when the network is known.
    Fixed(String),
}

/// Parses the `network` list of an instance, which may be absent.
pub fn parse_networks(value: Option<&Value>, findings: &mut ValidationFindings) -> Result<Vec<NetworkSpec>> {
    let elements = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(elements)) => elements,
        Some(_) => return Err(Error::Invalid("network: Not a valid list.".into())),
    };
    let parse = |(at, element)| parse_network(element, &format!("network[{at}]"), findings);
    elements.iter().enumerate().map(parse).collect()
}

/// Parses an interface; `path` is its name in error messages.
pub fn parse_network(value: &Value, path: &str, findings: &mut ValidationFindings) -> Result<NetworkSpec> {
    let Value::Object(values) = value else {
        return Err(Error::Invalid("network specification should contain JSON objects".into()));
    };
    let known = ["network_uuid", "macaddress", "address", "model", "float"];
    let fields = Fields::new(path, values, &known, findings)?;
    let Some(network) = fields.filled_text("network_uuid")? else {
        return Err(Error::Invalid("network specification is missing network_uuid".into()));
    };
    // Terraform cannot omit the MAC address and sends an empty one.
    let mac = match fields.filled_text("macaddress")?.map(str::parse::<MacAddress>) {
        None => None,
        Some(Ok(mac)) => Some(mac),
        Some(Err(_)) => return fields.reject("macaddress", "String does not match expected pattern."),
    };
    let address = match fields.text("address")? {
        None => AddressSpec::Any,
        Some(text) if text.is_empty() || text.eq_ignore_ascii_case("none") => AddressSpec::None,
        Some(text) => AddressSpec::Fixed(text.to_owned()),
    };
    // The lowest bit of the first byte marks a multicast address.
    if mac.is_some_and(|mac: MacAddress| mac.0[0] & 1 == 1 || mac.0 == [0; 6]) {
        return fields.reject("macaddress", "Must be the address of one device.");
    }
    let model = fields.model("model", fields.filled_text("model")?)?;
    Ok(NetworkSpec {
        network: network.to_owned(),
        mac,
        address,
        model: model.unwrap_or_else(|| "virtio".into()),
        float: parse_float(&fields, findings)?,
    })
}

/// Parses whether a floating address is requested. Unless the mode is `enforce`, an unrecognized string means yes.
fn parse_float(fields: &Fields<'_>, findings: &mut ValidationFindings) -> Result<bool> {
    let Some(value) = fields.get("float") else { return Ok(false) };
    match (parse_boolean(value), value) {
        (Some(float), _) => Ok(float),
        (None, Value::String(_)) => {
            findings.add(fields.error_text("float", "Not a valid boolean."))?;
            Ok(true)
        }
        (None, _) => fields.reject("float", "Not a valid boolean."),
    }
}

/// Parses a boolean in any notation of released clients.
fn parse_boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::Number(number) => [(0.0, false), (1.0, true)]
            .into_iter()
            .find(|(spelling, _)| number.as_f64() == Some(*spelling))
            .map(|(_, meaning)| meaning),
        Value::String(text) => match text.as_str() {
            "t" | "T" | "true" | "True" | "TRUE" | "on" | "On" | "ON" | "y" | "Y" | "yes" | "Yes" | "YES"
            | "1" => Some(true),
            "f" | "F" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" | "n" | "N" | "no" | "No"
            | "NO" | "0" => Some(false),
            _ => None,
        },
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}
