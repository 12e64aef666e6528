//! Agent operations in real guests.

mod commands_and_files;
mod hostile;
mod interrupted;
mod multi_host;
mod released;
mod terminal;

use muster_test_cluster::Host;
use muster_testing::wait_for;
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::console::Console;
use crate::instance::Instance;

/// Returns changes for an instance with an agent and disk space for large files.
fn large_disk() -> Value {
    json!({ "disk": [{ "base": "label:tiny", "size": 1 }], "side_channels": ["sf-agent"] })
}

/// Creates an instance and waits until its agent is ready.
fn create_ready(host: &Host, name: &str, changes: &Value) -> Instance {
    let instance = Instance::create(host, name, changes);
    wait_until_ready(host, &instance);
    instance
}

fn wait_until_ready(host: &Host, instance: &Instance) -> Value {
    wait_for("the agent to be ready", TIMEOUT, || {
        let record = instance.record(host);
        let state = record["agent_state"].as_str().unwrap_or_default();
        state.starts_with("ready").then_some(record)
    })
}

/// Logs in to the console of a guest that has already booted.
fn console(host: &Host, instance: &Instance) -> Console {
    let mut console = instance.console(host);
    // The prompt was printed before this connection.
    console.type_line("");
    console.log_in();
    console
}

/// Requests an agent operation.
fn request(host: &Host, instance: &Instance, kind: &str, body: Value) -> Operation {
    let record = host.post(&instance.path(&format!("/agent/{kind}")), Some(body));
    Operation { uuid: record["uuid"].as_str().unwrap().to_owned() }
}

/// Runs a command line and returns its result.
fn execute(host: &Host, instance: &Instance, line: &str) -> Value {
    let operation = request(host, instance, "execute", json!({ "command_line": line }));
    operation.wait_for(host, "complete")["results"]["0"].clone()
}

/// Runs a command line that must succeed and returns its standard output.
fn run(host: &Host, instance: &Instance, line: &str) -> String {
    let result = execute(host, instance, line);
    assert_eq!(result["return-code"], 0, "{line}: {result}");
    result["stdout"].as_str().unwrap().to_owned()
}

/// An agent operation.
struct Operation {
    uuid: String,
}

impl Operation {
    fn record(&self, host: &Host) -> Value {
        host.get(&format!("/agentoperations/{}", self.uuid))
    }

    /// Waits for a state. Fails if the operation ends in another one.
    fn wait_for(&self, host: &Host, state: &str) -> Value {
        wait_for(&format!("agent operation {} to be {state}", self.uuid), TIMEOUT, || {
            let record = self.record(host);
            let now = record["state"].as_str().unwrap();
            let ended = ["complete", "error", "expired", "deleted"].contains(&now);
            assert!(now == state || !ended, "not {state}: {record:#}\n{}", host.log());
            (now == state).then_some(record)
        })
    }

    /// Waits until the operation has transferred bytes.
    fn wait_for_progress(&self, host: &Host) {
        let began = self.wait_for(host, "executing")["last_progress"].clone();
        wait_for("progress", TIMEOUT, || (self.record(host)["last_progress"] != began).then_some(()));
    }

    /// Returns the messages of its events.
    fn messages(&self, host: &Host) -> Vec<String> {
        let events = host.get(&format!("/agentoperations/{}/events", self.uuid));
        let messages = events.as_array().unwrap().iter().map(|event| event["message"].as_str().unwrap());
        messages.map(str::to_owned).collect()
    }

    fn delete(&self, host: &Host) {
        let (status, response) = host.call(Method::DELETE, &format!("/agentoperations/{}", self.uuid), None);
        assert_eq!((status, &response["state"]), (200, &json!("deleted")), "{response}");
    }
}
