//! `muster instance snapshot`: copies of disks, which become versions of artifacts.

use std::collections::BTreeMap;

use anyhow::bail;
use clap::Args;
use muster_types::operation::{OperationState, OperationType};

use super::instance_tables::snapshots;
use super::wait::{LongWaiting, Patience};
use super::{Session, operation};
use crate::api::{Answer, Client, NewSnapshot, SnapshotHandle, SnapshotRecord};
use crate::output::{Table, visible};
use crate::transfer::unless_interrupted;

/// What to copy.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// Every disk, all as they are at one moment; without this it is the first
    #[arg(long, conflicts_with = "device")]
    all: bool,
    /// Only this disk, such as vdc, or nvram for the memory of the firmware
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Only what differs from the image that the disk began as
    #[arg(long)]
    thin: bool,
    /// How many versions are kept; 0 is the cluster's default
    #[arg(long, value_name = "N")]
    max_versions: Option<u32>,
    #[command(flatten)]
    waiting: LongWaiting,
}

/// Copies disks, and waits until the copies are whole.
pub(super) async fn snapshot(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { instance, all, device, thin, max_versions, waiting } = arguments;
    let client = &session.client;
    let id = client.instance(&instance).await?.value()?.uuid.to_string();
    let new = NewSnapshot { all, device, thin, max_versions };
    let answer = client.create_snapshot(&id, &new).await?;
    let handles = answer.clone().value()?;
    if handles.is_empty() {
        let which = new.device.map_or_else(String::new, |device| format!(" named {}", visible(&device)));
        bail!("instance {} has no disk{which} that can be copied", visible(&instance));
    }
    if let Some(patience) = waiting.patience() {
        let goes_on = || format!("the cluster goes on: `muster instance snapshots {id}` tells how far");
        unless_interrupted(wait(client, &id, &handles, patience), goes_on).await?;
    }
    session.show(answer, table)
}

fn table(handles: BTreeMap<String, SnapshotHandle>) -> Table {
    let table = Table::new(&["DEVICE", "ARTIFACT", "BLOB"], &["SOURCE"]);
    table.rows(handles.into_iter().map(|(device, handle)| {
        [device, handle.artifact_uuid.to_string(), handle.blob_uuid.to_string(), handle.source_url]
    }))
}

/// How far the copies are.
#[derive(Debug, PartialEq, Eq)]
enum Copies {
    Whole,
    Coming,
    /// This device's will never be whole.
    Broken(String),
}

fn copies(handles: &BTreeMap<String, SnapshotHandle>, there: &[SnapshotRecord]) -> Copies {
    let mut whole = true;
    for (device, handle) in handles {
        let copy = there.iter().find(|copy| copy.blob_uuid == handle.blob_uuid);
        match copy.map(|copy| copy.state.as_str()) {
            Some("created") => {}
            Some("error" | "deleted") => return Copies::Broken(device.clone()),
            Some(_) | None => whole = false,
        }
    }
    if whole { Copies::Whole } else { Copies::Coming }
}

async fn wait(
    client: &Client,
    id: &str,
    handles: &BTreeMap<String, SnapshotHandle>,
    mut patience: Patience,
) -> anyhow::Result<()> {
    loop {
        // Asked before the copies: what was made when no work was left is all that will be.
        let working = client.instance_operations(id, false).await?.value()?;
        let working = working.iter().any(|work| work.operation_type == OperationType::InstanceSnapshot);
        match copies(handles, &client.snapshots(id).await?.value()?) {
            Copies::Whole => return Ok(()),
            Copies::Coming if working => {}
            Copies::Coming => bail!("no snapshot was made: {}", failure(client, id).await),
            Copies::Broken(device) => {
                bail!("no snapshot of {} was made: {}", visible(&device), failure(client, id).await)
            }
        }
        if !patience.lasts().await {
            bail!("the snapshot is not whole in time; `muster instance snapshots {id}` tells when it is");
        }
    }
}

/// What the newest copying says about its end.
async fn failure(client: &Client, id: &str) -> String {
    let all = client.instance_operations(id, true).await.and_then(Answer::value).unwrap_or_default();
    let failed = all.iter().find(|work| {
        work.operation_type == OperationType::InstanceSnapshot && work.state != OperationState::Complete
    });
    failed.map_or_else(|| "the server does not say why".to_owned(), |work| visible(&operation::error(work)))
}

/// Lists the copies of an instance's disks.
pub(super) async fn list(session: &Session, instance: &str) -> anyhow::Result<()> {
    session.show(session.client.snapshots(instance).await?, snapshots)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    const BLOBS: [&str; 2] = ["0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"];

    #[test]
    fn copies_are_whole_when_every_one_of_them_is() {
        let handle = |blob| json!({ "source_url": "sf://x", "artifact_uuid": BLOBS[0], "blob_uuid": blob });
        let handles = from_value(json!({ "vda": handle(BLOBS[0]), "vdc": handle(BLOBS[1]) })).unwrap();
        let there = |states: &[&str]| -> Vec<SnapshotRecord> {
            let copies = states
                .iter()
                .zip(BLOBS)
                .map(|(state, blob)| json!({ "uuid": BLOBS[0], "blob_uuid": blob, "state": state }));
            from_value(copies.collect()).unwrap()
        };
        assert_eq!(copies(&handles, &there(&[])), Copies::Coming);
        assert_eq!(copies(&handles, &there(&["created"])), Copies::Coming);
        assert_eq!(copies(&handles, &there(&["created", "initial"])), Copies::Coming);
        assert_eq!(copies(&handles, &there(&["created", "created"])), Copies::Whole);
        assert_eq!(copies(&handles, &there(&["created", "error"])), Copies::Broken("vdc".into()));
    }
}
