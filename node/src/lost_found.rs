//! `lost+found`: the files of VMs that must not run on this node, but whose disks may still be needed. The daemon only
//! adds to it; an operator removes directories from it. See docs/decisions/0052.

use std::fs;
use std::path::{Path, PathBuf};

use muster_types::Result;
use muster_types::ids::InstanceId;
use muster_types::time::{format_utc, now};

use crate::files::{create_dir, io_error};

const README_FILE: &str = "README";

/// The directory `lost+found` of a node.
#[derive(Debug, Clone)]
pub(crate) struct LostFound {
    dir: PathBuf,
    node: String,
}

impl LostFound {
    /// Creates nothing until the first directory is added.
    pub(crate) fn new(storage_dir: &Path, node: &str) -> Self {
        Self { dir: storage_dir.join("lost+found"), node: node.to_owned() }
    }

    /// Moves the directory of a VM without a process to `DATE-NODE/INSTANCE`, with a README. Blocks.
    pub(crate) fn add(&self, id: InstanceId, vm_dir: &Path, reason: &str) -> Result<PathBuf> {
        let time = format_utc(now());
        let date = time.split('T').next().unwrap_or_default();
        let node = self.node.replace('/', "_");
        let parent = self.dir.join(format!("{date}-{node}"));
        create_dir(&parent)?;
        // A directory of the same instance may have been moved on the same day.
        let names = (1u64..).map(|number| match number {
            1 => id.to_string(),
            number => format!("{id}.{number}"),
        });
        let free = names.map(|name| parent.join(name)).find(|path| fs::symlink_metadata(path).is_err());
        let path = free.expect("the numbers are unlimited");
        let moved = fs::write(vm_dir.join(README_FILE), self.readme(id, &time, reason))
            .and_then(|()| fs::rename(vm_dir, &path))
            .and_then(|()| fs::File::open(&parent)?.sync_all());
        moved.map_err(io_error("failed to move a VM directory to lost+found"))?;
        Ok(path)
    }

    fn readme(&self, id: InstanceId, time: &str, reason: &str) -> String {
        format!(
            "These are the files of a VM of the instance {id}.\n\
             Node {} stopped the VM and moved them here at {time}.\n\n\
             Reason: {reason}.\n\n\
             Do not start the VM from these files: its addresses may be in use elsewhere. To keep the content of a\n\
             disk, such as vda, upload it as an image:\n\n    \
             qemu-img convert -O qcow2 vda.qcow2 copy.qcow2\n    \
             muster artifact upload NAME copy.qcow2\n\n\
             Muster never removes this directory. Remove it when its disks are no longer needed.\n",
            self.node
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_directories_without_replacing_any() {
        let storage = tempfile::tempdir().unwrap();
        let lost_found = LostFound::new(storage.path(), "node/1");
        let id = InstanceId::new();
        let mut moved = Vec::new();
        for content in ["old", "new"] {
            let vm_dir = storage.path().join("machines").join(id.to_string());
            fs::create_dir_all(&vm_dir).unwrap();
            fs::write(vm_dir.join("vda.qcow2"), content).unwrap();
            let path = lost_found.add(id, &vm_dir, "it runs elsewhere").unwrap();
            assert!(!vm_dir.exists());
            assert_eq!(fs::read_to_string(path.join("vda.qcow2")).unwrap(), content);
            assert!(fs::read_to_string(path.join("README")).unwrap().contains("it runs elsewhere"));
            moved.push(path);
        }
        assert_ne!(moved[0], moved[1]);
        let parent = moved[0].parent().unwrap();
        assert!(parent.file_name().unwrap().to_string_lossy().ends_with("-node_1"), "{parent:?}");
    }
}
