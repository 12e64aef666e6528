//! Snapshots and screenshots of simulated VMs: valid images.

use std::fs;

use muster_types::Result;
use muster_types::ids::InstanceId;
use muster_types::storage::Draft;
use muster_types::vm::{DiskPlan, SnapshotDisk};

use super::screen;
use super::vms::SimulatedVms;
use crate::files::io_error;
use crate::image::qcow2_writer;

/// The size of a simulated NVRAM, in bytes.
const NVRAM_SIZE: usize = 64 << 10;

impl SimulatedVms {
    pub(super) async fn take_snapshot(&self, id: InstanceId, disks: &[SnapshotDisk]) -> Result<()> {
        let (planned, number) = self.update(id, |vm| {
            for disk in disks {
                vm.require_snapshottable(&disk.device)?;
            }
            vm.snapshots += 1;
            let disks = vm.plan.as_ref().map_or_else(Vec::new, |plan| plan.disks.clone());
            Ok((disks, vm.snapshots))
        })?;
        for disk in disks {
            let scratch = self.storage.scratch()?;
            let file = scratch.path("snapshot");
            let content = format!(
                "disk {} of simulated VM {id}, snapshot {number}, thin: {}\n",
                disk.device, disk.thin
            );
            let plan = planned.iter().find(|plan| plan.device == disk.device);
            let written = match plan {
                Some(plan) => {
                    qcow2_writer::create(&file, self.disk_size(plan)?, None, Some(content.as_bytes()))
                }
                None => {
                    let mut nvram = content.into_bytes();
                    nvram.resize(NVRAM_SIZE, 0xff);
                    fs::write(&file, nvram)
                }
            };
            written.map_err(io_error("failed to write a disk snapshot"))?;
            self.storage.adopt_draft(disk.draft, &file).await?;
        }
        Ok(())
    }

    /// Returns the size of a disk in bytes. The conversion of its base may have been removed since it was built.
    fn disk_size(&self, disk: &DiskPlan) -> Result<u64> {
        let base = disk.base.map(|base| self.storage.conversion(base)).transpose()?.flatten();
        let min_size = base.map_or(1 << 20, |base| base.facts.virtual_size);
        Ok(disk.size.map_or(min_size, |size| size.max(min_size)))
    }

    pub(super) async fn take_screenshot(&self, id: InstanceId, draft: Draft) -> Result<()> {
        self.update(id, |vm| vm.require_active())?;
        let scratch = self.storage.scratch()?;
        let file = scratch.path("screen");
        let written = fs::write(&file, screen::screenshot(id.0.as_u128()));
        written.map_err(io_error("failed to write a screenshot"))?;
        self.storage.adopt_draft(draft, &file).await
    }
}
