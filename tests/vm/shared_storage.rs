//! Guests with disks on storage that two hosts share.

use std::path::PathBuf;

use muster_test_cluster::{Host, HostCluster, enter_vm_namespaces, qemu_processes, vm_hosts};
use muster_testing::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::instance::{Instance, request};

/// Each host has its own `/run`.
const MOUNT_POINT: &str = "/run/shared";

/// Returns the directory that stands for the server of the storage.
fn server(cluster: &HostCluster) -> PathBuf {
    cluster.directory.join("server")
}

fn mount(cluster: &HostCluster, host: &Host) {
    let server = server(cluster);
    std::fs::create_dir_all(&server).unwrap();
    host.namespace.sh(&format!("mkdir -p {MOUNT_POINT} && mount --bind {} {MOUNT_POINT}", server.display()));
}

/// Waits until a node reports its shared storage, and returns the report.
fn wait_for_storage(host: &Host, node: &str, is_usable: bool) -> Value {
    wait_for(&format!("the shared storage of {node}"), TIMEOUT, || {
        let storage = host.get(&format!("/nodes/{node}"))["shared_storage"].clone();
        (storage["uuid"].is_string() == is_usable && storage["problem"].is_null() == is_usable)
            .then_some(storage)
    })
}

fn disk_dir(cluster: &HostCluster, instance: &Instance) -> PathBuf {
    server(cluster).join("instances").join(&instance.uuid)
}

/// Waits until the guest runs elsewhere, and checks that it has the file that it wrote before.
fn check_file(instance: &Instance, host: &Host) {
    let mut console = instance.console(host);
    console.log_in();
    assert_eq!(console.run("cat /root/file").trim(), "kept");
}

fn write_file(instance: &Instance, host: &Host) {
    let mut console = instance.console(host);
    console.log_in();
    console.run("echo kept >/root/file; sync");
}

#[test]
fn evacuated_guest_has_the_data_that_it_wrote_to_shared_storage() {
    if !enter_vm_namespaces("shared_storage::evacuated_guest_has_the_data_that_it_wrote_to_shared_storage") {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("SHARED_STORAGE", MOUNT_POINT)];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    mount(&cluster, cluster.host(1));
    let first = cluster.host(1);
    let storage = wait_for_storage(first, "m1", true);

    // The other host has the path, but not the mount.
    cluster.host(2).namespace.sh(&format!("mkdir -p {MOUNT_POINT}"));
    let expected = format!("is not the storage {}", storage["uuid"].as_str().unwrap());
    wait_for("the unmounted storage to be reported", TIMEOUT, || {
        let problem = first.get("/nodes/m2")["limits"]["shared-storage"].clone();
        problem.as_str().is_some_and(|problem| problem.contains(&expected)).then_some(())
    });
    let body = request("refused", &json!({ "storage": "shared", "placed_on": "m2" }));
    let (status, refused) = first.call(Method::POST, "/instances", Some(body));
    assert!(status == 507 && refused.to_string().contains(&expected), "{status}: {refused}");

    let web = Instance::create(first, "web", &json!({ "storage": "shared", "placed_on": "m1" }));
    assert_eq!(web.record(first)["storage_uuid"], storage["uuid"]);
    let disks = disk_dir(&cluster, &web);
    assert!(disks.join("vda.qcow2").exists() && disks.join("vda.base").exists());
    assert!(!web.vm_dir(&cluster, 1).join("vda.qcow2").exists());
    write_file(&web, first);
    let stale = web.process().unwrap();

    // Only the daemon dies, as on a host that is cut off: the VM keeps running, and keeps its disks locked.
    cluster.hosts[0].kill();
    let second = cluster.host(2);
    web.wait_for_power(second, "unknown", 0.0);
    let dead = || second.post("/nodes/m1/evacuate", Some(json!({ "dead": true })));
    let waiting = dead();
    assert_eq!(waiting[0]["outcome"], "waiting", "{waiting}");
    mount(&cluster, second);
    assert_eq!(wait_for_storage(second, "m2", true)["uuid"], storage["uuid"]);
    let evacuated = dead();
    assert_eq!(
        (&evacuated[0]["node"], &evacuated[0]["reason"]),
        (&json!("m2"), &json!("from its disks on shared storage")),
        "{evacuated}"
    );
    let event = wait_for("the VM to wait for its disks", TIMEOUT, || {
        web.events(second, "the VM waits for its disks on shared storage").pop()
    });
    assert!(event["extra"]["reason"].to_string().contains("another host still uses the disks"), "{event}");
    assert_ne!(web.record(second)["state"], "created");

    // The host loses power.
    kill(Pid::from_raw(stale), Signal::SIGKILL).unwrap();
    web.wait_for_state(second, "created");
    assert_eq!(web.record(second)["power_state"], "on");
    check_file(&web, second);

    // The host returns. The disks do not belong to it any longer.
    cluster.hosts[0].start();
    assert_eq!(qemu_processes().len(), 1);
    wait_for("the stale VM to be moved", TIMEOUT, || (!web.vm_dir(&cluster, 1).exists()).then_some(()));
    assert!(disks.join("vda.qcow2").exists());
    let (first, second) = (cluster.host(1), cluster.host(2));

    // A snapshot, and deletion by way of the other host.
    let snapshot = second.post(&web.path("/snapshot"), Some(json!({})));
    let blob = snapshot["vda"]["blob_uuid"].as_str().unwrap().to_owned();
    wait_for("the snapshot", TIMEOUT, || {
        (first.call(Method::GET, &format!("/blobs/{blob}"), None).0 == 200).then_some(())
    });
    web.delete(first);
    assert!(!disks.exists());
}

