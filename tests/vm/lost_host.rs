//! An instance whose host is lost, evacuated and comes back.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use muster_test_cluster::{Host, enter_vm_namespaces, qemu_processes, vm_hosts};
use muster_testing::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::json;

use crate::TIMEOUT;
use crate::instance::Instance;

/// Waits until both hosts have the image of an instance.
fn wait_for_image_copy(host: &Host, instance: &Instance) {
    let blob = instance.record(host)["disks"][0]["blob_uuid"].as_str().unwrap().to_owned();
    wait_for("the other host to have a copy of the image", TIMEOUT, || {
        let copies = host.get(&format!("/blobs/{blob}"))["locations"].as_array().map_or(0, Vec::len);
        (copies == 2).then_some(())
    });
}

#[test]
fn evacuated_guest_has_its_address_and_returning_host_stops_its_stale_vm() {
    if !enter_vm_namespaces(
        "lost_host::evacuated_guest_has_its_address_and_returning_host_stops_its_stale_vm",
    ) {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("BLOB_REPLICATION_FACTOR", "2")];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    let first = cluster.host(1);
    let network = first.create_network(json!({ "name": "one" }))["uuid"].clone();
    let changes = json!({ "network": [{ "network_uuid": network }], "placed_on": "m1", "disposable": true });
    let web = Instance::create(first, "web", &changes);
    let interfaces = web.record(first)["interfaces"].clone();
    wait_for_image_copy(first, &web);

    // Only the daemon dies, as on a host that is cut off: the VM keeps running.
    cluster.hosts[0].kill();
    let second = cluster.host(2);
    web.wait_for_power(second, "unknown", 0.0);
    let (status, answer) = second.call(Method::POST, &web.path("/poweroff"), None);
    assert!(status == 503 && answer.to_string().contains("node m1"), "{status}: {answer}");
    let evacuated = second.post("/nodes/m1/evacuate", Some(json!({ "dead": true })));
    assert_eq!(evacuated[0]["node"], "m2", "{evacuated}");
    let record = web.wait_for_state(second, "created");
    assert_eq!((&record["power_state"], &record["interfaces"]), (&json!("on"), &interfaces), "{record}");
    assert_eq!(qemu_processes().len(), 2);

    // The daemon is ready only after it has stopped the stale VM.
    cluster.hosts[0].start();
    let running = qemu_processes();
    assert_eq!(running.len(), 1, "{running:?}");
    assert!(!web.vm_dir(&cluster, 1).exists());
    let lost_found: Vec<PathBuf> = std::fs::read_dir(cluster.directory.join("m1/data/lost+found"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join(&web.uuid))
        .collect();
    assert!(
        lost_found[0].join("vda.qcow2").exists() && lost_found[0].join("README").exists(),
        "{lost_found:?}"
    );
    let (first, second) = (cluster.host(1), cluster.host(2));
    assert_eq!(web.record(first)["power_state"], "on");
    let mut console = web.console(second);
    console.log_in();
    let address = web.address(first, 0);
    console.run_until(&format!("ip -4 addr show dev eth0 | grep -q 'inet {address}/24 '"));
    console.run_until("ping -c 1 -W 5 10.0.0.1 >/dev/null");
    web.delete(first);
    assert!(lost_found[0].join("vda.qcow2").exists(), "its old disk is kept");
}

#[test]
fn frozen_host_fences_itself_and_its_guest_restarts_elsewhere() {
    if !enter_vm_namespaces("lost_host::frozen_host_fences_itself_and_its_guest_restarts_elsewhere") {
        return;
    }
    let settings =
        [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("FENCING", "self"), ("FENCING_LEASE", "4")];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    let first = cluster.host(1);
    let changes = json!({ "placed_on": "m1", "disposable": true, "restart": "elsewhere" });
    let web = Instance::create(first, "web", &changes);
    wait_for_image_copy(first, &web);

    let frozen = cluster.hosts[0].take_daemon();
    frozen.signal(Signal::SIGSTOP);
    let second = cluster.host(2);
    wait_for("the guest to run elsewhere", TIMEOUT, || {
        let running = qemu_processes();
        assert!(running.len() <= 1, "{running:?}");
        let record = web.record(second);
        (record["node"] == "m2" && record["power_state"] == "on").then_some(())
    });
    frozen.signal(Signal::SIGCONT);
    cluster.hosts[0].set_daemon(frozen);
    wait_for("the stale VM to be moved", TIMEOUT, || (!web.vm_dir(&cluster, 1).exists()).then_some(()));
    assert_eq!(qemu_processes().len(), 1);
    assert_eq!(web.record(cluster.host(1))["power_state"], "on");
}

#[test]
fn frozen_host_fences_only_guests_with_self_fencing() {
    if !enter_vm_namespaces("lost_host::frozen_host_fences_only_guests_with_self_fencing") {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("FENCING_LEASE", "4")];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    let first = cluster.host(1);
    let keep = Instance::create(first, "keep", &json!({ "placed_on": "m1" }));
    assert_eq!(first.get("/nodes/m1")["fencing_lease"], json!(null), "no VM needs a watchdog");
    let changes = json!({ "placed_on": "m1", "disposable": true, "restart": "elsewhere", "fencing": "self" });
    let web = Instance::create(first, "web", &changes);
    let own = Instance::create(first, "own", &json!({ "placed_on": "m1", "fencing": "self" }));
    wait_for_image_copy(first, &web);
    wait_for_lease(first, 4.0);
    let is_kept = || {
        let running = qemu_processes();
        assert!(running.iter().any(|(line, _)| line.contains(&keep.uuid)), "{running:?}");
        running
    };
    is_kept();

    let frozen = cluster.hosts[0].take_daemon();
    frozen.signal(Signal::SIGSTOP);
    let second = cluster.host(2);
    wait_for("the guest to run elsewhere", TIMEOUT, || {
        let running = is_kept();
        let of_web = running.iter().filter(|(line, _)| line.contains(&web.uuid));
        assert!(of_web.count() <= 1, "{running:?}");
        let record = web.record(second);
        (record["node"] == "m2" && record["power_state"] == "on").then_some(())
    });
    assert_eq!(is_kept().len(), 2, "the other one with self-fencing is off");
    assert_eq!(own.record(second)["node"], "m1", "it waits for its host");
    frozen.signal(Signal::SIGCONT);
    cluster.hosts[0].set_daemon(frozen);

    // The host records what its watchdog did, once, and starts the guest that is still its own.
    wait_for("the stale VM to be moved", TIMEOUT, || {
        is_kept();
        (!web.vm_dir(&cluster, 1).exists()).then_some(())
    });
    let first = cluster.host(1);
    own.wait_for_power(first, "on", 0.0);
    wait_for("the guest to be restarted", TIMEOUT, || (is_kept().len() == 3).then_some(()));
    for instance in [&web, &own] {
        let event = wait_for("the event of the watchdog", TIMEOUT, || {
            instance.events(first, "watchdog stopped the VM").pop()
        });
        assert_eq!(event["extra"]["node"], "m1", "{event}");
        assert!(event["extra"]["stopped_at"].as_str().is_some_and(|time| time.starts_with("20")), "{event}");
    }
    let of_node = first.get("/nodes/m1/events?limit=1000");
    let of_node = of_node.as_array().unwrap().iter();
    assert_eq!(of_node.filter(|event| event["message"] == "watchdog stopped the VM").count(), 2);
    assert_eq!(own.events(first, "watchdog stopped the VM").len(), 1);
    assert_eq!(web.events(first, "watchdog stopped the VM").len(), 1);
    assert!(keep.events(first, "watchdog stopped the VM").is_empty());

    // Without such a VM the watchdog ends.
    web.delete(first);
    own.delete(first);
    wait_for("the watchdog to end", TIMEOUT, || {
        (first.get("/nodes/m1")["fencing_lease"] == json!(null)).then_some(())
    });
    keep.delete(first);
}

/// Returns the PID of the QEMU of an instance, if it runs.
fn qemu_of(instance: &Instance) -> Option<i32> {
    let mut running = qemu_processes().into_iter().filter(|(line, _)| line.contains(&instance.uuid));
    let pid = running.next().map(|(_, pid)| pid);
    assert_eq!(running.next(), None, "the VM runs twice");
    pid
}

/// Returns the PID and the arguments of the parent of a process.
fn parent(pid: i32) -> (i32, Vec<String>) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let parent = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap();
    let line = std::fs::read_to_string(format!("/proc/{parent}/cmdline")).unwrap();
    (parent, line.split('\0').map(str::to_owned).collect())
}

