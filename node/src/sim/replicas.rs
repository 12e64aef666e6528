//! Replicas of simulated VMs: files that contain which copy they are, in place of disks.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use muster_types::ids::InstanceId;
use muster_types::replica::{ReplicaCopy, ReplicaDriver};
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::vms::SimulatedVms;
use crate::files::io_error;
use crate::replica_messages::{
    CopyHeader, ReplicaStatus, confirm, receive_message, receive_status, send_message, to_async,
    wait_committed,
};

#[derive(Debug, Serialize, Deserialize)]
struct SimulatedReplica {
    copy: Uuid,
    time: f64,
    sealed: bool,
}

fn load(path: &Path) -> Result<Option<SimulatedReplica>> {
    match fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("failed to read a simulated replica")(error)),
    }
}

fn save(path: &Path, replica: &SimulatedReplica) -> Result<()> {
    let text = serde_json::to_vec(replica).map_err(|error| Error::Internal(error.to_string()))?;
    fs::write(path, text).map_err(io_error("failed to write a simulated replica"))
}

async fn receive(path: PathBuf, generation: i64, stream: UnixStream) -> Result<()> {
    let mut stream = to_async(stream)?;
    let last = load(&path)?;
    send_message(&mut stream, &ReplicaStatus { copy: last.as_ref().map(|last| last.copy) }).await?;
    let Ok(header) = receive_message::<CopyHeader>(&mut stream).await else { return Ok(()) };
    if header.generation != generation || last.is_some_and(|last| last.sealed) {
        return Err(Error::Conflict("the copy is not for this replica".into()));
    }
    save(&path, &SimulatedReplica { copy: header.copy, time: header.time, sealed: false })?;
    confirm(&mut stream).await
}

impl SimulatedVms {
    fn replica_path(&self, id: InstanceId) -> PathBuf {
        self.dir.join(format!("{id}.replica"))
    }

    /// Sends a copy without disks.
    pub(super) async fn send_copy(&self, id: InstanceId, driver: &dyn ReplicaDriver) -> Result<ReplicaCopy> {
        let generation = self.update(id, |vm| Ok(vm.plan.as_ref().map_or(1, |plan| plan.generation)))?;
        if let Some(reason) = self.state.lock().script.replica_error.clone() {
            return Err(Error::Unavailable(reason));
        }
        let (mut stream, status) = receive_status(driver.connect().await?).await?;
        let (copy, base, time) = (Uuid::new_v4(), status.copy, driver.now());
        let header = CopyHeader { copy, base, time, generation, disks: vec![], nvram: false };
        send_message(&mut stream, &header).await?;
        wait_committed(&mut stream).await?;
        Ok(ReplicaCopy { time, bytes: 0, incremental: base.is_some() })
    }

    pub(super) fn receive_copy(&self, id: InstanceId, generation: i64) -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair().map_err(io_error("failed to create a socket pair"))?;
        ours.set_nonblocking(true).map_err(io_error("failed to configure a socket"))?;
        fs::create_dir_all(&self.dir).map_err(io_error("failed to create a directory"))?;
        let path = self.replica_path(id);
        tokio::spawn(async move {
            if let Err(error) = receive(path, generation, theirs).await {
                tracing::info!(instance = %id, %error, "did not receive a copy of disks");
            }
        });
        Ok(ours)
    }

    pub(super) fn seal_replica(&self, id: InstanceId) -> Result<f64> {
        let path = self.replica_path(id);
        let missing = || Error::Conflict("the node has no complete replica of the disks".into());
        let mut replica = load(&path)?.ok_or_else(missing)?;
        replica.sealed = true;
        save(&path, &replica)?;
        Ok(replica.time)
    }

    pub(super) fn delete_replica(&self, id: InstanceId) -> Result<()> {
        match fs::remove_file(self.replica_path(id)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error("failed to remove a simulated replica")(error))
            }
            _ => Ok(()),
        }
    }
}
