//! `muster instance why`: the story of an instance, as somebody would tell it who watched. It is made only from what
//! the API says: events, operations and the record.

#[cfg(test)]
mod tests;

use anyhow::bail;
use muster_types::event::{EventRecord, EventType};
use muster_types::instance::{InstanceRecord, InstanceState, PowerState};
use muster_types::operation::{OperationRecord, OperationState};
use muster_types::time::now;
use serde_json::{Map, Value, json};

use super::Session;
use super::instance_create::awaited;
use super::instance_tables::{asked_for, megabytes};
use crate::api::{Answer, Client, EventQuery, Object};
use crate::output::{self, compact, visible};
use crate::time::ago;
use crate::transfer::pause;

/// The most events that the server answers.
const MOST_EVENTS: u32 = 1000;
/// Events are written down a little later than they happen: how often they are looked for.
const TRIES: usize = 10;
/// Nodes of one stage that are named; a cluster may have thousands.
const MOST_NODES: usize = 12;
/// Fields of an event that say why.
const REASONS: [&str; 3] = ["reason", "error", "error_message"];
/// What the events of a new instance are called.
const BIRTHS: [&str; 2] = ["db record created", "creation request from REST API"];
/// What follows a request in the messages of its events.
const REQUEST: &str = " request from REST API";

/// Tells the story of an instance.
pub(super) async fn why(session: &Session, instance: &str) -> anyhow::Result<()> {
    let client = &session.client;
    let answer = match client.instance(instance).await {
        Err(error) if error.status() == Some(404) => {
            let Some(id) = deleted(client, instance).await? else { return Err(error.into()) };
            client.instance(&id).await?
        }
        answer => answer?,
    };
    let record = answer.clone().value()?;
    let id = record.uuid.to_string();
    let query = EventQuery { limit: Some(MOST_EVENTS), event_type: None };
    let (events, operations) = tokio::try_join!(
        client.events(Object::Instance(&id), &query),
        client.instance_operations(&id, true)
    )?;
    if session.json {
        return output::print_json(&json!({
            "instance": answer.json(), "events": events.json(), "operations": operations.json()
        }));
    }
    output::print(&story(&record, &events.value()?, &operations.value()?, now()))
}

/// The instance that had a name until it was deleted: the server only knows it by its id.
async fn deleted(client: &Client, name: &str) -> anyhow::Result<Option<String>> {
    let all = client.instances(true).await?.value()?;
    let named = all.into_iter().filter(|record| record.name == name).map(|record| record.uuid.to_string());
    let mut named: Vec<String> = named.collect();
    if named.len() > 1 {
        bail!("several instances that are deleted were named {}: {}", visible(name), named.join(", "));
    }
    Ok(named.pop())
}

/// Why no node took an instance, node by node, as its newest events tell.
pub(super) async fn refusals(session: &Session, instance: &str) -> Vec<String> {
    let query = EventQuery { limit: Some(MOST_EVENTS), event_type: None };
    for _ in 0..TRIES {
        let events = session.client.events(Object::Instance(instance), &query).await;
        let events = events.and_then(Answer::value).unwrap_or_default();
        let run: Vec<&EventRecord> =
            events.iter().take_while(|event| event.message != "started scheduling").collect();
        let whole = |event: &&EventRecord| {
            refused_stage(&event.message).is_some() || event.message == "schedule final candidates"
        };
        if run.iter().any(whole) {
            return run.iter().rev().flat_map(|event| nodes_left(event)).collect();
        }
        pause().await;
    }
    vec![]
}

/// What a stage of the scheduler looks at, said of the nodes that dropped out there.
pub(super) fn stage_meaning(stage: &str) -> &'static str {
    match stage {
        "pre_schedule" => "no node is there to be asked",
        "is_hypervisor" => "no node runs instances",
        "cpu_max_per_instance" => "it wants more vCPUs than any node gives to one instance",
        "sufficient_idle_cpu" => "no node has enough vCPUs left",
        "sufficient_idle_memory" => "no node has enough memory left",
        "sufficient_free_disk" => "no node has enough disk space left",
        "affinity_constraints" => "no node has the neighbours that it requires",
        "queue_state" => "every node is busy with other work",
        "sufficient_idle_disk" => "the disks of every node are busy",
        "capacity_guard" => "the nodes filled up just now",
        _ => "no node was left",
    }
}

/// What to do when no node is left at a stage.
pub(super) fn stage_advice(stage: &str) -> &'static str {
    match stage {
        "pre_schedule" | "is_hypervisor" => {
            "an administrator sees with `muster node list` what the nodes lack"
        }
        "cpu_max_per_instance" => "ask for fewer vCPUs",
        "affinity_constraints" => "loosen --affinity, or make the neighbours first",
        "queue_state" | "sufficient_idle_disk" => "try again in a minute",
        "sufficient_idle_cpu" | "sufficient_idle_memory" | "sufficient_free_disk" | "capacity_guard" => {
            "ask for less, delete what is not needed, or try again when there is room"
        }
        _ => "`muster instance events` tells more",
    }
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
struct Line {
    time: f64,
    text: String,
    details: Vec<String>,
    /// How often it happened in a row.
    times: u32,
}

