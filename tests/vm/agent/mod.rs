//! Commands and files in guests, by way of the agent there.

mod across;
mod hostile;
mod interrupted;
mod released;
mod work;

use muster_test_cluster::Host;
use muster_testing::wait_for;
use reqwest::Method;
use serde_json::{Value, json};

use crate::PATIENCE;
use crate::console::Console;
use crate::instance::Instance;

/// What gives a guest room for large files.
fn roomy() -> Value {
    json!({ "disk": [{ "base": "label:tiny", "size": 1 }], "side_channels": ["sf-agent"] })
}

/// An instance whose agent is ready.
fn ready(machine: &Host, name: &str, changes: &Value) -> Instance {
    let instance = Instance::create(machine, name, changes);
    wait_until_ready(machine, &instance);
    instance
}

fn wait_until_ready(machine: &Host, instance: &Instance) -> Value {
    wait_for("the agent to be ready", PATIENCE, || {
        let record = instance.record(machine);
        let state = record["agent_state"].as_str().unwrap_or_default();
        state.starts_with("ready").then_some(record)
    })
}

/// The console of a guest that has been up for a while, logged in.
fn console(machine: &Host, instance: &Instance) -> Console {
    let mut console = instance.console(machine);
    // The prompt was there before we were.
    console.type_line("");
    console.log_in();
    console
}

/// Asks for something to be done in a guest.
fn ask(machine: &Host, instance: &Instance, what: &str, body: Value) -> Operation {
    let record = machine.post(&instance.path(&format!("/agent/{what}")), Some(body));
    Operation { uuid: record["uuid"].as_str().unwrap().to_owned() }
}

/// Runs a command line and answers its result.
fn execute(machine: &Host, instance: &Instance, line: &str) -> Value {
    let asked = ask(machine, instance, "execute", json!({ "command_line": line }));
    asked.wait_for(machine, "complete")["results"]["0"].clone()
}

/// What a command that must work writes.
fn said(machine: &Host, instance: &Instance, line: &str) -> String {
    let result = execute(machine, instance, line);
    assert_eq!(result["return-code"], 0, "{line}: {result}");
    result["stdout"].as_str().unwrap().to_owned()
}

/// Something to be done in a guest.
struct Operation {
    uuid: String,
}

impl Operation {
    fn record(&self, machine: &Host) -> Value {
        machine.get(&format!("/agentoperations/{}", self.uuid))
    }

    /// Waits until it is in a state, and fails if it comes to an end in another one.
    fn wait_for(&self, machine: &Host, state: &str) -> Value {
        wait_for(&format!("agent operation {} to be {state}", self.uuid), PATIENCE, || {
            let record = self.record(machine);
            let now = record["state"].as_str().unwrap();
            let ended = ["complete", "error", "expired", "deleted"].contains(&now);
            assert!(now == state || !ended, "not {state}: {record:#}\n{}", machine.log());
            (now == state).then_some(record)
        })
    }

    /// Waits until bytes have moved since it began.
    fn wait_for_progress(&self, machine: &Host) {
        let began = self.wait_for(machine, "executing")["last_progress"].clone();
        wait_for("bytes to move", PATIENCE, || {
            (self.record(machine)["last_progress"] != began).then_some(())
        });
    }

    /// Messages of its events.
    fn messages(&self, machine: &Host) -> Vec<String> {
        let events = machine.get(&format!("/agentoperations/{}/events", self.uuid));
        let messages = events.as_array().unwrap().iter().map(|event| event["message"].as_str().unwrap());
        messages.map(str::to_owned).collect()
    }

    fn delete(&self, machine: &Host) {
        let (status, answer) = machine.call(Method::DELETE, &format!("/agentoperations/{}", self.uuid), None);
        assert_eq!((status, &answer["state"]), (200, &json!("deleted")), "{answer}");
    }
}
