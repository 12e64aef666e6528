//! Live migration between two hosts of which one loses power, in every phase.

use std::path::PathBuf;
use std::time::Instant;

use muster_test_cluster::{
    ClusterDatabase, Host, HostCluster, LockedRows, enter_vm_namespaces, qemu_processes, vm_hosts,
};
use muster_testing::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::instance::Instance;

/// The phases of a migration, in their order.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// The target has not begun to prepare its VM.
    Requested,
    /// The disks are being copied.
    Disks,
    /// The memory is being copied.
    Memory,
    /// The target has received everything, and the instance is about to be moved.
    Loaded,
    /// The instance is on the target, which has not continued the guest.
    Moved,
}

const PHASES: [Phase; 5] = [Phase::Requested, Phase::Disks, Phase::Memory, Phase::Loaded, Phase::Moved];

/// The size of the memory of the guest, and more than what its disk contains.
const MEMORY_SIZE: u64 = 100 << 20;

struct PowerLoss {
    cluster: HostCluster,
    database: ClusterDatabase,
    web: Instance,
}

/// Returns whether an operation has ended.
fn is_final(operation: &Value) -> bool {
    !["queued", "executing"].contains(&operation["state"].as_str().unwrap())
}

impl PowerLoss {
    /// Returns the number of the host on which the instance is, and of the other one.
    fn hosts(&self) -> (usize, usize) {
        match self.web.record(self.cluster.host(1))["node"].as_str() {
            Some("m1") => (1, 2),
            node => {
                assert_eq!(node, Some("m2"));
                (2, 1)
            }
        }
    }

    /// Starts a migration to a host, and stops it in a phase: until the locks are dropped, if any. Returns the path of the
    /// operation.
    fn migrate_until(&self, phase: Phase, source: usize, target: usize) -> (String, Option<LockedRows>) {
        let host = self.cluster.host(source);
        let is_slow = matches!(phase, Phase::Disks | Phase::Memory);
        let limit = is_slow.then_some(8);
        let body = json!({ "target": format!("m{target}"), "bandwidth_limit_mbps": limit });
        let operation = wait_for("the target to be a candidate", TIMEOUT, || {
            if phase == Phase::Requested {
                self.cluster.host(target).freeze();
            }
            let (status, operation) = host.call(Method::POST, &self.web.path("/migrate"), Some(body.clone()));
            if status == 507 {
                // On a busy host its last check-in may be too old.
                self.cluster.host(target).unfreeze();
                return None;
            }
            assert_eq!(status, 202, "{operation}");
            Some(operation)
        });
        let path = format!("/clusteroperations/node_inst_op/{}", operation["uuid"].as_str().unwrap());
        match phase {
            Phase::Requested => {}
            Phase::Disks | Phase::Memory => {
                wait_for(&format!("the phase {phase:?}"), TIMEOUT, || {
                    let record = host.get(&path);
                    assert!(record["error_report"].is_null(), "{record}\n{}", host.log());
                    let total = record["progress"]["total"].as_u64().filter(|total| *total > 0)?;
                    assert!(phase == Phase::Memory || total < MEMORY_SIZE, "{record}");
                    (phase == Phase::Disks || total > MEMORY_SIZE).then_some(())
                });
            }
            Phase::Loaded | Phase::Moved => {
                let Some(locked) = self.hold(phase, host, &path, target) else {
                    // The source lost the lease of the operation, because it was held for too long on a busy host.
                    self.cluster.host(target).unfreeze();
                    wait_for("operations to end", TIMEOUT, || self.unfinished().is_empty().then_some(()));
                    return self.migrate_until(phase, source, target);
                };
                return (path, locked);
            }
        }
        (path, None)
    }

    /// Holds a migration that was requested when the target has received everything, or has become the node of the
    /// instance. Returns the locks that hold it, if any, or `None` if the operation has ended before.
    fn hold(&self, phase: Phase, host: &Host, operation: &str, target: usize) -> Option<Option<LockedRows>> {
        let node = self.cluster.host(target).node();
        let locked = self
            .database
            .lock_rows(&format!("UPDATE node_claims SET cpus = cpus WHERE node_uuid = '{node}'"));
        // Not the table innodb_trx, whose content stays the same while it is read more often than every 100 ms.
        let waits = "SELECT variable_value FROM information_schema.global_status \
                     WHERE variable_name = 'innodb_row_lock_current_waits' AND variable_value > 0";
        let is_held = wait_for("the source to move the instance", TIMEOUT, || {
            let is_waiting = !self.database.first_column(waits).is_empty();
            (is_waiting || is_final(&host.get(operation))).then_some(is_waiting)
        });
        if !is_held {
            return None;
        }
        if phase == Phase::Loaded {
            return Some(Some(locked));
        }
        self.cluster.host(target).signal(Signal::SIGSTOP);
        drop(locked);
        let is_moved = wait_for("the instance to be moved", TIMEOUT, || {
            let is_moved = self.web.record(host)["node"] == format!("m{target}");
            (is_moved || is_final(&host.get(operation))).then_some(is_moved)
        });
        is_moved.then_some(None)
    }

