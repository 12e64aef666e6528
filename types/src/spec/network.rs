//! Interfaces as callers ask for them.

use serde_json::Value;

use super::fields::{Fields, ValidationFindings};
use crate::address::MacAddress;
use crate::{Error, Result};

/// An interface as a caller asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Id or name of the network.
    pub network: String,
    pub mac: Option<MacAddress>,
    pub address: AddressSpec,
    pub model: String,
    pub float: bool,
}

/// Which address an interface is to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressSpec {
    Any,
    None,
    /// As the caller wrote it: whether it is one is found out when the network is known.
    Fixed(String),
}

/// Reads the `network` list of an instance; none is fine.
pub fn parse_networks(value: Option<&Value>, findings: &mut ValidationFindings) -> Result<Vec<NetworkSpec>> {
    let elements = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(elements)) => elements,
        Some(_) => return Err(Error::Invalid("network: Not a valid list.".into())),
    };
    let read = |(at, element)| parse_network(element, &format!("network[{at}]"), findings);
    elements.iter().enumerate().map(read).collect()
}

/// Reads one interface; `path` is what refusals call it.
pub fn parse_network(value: &Value, path: &str, findings: &mut ValidationFindings) -> Result<NetworkSpec> {
    let Value::Object(values) = value else {
        return Err(Error::Invalid("network specification should contain JSON objects".into()));
    };
    let known = ["network_uuid", "macaddress", "address", "model", "float"];
    let fields = Fields::new(path, values, &known, findings)?;
    let Some(network) = fields.filled_text("network_uuid")? else {
        return Err(Error::Invalid("network specification is missing network_uuid".into()));
    };
    // An empty hardware address is one that was not supplied: terraform cannot leave it out, and nobody else would
    // write it.
    let mac = match fields.filled_text("macaddress")?.map(str::parse::<MacAddress>) {
        None => None,
        Some(Ok(mac)) => Some(mac),
        Some(Err(_)) => return fields.refuse("macaddress", "String does not match expected pattern."),
    };
    let address = match fields.text("address")? {
        None => AddressSpec::Any,
        Some(text) if text.is_empty() || text.eq_ignore_ascii_case("none") => AddressSpec::None,
        Some(text) => AddressSpec::Fixed(text.to_owned()),
    };
    // The lowest bit of the first byte says that it is the address of a group.
    if mac.is_some_and(|mac: MacAddress| mac.0[0] & 1 == 1 || mac.0 == [0; 6]) {
        return fields.refuse("macaddress", "Must be the address of one device.");
    }
    let model = fields.model("model", fields.filled_text("model")?)?;
    Ok(NetworkSpec {
        network: network.to_owned(),
        mac,
        address,
        model: model.unwrap_or_else(|| "virtio".into()),
        float: float(&fields, findings)?,
    })
}

/// Whether a floating address is wanted. Without enforcement every text that says something else than no says yes.
fn float(fields: &Fields<'_>, findings: &mut ValidationFindings) -> Result<bool> {
    let Some(value) = fields.get("float") else { return Ok(false) };
    match (boolean(value), value) {
        (Some(float), _) => Ok(float),
        (None, Value::String(_)) => {
            findings.add(fields.text_of("float", "Not a valid boolean."))?;
            Ok(true)
        }
        (None, _) => fields.refuse("float", "Not a valid boolean."),
    }
}

/// The spellings of released clients.
fn boolean(value: &Value) -> Option<bool> {
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
