//! Instances with an empty disk: real processes that do not load the processors.

use std::collections::BTreeMap;
use std::time::Duration;

use muster_testing::wait;
use reqwest::Method;
use serde_json::{Value, json};

use super::Caller;
use crate::client::{Client, Told};
use crate::referee::running_vms;

/// The instances that the caller may have at a time.
const MAX_INSTANCES: usize = 3;
const PREFIX: &str = "vm";
const INTERVAL: Duration = Duration::from_millis(300);

/// An instance, as far as the responses to its caller describe it.
#[derive(Debug, Default)]
pub(crate) struct ExpectedInstance {
    /// `None` if the creation got no response.
    id: Option<String>,
    /// Whether it was acknowledged as on or off; `None` before, and if the outcome of a later call is unknown.
    power: Option<bool>,
    /// Set when the deletion was acknowledged; `Some(false)` if its outcome is unknown.
    deleted: Option<bool>,
    /// The rejection, if the creation was rejected.
    rejected: Option<String>,
}

/// The instances that the caller created, by name.
pub(crate) type ExpectedInstances = BTreeMap<String, ExpectedInstance>;

/// Creates and deletes instances, and changes their power state.
pub(super) fn run(mut caller: Caller, network: &str) -> ExpectedInstances {
    let (mut expected, mut own) = (ExpectedInstances::new(), Vec::<String>::new());
    while caller.next() {
        let choice = caller.random.u8(..) % 4;
        let index = if own.is_empty() { 0 } else { caller.random.usize(..own.len()) };
        match choice {
            0 if own.len() >= MAX_INSTANCES - 1 => {
                let instance = expected.get_mut(&own[index]).unwrap();
                let path = format!("/instances/{}", instance.id.as_ref().unwrap());
                match caller.call(Method::DELETE, &path, None) {
                    Told::Done(_) => instance.deleted = Some(true),
                    Told::Failed(_) | Told::Unknown => instance.deleted = Some(false),
                }
                own.remove(index);
            }
            1..=2 if !own.is_empty() => {
                let instance = expected.get_mut(&own[index]).unwrap();
                let is_on = choice == 1;
                let verb = if is_on { "poweron" } else { "poweroff" };
                let path = format!("/instances/{}/{verb}", instance.id.as_ref().unwrap());
                match caller.call(Method::POST, &path, None) {
                    Told::Done(_) => instance.power = Some(is_on),
                    // It is not ready or has failed.
                    Told::Failed(reason) if reason.starts_with('4') => {}
                    // A part of it may have been done before it failed.
                    Told::Failed(_) | Told::Unknown => instance.power = None,
                }
            }
            _ if own.len() < MAX_INSTANCES => {
                let name = caller.name(PREFIX);
                let instance = create(&mut caller, &name, network);
                if instance.id.is_some() {
                    own.push(name.clone());
                }
                expected.insert(name, instance);
            }
            _ => {}
        }
        wait(INTERVAL);
    }
    expected
}

fn create(caller: &mut Caller, name: &str, network: &str) -> ExpectedInstance {
    let mut body = json!({
        "name": name, "cpus": 1, "memory": 64, "disk": [{ "size": 1 }], "network": [{ "network_uuid": network }],
    });
    if caller.random.bool() {
        body["placed_on"] = format!("m{}", caller.host() + 1).into();
    }
    match caller.call(Method::POST, "/instances", Some(&body)) {
        Told::Done(record) => {
            ExpectedInstance { id: record["uuid"].as_str().map(str::to_owned), ..ExpectedInstance::default() }
        }
        Told::Failed(reason) => ExpectedInstance { rejected: Some(reason), ..ExpectedInstance::default() },
        Told::Unknown => ExpectedInstance::default(),
    }
}

/// Compares what the caller was told with the instances that exist, through a host. A power failure ends VMs.
pub(crate) fn check(
    client: &Client,
    host: usize,
    expected: &ExpectedInstances,
    is_power_failure: bool,
) -> Vec<String> {
    let instances = match client.get(host, "/instances") {
        Ok(instances) => instances,
        Err(error) => return vec![format!("failed to list instances: {error}")],
    };
    let running = running_vms();
    let existing: BTreeMap<&str, &Value> = instances
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|record| Some((record["name"].as_str()?, record)))
        .collect();
    let mut violations = Vec::new();
    for (name, instance) in expected {
        let found = existing.get(name.as_str());
        let is_running = instance.id.as_ref().is_some_and(|id| running.contains_key(id));
        match (instance, found) {
            // A rejected instance may be kept in this state, with the reason.
            (ExpectedInstance { rejected: Some(reason), .. }, Some(record)) if record["state"] != "error" => {
                violations.push(format!("{name} exists, but its caller was told {reason}: {record}"));
            }
            (ExpectedInstance { id: Some(_), deleted: None, .. }, None) => {
                violations.push(format!("{name} was acknowledged and is lost"));
            }
            (ExpectedInstance { deleted: Some(true), .. }, Some(record)) => {
                violations.push(format!("{name} was deleted and is {}", record["state"]));
            }
            (ExpectedInstance { deleted: Some(true), .. }, None) if is_running => {
                violations.push(format!("{name} was deleted and runs"));
            }
            (ExpectedInstance { power: Some(false), deleted: None, .. }, Some(record)) if is_running => {
                violations.push(format!("{name} was powered off and runs: {record}"));
            }
            (ExpectedInstance { power: Some(true), deleted: None, .. }, Some(record))
                if !is_running && !is_power_failure =>
            {
                violations.push(format!("{name} was powered on and does not run: {record}"));
            }
            _ => {}
        }
    }
    violations
}

/// Requests the deletion of the instances of a round.
pub(crate) fn delete(client: &Client) -> Result<(), String> {
    let instances = client.get(0, "/instances")?;
    for instance in instances.as_array().into_iter().flatten() {
        let is_own = instance["name"].as_str().is_some_and(|name| name.starts_with(&format!("{PREFIX}-")));
        if is_own {
            client.delete(&format!("/instances/{}", instance["uuid"].as_str().unwrap_or_default()))?;
        }
    }
    Ok(())
}