    /// Returns the directory of the VM of a host.
    fn vm_dir(&self, host: usize) -> PathBuf {
        self.web.vm_dir(&self.cluster, host)
    }

    /// Returns the hosts of the VMs of the instance.
    fn running_on(&self) -> Vec<usize> {
        // Daemons also query QEMU.
        let own = qemu_processes().into_iter().filter(|(line, _)| line.contains(&self.web.uuid));
        let dirs = own.filter_map(|(_, pid)| std::fs::read_link(format!("/proc/{pid}/cwd")).ok());
        dirs.map(|dir| (1..=2).find(|host| self.vm_dir(*host) == dir).unwrap()).collect()
    }

    /// Ends every process of a host at once. Its VM is lost, as after a restart of the host.
    fn power_off(&mut self, host: usize) {
        let dir = self.vm_dir(host);
        self.cluster.hosts[host - 1].kill();
        for (_, pid) in qemu_processes() {
            if std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == dir) {
                // It may have ended.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        wait_for("QEMU to exit", TIMEOUT, || (!self.running_on().contains(&host)).then_some(()));
        let record = dir.join("machine.json");
        if let Ok(text) = std::fs::read_to_string(&record) {
            let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
            std::fs::write(record, text.replace(boot.trim(), "another")).unwrap();
        }
    }

    /// Lets a host lose power in a phase of a migration, and asserts that exactly one copy runs when it is back.
    fn lose_power(&mut self, phase: Phase, of_source: bool) {
        let started = Instant::now();
        let (source, target) = self.hosts();
        let (lost, other) = if of_source { (source, target) } else { (target, source) };
        let (operation, locked) = self.migrate_until(phase, source, target);
        self.power_off(lost);
        drop(locked);
        self.cluster.host(other).unfreeze();
        self.cluster.hosts[lost - 1].start();
        let host = self.cluster.host(other);
        let ended = wait_for("the migration to end", TIMEOUT, || Some(host.get(&operation)).filter(is_final));
        let record = wait_for("exactly one copy to run", TIMEOUT, || {
            let running = self.running_on();
            let record = self.web.record(host);
            let (node, other) = self.hosts();
            let is_done = running == [node]
                && record["power_state"] == "on"
                && !self.vm_dir(other).exists()
                && self.unfinished().is_empty();
            is_done.then_some(record)
        });
        println!(
            "{phase:?}, power loss of the {}: m{source} -> {}, the migration ended in {}, after {:.1} s",
            if of_source { "source" } else { "target" },
            record["node"],
            ended["state"],
            started.elapsed().as_secs_f64()
        );
        // Up to the move the instance belongs to the source, afterwards to the target.
        if phase == Phase::Moved {
            assert_eq!(record["node"], format!("m{target}"), "{phase:?} {of_source}");
        } else if of_source && phase != Phase::Requested {
            assert_eq!(record["node"], format!("m{source}"), "{phase:?} {of_source}");
        }
    }

    fn unfinished(&self) -> Vec<Value> {
        let migrations = self.database.first_column("SELECT instance_uuid FROM instance_migrations");
        let sql = "SELECT name FROM operations WHERE state IN ('queued', 'executing')";
        migrations.into_iter().chain(self.database.first_column(sql)).map(Value::from).collect()
    }
}

#[test]
fn power_loss_in_any_phase_leaves_one_copy_running() {
    if !enter_vm_namespaces("migration_power_loss::power_loss_in_any_phase_leaves_one_copy_running") {
        return;
    }
    let settings =
        [("NODE_CHECKIN_MAXIMUM", "30"), ("BLOB_REPLICATION_FACTOR", "2"), ("CLUSTER_OP_LEASE", "3")];
    let Some(cluster) = vm_hosts(2, &settings) else { return };
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let web = Instance::create(cluster.host(1), "web", &json!({ "placed_on": "m1" }));
    let mut console = web.console(cluster.host(1));
    console.log_in();
    let sum =
        console.run("dd if=/dev/urandom of=/root/data bs=64k count=64 2>/dev/null; sync; md5sum </root/data");
    drop(console);
    let mut test = PowerLoss { cluster, database, web };
    for of_source in [false, true] {
        for phase in PHASES {
            test.lose_power(phase, of_source);
        }
    }
    let (host, _) = test.hosts();
    let mut console = test.web.console(test.cluster.host(host));
    // The guest may have shown its prompt before it was migrated.
    console.type_line("");
    console.log_in();
    assert_eq!(console.run("md5sum </root/data"), sum);
    test.web.delete(test.cluster.host(1));
}
