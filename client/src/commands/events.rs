//! `muster events`.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use muster_types::event::{EventRecord, EventType};
use serde_json::{Map, Value};

use super::Session;
use crate::api::{EventQuery, Object};
use crate::output::{Table, compact, or_dash};
use crate::time::iso;

/// The commands about events, by what the events happened to.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Events of a namespace
    Namespace {
        name: String,
        #[command(flatten)]
        which: Which,
    },
    /// Events of a node
    Node {
        name: String,
        #[command(flatten)]
        which: Which,
    },
    /// Events of a network
    Network {
        network: String,
        #[command(flatten)]
        which: Which,
    },
    /// Events of an instance
    Instance {
        instance: String,
        #[command(flatten)]
        which: Which,
    },
    /// Events of an artifact
    Artifact {
        artifact: String,
        #[command(flatten)]
        which: Which,
    },
    /// Events of a blob
    Blob {
        uuid: String,
        #[command(flatten)]
        which: Which,
    },
}

/// Which events to show.
#[derive(Debug, Args)]
pub struct Which {
    /// How many at most; the server answers 100 when not told, and never more than 1000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Only events of this type
    #[arg(long = "type", value_name = "TYPE", value_parser = types())]
    event_type: Option<String>,
}

fn types() -> PossibleValuesParser {
    PossibleValuesParser::new(EventType::ALL.iter().map(|event_type| event_type.as_str()))
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let (object, which) = match &command {
        Command::Namespace { name, which } => (Object::Namespace(name), which),
        Command::Node { name, which } => (Object::Node(name), which),
        Command::Network { network, which } => (Object::Network(network), which),
        Command::Instance { instance, which } => (Object::Instance(instance), which),
        Command::Artifact { artifact, which } => (Object::Artifact(artifact), which),
        Command::Blob { uuid, which } => (Object::Blob(uuid), which),
    };
    show(session, object, which).await
}

/// Prints the events of an object.
pub(super) async fn show(session: &Session, object: Object<'_>, which: &Which) -> anyhow::Result<()> {
    let query = EventQuery { limit: which.limit, event_type: which.event_type.clone() };
    session.show(session.client.events(object, &query).await?, table)
}

fn table(events: Vec<EventRecord>) -> Table {
    Table::new(&["TIME", "TYPE", "NODE"], &["MESSAGE", "EXTRA"]).rows(events.into_iter().map(|event| {
        let extra = or_dash(pairs(&event.extra));
        [iso(event.timestamp), event.event_type, or_dash(event.node), event.message, extra]
    }))
}

/// `name=value` pairs; a value with white space in it is quoted.
fn pairs(extra: &Map<String, Value>) -> String {
    let pairs: Vec<String> = extra
        .iter()
        .map(|(name, value)| {
            let text = compact(value);
            let bare = !text.is_empty() && !text.contains(char::is_whitespace);
            format!("{name}={}", if bare { text } else { value.to_string() })
        })
        .collect();
    pairs.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn an_event_is_one_line_with_its_extra_as_pairs() {
        let event = json!({
            "event_uuid": "x", "request_id": null, "timestamp": 1_767_225_600.25, "event_type": "audit", "type": "audit",
            "message": "token used", "extra": { "key": "deploy", "none": "", "path": "/a b", "size": 7 }, "node": "sim-1",
            "fqdn": "sim-1", "duration": null
        });
        let text = table(from_value(json!([event])).unwrap()).render(None);
        let line =
            "2026-01-01T00:00:00.250Z  audit  sim-1  token used  key=deploy none=\"\" path=\"/a b\" size=7";
        assert_eq!(text.lines().nth(1), Some(line));
        assert_eq!(text.lines().count(), 2);
    }
}
