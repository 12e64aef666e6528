//! `muster top`: which nodes and instances are busy.

use std::cmp::Reverse;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use clap::Args;
use futures_util::future::join_all;
use muster_types::event::{EventRecord, EventType};
use muster_types::instance::{InstanceRecord, PowerState};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::cluster;
use super::instance_tables::format_megabytes;
use super::session::Session;
use crate::api::{ApiResponse, ClusterResources, EventQuery, ListQuery, ObjectPath};
use crate::output::{Table, or_dash};
use crate::terminal::write_output;

/// The number of instances whose usage is requested at the same time.
const CONCURRENT_QUERIES: usize = 8;
/// Moves the cursor of a terminal to the upper left corner and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Arguments of `muster top`.
#[derive(Debug, Args)]
#[command(
    after_help = "The CPU usage of an instance is the average between its last two usage events, which nodes record every \
                  USAGE_EVENT_FREQUENCY seconds; 100 % is one CPU. Only the namespace system sees the nodes."
)]
pub struct Arguments {
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    interval: u64,
    /// Print once and end, as if the output is not a terminal
    #[arg(long)]
    once: bool,
    /// Maximum number of instances
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
}

/// A running instance and its CPU usage in percent of one CPU, if it is known.
struct BusyInstance {
    record: InstanceRecord,
    cpu_percent: Option<f64>,
}

pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<()> {
    let is_live = !arguments.once && !session.is_structured() && io::stdout().is_terminal();
    loop {
        let (resources, instances) = tokio::join!(
            // Other namespaces than system may not see it.
            async { session.client.cluster_resources().await.ok() },
            busy_instances(session, arguments.limit)
        );
        let instances = instances?;
        if session.is_structured() {
            let resources = resources.map_or(Value::Null, |resources| resources.json().clone());
            return session.print_value(&json!({ "resources": resources, "instances": as_json(&instances) }));
        }
        let resources = resources.map(ApiResponse::value).transpose()?;
        let mut text = if is_live { CLEAR.to_owned() } else { String::new() };
        text.push_str(&render(resources, instances));
        if !write_output(&mut io::stdout(), text.as_bytes())? || !is_live {
            return Ok(());
        }
        sleep(Duration::from_secs(arguments.interval)).await;
    }
}

/// Returns the running instances that use the most CPU time.
async fn busy_instances(session: &Session, limit: usize) -> anyhow::Result<Vec<BusyInstance>> {
    let client = &session.client;
    let mut running = client.instances(false, &ListQuery::default()).await?.value()?;
    running.retain(|instance| instance.power_state == PowerState::On);
    let query = EventQuery {
        limit: Some(2),
        event_type: Some(EventType::Usage.to_string()),
        ..EventQuery::default()
    };
    let query = &query;
    let mut busy = vec![];
    for chunk in running.chunks(CONCURRENT_QUERIES) {
        let queries = chunk.iter().map(|record| async move {
            let id = record.uuid.to_string();
            let events = client.events(ObjectPath::Instance(&id), query).await;
            // The instance may have been deleted in the meantime.
            let events = events.and_then(ApiResponse::value).unwrap_or_default();
            BusyInstance { record: record.clone(), cpu_percent: cpu_percent(&events) }
        });
        busy.extend(join_all(queries).await);
    }
    // Tenths of a percent, because floats have no order; instances of unknown usage come last.
    busy.sort_by_key(|instance| {
        let tenths = instance.cpu_percent.map_or(-1, |percent| (percent * 10.0) as i64);
        (Reverse(tenths), instance.record.name.clone())
    });
    busy.truncate(limit);
    Ok(busy)
}

/// Returns the CPU usage between two usage events, newest first, in percent of one CPU.
fn cpu_percent(events: &[EventRecord]) -> Option<f64> {
    let [newer, older] = events else { return None };
    let cpu_time = |event: &EventRecord| event.extra.get("cpu usage")?.get("cpu time ns")?.as_f64();
    let (used, elapsed) = (cpu_time(newer)? - cpu_time(older)?, newer.timestamp - older.timestamp);
    // The counter starts again with the VM.
    (used >= 0.0 && elapsed > 0.0).then(|| used / 1e9 / elapsed * 100.0)
}

fn render(resources: Option<ClusterResources>, instances: Vec<BusyInstance>) -> String {
    let mut text = String::new();
    if let Some(resources) = resources {
        text.push_str(&cluster::resources(resources).render(None));
        text.push('\n');
    }
    let table = Table::new(&["INSTANCE", "CPU %", "CPUS", "MEMORY", "NODE", "NAMESPACE"], &[]);
    let table = table.rows(instances.into_iter().map(|BusyInstance { record, cpu_percent }| {
        [
            record.name,
            cpu_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1}")),
            record.cpus.to_string(),
            format_megabytes(record.memory),
            or_dash(record.node.unwrap_or_default()),
            record.namespace,
        ]
    }));
    text + &table.render(None)
}

fn as_json(instances: &[BusyInstance]) -> Value {
    let instances = instances.iter().map(|BusyInstance { record, cpu_percent }| {
        json!({ "uuid": record.uuid, "name": record.name, "namespace": record.namespace, "node": record.node,
                "cpus": record.cpus, "memory": record.memory, "cpu_percent": cpu_percent })
    });
    instances.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::super::instance_tables::tests::example;
    use super::*;

    fn usage(timestamp: f64, cpu_time: u64) -> EventRecord {
        from_value(json!({
            "event_uuid": "x", "request_id": null, "timestamp": timestamp, "event_type": "usage", "type": "usage",
            "message": "usage", "extra": { "cpu usage": { "cpu time ns": cpu_time } }, "node": "a", "fqdn": "a",
            "duration": null
        }))
        .unwrap()
    }

    #[test]
    fn cpu_usage_is_the_average_between_two_events() {
        let percent = cpu_percent(&[usage(110.0, 16_000_000_000), usage(100.0, 1_000_000_000)]);
        assert_eq!(percent, Some(150.0));
        assert_eq!(cpu_percent(&[usage(110.0, 1), usage(100.0, 2)]), None, "the VM was restarted");
        assert_eq!(cpu_percent(&[usage(110.0, 1)]), None);
    }

    #[test]
    fn shows_instances_without_known_usage() {
        let instance = |cpu_percent| BusyInstance { record: example(&json!({})), cpu_percent };
        let text = render(None, vec![instance(Some(12.34)), instance(None)]);
        let mut lines = text.lines();
        assert!(lines.next().unwrap().starts_with("INSTANCE"), "{text}");
        assert!(lines.next().unwrap().contains("  12.3 "), "{text}");
        assert!(lines.next().unwrap().contains("  -  "), "{text}");
    }
}