/// Returns the PID of the watchdog that is the parent of the QEMU of an instance.
fn watchdog_of(instance: &Instance) -> Option<i32> {
    let (pid, arguments) = parent(qemu_of(instance)?);
    (arguments.get(1).is_some_and(|argument| argument == "watchdog")).then_some(pid)
}

/// Waits until the first host has reported its fencing lease.
fn wait_for_lease(host: &Host, seconds: f64) {
    wait_for("the node to report its fencing lease", TIMEOUT, || {
        (host.get("/nodes/m1")["fencing_lease"] == json!(seconds)).then_some(())
    });
}

#[test]
fn vm_with_self_fencing_ends_with_its_watchdog_and_survives_its_daemon() {
    if !enter_vm_namespaces("lost_host::vm_with_self_fencing_ends_with_its_watchdog_and_survives_its_daemon")
    {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("FENCING_LEASE", "20")];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    let first = cluster.host(1);
    let keep = Instance::create(first, "keep", &json!({ "placed_on": "m1" }));
    let changes = json!({ "placed_on": "m1", "disposable": true, "restart": "elsewhere", "fencing": "self" });
    let web = Instance::create(first, "web", &changes);
    wait_for_image_copy(first, &web);
    assert_eq!(watchdog_of(&keep), None);
    let watchdog = watchdog_of(&web).unwrap();
    let memory = std::fs::read_to_string(format!("/proc/{watchdog}/status")).unwrap();
    let anonymous = memory.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let anonymous: u64 = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(anonymous < 4 << 10, "the watchdog uses {anonymous} KiB");

    // A daemon that is restarted, or killed and started before the lease expires, finds its VMs.
    let running = qemu_processes();
    cluster.hosts[0].stop();
    cluster.hosts[0].start();
    assert_eq!(qemu_processes(), running);
    cluster.hosts[0].kill();
    cluster.hosts[0].start();
    assert_eq!(qemu_processes(), running);
    wait_for_lease(cluster.host(1), 20.0);

    // Without a daemon and without its watchdog, nothing could stop the VM later.
    cluster.hosts[0].kill();
    kill(Pid::from_raw(watchdog), Signal::SIGKILL).unwrap();
    wait_for("the VM to end", TIMEOUT, || qemu_of(&web).is_none().then_some(()));
    let second = cluster.host(2);
    wait_for("the guest to run elsewhere", TIMEOUT, || {
        qemu_of(&web);
        let record = web.record(second);
        (record["node"] == "m2" && record["power_state"] == "on").then_some(())
    });
    assert!(watchdog_of(&web).is_some());
    assert!(qemu_of(&keep).is_some());
    cluster.hosts[0].start();
    let first = cluster.host(1);
    wait_for("the stale VM to be moved", TIMEOUT, || (!web.vm_dir(&cluster, 1).exists()).then_some(()));

    // The daemon learns from the watchdog how QEMU ended.
    kill(Pid::from_raw(qemu_of(&web).unwrap()), Signal::SIGSEGV).unwrap();
    let reason = wait_for("the crash to be recorded", TIMEOUT, || {
        let events = web.events(first, "power state is now crashed");
        events.first().map(|event| event["extra"].to_string())
    });
    assert!(reason.contains("SIGSEGV"), "{reason}");
    web.delete(first);
    keep.delete(first);
}

