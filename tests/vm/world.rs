//! Hosts whose daemons publish the small guest, and checks for what instances could leave behind on them.

use std::path::{Path, PathBuf};

use muster_testing::{skipped, wait_for};

use crate::PATIENCE;
use crate::backdoor::Backdoor;
use crate::machine::{World, wait_until_same};

/// Runs a test in a world of its own that can have guests.
pub(crate) fn enter(test: &str) -> bool {
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
    if !image().exists() {
        skipped("target/image/tiny.qcow2 (make image)");
        return false;
    }
    muster_testing::enter(test, &PROGRAMS)
}

/// The small guest.
pub(crate) fn image() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("target/image/tiny.qcow2")
}

/// What makes the most of a small machine, and lets go soon of what is gone.
pub(crate) fn settings<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut all = vec![
        ("CPU_OVERCOMMIT_RATIO", "20"),
        ("IP_DELETION_HALO_DURATION", "1"),
        ("NODE_DISK_RESERVATION_GB", "0"),
    ];
    all.extend(more);
    all
}

/// One machine with the small guest, with SQLite.
pub(crate) fn of_one(more: &[(&str, &str)]) -> World {
    offer(World::of_one(&settings(more)), "tiny", &image())
}

/// Several machines on one MariaDB, of which the first has the small guest; nothing if that is not installed.
pub(crate) fn of(count: usize, more: &[(&str, &str)]) -> Option<World> {
    World::of(count, &settings(more)).map(|world| offer(world, "tiny", &image()))
}

/// Lets the first machine offer an image.
pub(crate) fn offer(mut world: World, name: &str, image: &Path) -> World {
    let first = &mut world.machines[0];
    first.stop();
    first.setup = first.setup.clone().arguments(&["--image", &format!("{name}={}", image.display())]);
    first.start();
    wait_for("the image to be offered", PATIENCE, || {
        let artifacts = first.get("/artifacts");
        let label = format!("sf://label/system/{name}");
        let mut artifacts = artifacts.as_array().unwrap().iter();
        artifacts.any(|found| found["source_url"] == label.as_str()).then_some(())
    });
    world
}

/// Rows that instances have, or change.
const ROWS: [(&str, &str); 16] = [
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

/// Everything that instances could leave behind: devices, rules and servers of networks, processes, files, resource
/// groups, rows. `ids` are all instances that there were.
pub(crate) fn remains(world: &World, backdoor: &Backdoor, ids: &[String]) -> String {
    let mut text: String = world.machines.iter().map(crate::machine::Machine::inventory).collect();
    for (process, _) in processes() {
        text += &format!("process {process}\n");
    }
    for file in files(&world.folder) {
        text += &format!("file {}\n", file.display());
    }
    for group in groups().into_iter().filter(|group| ids.iter().any(|id| group.ends_with(id))) {
        text += &format!("group {}\n", group.display());
    }
    for (table, column) in ROWS {
        for row in backdoor.find(&format!("SELECT {column} FROM {table} ORDER BY {column}")) {
            text += &format!("row of {table}: {row}\n");
        }
    }
    text
}

/// Waits until everything is as it was.
pub(crate) fn wait_until_nothing_is_left(world: &World, backdoor: &Backdoor, before: &str, ids: &[String]) {
    wait_until_same("nothing to be left of the instances", PATIENCE, before, || {
        remains(world, backdoor, ids)
    });
}

/// Waits until no operation is left, nor its record.
pub(crate) fn wait_until_calm(backdoor: &Backdoor) {
    wait_for("operations to end", PATIENCE, || {
        backdoor.find("SELECT uuid FROM operations").is_empty().then_some(())
    });
}

/// The command lines of all QEMUs, with their process numbers.
pub(crate) fn processes() -> Vec<(String, i32)> {
    let mut found: Vec<(String, i32)> = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
            let program = line.split('\0').next()?;
            program.contains("qemu-system").then(|| (line.replace('\0', " "), number))
        })
        .collect();
    found.sort_unstable();
    found
}

/// The resource groups of all machines, also of other tests.
pub(crate) fn groups() -> Vec<PathBuf> {
    let hierarchies = ["", "cpu", "memory", "pids"].map(|name| Path::new("/sys/fs/cgroup").join(name));
    let ours = hierarchies.iter().filter_map(|folder| std::fs::read_dir(folder.join("muster")).ok());
    let entries = ours.flatten().flatten().filter(|entry| entry.path().is_dir());
    entries.map(|entry| entry.path()).collect()
}

/// All files in the machines' data and the folders of machines, without the database and the queue of events.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if name == "spool" || name.starts_with("muster.db") || name.ends_with(".log") {
            continue;
        }
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder {
            found.extend(files(&path));
        }
        if !is_folder || folder.ends_with("machines") {
            found.push(path);
        }
    }
    found.sort_unstable();
    found
}