/// The whole story: what happened, oldest first, and how it is now. Events and operations come newest first.
fn story(
    record: &InstanceRecord,
    events: &[EventRecord],
    operations: &[OperationRecord],
    now: f64,
) -> String {
    let mut lines: Vec<Line> = vec![];
    // Two events are about the same moment; either may be forgotten by now, and not both say who it was.
    let births = |event: &&EventRecord| BIRTHS.contains(&event.message.as_str());
    let creator = events.iter().filter(births).map(|event| by(&event.extra)).find(|by| !by.is_empty());
    let creator = creator.unwrap_or_default();
    let birth = events.iter().rfind(births).map(|event| &event.event_uuid);
    for event in events.iter().rev() {
        if births(&event) && Some(&event.event_uuid) != birth {
            continue;
        }
        lines.extend(happened(record, event, &creator));
    }
    lines.extend(operations.iter().rev().filter_map(|operation| ended(operation, events)));
    lines.sort_by(|a, b| a.time.total_cmp(&b.time));
    lines.dedup_by(|later, earlier| {
        let same = later.text == earlier.text && later.details == earlier.details;
        if same {
            earlier.times += 1;
            earlier.time = later.time;
        }
        same
    });
    let mut text = format!("instance {} ({}) of namespace {}\n", record.name, record.uuid, record.namespace);
    text = visible(text.trim_end()) + "\n\n";
    if lines.is_empty() {
        text.push_str("nothing is remembered of its past\n");
    }
    let ages: Vec<String> = lines.iter().map(|line| ago(now, line.time)).collect();
    let width = ages.iter().map(|age| age.chars().count()).max().unwrap_or(0);
    for (line, age) in lines.iter().zip(&ages) {
        let times = if line.times > 1 { format!(" ({} times)", line.times) } else { String::new() };
        text.push_str(&format!("{age:>width$}  {}{times}\n", visible(&line.text)));
        for detail in &line.details {
            text.push_str(&format!("{:width$}    {}\n", "", visible(detail)));
        }
    }
    text.push_str(&format!("\nnow: {}\n", visible(&present(record, events, operations, now))));
    text
}

/// What an event tells, if it is part of the story.
fn happened(record: &InstanceRecord, event: &EventRecord, creator: &str) -> Option<Line> {
    let dull = [EventType::Usage, EventType::Resources, EventType::Prune];
    if dull.iter().any(|kind| event.event_type == kind.as_str()) {
        return None;
    }
    let message = event.message.as_str();
    let mut details = vec![];
    let text = match message {
        birth if BIRTHS.contains(&birth) => {
            let disks: Vec<String> = record.disk_spec.iter().map(asked_for).collect();
            let cpus = counted(u64::try_from(record.cpus).unwrap_or(0), "vCPU");
            details.push(format!("{cpus}, {}", megabytes(record.memory)));
            details.extend(disks.into_iter().map(|disk| format!("disk: {disk}")));
            format!("created{creator}")
        }
        "started scheduling" | "schedule inputs" | "schedule have highest affinity" => return None,
        // Whoever looks at the console asks for this, and what an operation did is told by what became of it.
        "vdi console helper request from REST API" | "operation started" | "operation complete" => {
            return None;
        }
        "disk was copied" => {
            let value = |name: &str| event.extra.get(name).map(compact).unwrap_or_default();
            format!("disk {} was copied to artifact {}", value("device"), value("artifact_uuid"))
        }
        "image is ready on the node" => {
            let seconds = event.extra.get("seconds").and_then(Value::as_f64);
            let length = seconds.map_or_else(String::new, |seconds| format!(" after {seconds:.1} s"));
            let blob = event.extra.get("blob_uuid").map(compact).unwrap_or_default();
            format!("the image in blob {blob} was there{length}")
        }
        "schedule initial candidates" => {
            let candidates = event.extra.get("candidates");
            let count =
                candidates.and_then(|value| value.as_u64().or_else(|| Some(value.as_array()?.len() as u64)));
            let count = count.map_or_else(String::new, |count| format!(": {}", counted(count, "candidate")));
            format!("a node was looked for{count}")
        }
        "schedule final candidates" => {
            details = nodes_left(event);
            match event.extra.get("chosen").and_then(Value::as_str) {
                Some(node) => format!("placed on {node}"),
                None => format!("nodes that could take it: {}", names(event.extra.get("candidates"))),
            }
        }
        _ => other(record, event, &mut details)?,
    };
    Some(Line { time: event.timestamp, text, details, times: 1 })
}

