//! The source of a live migration: connections to the target, progress, and moving the instance. See docs/decisions/0070.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_store::instance_migrations::{self, MigrationRow};
use muster_store::instances;
use muster_store::nodes::NodeRow;
use muster_store::operations::{self, OperationRow};
use muster_store::transaction;
use muster_types::ids::InstanceId;
use muster_types::instance::InstanceState;
use muster_types::migration::{
    MIGRATION_PROTOCOL, MigrationConnection, MigrationDriver, MigrationProgress, SwitchOver,
};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::node::{NodeApi, NodeFuture};
use muster_types::operation::OperationProgress;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use reqwest::{Method, StatusCode, header};
use serde_json::json;
use tokio::sync::OwnedMutexGuard;

use super::migrate;
use crate::app::App;
use crate::auth::scopes::CLUSTER_ADMIN;
use crate::objects::node_location::NodeLocation;
use crate::objects::service_key::ServiceKey;
use crate::peer::FORWARDED;

/// How often progress is recorded, and cancellation noticed.
const RECORD_INTERVAL: Duration = Duration::from_secs(1);
/// How often the target is probed. Writes of the guest wait for the target, so it must not be silent for long.
const PROBE_INTERVAL: Duration = Duration::from_secs(3);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of failed probes in a row after which the migration is cancelled.
const MAX_FAILED_PROBES: u32 = 3;
/// How long a migration may take to copy more than ever before: a guest may change its memory faster than it is copied.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(300);
const BUFFER_SIZE: usize = 256 << 10;

/// A migration that this daemon runs.
pub(crate) struct OutgoingMigration<'a> {
    app: &'a App,
    leased: &'a OperationRow,
    migration: MigrationRow,
    target: NodeLocation,
    state: Mutex<OutgoingState>,
}

#[derive(Default)]
struct OutgoingState {
    recorded: Option<Instant>,
    probed: Option<Instant>,
    failed_probes: u32,
    /// The most bytes that were copied, and since when.
    copied: Option<(u64, Instant)>,
    /// The instance lock, from when the guest is stopped on.
    lock: Option<OwnedMutexGuard<()>>,
}

impl<'a> OutgoingMigration<'a> {
    pub(crate) fn new(
        app: &'a App,
        leased: &'a OperationRow,
        migration: MigrationRow,
        target: NodeRow,
    ) -> Self {
        let target = NodeLocation::of(app, target);
        Self { app, leased, migration, target, state: Mutex::default() }
    }

    /// Returns the target if it is a node of this daemon.
    pub(crate) fn local_target(&self) -> Option<&Arc<dyn NodeApi>> {
        match &self.target {
            NodeLocation::Local(node) => Some(node),
            NodeLocation::Remote(_) => None,
        }
    }

    async fn record(&self, progress: MigrationProgress) -> Result<()> {
        self.state.lock().require_progress(progress.done, Instant::now())?;
        let is_due = |last: Option<Instant>, interval| last.is_none_or(|last| last.elapsed() >= interval);
        let (record, probe) = {
            let state = self.state.lock();
            (is_due(state.recorded, RECORD_INTERVAL), is_due(state.probed, PROBE_INTERVAL))
        };
        if record {
            self.state.lock().recorded = Some(Instant::now());
            self.require_pending().await?;
            record_progress(self.app, self.leased, Some(progress)).await?;
        }
        if let (true, NodeLocation::Remote(node)) = (probe, &self.target) {
            let probed = self.app.peers.probe(node, PROBE_TIMEOUT).await;
            let mut state = self.state.lock();
            state.probed = Some(Instant::now());
            state.failed_probes = if probed.is_ok() { 0 } else { state.failed_probes + 1 };
            if state.failed_probes >= MAX_FAILED_PROBES {
                return Err(Error::Conflict(format!("node {} does not respond", node.identity.name)));
            }
        }
        Ok(())
    }

    /// Fails if the migration was cancelled, or its instance changed.
    async fn require_pending(&self) -> Result<()> {
        let current = instance_migrations::get(&*self.app.store, self.migration.instance).await?;
        match current.filter(|current| current.generation == self.migration.generation) {
            Some(current) if current.cancelled => Err(Error::Conflict("the migration was cancelled".into())),
            Some(_) => Ok(()),
            None => Err(Error::Conflict("the migration has ended".into())),
        }
    }

    async fn lock(&self) -> Result<()> {
        let lock = self.app.instance_locks.lock(self.migration.instance).await;
        self.require_pending().await?;
        let row = instances::get(&*self.app.store, self.migration.instance).await?;
        if row.is_none_or(|row| row.state != InstanceState::Created) {
            return Err(Error::Conflict("the instance is being deleted".into()));
        }
        self.state.lock().lock = Some(lock);
        Ok(())
    }

