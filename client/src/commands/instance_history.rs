//! `muster instance why`: the history of an instance, derived from its record, events and operations, and its current state,
//! as the server explains it.

#[cfg(test)]
mod tests;

use anyhow::bail;
use muster_types::event::{EventRecord, EventType};
use muster_types::event_message::EventMessage;
use muster_types::instance::{InstanceRecord, InstanceState, PowerState};
use muster_types::operation::{OperationRecord, OperationState};
use muster_types::time::now;
use serde_json::{Map, Value, json};

use super::instance_refusal::{MAX_EVENTS, is_transient, rejected_nodes, stage_advice, stage_reason};
use super::instance_tables::{describe_disk_spec, format_megabytes};
use super::session::Session;
use super::why;
use crate::api::{Client, EventQuery, ListQuery, ObjectPath};
use crate::output::{self, compact, escape_control};
use crate::time::format_age;

/// Fields of an event that contain a reason.
const REASON_FIELDS: [&str; 3] = ["reason", "error", "error_message"];
/// Fields of an event that identify the requester.
const REQUESTER_FIELDS: [&str; 4] = ["caller", "keyname", "remote-address", "method"];

/// Prints the history of an instance.
pub(super) async fn show(session: &Session, instance: &str) -> anyhow::Result<()> {
    let client = &session.client;
    let response = match client.instance(instance).await {
        Err(error) if error.is_not_found() => {
            let Some(id) = find_deleted(client, instance).await? else { return Err(error.into()) };
            client.instance(&id).await?
        }
        response => response?,
    };
    let record = response.clone().value()?;
    let id = record.uuid.to_string();
    let query = EventQuery { limit: Some(MAX_EVENTS), ..EventQuery::default() };
    let all = ListQuery::default();
    let (events, operations, explanation) = tokio::try_join!(
        client.events(ObjectPath::Instance(&id), &query),
        client.instance_operations(&id, true, &all),
        client.explain(ObjectPath::Instance(&id)),
    )?;
    if session.is_structured() {
        return session.print_value(&json!({
            "instance": response.json(), "events": events.json(), "operations": operations.json(),
            "explanation": explanation.json()
        }));
    }
    let history = render(&record, &events.value()?, &operations.value()?, now());
    output::print(&format!("{history}\n{}", why::lines(&explanation.value()?)))
}

