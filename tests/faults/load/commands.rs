//! Commands that run in the guests.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use muster_testing::wait;
use reqwest::Method;
use serde_json::json;

use super::Caller;
use crate::client::{Client, Told};
use crate::cluster::HEAL_TIMEOUT;

/// The file in a guest to which each command appends its id.
pub(crate) const OUTPUT_FILE: &str = "/run/ran";
/// How long a caller waits until it requests the next command.
const INTERVAL: Duration = Duration::from_millis(700);

/// A command, as its caller knows it.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) id: String,
    guest: String,
    told: Told,
}

impl Command {
    /// Compares what the caller was told with how often the command ran.
    pub(crate) fn violation(&self, state: Option<&String>, count: usize) -> Option<String> {
        let id = &self.id;
        match (&self.told, state.map(String::as_str)) {
            _ if count > 1 => Some(format!("{id} ran {count} times")),
            (Told::Failed(reason), _) if count > 0 => {
                Some(format!("{id} ran, but its caller was told {reason}"))
            }
            (Told::Done(_), Some("complete")) if count == 0 => {
                Some(format!("{id} is complete and did not run"))
            }
            _ => None,
        }
    }
}

/// The commands of a round.
#[derive(Debug, Default)]
pub(crate) struct Commands(Vec<Command>);

impl Commands {
    /// Returns the commands for a guest.
    pub(crate) fn of<'a>(&'a self, guest: &'a str) -> impl Iterator<Item = &'a Command> {
        self.0.iter().filter(move |command| command.guest == guest)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().filter(|command| matches!(command.told, Told::Done(_))).count()
    }

    /// Waits until all acknowledged commands have ended, and returns their states and which did not.
    pub(crate) fn wait_for_states(&self, client: &Client) -> (BTreeMap<String, String>, Vec<String>) {
        let (mut states, mut violations) = (BTreeMap::new(), Vec::new());
        let began = Instant::now();
        for command in &self.0 {
            let Told::Done(operation) = &command.told else { continue };
            let path = format!("/agentoperations/{}", operation["uuid"].as_str().unwrap_or_default());
            loop {
                let record = client.get(0, &path);
                let state = record.as_ref().ok().and_then(|record| record["state"].as_str());
                if let Some(state @ ("complete" | "error" | "expired" | "deleted")) = state {
                    states.insert(command.id.clone(), state.to_owned());
                    break;
                }
                if began.elapsed() > HEAL_TIMEOUT {
                    violations.push(format!("{} does not end: {record:?}", command.id));
                    break;
                }
                wait(Duration::from_millis(100));
            }
        }
        (states, violations)
    }
}

/// Requests commands.
pub(super) fn run(mut caller: Caller, guests: &[String]) -> Commands {
    let mut commands = Vec::new();
    while caller.next() {
        let (id, guest) = (caller.name("command"), guests[caller.random.usize(..guests.len())].clone());
        // The second write needs space on the disk of the host.
        let line = format!(
            "echo {id} >>{OUTPUT_FILE}; head -c 200000 /dev/urandom >/root/{id}; sync; rm /root/{id}"
        );
        let body = json!({ "command_line": line, "deadline_seconds": 30 });
        let told = caller.call(Method::POST, &format!("/instances/{guest}/agent/execute"), Some(&body));
        commands.push(Command { id, guest, told });
        wait(INTERVAL);
    }
    Commands(commands)
}