/// The messages that have something in them.
fn other(record: &InstanceRecord, event: &EventRecord, details: &mut Vec<String>) -> Option<String> {
    let message = event.message.as_str();
    let because = reason(&event.extra).map_or_else(String::new, |why| format!(": {why}"));
    if let Some(stage) = refused_stage(message) {
        details.push(format!("next: {}", stage_advice(stage)));
        return Some(format!("not placed: {}{because}", stage_meaning(stage)));
    }
    if message.starts_with("schedule at stage ") {
        *details = nodes_left(event);
        return (!details.is_empty()).then(|| "some nodes were left out".to_owned());
    }
    if let Some(end) = message.strip_prefix("operation ") {
        let name = event.extra.get("operation").map(compact).unwrap_or_else(|| "an operation".to_owned());
        return Some(format!("{name} {end}{because}"));
    }
    if let Some(state) = message.strip_prefix("state is now ") {
        return state_change(record, state, &because);
    }
    let power = ["power state is now ", "power_state is now "];
    if let Some(power) = power.iter().find_map(|prefix| message.strip_prefix(prefix)) {
        let text = match power {
            "on" => "it is on",
            "off" => "it is off",
            "paused" => "it is paused",
            "crashed" => "it crashed",
            other => return Some(format!("its power is {other}{because}")),
        };
        if power == "crashed" {
            details.push(format!("next: `muster instance log {}` shows its last words", record.uuid));
        }
        return Some(format!("{text}{because}"));
    }
    if let Some(request) = message.strip_suffix(REQUEST) {
        let mut extra = event.extra.clone();
        extra.retain(|name, _| !BY.contains(&name.as_str()));
        return Some(format!("asked for{}: {request}{}", by(&event.extra), pairs(&extra)));
    }
    let mut extra = event.extra.clone();
    extra.retain(|name, _| !REASONS.contains(&name.as_str()));
    let length = event.duration.map_or_else(String::new, |seconds| format!(", in {seconds:.1} s"));
    Some(format!("{message}{because}{}{length}", pairs(&extra)))
}

fn state_change(record: &InstanceRecord, state: &str, because: &str) -> Option<String> {
    let on = record.node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    let text = match state.parse::<InstanceState>() {
        // Being created says the same.
        Ok(InstanceState::Initial) => return None,
        Ok(InstanceState::Preflight) => "its images and networks are made ready".to_owned(),
        Ok(InstanceState::Creating) => format!("it is built and started{on}"),
        Ok(InstanceState::Created) => format!("it is ready{on}"),
        Ok(InstanceState::InitialError) => "it could not be begun".to_owned(),
        Ok(InstanceState::PreflightError) => "its images and networks could not be made ready".to_owned(),
        Ok(InstanceState::CreatingError) => "it could not be built and started".to_owned(),
        Ok(InstanceState::CreatedError) => "it broke".to_owned(),
        Ok(InstanceState::DeleteWait) => "it is being deleted".to_owned(),
        Ok(InstanceState::DeleteWaitError) => "it could not be deleted".to_owned(),
        Ok(InstanceState::Error) => "it has failed".to_owned(),
        Ok(InstanceState::Deleted) => "it is deleted".to_owned(),
        Err(_) => format!("its state is {state}"),
    };
    Some(format!("{text}{because}"))
}

/// How an operation ended, where no event says so.
fn ended(operation: &OperationRecord, events: &[EventRecord]) -> Option<Line> {
    let steps = steps(operation);
    let text = match operation.state {
        OperationState::Error => {
            let report = operation.error_report.as_ref();
            let why = report.map_or_else(|| "nobody said why".to_owned(), |report| report.message.clone());
            if events.iter().any(|event| reason(&event.extra).as_deref() == Some(why.as_str())) {
                return None;
            }
            let attempts = u64::try_from(operation.attempts).unwrap_or(0);
            format!("{steps} failed after {}: {why}", counted(attempts, "attempt"))
        }
        OperationState::Abort => format!("{steps} was given up"),
        OperationState::Complete | OperationState::Queued | OperationState::Executing => return None,
    };
    Some(Line { time: operation.updated, text, details: vec![], times: 1 })
}

fn steps(operation: &OperationRecord) -> String {
    if operation.tasks.is_empty() { operation.operation_type.to_string() } else { operation.tasks.join(", ") }
}

