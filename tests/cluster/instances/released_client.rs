//! Instances on a real node with the unmodified released Python client.

use muster_test_cluster::{HostCluster, SYSTEM_KEY, enter_vm_namespaces, qemu_processes, single_vm_host};
use muster_testing::wait_for;
use serde_json::Value;

use crate::TIMEOUT;
use crate::released_client::{installed, run_at};

/// Runs the client in the network namespace of the daemon.
fn run_client(cluster: &HostCluster, arguments: &str) -> (bool, String) {
    let command = installed().unwrap();
    let host = cluster.host(1);
    let (url, arguments) = (host.url(), arguments.to_owned());
    host.namespace.run(move || run_at(&command, &url, "system", SYSTEM_KEY, &arguments))
}

#[test]
fn released_client_manages_instance_lifecycle() {
    // Installed before the namespaces are entered, which have no internet access.
    if installed().is_none() {
        return muster_testing::skipped("the released client from PyPI");
    }
    if !enter_vm_namespaces("instances::released_client::released_client_manages_instance_lifecycle") {
        return;
    }
    let cluster = single_vm_host(&[]);
    let ok = |arguments: &str| {
        let (success, output) = run_client(&cluster, arguments);
        assert!(success, "{arguments}: {output}\n{}", cluster.host(1).log());
        output
    };
    let json = |arguments: &str| -> Value {
        let output = ok(&format!("--json {arguments}"));
        serde_json::from_str(&output).unwrap_or_else(|error| panic!("{arguments}: {error}: {output}"))
    };
    let ok_in_every_format = |arguments: &str, word: &str| {
        for format in ["", "--simple ", "--json "] {
            let output = ok(&format!("{format}{arguments}"));
            assert!(output.contains(word), "{format}{arguments}: no {word}: {output}");
        }
    };
    let assert_power = |expected: &str| {
        let record = json("instance show web");
        assert_eq!(record["power_state"], expected, "{record:#}");
    };

    ok("network create blue 10.0.0.0/24");
    ok("network create green 10.1.0.0/24");
    let created = ok("instance create web 1 128 -f blue@10.0.0.9 -N network_uuid=green,model=virtio \
         -d 1@label:tiny -D size=1,bus=scsi,type=disk -V model=vga,memory=16384 -p m1 -m colour=navy \
         -I ssh-ed25519-none");
    assert!(created.contains("colour  : navy"), "{created}");
    let record = wait_for("the instance", TIMEOUT, || {
        let record = json("instance show web");
        assert_ne!(record["state"], "error", "{record:#}");
        (record["state"] == "created").then_some(record)
    });
    assert_eq!((&record["node"], &record["cpus"]), (&"m1".into(), &1.into()));
    assert_eq!(record["network_interfaces"].as_array().unwrap().len(), 2);
    assert_eq!(record["network_interfaces"][0]["ipv4"], "10.0.0.9");
    assert_power("on");

    for (arguments, word) in [
        ("instance list", "web"),
        ("instance list --all", "web"),
        ("instance show web", "navy"),
        ("instance events web", "schedule final candidates"),
        ("network instances blue", "10.0.0.9"),
    ] {
        ok_in_every_format(arguments, word);
    }
    ok("instance events web -t audit -l 5");
    wait_for("the login prompt", TIMEOUT, || {
        ok("instance consoledata web").contains("web login: ").then_some(())
    });
    assert_eq!(ok("instance consoledata web 7").len(), 7);
    let directory = tempfile::tempdir().unwrap();
    let screenshot = directory.path().join("screen.png");
    ok(&format!("instance screenshot web {}", screenshot.display()));
    assert!(std::fs::read(&screenshot).unwrap().starts_with(b"\x89PNG"));
    let helper = ok("instance vdiconsolefile web");
    assert!(helper.starts_with("[virt-viewer]\ntype=spice\nhost=10.99.0.1\n"), "{helper}");
    ok("instance consoledelete web");
    assert!(!ok("instance consoledata web").contains("web login: "));

    ok("instance pause web");
    assert_power("paused");
    ok("instance unpause web");
    assert_power("on");
    ok("instance reboot --soft web");
    ok("instance reboot --hard web");
    ok("--json instance poweroff web");
    assert_power("off");
    let (success, output) = run_client(&cluster, "instance pause web");
    assert!(!success && output.contains("you cannot pause a powered off instance"), "{output}");
    ok("instance poweron web");
    assert_power("on");

    ok("instance set-metadata web season autumn");
    assert_eq!(json("instance show web")["metadata"]["season"], "autumn");
    ok("instance delete-metadata web season");
    ok("instance add-interface web -n green");
    let record = json("instance show web");
    let added = &record["network_interfaces"][2];
    assert!(added["ipv4"].as_str().unwrap().starts_with("10.1.0."), "{record:#}");
    ok(&format!("interface show {}", record["network_interfaces"][0]["uuid"].as_str().unwrap()));

    // Snapshots, of which one gets a label and becomes the disk of another instance.
    let snapshot = json("instance snapshot web --all");
    assert!(snapshot["vda"].is_object() && snapshot.as_object().unwrap().len() == 2, "{snapshot:#}");
    ok("instance snapshot web -l saved");
    ok_in_every_format("instance show web --snapshots", "vda");
    ok("instance create copy 1 128 -d 1@label:saved");
    wait_for("the copy", TIMEOUT, || {
        let record = json("instance show copy");
        assert_ne!(record["state"], "error", "{record:#}");
        (record["state"] == "created").then_some(())
    });

    let deleted = json("instance delete web");
    let (success, output) = run_client(&cluster, "instance show web");
    assert!(!success && output.contains("instance not found"), "{output}");
    assert_eq!(json(&format!("instance show {}", deleted["uuid"].as_str().unwrap()))["state"], "deleted");
    ok("instance delete-all --confirm --namespace system");
    assert_eq!(json("instance list")["instances"], Value::Array(vec![]));
    assert_eq!(qemu_processes(), []);
}
