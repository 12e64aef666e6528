//! Clusters of hosts whose daemons publish the tiny image, and lists of everything that instances occupy on them.

use std::path::{Path, PathBuf};

use muster_testing::{skipped, wait_for};

use crate::database::ClusterDatabase;
use crate::hosts::{Host, HostCluster, WAIT_TIMEOUT, wait_until_same};

/// Reruns a test in namespaces that can run guests. See [`muster_testing::enter_namespaces`].
pub fn enter_vm_namespaces(test: &str) -> bool {
    const PROGRAMS: [&str; 10] = [
        "ip",
        "bridge",
        "nft",
        "dnsmasq",
        "ping",
        "busybox",
        "unshare",
        "setpriv",
        "qemu-system-x86_64",
        "qemu-img",
    ];
    if !tiny_image().exists() {
        skipped("target/image/tiny.qcow2 (make image)");
        return false;
    }
    muster_testing::enter_namespaces(test, &PROGRAMS)
}

/// Returns the path of the tiny image, which `make image` builds.
#[must_use]
pub fn tiny_image() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target/image/tiny.qcow2")
}

/// Returns settings for many guests on a small host and short quarantines, and `more`.
pub fn vm_settings<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut all = vec![
        ("CPU_OVERCOMMIT_RATIO", "20"),
        ("IP_DELETION_HALO_DURATION", "1"),
        ("NODE_DISK_RESERVATION_GB", "0"),
    ];
    all.extend(more);
    all
}

/// Creates a cluster of one host with the tiny image, with SQLite.
pub fn single_vm_host(more: &[(&str, &str)]) -> HostCluster {
    publish_image(HostCluster::single_host(&vm_settings(more)), "tiny", &tiny_image())
}

/// Creates a cluster of hosts that share a MariaDB, of which the first publishes the tiny image, or `None` when MariaDB is
/// not installed.
pub fn vm_hosts(count: usize, more: &[(&str, &str)]) -> Option<HostCluster> {
    let cluster = HostCluster::with_hosts(count, &vm_settings(more))?;
    Some(publish_image(cluster, "tiny", &tiny_image()))
}

/// Like [`vm_hosts`], with another program than the one under test.
pub fn vm_hosts_with_program(program: &str, count: usize, more: &[(&str, &str)]) -> Option<HostCluster> {
    let image = format!("tiny={}", tiny_image().display());
    let cluster = HostCluster::with_program(program, &["--image", &image], count, &vm_settings(more))?;
    wait_until_published(cluster.host(1), "tiny");
    Some(cluster)
}

/// Restarts the first host's daemon so that it publishes an image.
pub fn publish_image(mut cluster: HostCluster, name: &str, image: &Path) -> HostCluster {
    let first = &mut cluster.hosts[0];
    first.stop();
    first.setup = first.setup.clone().arguments(&["--image", &format!("{name}={}", image.display())]);
    first.start();
    wait_until_published(first, name);
    cluster
}

fn wait_until_published(host: &Host, name: &str) {
    wait_for("the image to be published", WAIT_TIMEOUT, || {
        let artifacts = host.get("/artifacts");
        let label = format!("sf://label/system/{name}");
        let mut artifacts = artifacts.as_array().unwrap().iter();
        artifacts.any(|artifact| artifact["source_url"] == label.as_str()).then_some(())
    });
}

/// The tables whose rows instances add or change, and the column that identifies a row.
const INSTANCE_TABLES: [(&str, &str); 16] = [
    ("instances", "uuid"),
    ("instance_ports", "port"),
    ("node_claims WHERE cpus <> 0 OR memory <> 0 OR disk <> 0", "node_uuid"),
    ("interfaces", "uuid"),
    ("hardware_addresses", "macaddr"),
    ("addresses", "address"),
    ("address_halos", "address"),
    ("address_blocks WHERE taken <> 0", "network_uuid"),
    ("node_networks", "network_uuid"),
    ("object_references", "target_id"),
    ("metadata", "object_id"),
    ("operations", "uuid"),
    ("artifacts", "uuid"),
    ("blobs", "uuid"),
    ("blob_locations", "blob_uuid"),
    ("uploads", "uuid"),
];

/// Lists everything that instances occupy: devices, rules and processes of networks, VM processes, files, cgroups, rows.
/// `ids` are the instances whose cgroups are listed.
pub fn list_resources(cluster: &HostCluster, database: &ClusterDatabase, ids: &[String]) -> String {
    let mut text: String = cluster.hosts.iter().map(Host::inventory).collect();
    for (process, _) in qemu_processes() {
        text += &format!("process {process}\n");
    }
    for file in files(&cluster.directory) {
        text += &format!("file {}\n", file.display());
    }
    for cgroup in cgroups().into_iter().filter(|cgroup| ids.iter().any(|id| cgroup.ends_with(id))) {
        text += &format!("cgroup {}\n", cgroup.display());
    }
    for (table, column) in INSTANCE_TABLES {
        for row in database.first_column(&format!("SELECT {column} FROM {table} ORDER BY {column}")) {
            text += &format!("row of {table}: {row}\n");
        }
    }
    text
}

/// Waits until the resources are the ones listed before.
pub fn wait_until_released(cluster: &HostCluster, database: &ClusterDatabase, before: &str, ids: &[String]) {
    wait_until_same("instances to release their resources", WAIT_TIMEOUT, before, || {
        list_resources(cluster, database, ids)
    });
}

/// Waits until all operations are finished and their rows removed.
pub fn wait_until_no_operations(database: &ClusterDatabase) {
    wait_for("operations to finish", WAIT_TIMEOUT, || {
        database.first_column("SELECT uuid FROM operations").is_empty().then_some(())
    });
}

/// Returns the command lines and process IDs of all QEMU processes.
pub fn qemu_processes() -> Vec<(String, i32)> {
    let mut found: Vec<(String, i32)> = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
            let program = line.split('\0').next()?;
            program.contains("qemu-system").then(|| (line.replace('\0', " "), pid))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Returns the cgroups of all VMs, also of other tests.
pub fn cgroups() -> Vec<PathBuf> {
    let hierarchies = ["", "cpu", "memory", "pids"].map(|name| Path::new("/sys/fs/cgroup").join(name));
    let directories = |path: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(|path| path.is_dir()).collect()
    };
    // Each user has a parent: `muster`, or `muster-` and the user's id.
    let is_parent = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name == "muster" || name.starts_with("muster-")
    };
    let parents = hierarchies.iter().flat_map(|hierarchy| directories(hierarchy)).filter(is_parent);
    parents.flat_map(|parent| directories(&parent)).collect()
}

/// Lists the files below a directory and the directories of VMs, without databases, event spools and logs.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if name == "spool" || name.starts_with("muster.db") || name.ends_with(".log") {
            continue;
        }
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory {
            found.extend(files(&path));
        }
        if !is_directory || directory.ends_with("machines") {
            found.push(path);
        }
    }
    found.sort_unstable();
    found
}