/// How it is, and what to do about it.
fn present(
    record: &InstanceRecord,
    events: &[EventRecord],
    operations: &[OperationRecord],
    now: f64,
) -> String {
    let id = record.uuid;
    let on = record.node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    let mut text = match record.state {
        InstanceState::Created => match record.power_state {
            PowerState::On => format!("it runs{on}; `muster console {id}` is its console"),
            PowerState::Off => format!("it is off; `muster instance poweron {id}` switches it on"),
            PowerState::Paused => format!("it is paused{on}; `muster instance unpause {id}` lets it go on"),
            PowerState::Crashed => format!(
                "it crashed; `muster instance log {id}` shows its last words, `muster instance poweron {id}` switches it \
                 on again"
            ),
            PowerState::Initial => format!("it is made{on} and was never on"),
        },
        InstanceState::Initial | InstanceState::Preflight | InstanceState::Creating => {
            let images = awaited(record);
            let images = if images.is_empty() {
                String::new()
            } else {
                format!(", waiting for {}", images.join(", "))
            };
            format!("it is on its way ({}){on}{images}", record.state)
        }
        InstanceState::DeleteWait => "it is being deleted".to_owned(),
        InstanceState::Deleted => "it is deleted".to_owned(),
        InstanceState::Error
        | InstanceState::InitialError
        | InstanceState::PreflightError
        | InstanceState::CreatingError
        | InstanceState::CreatedError
        | InstanceState::DeleteWaitError => {
            let why = record.error_message.as_deref().unwrap_or("the server does not say why");
            format!(
                "it has failed: {why}; {}`muster instance delete {id}` clears it away",
                advice(record, events)
            )
        }
    };
    for operation in operations.iter().filter(|operation| !operation.state.is_final()) {
        let since = ago(now, operation.created);
        let again =
            if operation.attempts > 1 { format!(", attempt {}", operation.attempts) } else { String::new() };
        let progress = operation.progress.as_ref().map_or_else(String::new, |progress| {
            let total =
                progress.total.map_or_else(String::new, |total| format!(" of {}", output::size(total)));
            format!(", {}{total}", output::size(progress.done))
        });
        text.push_str(&format!("; under way: {} (begun {since}{again}{progress})", steps(operation)));
    }
    text
}

/// What to do about a failure.
fn advice(record: &InstanceRecord, events: &[EventRecord]) -> String {
    let why = record.error_message.as_deref().unwrap_or_default().to_lowercase();
    let stage = events.iter().find_map(|event| refused_stage(&event.message));
    let advice = match stage {
        Some(stage) if why.contains("schedul") || why.contains("no node") => stage_advice(stage),
        _ if ["image", "artifact", "blob", "fetch", "download"].iter().any(|word| why.contains(word)) => {
            "`muster artifact list` shows the images that there are"
        }
        _ if why.contains("address") || why.contains("network") => {
            "`muster network addresses` shows which addresses are taken"
        }
        _ => return String::new(),
    };
    format!("{advice}; ")
}

/// The stage at which no node was left.
fn refused_stage(message: &str) -> Option<&str> {
    message.strip_prefix("schedule has no candidates at stage ")?.strip_suffix(", aborting")
}

/// The nodes that an event leaves out, each with its reason.
fn nodes_left(event: &EventRecord) -> Vec<String> {
    let mut lines = vec![];
    for (node, why) in
        ["dropped", "refused"].iter().filter_map(|name| event.extra.get(*name)?.as_object()).flatten()
    {
        lines.push(format!("not on {node}: {}", compact(why)));
    }
    if lines.len() > MOST_NODES {
        let more = lines.len() - MOST_NODES;
        lines.truncate(MOST_NODES);
        lines.push(format!("nor on {more} more"));
    }
    lines
}

/// Fields that say who wanted something.
const BY: [&str; 4] = ["caller", "keyname", "remote-address", "method"];

fn by(extra: &Map<String, Value>) -> String {
    let text = |name: &str| extra.get(name).and_then(Value::as_str);
    match (text("keyname"), text("caller")) {
        (Some(key), Some(namespace)) => format!(" by key {key} of namespace {namespace}"),
        (Some(key), None) => format!(" by key {key}"),
        (None, Some(namespace)) => format!(" by namespace {namespace}"),
        (None, None) => String::new(),
    }
}

fn reason(extra: &Map<String, Value>) -> Option<String> {
    let value = REASONS.iter().find_map(|name| extra.get(*name)).filter(|value| !value.is_null())?;
    // The report of an operation has its sentence in it.
    Some(compact(value.get("message").unwrap_or(value)))
}

fn names(value: Option<&Value>) -> String {
    let names = value.and_then(Value::as_array).into_iter().flatten().map(compact).collect::<Vec<_>>();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// What else an event says, in brackets.
fn pairs(extra: &Map<String, Value>) -> String {
    let told = extra.iter().filter(|(_, value)| !value.is_null() && **value != json!({}));
    let pairs: Vec<String> = told.map(|(name, value)| format!("{name} {}", compact(value))).collect();
    if pairs.is_empty() { String::new() } else { format!(" ({})", pairs.join(", ")) }
}

fn counted(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
