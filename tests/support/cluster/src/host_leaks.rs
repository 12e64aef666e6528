//! The end of a cluster of hosts: deletes the objects that the test left, then checks that nothing of them remains.

use std::collections::BTreeSet;
use std::path::PathBuf;

use muster_testing::{job_directories, wait_for};
use reqwest::Method;

use crate::database::ClusterDatabase;
use crate::hosts::{HostCluster, WAIT_TIMEOUT, wait_until_same};
use crate::vms::{cgroups, qemu_processes};

const INSTANCES: &str = "SELECT uuid FROM instances WHERE state <> 'deleted'";
const INTERFACES: &str = "SELECT uuid FROM interfaces WHERE state <> 'deleted'";
const NETWORKS: &str = "SELECT uuid FROM networks WHERE state <> 'deleted' AND name <> 'floating'";
const UNFINISHED_OPERATIONS: &str = "SELECT name FROM operations WHERE state IN ('queued', 'executing')";

/// Fails the test when processes, devices, rules or directories remain after all instances and networks are deleted.
impl Drop for HostCluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for host in &mut self.hosts {
            host.start_if_stopped();
        }
        let database = ClusterDatabase::open(&self.database_url, &self.directory);
        let instances = database.first_column("SELECT uuid FROM instances");
        self.delete_objects(&database);
        wait_until_same("operations to finish", WAIT_TIMEOUT, "", || {
            database.first_column(UNFINISHED_OPERATIONS).join("\n")
        });
        for host in &self.hosts {
            let what = format!("host {} to have the networks that it started with", host.address);
            wait_until_same(&what, WAIT_TIMEOUT, &host.initial_inventory, || host.inventory());
        }
        wait_until_same("VMs to be removed", WAIT_TIMEOUT, "", || self.remains_of_vms(&instances));
    }
}

impl HostCluster {
    /// Deletes all instances, interfaces that the test created without an instance, and networks.
    fn delete_objects(&self, database: &ClusterDatabase) {
        self.delete_through_api(database, INSTANCES, "instances");
        for interface in database.first_column(INTERFACES) {
            database.delete_interface(interface.parse().unwrap());
        }
        self.delete_through_api(database, NETWORKS, "networks");
    }

    /// Requests the deletion of everything that a query selects, and waits until it selects nothing.
    fn delete_through_api(&self, database: &ClusterDatabase, query: &str, collection: &str) {
        let mut requested = BTreeSet::new();
        wait_for(&format!("{collection} to be deleted"), WAIT_TIMEOUT, || {
            let found = database.first_column(query);
            for id in &found {
                let path = format!("/{collection}/{id}");
                if !requested.contains(id) && self.host(1).call(Method::DELETE, &path, None).0 < 300 {
                    requested.insert(id.clone());
                }
            }
            found.is_empty().then_some(())
        });
    }

    /// Lists QEMU processes, directories of VMs and jobs, and the cgroups of these instances.
    fn remains_of_vms(&self, instances: &[String]) -> String {
        let data_directories = (1..=self.hosts.len()).map(|number| self.data_directory(number));
        let vm_directories = data_directories.clone().flat_map(|data| {
            let entries = std::fs::read_dir(data.join("machines")).into_iter().flatten().flatten();
            entries.map(|entry| format!("VM directory {}", entry.path().display())).collect::<Vec<_>>()
        });
        let jobs = data_directories.clone().flat_map(|data| job_directories(&data));
        let is_own = |cgroup: &PathBuf| {
            let name = cgroup.file_name().unwrap_or_default().to_string_lossy();
            instances.iter().any(|id| name.starts_with(id.as_str()))
        };
        let cgroups = cgroups().into_iter().filter(is_own).map(|path| format!("cgroup {}", path.display()));
        let processes = qemu_processes().into_iter().map(|(line, _)| format!("process {line}"));
        vm_directories.chain(jobs).chain(cgroups).chain(processes).collect::<Vec<_>>().join("\n")
    }

    fn data_directory(&self, number: usize) -> PathBuf {
        self.directory.join(format!("m{number}/data"))
    }
}
