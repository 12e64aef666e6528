//! `muster instance snapshot`: snapshots of disks, stored as artifact versions.

use std::collections::BTreeMap;

use anyhow::bail;
use clap::Args;
use muster_types::blob::BlobState;
use muster_types::operation::{OperationState, OperationType};

use super::operation;
use super::session::Session;
use super::wait::{LongWaitOptions, PollTimer};
use crate::api::{ApiResponse, Client, ListQuery, NewSnapshot, SnapshotHandle, SnapshotRecord};
use crate::exit_code::timed_out;
use crate::output::{Table, escape_control};
use crate::transfer::unless_interrupted;

/// Arguments of `muster instance snapshot`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name or id of the instance
    pub(super) instance: String,
    /// Snapshot all disks at the same point in time instead of only the first
    #[arg(long, conflicts_with = "device")]
    all: bool,
    /// Snapshot only this disk, such as vdc, or nvram for the UEFI variables
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Store only the differences from the base image
    #[arg(long)]
    thin: bool,
    /// Number of versions to keep; 0 selects the cluster's default
    #[arg(long, value_name = "N")]
    max_versions: Option<u32>,
    #[command(flatten)]
    wait: LongWaitOptions,
}

/// Creates snapshots and waits until they are complete.
pub(super) async fn snapshot(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { instance, all, device, thin, max_versions, wait } = arguments;
    let client = &session.client;
    let id = client.instance(&instance).await?.value()?.uuid.to_string();
    let new = NewSnapshot { all, device, thin, max_versions };
    let response = client.create_snapshot(&id, &new).await?;
    let handles = response.clone().value()?;
    if handles.is_empty() {
        let device =
            new.device.map_or_else(String::new, |device| format!(" named {}", escape_control(&device)));
        bail!("instance {} has no disk{device} for a snapshot", escape_control(&instance));
    }
    if let Some(timer) = wait.timer() {
        let consequence = || format!("the snapshot continues: see `muster instance snapshots {id}`");
        unless_interrupted(wait_until_complete(client, &id, &handles, timer), consequence).await?;
    }
    session.show(response, table)
}

fn table(handles: BTreeMap<String, SnapshotHandle>) -> Table {
    let table = Table::new(&["DEVICE", "ARTIFACT", "BLOB"], &["SOURCE"]);
    table.rows(handles.into_iter().map(|(device, handle)| {
        [device, handle.artifact_uuid.to_string(), handle.blob_uuid.to_string(), handle.source_url]
    }))
}

/// The progress of a group of snapshots.
#[derive(Debug, PartialEq, Eq)]
enum SnapshotProgress {
    Complete,
    Pending,
    /// The snapshot of this device failed.
    Failed(String),
}

fn progress(handles: &BTreeMap<String, SnapshotHandle>, snapshots: &[SnapshotRecord]) -> SnapshotProgress {
    let mut complete = true;
    for (device, handle) in handles {
        let snapshot = snapshots.iter().find(|snapshot| snapshot.blob_uuid == handle.blob_uuid);
        match snapshot.map(|snapshot| snapshot.state) {
            Some(BlobState::Created) => {}
            Some(BlobState::Deleted) => return SnapshotProgress::Failed(device.clone()),
            Some(BlobState::Initial) | None => complete = false,
        }
    }
    if complete { SnapshotProgress::Complete } else { SnapshotProgress::Pending }
}

async fn wait_until_complete(
    client: &Client,
    id: &str,
    handles: &BTreeMap<String, SnapshotHandle>,
    mut timer: PollTimer,
) -> anyhow::Result<()> {
    loop {
        // Queried before the snapshots: without an operation no more snapshots will be created.
        let operations = client.instance_operations(id, false, &ListQuery::default()).await?.value()?;
        let in_progress =
            operations.iter().any(|operation| operation.operation_type == OperationType::InstanceSnapshot);
        match progress(handles, &client.snapshots(id, &ListQuery::default()).await?.value()?) {
            SnapshotProgress::Complete => return Ok(()),
            SnapshotProgress::Pending if in_progress => {}
            SnapshotProgress::Pending => bail!("the snapshot failed: {}", failure(client, id).await),
            SnapshotProgress::Failed(device) => {
                bail!("the snapshot of {} failed: {}", escape_control(&device), failure(client, id).await)
            }
        }
        let devices: Vec<&str> = handles.keys().map(String::as_str).collect();
        if !timer.wait_for(&format!("the snapshot of {}", devices.join(", "))).await {
            return Err(timed_out(format!(
                "timed out; the snapshot continues: see `muster instance snapshots {id}`"
            )));
        }
    }
}

/// Returns why the newest snapshot operation failed.
async fn failure(client: &Client, id: &str) -> String {
    let all = client
        .instance_operations(id, true, &ListQuery::default())
        .await
        .and_then(ApiResponse::value)
        .unwrap_or_default();
    let failed = all.iter().find(|operation| {
        operation.operation_type == OperationType::InstanceSnapshot
            && operation.state != OperationState::Complete
    });
    failed.map_or_else(
        || "the server gives no reason".to_owned(),
        |failed| escape_control(&operation::error(failed)),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    const BLOBS: [&str; 2] = ["0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"];

    #[test]
    fn snapshots_are_complete_when_all_of_them_are() {
        let handle = |blob| json!({ "source_url": "sf://x", "artifact_uuid": BLOBS[0], "blob_uuid": blob });
        let handles = from_value(json!({ "vda": handle(BLOBS[0]), "vdc": handle(BLOBS[1]) })).unwrap();
        let snapshots = |states: &[&str]| -> Vec<SnapshotRecord> {
            let records = states
                .iter()
                .zip(BLOBS)
                .map(|(state, blob)| json!({ "uuid": BLOBS[0], "blob_uuid": blob, "state": state }));
            from_value(records.collect()).unwrap()
        };
        assert_eq!(progress(&handles, &snapshots(&[])), SnapshotProgress::Pending);
        assert_eq!(progress(&handles, &snapshots(&["created"])), SnapshotProgress::Pending);
        assert_eq!(progress(&handles, &snapshots(&["created", "initial"])), SnapshotProgress::Pending);
        assert_eq!(progress(&handles, &snapshots(&["created", "created"])), SnapshotProgress::Complete);
        assert_eq!(
            progress(&handles, &snapshots(&["created", "deleted"])),
            SnapshotProgress::Failed("vdc".into())
        );
    }
}