    async fn connect_to(&self, connection: &MigrationConnection) -> Result<UnixStream> {
        match &self.target {
            NodeLocation::Local(node) => {
                node.vms().connect_incoming(self.migration.instance, connection).await
            }
            NodeLocation::Remote(node) => {
                let MigrationRow { instance, generation, .. } = self.migration;
                connect_peer(self.app, node, instance, generation, connection).await
            }
        }
    }
}

impl OutgoingState {
    /// Fails if the migration has not copied more for too long.
    fn require_progress(&mut self, done: u64, now: Instant) -> Result<()> {
        match self.copied {
            Some((most, since)) if done <= most => {
                if now.duration_since(since) >= PROGRESS_TIMEOUT {
                    return Err(Error::Conflict(format!(
                        "the migration has made no progress for {} seconds, at {most} bytes: the target hangs, or the guest \
                         changes its memory faster than it is copied (see `--auto-converge` and `--stop`)",
                        PROGRESS_TIMEOUT.as_secs()
                    )));
                }
            }
            _ => self.copied = Some((done, now)),
        }
        Ok(())
    }
}

/// Records the progress of a migration; without a value, that it has begun.
pub(crate) async fn record_progress(
    app: &App,
    leased: &OperationRow,
    progress: Option<MigrationProgress>,
) -> Result<()> {
    let bytes = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let progress = OperationProgress {
        done: progress.map_or(0, |progress| bytes(progress.done)),
        total: progress.map(|progress| bytes(progress.total)),
        validator: None,
        node: None,
    };
    transaction!(app.store, |tx| { Ok(operations::set_progress(tx, leased, &progress).await?) })
}

/// Opens a connection to the VM or the replica on a node of another daemon.
pub(super) async fn connect_peer(
    app: &App,
    node: &NodeRow,
    instance: InstanceId,
    generation: i64,
    connection: &MigrationConnection,
) -> Result<UnixStream> {
    let name = &node.identity.name;
    let failed = |error: &dyn std::fmt::Display| {
        Error::Unavailable(format!("failed to connect to node {name} for the disks of the instance: {error}"))
    };
    let path = format!("/instances/{instance}/migration");
    let request = app.peers.request(node, Method::POST, &path).await.map_err(|error| failed(&error))?;
    let body = json!({
        "channel": connection.channel, "generation": generation,
        "password": connection.display_password.as_ref().map(|password| password.expose().to_owned()),
    });
    let scopes = vec!["instance.write".to_owned(), CLUSTER_ADMIN.to_owned()];
    let key = ServiceKey::for_daemon(app, SYSTEM_NAMESPACE, scopes).await?;
    let request = request
        .header(FORWARDED, "1")
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, MIGRATION_PROTOCOL)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string())
        .bearer_auth(key.token());
    let response = app.peers.send(node, request).await;
    key.remove(app).await;
    let response = response.map_err(|error| failed(&error))?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let text = response.text().await.unwrap_or_default();
        return Err(failed(&text.trim()));
    }
    let mut peer = response.upgrade().await.map_err(|error| failed(&error))?;
    let (ours, theirs) = UnixStream::pair().map_err(|error| failed(&error))?;
    ours.set_nonblocking(true).and_then(|()| theirs.set_nonblocking(true)).map_err(|error| failed(&error))?;
    let mut ours = tokio::net::UnixStream::from_std(ours).map_err(|error| failed(&error))?;
    tokio::spawn(async move {
        // QEMU notices the end of its connection.
        let _ =
            tokio::io::copy_bidirectional_with_sizes(&mut ours, &mut peer, BUFFER_SIZE, BUFFER_SIZE).await;
    });
    Ok(theirs)
}

impl MigrationDriver for OutgoingMigration<'_> {
    fn connect(&self, connection: MigrationConnection) -> NodeFuture<'_, UnixStream> {
        Box::pin(async move { self.connect_to(&connection).await })
    }

    fn report_progress(&self, progress: MigrationProgress) -> NodeFuture<'_, ()> {
        Box::pin(self.record(progress))
    }

    fn prepare_switch_over(&self) -> NodeFuture<'_, ()> {
        Box::pin(self.lock())
    }

    fn switch_over(&self) -> NodeFuture<'_, SwitchOver> {
        Box::pin(migrate::switch_over(self.app, self.leased, &self.migration))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migration_without_progress_ends_with_a_reason() {
        let (mut state, start) = (OutgoingState::default(), Instant::now());
        let mut at = |done, seconds| state.require_progress(done, start + Duration::from_secs(seconds));
        at(10, 0).unwrap();
        at(11, 299).unwrap();
        // A guest that changes its memory makes the copy fall back.
        at(5, 400).unwrap();
        at(11, 598).unwrap();
        let error = at(11, 599).unwrap_err().to_string();
        assert!(error.contains("no progress for 300 seconds, at 11 bytes"), "{error}");
        at(12, 599).unwrap();
    }
}