/// Returns the id of the deleted instance with a name. The server finds deleted instances only by id.
async fn find_deleted(client: &Client, name: &str) -> anyhow::Result<Option<String>> {
    let all = client.instances(true, &ListQuery::default()).await?.value()?;
    let named = all.into_iter().filter(|record| record.name == name).map(|record| record.uuid.to_string());
    let mut named: Vec<String> = named.collect();
    if named.len() > 1 {
        let name = escape_control(name);
        bail!("several deleted instances were named {name}; give one of the ids {}", named.join(", "));
    }
    Ok(named.pop())
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
struct HistoryEntry {
    time: f64,
    text: String,
    details: Vec<String>,
    /// How often it happened in a row.
    count: u32,
}

/// Renders the history, oldest first. Events and operations are given newest first.
fn render(
    record: &InstanceRecord,
    events: &[EventRecord],
    operations: &[OperationRecord],
    now: f64,
) -> String {
    let entries = history(record, events, operations);
    let title = format!("instance {} ({}) of namespace {}", record.name, record.uuid, record.namespace);
    let mut text = escape_control(&title) + "\n\n";
    if entries.is_empty() {
        text.push_str("no events are recorded\n");
    }
    let ages: Vec<String> = entries.iter().map(|entry| format_age(now, entry.time)).collect();
    let width = ages.iter().map(|age| age.chars().count()).max().unwrap_or(0);
    for (entry, age) in entries.iter().zip(&ages) {
        let count = if entry.count > 1 { format!(" ({} times)", entry.count) } else { String::new() };
        text.push_str(&format!("{age:>width$}  {}{count}\n", escape_control(&entry.text)));
        for detail in &entry.details {
            text.push_str(&format!("{:width$}    {}\n", "", escape_control(detail)));
        }
    }
    text
}

/// Returns the entries, oldest first, with repetitions merged.
fn history(
    record: &InstanceRecord,
    events: &[EventRecord],
    operations: &[OperationRecord],
) -> Vec<HistoryEntry> {
    let mut entries: Vec<HistoryEntry> = vec![];
    // Two events report the creation. Either may have been pruned, and only one names the requester.
    let is_creation = |event: &&EventRecord| {
        matches!(
            EventMessage::parse(&event.message),
            Some(EventMessage::RecordCreated | EventMessage::CreationRequested)
        )
    };
    let creator = events.iter().filter(is_creation).map(|event| requester(&event.extra));
    let creator = creator.into_iter().find(|creator| !creator.is_empty()).unwrap_or_default();
    let creation = events.iter().rfind(is_creation).map(|event| &event.event_uuid);
    for event in events.iter().rev() {
        if is_creation(&event) && Some(&event.event_uuid) != creation {
            continue;
        }
        entries.extend(describe_event(record, event, &creator));
    }
    entries.extend(operations.iter().rev().filter_map(|operation| describe_end(operation, events)));
    entries.sort_by(|a, b| a.time.total_cmp(&b.time));
    entries.dedup_by(|later, earlier| {
        let same = later.text == earlier.text && later.details == earlier.details;
        if same {
            earlier.count += 1;
            earlier.time = later.time;
        }
        same
    });
    entries
}

/// Describes an event, if it is relevant to the history.
fn describe_event(record: &InstanceRecord, event: &EventRecord, creator: &str) -> Option<HistoryEntry> {
    let irrelevant = [EventType::Usage, EventType::Resources, EventType::Prune];
    if irrelevant.iter().any(|kind| event.event_type == kind.as_str()) {
        return None;
    }
    let mut details = vec![];
    let text = match EventMessage::parse(&event.message) {
        Some(EventMessage::RecordCreated | EventMessage::CreationRequested) => {
            let cpus = pluralize(record.cpus, "vCPU");
            details.push(format!("{cpus}, {}", format_megabytes(record.memory)));
            let disks = record.disk_spec.iter().map(describe_disk_spec);
            details.extend(disks.map(|disk| format!("disk: {disk}")));
            format!("created{creator}")
        }
        Some(EventMessage::ImageReady) => image_ready(event),
        Some(EventMessage::DiskCopied) => {
            format!(
                "disk {} was copied to artifact {}",
                field(event, "device"),
                field(event, "artifact_uuid")
            )
        }
        Some(EventMessage::InstanceState(state)) => state_change(record, state)? + &because(event),
        Some(EventMessage::PowerState(power)) => {
            if power == PowerState::Crashed {
                details.push(format!("next: `muster instance log {}` shows its last output", record.uuid));
            }
            power_change(power) + &because(event)
        }
        Some(EventMessage::OperationState(state)) => describe_operation(event, state)?,
        // Opening a console requests the viewer file.
        Some(EventMessage::ViewerFileRequested) => return None,
        Some(EventMessage::Requested(request)) => {
            let mut extra = event.extra.clone();
            extra.retain(|name, _| !REQUESTER_FIELDS.contains(&name.as_str()));
            format!("requested{}: {request}{}", requester(&event.extra), format_fields(&extra))
        }
        Some(scheduling) if is_scheduling(&scheduling) => {
            describe_scheduling(event, &scheduling, &mut details)?
        }
        Some(_) | None => {
            let mut extra = event.extra.clone();
            extra.retain(|name, _| !REASON_FIELDS.contains(&name.as_str()));
            let duration = event.duration.map_or_else(String::new, |seconds| format!(", in {seconds:.1} s"));
            format!("{}{}{}{duration}", event.message, because(event), format_fields(&extra))
        }
    };
    Some(HistoryEntry { time: event.timestamp, text, details, count: 1 })
}

fn is_scheduling(message: &EventMessage) -> bool {
    matches!(
        message,
        EventMessage::SchedulingStarted
            | EventMessage::SchedulingInputs
            | EventMessage::SchedulingHighestAffinity
            | EventMessage::SchedulingInitialCandidates
            | EventMessage::SchedulingStage(_)
            | EventMessage::SchedulingAborted(_)
            | EventMessage::SchedulingFinalCandidates
    )
}

fn describe_scheduling(
    event: &EventRecord,
    message: &EventMessage,
    details: &mut Vec<String>,
) -> Option<String> {
    match message {
        EventMessage::SchedulingInitialCandidates => {
            let candidates = event.extra.get("candidates");
            let count =
                candidates.and_then(|value| value.as_i64().or_else(|| Some(value.as_array()?.len() as i64)));
            let count =
                count.map_or_else(String::new, |count| format!(": {}", pluralize(count, "candidate")));
            Some(format!("scheduling started{count}"))
        }
        EventMessage::SchedulingStage(_) => {
            *details = rejected_nodes(event);
            (!details.is_empty()).then(|| "some nodes were rejected".to_owned())
        }
        EventMessage::SchedulingAborted(stage) => {
            details.push(format!("next: {}", stage_advice(Some(*stage), is_transient(event))));
            let reason = stage_reason(Some(*stage), is_transient(event));
            Some(format!("not placed: {reason}{}", because(event)))
        }
        EventMessage::SchedulingFinalCandidates => {
            *details = rejected_nodes(event);
            Some(match event.extra.get("chosen").and_then(Value::as_str) {
                Some(node) => format!("placed on {node}"),
                None => format!("suitable nodes: {}", join_names(event.extra.get("candidates"))),
            })
        }
        _ => None,
    }
}

fn image_ready(event: &EventRecord) -> String {
    let seconds = event.extra.get("seconds").and_then(Value::as_f64);
    let duration = seconds.map_or_else(String::new, |seconds| format!(" after {seconds:.1} s"));
    format!("the image in blob {} was ready{duration}", field(event, "blob_uuid"))
}

fn describe_operation(event: &EventRecord, state: OperationState) -> Option<String> {
    let outcome = match state {
        // The effects of the operation have their own events.
        OperationState::Executing | OperationState::Complete => return None,
        OperationState::Queued => "will be retried",
        OperationState::Error => "failed",
        OperationState::Abort => "was aborted",
    };
    let name = event.extra.get("operation").map_or_else(|| "an operation".to_owned(), compact);
    Some(format!("{name} {outcome}{}", because(event)))
}

fn power_change(power: PowerState) -> String {
    match power {
        PowerState::On => "it is on",
        PowerState::Off => "it is off",
        PowerState::Paused => "it is paused",
        PowerState::Crashed => "it crashed",
        PowerState::Initial => "it has not been started",
        PowerState::Unknown => "its power state is unknown",
    }
    .to_owned()
}

fn state_change(record: &InstanceRecord, state: InstanceState) -> Option<String> {
    let on = record.node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    Some(match state {
        // The creation event says the same.
        InstanceState::Initial => return None,
        InstanceState::Preflight => "preparing its images and networks".to_owned(),
        InstanceState::Creating => format!("building and starting it{on}"),
        InstanceState::Created => format!("it is ready{on}"),
        InstanceState::InitialError => "it could not be scheduled".to_owned(),
        InstanceState::PreflightError => "its images and networks could not be prepared".to_owned(),
        InstanceState::CreatingError => "it could not be built and started".to_owned(),
        InstanceState::CreatedError => "it failed after it was created".to_owned(),
        InstanceState::DeleteWait => "it is being deleted".to_owned(),
        InstanceState::DeleteWaitError => "it could not be deleted".to_owned(),
        InstanceState::Error => "it failed".to_owned(),
        InstanceState::Deleted => "it was deleted".to_owned(),
    })
}

/// Describes how an operation ended, unless an event already gives the same reason.
fn describe_end(operation: &OperationRecord, events: &[EventRecord]) -> Option<HistoryEntry> {
    let tasks = describe_tasks(operation);
    let text = match operation.state {
        OperationState::Error => {
            let report = operation.error_report.as_ref();
            let message = report.map_or_else(|| "unknown reason".to_owned(), |report| report.message.clone());
            if events.iter().any(|event| reason(&event.extra).as_deref() == Some(message.as_str())) {
                return None;
            }
            let attempts = pluralize(operation.attempts, "attempt");
            format!("{tasks} failed after {attempts}: {message}")
        }
        OperationState::Abort => format!("{tasks} was aborted"),
        OperationState::Complete | OperationState::Queued | OperationState::Executing => return None,
    };
    Some(HistoryEntry { time: operation.updated, text, details: vec![], count: 1 })
}

fn describe_tasks(operation: &OperationRecord) -> String {
    if operation.tasks.is_empty() { operation.operation_type.to_string() } else { operation.tasks.join(", ") }
}

fn requester(extra: &Map<String, Value>) -> String {
    let text = |name: &str| extra.get(name).and_then(Value::as_str);
    match (text("keyname"), text("caller")) {
        (Some(key), Some(namespace)) => format!(" by key {key} of namespace {namespace}"),
        (Some(key), None) => format!(" by key {key}"),
        (None, Some(namespace)) => format!(" by namespace {namespace}"),
        (None, None) => String::new(),
    }
}

fn reason(extra: &Map<String, Value>) -> Option<String> {
    let value = REASON_FIELDS.iter().find_map(|name| extra.get(*name)).filter(|value| !value.is_null())?;
    // An error report contains its message as a field.
    Some(compact(value.get("message").unwrap_or(value)))
}

fn because(event: &EventRecord) -> String {
    reason(&event.extra).map_or_else(String::new, |reason| format!(": {reason}"))
}

fn field(event: &EventRecord, name: &str) -> String {
    event.extra.get(name).map_or_else(|| "-".to_owned(), compact)
}

fn join_names(value: Option<&Value>) -> String {
    let names = value.and_then(Value::as_array).into_iter().flatten().map(compact).collect::<Vec<_>>();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Formats the other fields of an event in parentheses.
fn format_fields(extra: &Map<String, Value>) -> String {
    let present = extra.iter().filter(|(_, value)| !value.is_null() && **value != json!({}));
    let fields: Vec<String> = present.map(|(name, value)| format!("{name} {}", compact(value))).collect();
    if fields.is_empty() { String::new() } else { format!(" ({})", fields.join(", ")) }
}

fn pluralize(count: i64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}
