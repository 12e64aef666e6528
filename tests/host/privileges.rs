//! A daemon without the rights to carry networks says so, and serves everything else.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use muster_test_cluster::{HostCluster, network_id};
use muster_testing::wait_for;
use serde_json::json;

use crate::{PATIENCE, SOON, enter};

const REASON: &str = "networks need CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing \
                      CAP_NET_ADMIN, CAP_SYS_ADMIN";

#[test]
fn a_daemon_without_rights_serves_and_says_what_it_cannot_do() {
    if !enter("privileges::a_daemon_without_rights_serves_and_says_what_it_cannot_do") {
        return;
    }
    let mut world = HostCluster::single_host(&[]);
    let machine = &mut world.hosts[0];
    let before = machine.inventory();
    machine.stop();
    let program = open_to_nobody(&world.directory);
    machine.setup = machine.setup.clone().program(&program).wrapped(&[
        "setpriv",
        "--reuid=nobody",
        "--regid=nogroup",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]);
    machine.start();
    let node = machine.get("/nodes")[0].clone();
    assert_eq!(node["limits"]["networks"], REASON, "{node}");
    assert!(machine.log().contains(REASON), "{}", machine.log());

    let network = network_id(&machine.request_network(json!({ "name": "one" })));
    let record = wait_for("the network to fail", PATIENCE, || {
        let record = machine.get(&format!("/networks/{network}"));
        assert_ne!(record["state"], "created");
        (record["state"] == "error").then_some(record)
    });
    let why = record["error_message"].as_str().unwrap();
    assert!(why.contains(REASON) && why.contains("m1"), "{why}");
    machine.request_network_deletion(network);
    machine.wait_for_network_state(network, "deleted");
    assert_eq!(machine.inventory(), before);

    // With the rights it works, on the same data.
    machine.stop();
    machine.setup = machine.setup.clone().wrapped(&[]);
    machine.start();
    wait_for("the limit to go", SOON, || {
        machine.get("/nodes")[0]["limits"].get("networks").is_none().then_some(())
    });
    let network = network_id(&machine.create_network(json!({ "name": "one" })));
    machine.request_network_deletion(network);
    machine.wait_for_network_state(network, "deleted");
}

/// Lets nobody get at the data, and at a copy of the program, whose path may be closed to it.
fn open_to_nobody(folder: &Path) -> String {
    for folder in folder.ancestors().take(2) {
        let mode = folder.metadata().unwrap().permissions().mode();
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode | 0o011)).unwrap();
    }
    let program = folder.join("muster");
    std::fs::copy(env!("CARGO_BIN_EXE_muster"), &program).unwrap();
    let owned = Command::new("chown").arg("-R").arg("nobody:nogroup").arg(folder.join("m1")).status();
    assert!(owned.unwrap().success());
    program.to_str().unwrap().to_owned()
}