#[test]
fn fenced_guest_restarts_elsewhere_from_shared_storage() {
    if !enter_vm_namespaces("shared_storage::fenced_guest_restarts_elsewhere_from_shared_storage") {
        return;
    }
    let settings = [
        ("NODE_CHECKIN_MAXIMUM", "4"),
        ("CLEANER_DELAY", "8"),
        ("FENCING", "self"),
        ("FENCING_LEASE", "4"),
        ("SHARED_STORAGE", MOUNT_POINT),
    ];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    for number in [1, 2] {
        mount(&cluster, cluster.host(number));
        wait_for_storage(cluster.host(number), &format!("m{number}"), true);
    }
    let first = cluster.host(1);
    let changes = json!({ "storage": "shared", "placed_on": "m1", "restart": "elsewhere" });
    let web = Instance::create(first, "web", &changes);
    write_file(&web, first);

    let frozen = cluster.hosts[0].take_daemon();
    frozen.signal(Signal::SIGSTOP);
    let second = cluster.host(2);
    wait_for("the guest to run elsewhere", TIMEOUT, || {
        let record = web.record(second);
        (record["node"] == "m2" && record["power_state"] == "on").then_some(())
    });
    check_file(&web, second);
    frozen.signal(Signal::SIGCONT);
    cluster.hosts[0].set_daemon(frozen);
    wait_for("the stale VM to be moved", TIMEOUT, || (!web.vm_dir(&cluster, 1).exists()).then_some(()));
    assert_eq!(qemu_processes().len(), 1);
    assert!(disk_dir(&cluster, &web).join("vda.qcow2").exists());
    web.delete(cluster.host(2));
    assert!(!disk_dir(&cluster, &web).exists());
}

#[test]
fn full_or_unmounted_storage_is_reported_and_its_guests_continue() {
    if !enter_vm_namespaces("shared_storage::full_or_unmounted_storage_is_reported_and_its_guests_continue") {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("SHARED_STORAGE", MOUNT_POINT)];
    let Some(cluster) = vm_hosts(1, &settings) else { return };
    let host = cluster.host(1);
    let sh = |script: &str| host.namespace.sh(script);
    let mount = || sh(&format!("mkdir -p {MOUNT_POINT} && mount --bind /run/server {MOUNT_POINT}"));
    sh("mkdir /run/server && mount -t tmpfs -o size=3g,mode=755 none /run/server");
    mount();
    wait_for_storage(host, "m1", true);
    let wait_for_problem = |expected: &str| {
        wait_for(&format!("the problem: {expected}"), TIMEOUT, || {
            let problem = host.get("/nodes/m1")["limits"]["shared-storage"].clone();
            problem.as_str().is_some_and(|problem| problem.contains(expected)).then_some(())
        });
    };
    let web = Instance::create(host, "web", &json!({ "storage": "shared" }));
    let mut console = web.console(host);
    console.log_in();

    sh("mount -o remount,size=$(df -B1 --output=used /run/server | tail -n 1) /run/server");
    console.type_line("head -c 5000000 /dev/urandom >/root/file; sync; echo writ\\ten");
    web.wait_for_power(host, "paused", 0.0);
    wait_for_problem("it is full");
    let (status, refused) =
        host.call(Method::POST, "/instances", Some(request("refused", &json!({ "storage": "shared" }))));
    assert!(status == 507 && refused.to_string().contains("it is full"), "{status}: {refused}");
    let resumed = crate::instance::now();
    sh("mount -o remount,size=3g /run/server");
    web.wait_for_power(host, "on", resumed);
    console.wait_for("written");

    web.post(host, "/poweroff");
    sh(&format!("umount {MOUNT_POINT}"));
    let (status, refused) = host.call(Method::POST, &web.path("/poweron"), None);
    assert!(status == 406 && refused.to_string().contains("is not mounted at"), "{status}: {refused}");
    wait_for_problem("mount it there");
    assert_eq!(sh(&format!("ls {MOUNT_POINT}")), "", "nothing is written there");
    mount();
    wait_for_storage(host, "m1", true);
    web.post(host, "/poweron");
    let mut console = web.console(host);
    console.log_in();
    assert_eq!(console.run("wc -c </root/file").trim(), "5000000");
    web.delete(host);
    assert_eq!(sh(&format!("ls {MOUNT_POINT}/instances")), "");
}
