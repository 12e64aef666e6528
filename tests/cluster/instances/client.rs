//! The released Python client, unchanged, with instances on a real node.

use muster_test_cluster::{HostCluster, SYSTEM_KEY, enter_vm_namespaces, qemu_processes, single_vm_host};
use muster_testing::wait_for;
use serde_json::Value;

use crate::PATIENCE;
use crate::clients::{installed, run_at};

/// Runs the client where the daemon is.
fn client(world: &HostCluster, arguments: &str) -> (bool, String) {
    let command = installed().unwrap();
    let machine = world.host(1);
    let (url, arguments) = (machine.url(), arguments.to_owned());
    machine.namespace.run(move || run_at(&command, &url, "system", SYSTEM_KEY, &arguments))
}

#[test]
fn the_released_client_drives_the_whole_life_of_an_instance() {
    // Out here, from where it can be had.
    if installed().is_none() {
        return muster_testing::skipped("the released client from PyPI");
    }
    if !enter_vm_namespaces("instances::client::the_released_client_drives_the_whole_life_of_an_instance") {
        return;
    }
    let world = single_vm_host(&[]);
    let ok = |arguments: &str| {
        let (done, said) = client(&world, arguments);
        assert!(done, "{arguments}: {said}\n{}", world.host(1).log());
        said
    };
    let json = |arguments: &str| -> Value {
        let said = ok(&format!("--json {arguments}"));
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{arguments}: {error}: {said}"))
    };
    let ok_in_every_form = |arguments: &str, word: &str| {
        for form in ["", "--simple ", "--json "] {
            let said = ok(&format!("{form}{arguments}"));
            assert!(said.contains(word), "{form}{arguments}: no {word}: {said}");
        }
    };
    let power = |wanted: &str| {
        let shown = json("instance show web");
        assert_eq!(shown["power_state"], wanted, "{shown:#}");
    };

    ok("network create blue 10.0.0.0/24");
    ok("network create green 10.1.0.0/24");
    let made = ok("instance create web 1 128 -f blue@10.0.0.9 -N network_uuid=green,model=virtio \
         -d 1@label:tiny -D size=1,bus=scsi,type=disk -V model=vga,memory=16384 -p m1 -m colour=navy \
         -I ssh-ed25519-none");
    assert!(made.contains("colour  : navy"), "{made}");
    let shown = wait_for("the instance", PATIENCE, || {
        let shown = json("instance show web");
        assert_ne!(shown["state"], "error", "{shown:#}");
        (shown["state"] == "created").then_some(shown)
    });
    assert_eq!((&shown["node"], &shown["cpus"]), (&"m1".into(), &1.into()));
    assert_eq!(shown["network_interfaces"].as_array().unwrap().len(), 2);
    assert_eq!(shown["network_interfaces"][0]["ipv4"], "10.0.0.9");
    power("on");

    for (arguments, word) in [
        ("instance list", "web"),
        ("instance list --all", "web"),
        ("instance show web", "navy"),
        ("instance events web", "schedule final candidates"),
        ("network instances blue", "10.0.0.9"),
    ] {
        ok_in_every_form(arguments, word);
    }
    ok("instance events web -t audit -l 5");
    wait_for("the login", PATIENCE, || ok("instance consoledata web").contains("web login: ").then_some(()));
    assert_eq!(ok("instance consoledata web 7").len(), 7);
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("screen.png");
    ok(&format!("instance screenshot web {}", picture.display()));
    assert!(std::fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    let helper = ok("instance vdiconsolefile web");
    assert!(helper.starts_with("[virt-viewer]\ntype=spice\nhost=10.99.0.1\n"), "{helper}");
    ok("instance consoledelete web");
    assert!(!ok("instance consoledata web").contains("web login: "));

    ok("instance pause web");
    power("paused");
    ok("instance unpause web");
    power("on");
    ok("instance reboot --soft web");
    ok("instance reboot --hard web");
    ok("--json instance poweroff web");
    power("off");
    let (done, said) = client(&world, "instance pause web");
    assert!(!done && said.contains("you cannot pause a powered off instance"), "{said}");
    ok("instance poweron web");
    power("on");

    ok("instance set-metadata web season autumn");
    assert_eq!(json("instance show web")["metadata"]["season"], "autumn");
    ok("instance delete-metadata web season");
    ok("instance add-interface web -n green");
    let shown = json("instance show web");
    let added = &shown["network_interfaces"][2];
    assert!(added["ipv4"].as_str().unwrap().starts_with("10.1.0."), "{shown:#}");
    ok(&format!("interface show {}", shown["network_interfaces"][0]["uuid"].as_str().unwrap()));

    // Its copies, of which one gets a name and becomes another instance.
    let copy = json("instance snapshot web --all");
    assert!(copy["vda"].is_object() && copy.as_object().unwrap().len() == 2, "{copy:#}");
    ok("instance snapshot web -l saved");
    ok_in_every_form("instance show web --snapshots", "vda");
    ok("instance create copy 1 128 -d 1@label:saved");
    wait_for("the copy", PATIENCE, || {
        let shown = json("instance show copy");
        assert_ne!(shown["state"], "error", "{shown:#}");
        (shown["state"] == "created").then_some(())
    });

    let gone = json("instance delete web");
    let (done, said) = client(&world, "instance show web");
    assert!(!done && said.contains("instance not found"), "{said}");
    assert_eq!(json(&format!("instance show {}", gone["uuid"].as_str().unwrap()))["state"], "deleted");
    ok("instance delete-all --confirm --namespace system");
    assert_eq!(json("instance list")["instances"], Value::Array(vec![]));
    assert_eq!(qemu_processes(), []);
}
