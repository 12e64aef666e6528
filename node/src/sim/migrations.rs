//! Migration of simulated VMs: the source sends a line over the connection for the memory, or for the files of a VM that is off,
//! and the target confirms it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::ids::InstanceId;
use muster_types::migration::{
    IncomingState, MigrationChannel, MigrationConnection, MigrationDriver, MigrationMode, MigrationProgress,
    SwitchOver,
};
use muster_types::vm::{DiskKind, VmPlan, VmPower};
use muster_types::{Error, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::vm::{SimulatedVm, never_started};
use super::vms::{SimulatedVms, without_drive_files};
use crate::files::io_error;

/// Stands for the memory of a VM, or its disks.
const MEMORY: &str = "simulated memory\n";
/// The confirmation of the target.
const LOADED: &str = "loaded\n";
/// How long the target may take to confirm.
const LOAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How often progress is reported.
const REPORT_INTERVAL: Duration = Duration::from_millis(20);

impl SimulatedVms {
    /// Prepares a VM that was built to receive a migration.
    pub(super) fn prepare_migration(&self, plan: &VmPlan, mode: MigrationMode) -> Result<()> {
        let power = match mode {
            MigrationMode::Live => VmPower::On,
            MigrationMode::Off => VmPower::Off { reason: "it was migrated while it was off".into() },
        };
        let mut state = self.state.lock();
        if plan.shared_storage.is_some() && !state.vms.contains_key(&plan.id) {
            state.vms.insert(plan.id, SimulatedVm::new(None, never_started()));
        }
        let vm = state.vms.get_mut(&plan.id).ok_or_else(|| Error::not_found("VM"))?;
        vm.plan = Some(without_drive_files(plan));
        vm.incoming = Some(IncomingState::Waiting);
        vm.power = power.clone();
        drop(state);
        self.save(plan.id, Some(&power));
        Ok(())
    }

    /// Returns a connection to a VM that waits for a migration.
    pub(super) fn accept_migration(
        &self,
        id: InstanceId,
        connection: &MigrationConnection,
    ) -> Result<UnixStream> {
        self.update(id, |vm| {
            if vm.incoming != Some(IncomingState::Waiting) {
                return Err(Error::Conflict("the VM does not wait for a migration".into()));
            }
            if let Some(password) = &connection.display_password {
                vm.display_password = password.clone();
            }
            Ok(())
        })?;
        let (ours, theirs) = UnixStream::pair().map_err(io_error("failed to create a socket pair"))?;
        ours.set_nonblocking(true).map_err(io_error("failed to configure a socket"))?;
        if connection.channel != MigrationChannel::Disk {
            let state = Arc::clone(&self.state);
            std::thread::spawn(move || {
                let mut reader = BufReader::new(theirs);
                let mut line = String::new();
                if reader.read_line(&mut line).is_ok() && line == MEMORY {
                    if let Some(vm) = state.lock().vms.get_mut(&id) {
                        vm.incoming = Some(IncomingState::Loaded);
                    }
                    // The source may have left.
                    let _ = reader.get_mut().write_all(LOADED.as_bytes());
                }
            });
        }
        Ok(ours)
    }

    /// Lets a VM continue that has received a migration.
    pub(super) fn finish_migration(&self, id: InstanceId, resume: bool) -> Result<()> {
        let finished = self.update(id, |vm| match vm.incoming {
            None => Ok(None),
            Some(IncomingState::Loaded) => {
                vm.incoming = None;
                if vm.is_active() {
                    vm.power = if resume { VmPower::On } else { VmPower::Paused };
                }
                Ok(Some((vm.power.clone(), vm.plan.clone())))
            }
            Some(_) => Err(Error::Conflict("the VM has not received its memory".into())),
        })?;
        if let Some((power, plan)) = finished {
            let before = VmPower::Off { reason: "it was on another node".into() };
            self.guests.apply_power(id, &before, &power, plan.as_ref());
            self.save(id, Some(&power));
            self.change_notifier.notify(id);
        }
        Ok(())
    }

    /// Migrates a VM, and returns its downtime.
    pub(super) async fn run_migration(
        &self,
        id: InstanceId,
        mode: MigrationMode,
        driver: &dyn MigrationDriver,
    ) -> Result<u64> {
        let require = |vm: &SimulatedVm| match (mode, vm.is_active()) {
            (MigrationMode::Off, true) => Err(Error::Conflict("the VM is running".into())),
            (MigrationMode::Live, _) => vm.require_active(),
            (MigrationMode::Off, false) => Ok(()),
        };
        let (disks, password) = self.update(id, |vm| {
            require(vm)?;
            let disks = vm.plan.iter().flat_map(|plan| &plan.disks);
            let count =
                disks.filter(|disk| disk.kind == DiskKind::Disk && mode == MigrationMode::Live).count();
            Ok((count, vm.display_password.clone()))
        })?;
        let (duration, error) = {
            let script = &self.state.lock().script;
            (script.migration_duration, script.migration_error.clone())
        };
        for _ in 0..disks {
            let disk = MigrationConnection { channel: MigrationChannel::Disk, display_password: None };
            driver.connect(disk).await?;
        }
        let started = Instant::now();
        driver.report_progress(MigrationProgress { done: 1, total: 2 }).await?;
        while started.elapsed() < duration {
            tokio::time::sleep(REPORT_INTERVAL).await;
            self.update(id, |vm| require(vm))?;
            driver.report_progress(MigrationProgress { done: 1, total: 2 }).await?;
        }
        if let Some(reason) = error {
            return Err(Error::Unavailable(reason));
        }
        let connection = match mode {
            MigrationMode::Live => {
                MigrationConnection { channel: MigrationChannel::Memory, display_password: Some(password) }
            }
            MigrationMode::Off => {
                MigrationConnection { channel: MigrationChannel::Files, display_password: None }
            }
        };
        let stream = driver.connect(connection).await?;
        let lost = io_error("the connection to the target failed");
        let mut stream = tokio::net::UnixStream::from_std(stream).map_err(lost)?;
        driver.prepare_switch_over().await?;
        self.update(id, |vm| require(vm))?;
        let confirmed = async {
            stream.write_all(MEMORY.as_bytes()).await?;
            let mut reply = [0; LOADED.len()];
            stream.read_exact(&mut reply).await
        };
        let confirmed = tokio::time::timeout(LOAD_TIMEOUT, confirmed).await;
        let confirmed = confirmed.map_err(|_| Error::Unavailable("the target does not confirm".into()))?;
        confirmed.map_err(io_error("the connection to the target failed"))?;
        match driver.switch_over().await? {
            SwitchOver::Moved => Ok(1),
            SwitchOver::Refused(reason) => Err(Error::Conflict(reason)),
        }
    }
}
