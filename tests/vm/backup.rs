//! A restore drill with a real guest, without root.

use muster_test_cluster::{enter_vm_namespaces, qemu_processes};
use muster_testing::{skipped, wait_for};

use crate::TIMEOUT;
use crate::rootless::{RootlessHost, has_pasta, processes};

#[test]
fn drill_boots_an_instance_of_the_backup_and_leaves_nothing() {
    if !has_pasta() {
        return skipped("pasta (Debian package passt)");
    }
    if !enter_vm_namespaces("backup::drill_boots_an_instance_of_the_backup_and_leaves_nothing") {
        return;
    }
    let cluster = RootlessHost::new();
    let before = cluster.inventory();
    cluster.muster(&format!("up --background --image {}", cluster.path("tiny.qcow2").display()));
    cluster.muster("network create lan 10.0.0.0/24 --dns");
    wait_for("the image to be published", TIMEOUT, || cluster.try_muster("label show tiny").0.then_some(()));
    cluster.muster("instance create web --cpus 1 --memory 128 --disk 1@tiny --network lan");
    cluster.muster("exec web --wait 240 -- sh -c 'echo kept > /root/kept && sync'");
    cluster.muster("instance snapshot web");
    let home = cluster.path("home");
    let (key, file) = (home.join("backup.key"), home.join("all.backup"));
    let output = cluster.muster(&format!("backup create-key {}", key.display()));
    let recipient = output.lines().find(|line| line.starts_with("backup-recipient-")).unwrap();
    cluster.muster(&format!("backup create {} --blobs include --recipient {recipient}", file.display()));
    cluster.muster("down");
    assert_eq!(processes(), Vec::<String>::new());

    let directory = home.join("drills");
    std::fs::create_dir(&directory).unwrap();
    std::os::unix::fs::chown(&directory, Some(crate::rootless::UID), Some(crate::rootless::UID)).unwrap();
    let drill = |options: &str| {
        let (file, key, directory) = (file.display(), key.display(), directory.display());
        cluster.try_muster(&format!("backup drill {file} --key-file {key} --directory {directory} {options}"))
    };
    let (success, output) = drill("--instance web");
    assert!(
        success && output.contains("the agent of instance web") && output.contains("snapshots"),
        "{output}"
    );
    let (success, output) = drill("--instance nothing");
    assert!(!success && output.contains("has no instance nothing"), "{output}");
    // A guest that does not answer in time is reported, and removed, too.
    let (success, output) = drill("--timeout 1");
    assert!(!success && output.contains("did not answer within 1 seconds"), "{output}");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    assert_eq!(processes(), Vec::<String>::new());
    assert!(qemu_processes().is_empty());
    assert_eq!(cluster.inventory(), before);

    cluster.host.sh("chmod 600 /dev/net/tun");
    let (success, output) = drill("");
    assert!(!success && output.contains("a drill is impossible here") && output.contains("tun"), "{output}");
}
