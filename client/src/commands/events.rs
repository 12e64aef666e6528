//! `muster events`.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use muster_types::event::{EventRecord, EventType};
use serde_json::{Map, Value};

use super::event_log;
use super::list::{ListOptions, ListView, parse_condition};
use super::lookup::{NamedType, resolve};
use super::session::Session;
use crate::api::{EventQuery, ObjectPath};
use crate::output::{Table, compact, or_dash};
use crate::time::format_utc;

/// Arguments of `muster events`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub struct Arguments {
    /// Print the events of everything that you may see, as they happen
    #[arg(short, long)]
    follow: bool,
    /// Show only events of this type
    #[arg(long = "type", value_name = "TYPE", value_parser = event_types(), requires = "follow")]
    event_type: Option<String>,
    #[command(subcommand)]
    object: Option<Command>,
}

/// Commands for events, by type of the object.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show the events of a namespace
    Namespace {
        name: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the events of a node
    Node {
        name: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the events of a network
    Network {
        network: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the events of an instance
    Instance {
        instance: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the events of an artifact
    Artifact {
        artifact: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the events of a blob
    Blob {
        uuid: String,
        #[command(flatten)]
        filter: EventFilter,
    },
}

/// Selects the events to show.
#[derive(Debug, Args)]
pub struct EventFilter {
    /// Maximum number of events, at most 1000; the default is 100
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Show only events of this type
    #[arg(long = "type", value_name = "TYPE", value_parser = event_types())]
    event_type: Option<String>,
    /// Only events with this value; FIELD:PREFIX* for a prefix; may be repeated
    #[arg(long, value_name = "FIELD:VALUE", value_parser = parse_condition, conflicts_with = "follow")]
    filter: Vec<String>,
    /// Columns to show: those of the table, or fields of the events
    #[arg(long, value_name = "COLUMN,...", value_delimiter = ',', conflicts_with = "follow")]
    columns: Vec<String>,
    /// Print the newest events, oldest first, and then new ones as they happen
    #[arg(short, long)]
    follow: bool,
}

const LIST: ListView<EventRecord> =
    ListView { table, wide: &["duration", "request_id", "event_uuid"], order: &[], watched: &[] };

fn event_types() -> PossibleValuesParser {
    PossibleValuesParser::new(EventType::ALL.iter().map(|event_type| event_type.as_str()))
}

pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    let Some(mut command) = arguments.object else {
        return event_log::follow_all(session, arguments.event_type.as_deref()).await;
    };
    match &mut command {
        Command::Network { network, .. } => resolve(client, NamedType::Network, network, None).await?,
        Command::Instance { instance, .. } => resolve(client, NamedType::Instance, instance, None).await?,
        Command::Artifact { artifact, .. } => resolve(client, NamedType::Artifact, artifact, None).await?,
        Command::Namespace { .. } | Command::Node { .. } | Command::Blob { .. } => {}
    }
    let (object, filter) = match &command {
        Command::Namespace { name, filter } => (ObjectPath::Namespace(name), filter),
        Command::Node { name, filter } => (ObjectPath::Node(name), filter),
        Command::Network { network, filter } => (ObjectPath::Network(network), filter),
        Command::Instance { instance, filter } => (ObjectPath::Instance(instance), filter),
        Command::Artifact { artifact, filter } => (ObjectPath::Artifact(artifact), filter),
        Command::Blob { uuid, filter } => (ObjectPath::Blob(uuid), filter),
    };
    show(session, object, filter).await
}

/// Prints the events of an object.
pub(super) async fn show(
    session: &Session,
    object: ObjectPath<'_>,
    filter: &EventFilter,
) -> anyhow::Result<()> {
    let query = EventQuery {
        limit: filter.limit,
        event_type: filter.event_type.clone(),
        filter: filter.filter.clone(),
    };
    if filter.follow {
        return event_log::follow_object(session, object, &query).await;
    }
    let options = ListOptions { columns: filter.columns.clone(), ..ListOptions::default() };
    session.list(&options, &LIST, || session.client.events(object, &query)).await
}

fn table(events: Vec<EventRecord>) -> Table {
    Table::new(&["TIME", "TYPE", "NODE"], &["MESSAGE", "EXTRA"]).rows(events.into_iter().map(|event| {
        let extra = or_dash(format_fields(&event.extra));
        [format_utc(event.timestamp), event.event_type, or_dash(event.node), event.message, extra]
    }))
}

/// Formats fields as `name=value` pairs, quoting values with white space.
pub(super) fn format_fields(extra: &Map<String, Value>) -> String {
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
    fn shows_an_event_in_one_line_with_its_fields() {
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