#[test]
fn watchdog_follows_the_policy_of_a_running_vm() {
    if !enter_vm_namespaces("lost_host::watchdog_follows_the_policy_of_a_running_vm") {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("FENCING_LEASE", "4")];
    let Some(mut cluster) = vm_hosts(1, &settings) else { return };
    let host = cluster.host(1);
    let late = Instance::create(host, "late", &json!({}));
    let former = Instance::create(host, "former", &json!({ "fencing": "self" }));
    assert!(watchdog_of(&late).is_none() && watchdog_of(&former).is_some());
    for (instance, fencing) in [(&late, "self"), (&former, "none")] {
        let (status, answer) =
            host.call(Method::PUT, &instance.path("/fencing"), Some(json!({ "fencing": fencing })));
        assert_eq!(status, 200, "{answer}");
    }

    let frozen = cluster.hosts[0].take_daemon();
    frozen.signal(Signal::SIGSTOP);
    wait_for("the VM to be fenced", TIMEOUT, || qemu_of(&late).is_none().then_some(()));
    // Its watchdog reads the lease twice a second.
    let fenced = Instant::now();
    wait_for("other watchdogs to read the lease", TIMEOUT, || {
        (fenced.elapsed() > Duration::from_secs(3)).then_some(())
    });
    assert!(qemu_of(&former).is_some());
    frozen.signal(Signal::SIGCONT);
    cluster.hosts[0].set_daemon(frozen);
    let host = cluster.host(1);
    wait_for("the guest to be restarted with its own watchdog", TIMEOUT, || watchdog_of(&late));
    wait_for("the event of the watchdog", TIMEOUT, || late.events(host, "watchdog stopped the VM").pop());
    assert!(former.events(host, "watchdog stopped the VM").is_empty());
    late.delete(host);
    former.delete(host);
}
