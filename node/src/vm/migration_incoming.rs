//! The target of a migration: a QEMU that waits for the memory of the VM, and serves its disks over NBD meanwhile, or only
//! the files of a VM that is off. See docs/decisions/0070.
//!
//! It has no guest to run before `finish`, which is called once the instance is on this node.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use muster_types::migration::{IncomingState, MigrationChannel, MigrationConnection, MigrationMode};
use muster_types::vm::{VmPlan, VmPower};
use muster_types::{Error, Result};
use serde_json::{Value, json};

use super::hypervisor::{Hypervisor, blocking};
use super::lifecycle::Vm;
use super::migration_jobs::is_loaded;
use super::migration_outgoing::{MEMORY_FD, set_capabilities};
use super::qmp::Qmp;
use super::vm_dir::{VmDir, VmExit};
use super::{migration_files, start};
use crate::files::io_error;
use crate::vm_socket;

/// How a network learns where the guest is: announcements of its addresses, at growing intervals in milliseconds.
fn announcements() -> Value {
    json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 })
}

/// Serves the writable disks of a VM over NBD.
pub(super) async fn export_disks(qmp: &Qmp, dir: &VmDir, disks: &[String]) -> Result<()> {
    let dir = dir.clone();
    let listener = blocking(move || {
        vm_socket::listen(dir.path(), vm_socket::NBD).map_err(io_error("failed to create VM socket"))
    })
    .await?;
    qmp.send_fd(vm_socket::NBD, listener.as_fd()).await?;
    let address = json!({ "type": "fd", "data": { "str": vm_socket::NBD } });
    qmp.execute("nbd-server-start", json!({ "addr": address })).await?;
    for disk in disks {
        let export = json!({ "type": "nbd", "id": format!("export-{disk}"), "node-name": disk, "name": disk, "writable": true });
        qmp.execute("block-export-add", export).await?;
    }
    set_capabilities(qmp, false).await
}

/// Prepares a VM that is off to receive its files.
pub(super) async fn prepare_off(hypervisor: &Arc<Hypervisor>, vm: &Vm, plan: &VmPlan) -> Result<()> {
    let off = VmExit::off("it was migrated while it was off");
    let (record, dir) = (start::new_record(hypervisor, plan, None), vm.dir.clone());
    let (fencing, exit) = (plan.fencing, off.clone());
    let shared = plan.shared_storage.map(|storage| (hypervisor.storage.clone(), storage, plan.id));
    blocking(move || {
        if let Some((files, storage, id)) = shared {
            dir.create()?;
            // Acquired when the VM is started. The source needs them if the migration fails.
            dir.link_disks(&files.require_shared()?.disk_dir(storage, id)?)?;
        }
        dir.set_fencing(fencing)?;
        dir.begin_run(&record)?;
        dir.save_exit(&exit)?;
        dir.mark_incoming(MigrationMode::Off)?;
        dir.sync()
    })
    .await?;
    vm.set_power(off.power());
    Ok(())
}

/// Opens a connection to the disks of a VM, or one over which it receives its memory or files.
pub(super) async fn connect(vm: &Arc<Vm>, connection: &MigrationConnection) -> Result<UnixStream> {
    let Some(mode) = vm.dir.incoming_mode() else {
        return Err(Error::Conflict("the VM does not wait for a migration".into()));
    };
    let failed = io_error("failed to connect to the VM");
    let pair = || -> std::io::Result<(UnixStream, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((ours, theirs))
    };
    if connection.channel == MigrationChannel::Files {
        let (ours, theirs) = pair().map_err(failed)?;
        theirs.set_nonblocking(true).map_err(io_error("failed to configure a socket"))?;
        migration_files::receive(vm, theirs, mode);
        return Ok(ours);
    }
    let running = vm.require_running()?;
    match connection.channel {
        MigrationChannel::Files | MigrationChannel::Disk => {
            let stream = vm_socket::connect(vm.dir.path(), vm_socket::NBD).await;
            stream.and_then(tokio::net::UnixStream::into_std).map_err(failed)
        }
        MigrationChannel::Replica => Err(Error::Invalid("a replica is not part of a migration".into())),
        MigrationChannel::Memory => {
            let qmp = running.qmp()?;
            if let Some(password) = &connection.display_password
                && let Some(display) = running.record().display
            {
                vm.dir.save_display_password(password)?;
                display.set_password(&qmp, password).await?;
            }
            let (ours, theirs) = pair().map_err(failed)?;
            qmp.send_fd(MEMORY_FD, theirs.as_fd()).await?;
            qmp.execute("migrate-incoming", json!({ "uri": format!("fd:{MEMORY_FD}") })).await?;
            Ok(ours)
        }
    }
}

/// Returns the state of a VM that was prepared to receive a migration, or `None` of any other.
pub(super) async fn state(vm: &Vm) -> Option<IncomingState> {
    if vm.dir.incoming_mode()? == MigrationMode::Off {
        return Some(if vm.dir.is_received() { IncomingState::Loaded } else { IncomingState::Waiting });
    }
    let Some(running) = vm.running() else {
        let reason = match vm.power() {
            VmPower::Off { reason } | VmPower::Crashed { reason } => reason,
            power => format!("it is {power:?}"),
        };
        return Some(IncomingState::Failed(reason));
    };
    let status = match running.qmp() {
        Ok(qmp) => qmp.execute("query-migrate", json!({})).await,
        Err(error) => Err(error),
    };
    Some(match status {
        Ok(status) if status["status"] == json!("completed") => IncomingState::Loaded,
        Ok(status) if status["status"] == json!("failed") => {
            IncomingState::Failed(status["error-desc"].as_str().unwrap_or("QEMU gives no reason").to_owned())
        }
        // QEMU may be busy, or exit soon.
        Ok(_) | Err(_) => IncomingState::Waiting,
    })
}

/// Lets a VM continue that has received everything, unless it is off.
pub(super) async fn finish(vm: &Vm, resume: bool) -> Result<()> {
    match vm.dir.incoming_mode() {
        None => return Ok(()),
        Some(MigrationMode::Off) if vm.dir.is_received() => return vm.dir.clear_incoming(),
        Some(MigrationMode::Off) => {
            return Err(Error::Conflict("the VM has not received its disks".into()));
        }
        Some(MigrationMode::Live) => {}
    }
    let running = vm.require_running()?;
    let qmp = running.qmp()?;
    if !is_loaded(&qmp, &vm.dir).await {
        return Err(Error::Conflict("the VM has not received its memory".into()));
    }
    // An earlier attempt may have stopped it.
    let _ = qmp.execute("nbd-server-stop", json!({})).await;
    if resume {
        qmp.execute("cont", json!({})).await?;
    }
    vm.dir.mark_started()?;
    vm.dir.clear_incoming()?;
    vm.dir.remove(vm_socket::NBD)?;
    vm.attach_guest(&running);
    if let Err(error) = qmp.execute("announce-self", announcements()).await {
        tracing::warn!(vm = %vm.id, %error, "failed to announce the addresses of a guest");
    }
    vm.refresh_power(&running).await
}
