//! Networks and their metadata.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};

use super::Caller;
use crate::client::{Client, Told};

/// The networks that one caller may have at a time.
const MAX_NETWORKS: usize = 6;
const PREFIX: &str = "net";

/// A network, as far as the responses to its caller describe it.
#[derive(Debug, Default)]
pub(crate) struct ExpectedNetwork {
    /// `None` if the creation got no response.
    id: Option<String>,
    /// The acknowledged value of its metadata.
    value: Option<u64>,
    /// Later values, whose outcome is unknown.
    possible_values: Vec<u64>,
    /// Set when the deletion was acknowledged; `Some(false)` if its outcome is unknown.
    deleted: Option<bool>,
    /// The rejection, if the creation was rejected.
    rejected: Option<String>,
}

/// The networks that callers created, by name.
pub(crate) type ExpectedNetworks = BTreeMap<String, ExpectedNetwork>;

/// Creates, changes and deletes networks.
pub(super) fn run(mut caller: Caller) -> ExpectedNetworks {
    let (mut expected, mut own) = (ExpectedNetworks::new(), Vec::<String>::new());
    while caller.next() {
        let choice = caller.random.u8(..) % 4;
        let index = if own.is_empty() { 0 } else { caller.random.usize(..own.len()) };
        match choice {
            1 if own.len() >= MAX_NETWORKS / 2 => {
                let network = expected.get_mut(&own[index]).unwrap();
                let path = format!("/networks/{}", network.id.as_ref().unwrap());
                network.deleted = match caller.call(Method::DELETE, &path, None) {
                    Told::Done(_) => Some(true),
                    Told::Unknown => Some(false),
                    Told::Failed(_) => continue,
                };
                own.remove(index);
            }
            1..=3 if !own.is_empty() => {
                let network = expected.get_mut(&own[index]).unwrap();
                let (path, value) =
                    (format!("/networks/{}/metadata/value", network.id.as_ref().unwrap()), caller.counter);
                match caller.call(Method::PUT, &path, Some(&json!({ "value": value }))) {
                    Told::Done(_) => (network.value, network.possible_values) = (Some(value), vec![]),
                    Told::Unknown => network.possible_values.push(value),
                    Told::Failed(_) => {}
                }
            }
            _ if own.len() < MAX_NETWORKS => {
                let name = caller.name(PREFIX);
                let network = create(&mut caller, &name);
                if network.id.is_some() {
                    own.push(name.clone());
                }
                expected.insert(name, network);
            }
            _ => {}
        }
    }
    expected
}

fn create(caller: &mut Caller, name: &str) -> ExpectedNetwork {
    let netblock = format!("10.{}.{}.0/24", 100 + caller.random.u8(..100), caller.counter % 250);
    let body = json!({ "name": name, "netblock": netblock, "provide_dhcp": false, "provide_nat": false });
    match caller.call(Method::POST, "/networks", Some(&body)) {
        Told::Done(record) => {
            ExpectedNetwork { id: record["uuid"].as_str().map(str::to_owned), ..ExpectedNetwork::default() }
        }
        Told::Failed(reason) => ExpectedNetwork { rejected: Some(reason), ..ExpectedNetwork::default() },
        Told::Unknown => ExpectedNetwork::default(),
    }
}

/// Compares what callers were told with the networks that exist, through a host.
pub(crate) fn check(client: &Client, host: usize, expected: &ExpectedNetworks) -> Vec<String> {
    let networks = match client.get(host, "/networks") {
        Ok(networks) => networks,
        Err(error) => return vec![format!("failed to list networks: {error}")],
    };
    let existing: BTreeMap<&str, &Value> = networks
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|record| Some((record["name"].as_str()?, record)))
        .collect();
    expected
        .iter()
        .filter_map(|(name, network)| violation(name, network, existing.get(name.as_str())))
        .collect()
}

fn violation(name: &str, network: &ExpectedNetwork, found: Option<&&Value>) -> Option<String> {
    match (network, found) {
        (ExpectedNetwork { rejected: Some(reason), .. }, Some(_)) => {
            Some(format!("{name} exists, but its caller was told {reason}"))
        }
        (ExpectedNetwork { id: Some(_), deleted: None, .. }, None) => {
            Some(format!("{name} was acknowledged and is lost"))
        }
        (ExpectedNetwork { deleted: Some(true), .. }, Some(record)) => {
            Some(format!("{name} was deleted and is {}", record["state"]))
        }
        (ExpectedNetwork { value, possible_values, deleted: None, .. }, Some(record)) => {
            let found = record["metadata"]["value"].as_u64();
            let is_possible = found.is_some_and(|found| possible_values.contains(&found));
            (found != *value && !is_possible)
                .then(|| format!("the value of {name} is {found:?}, not {value:?} or {possible_values:?}"))
        }
        _ => None,
    }
}

/// Requests the deletion of the networks of a round.
pub(crate) fn delete(client: &Client) -> Result<(), String> {
    let networks = client.get(0, "/networks")?;
    for network in networks.as_array().into_iter().flatten() {
        let is_own = network["name"].as_str().is_some_and(|name| name.starts_with(&format!("{PREFIX}-")));
        if is_own {
            client.delete(&format!("/networks/{}", network["uuid"].as_str().unwrap_or_default()))?;
        }
    }
    Ok(())
}
