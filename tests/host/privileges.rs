//! A daemon without the capabilities for networks reports that and serves everything else.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use muster_test_cluster::{HostCluster, network_id};
use muster_testing::wait_for;
use serde_json::json;

use crate::{RECONCILE_TIMEOUT, TIMEOUT, enter};

const LIMIT_REASON: &str = "networks need CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing \
                      CAP_NET_ADMIN, CAP_SYS_ADMIN";

#[test]
fn unprivileged_daemon_serves_and_reports_missing_capabilities() {
    if !enter("privileges::unprivileged_daemon_serves_and_reports_missing_capabilities") {
        return;
    }
    let mut cluster = HostCluster::single_host(&[]);
    let host = &mut cluster.hosts[0];
    let before = host.inventory();
    host.stop();
    let program = grant_access_to_nobody(&cluster.directory);
    host.setup = host.setup.clone().program(&program).wrapped(&[
        "setpriv",
        "--reuid=nobody",
        "--regid=nogroup",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]);
    host.start();
    let node = host.get("/nodes")[0].clone();
    assert_eq!(node["limits"]["networks"], LIMIT_REASON, "{node}");
    assert!(host.log().contains(LIMIT_REASON), "{}", host.log());

    let network = network_id(&host.request_network(json!({ "name": "one" })));
    let record = wait_for("the network to fail", TIMEOUT, || {
        let record = host.get(&format!("/networks/{network}"));
        assert_ne!(record["state"], "created");
        (record["state"] == "error").then_some(record)
    });
    let error = record["error_message"].as_str().unwrap();
    assert!(error.contains(LIMIT_REASON) && error.contains("m1"), "{error}");
    host.request_network_deletion(network);
    host.wait_for_network_state(network, "deleted");
    assert_eq!(host.inventory(), before);

    // With the capabilities it works, on the same data.
    host.stop();
    host.setup = host.setup.clone().wrapped(&[]);
    host.start();
    wait_for("the limit to be removed", RECONCILE_TIMEOUT, || {
        host.get("/nodes")[0]["limits"].get("networks").is_none().then_some(())
    });
    let network = network_id(&host.create_network(json!({ "name": "one" })));
    host.request_network_deletion(network);
    host.wait_for_network_state(network, "deleted");
}

/// Gives the user `nobody` access to the data and to a copy of the program. Returns the path of the copy.
fn grant_access_to_nobody(directory: &Path) -> String {
    for directory in directory.ancestors().take(2) {
        let mode = directory.metadata().unwrap().permissions().mode();
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode | 0o011)).unwrap();
    }
    let program = directory.join("muster");
    std::fs::copy(env!("CARGO_BIN_EXE_muster"), &program).unwrap();
    let chown = Command::new("chown").arg("-R").arg("nobody:nogroup").arg(directory.join("m1")).status();
    assert!(chown.unwrap().success());
    program.to_str().unwrap().to_owned()
}
