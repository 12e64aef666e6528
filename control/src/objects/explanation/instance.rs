//! Why an instance is in its state.

use muster_types::event::EventRecord;
use muster_types::event_message::EventMessage;
use muster_types::explanation::{AwaitedObject, Explanation, NextStep};
use muster_types::instance::{InstanceRecord, InstanceState, PowerState};
use muster_types::object::ObjectType;
use muster_types::{Error, Result};

use super::placement::LastPlacement;
use super::{MAX_EVENTS, awaited, last, reason};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::instance;
use muster_store::explanations::{self, Evidence};

/// Explains an instance that the caller may change.
pub async fn explain_instance(app: &App, caller: &Caller, reference: &str) -> Result<Explanation> {
    let row = instance::find_own(app, caller, reference, None).await?;
    let images: Vec<String> = row.spec.awaited.values().map(ToString::to_string).collect();
    let (details, Evidence { events, operations }) =
        explanations::of_instance(&*app.store, row.id, MAX_EVENTS).await?;
    let record = instance::records_from(app, vec![row], details).pop();
    let record = record.ok_or_else(|| Error::not_found("instance"))?;
    let mut waits_for: Vec<AwaitedObject> = operations.into_iter().map(awaited).collect();
    if is_being_created(record.state) {
        let images = images.into_iter().map(|uuid| AwaitedObject {
            object_type: ObjectType::Artifact.to_string(),
            uuid,
            state: "initial".into(),
            text: "an image that is being fetched".into(),
        });
        waits_for.extend(images);
    }
    let placement = LastPlacement::read(&events);
    Ok(Explanation {
        object_type: ObjectType::Instance.to_string(),
        uuid: record.uuid.to_string(),
        name: Some(record.name.clone()),
        state: state(&record),
        since: since(&record, &events),
        why: why(&record, &events),
        waits_for,
        next: next(&record, &events, &placement),
        placement: placement.verdicts,
    })
}

fn is_being_created(state: InstanceState) -> bool {
    matches!(state, InstanceState::Initial | InstanceState::Preflight | InstanceState::Creating)
}

fn state(record: &InstanceRecord) -> String {
    match record.state {
        InstanceState::Created => record.power_state.to_string(),
        other => other.to_string(),
    }
}

fn since(record: &InstanceRecord, events: &[EventRecord]) -> Option<f64> {
    match record.state {
        InstanceState::Created if record.power_state_since.is_some() => record.power_state_since,
        state => last(events, &EventMessage::InstanceState(state)).map(|event| event.timestamp),
    }
}

fn why(record: &InstanceRecord, events: &[EventRecord]) -> String {
    let on = record.node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    match record.state {
        InstanceState::Created => {
            let change = last(events, &EventMessage::PowerState(record.power_state));
            let because = change.and_then(reason).map_or_else(String::new, |reason| format!(": {reason}"));
            let text = match record.power_state {
                PowerState::On => format!("it runs{on}"),
                PowerState::Off => "it is off".to_owned(),
                PowerState::Paused => format!("it is paused{on}"),
                PowerState::Crashed => "its VM crashed".to_owned(),
                PowerState::Initial => format!("it is created{on} and has never been started"),
                PowerState::Unknown if because.is_empty() => {
                    let node = record.node.as_deref().unwrap_or("its node");
                    format!("{node} does not check in, and the VM may still be running")
                }
                PowerState::Unknown => "its power state is unknown".to_owned(),
            };
            text + &because + &failing_replica(record)
        }
        InstanceState::Initial => "it waits to be placed and prepared".to_owned(),
        InstanceState::Preflight => "its images and networks are being prepared".to_owned(),
        InstanceState::Creating => format!("it is being built and started{on}"),
        InstanceState::DeleteWait => "it is being deleted".to_owned(),
        InstanceState::Deleted => "it was deleted".to_owned(),
        InstanceState::Error
        | InstanceState::InitialError
        | InstanceState::PreflightError
        | InstanceState::CreatingError
        | InstanceState::CreatedError
        | InstanceState::DeleteWaitError => {
            let message = record.error_message.as_deref().unwrap_or("no reason was recorded, see its events");
            format!("it failed: {message}")
        }
    }
}

/// Returns that the replica of an instance does not get its changes, if that is so.
fn failing_replica(record: &InstanceRecord) -> String {
    let error = record.replica.as_ref().and_then(|replica| replica.error.as_ref());
    error.map_or_else(String::new, |error| format!("; copying its disks to its replica fails: {error}"))
}

fn next(record: &InstanceRecord, events: &[EventRecord], placement: &LastPlacement) -> Vec<NextStep> {
    let id = record.uuid;
    let command = |text: &str, command: &str| NextStep::command(text, format!("muster {command} {id}"));
    match record.state {
        InstanceState::Created => match record.power_state {
            PowerState::On => vec![command("open its console", "console")],
            PowerState::Off | PowerState::Initial => vec![command("start it", "instance poweron")],
            PowerState::Paused => vec![command("resume it", "instance unpause")],
            PowerState::Crashed => vec![
                command("read its last output", "instance log"),
                command("start it again", "instance poweron"),
            ],
            PowerState::Unknown => match &record.node {
                Some(node) => vec![
                    NextStep::command("check its node", format!("muster node show {node}")),
                    NextStep::command(
                        "if the host is certainly off, start its instances elsewhere",
                        format!("muster node evacuate {node} --dead"),
                    ),
                ],
                None => vec![],
            },
        },
        InstanceState::Initial
        | InstanceState::Preflight
        | InstanceState::Creating
        | InstanceState::DeleteWait
        | InstanceState::Deleted => vec![],
        InstanceState::Error
        | InstanceState::InitialError
        | InstanceState::PreflightError
        | InstanceState::CreatingError
        | InstanceState::CreatedError
        | InstanceState::DeleteWaitError => {
            let mut steps: Vec<NextStep> = failure_advice(record, events, placement).into_iter().collect();
            steps.push(command("delete it", "instance delete"));
            steps
        }
    }
}

/// Returns what to do about a failed instance: it was not placed, lacks an image, or lacks a network.
fn failure_advice(
    record: &InstanceRecord,
    events: &[EventRecord],
    placement: &LastPlacement,
) -> Option<NextStep> {
    if let Some((stage, transient)) = placement.refusal.filter(|_| record.node.is_none()) {
        return Some(NextStep::text(stage.advice(transient)));
    }
    let preflight_failed = last(events, &EventMessage::InstanceState(InstanceState::PreflightError));
    preflight_failed?;
    let lacks_image =
        record.disk_spec.iter().any(|disk| disk.spec.base.is_some() && disk.blob_uuid.is_none());
    Some(if lacks_image {
        NextStep::command("list the images", "muster artifact list".into())
    } else {
        NextStep::command("list the networks", "muster network list".into())
    })
}
