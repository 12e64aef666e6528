//! The `muster` command line against a daemon.

use std::path::Path;
use std::process::Command;

use muster_testing::Daemon;
use serde_json::Value;

use crate::setup;

fn run(credentials: &Path, arguments: &str) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_muster"))
        .args(arguments.split(' '))
        .env("MUSTER_CREDENTIALS", credentials)
        .env("HOME", credentials.parent().unwrap())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn commands_manage_objects_of_the_api() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    let credentials = daemon.data.join("credentials.json");
    let ok = |arguments: &str| {
        let (success, stdout, stderr) = run(&credentials, arguments);
        assert!(success, "{arguments}: {stdout}{stderr}");
        stdout
    };
    let json =
        |arguments: &str| -> Value { serde_json::from_str(&ok(&format!("--json {arguments}"))).unwrap() };
    assert!(ok("namespace list").contains("system"));
    ok("namespace create ci");
    let secret = ok("key add ci robot --expires 2h");
    assert!(secret.trim().starts_with("sfk_") && secret.trim().len() == 42, "{secret}");
    let keys = ok("key list ci");
    assert!(
        keys.starts_with("NAME   EXPIRES") && keys.contains("robot  20") && keys.contains("all"),
        "{keys}"
    );
    ok("key update ci robot --key another");
    ok(
        "issuer create forge --issuer-url https://forge.example --jwks-uri https://forge.example/keys --audience x",
    );
    ok("issuer update forge --audience cloud");
    assert!(ok("issuer list").contains("cloud"));
    ok(
        "rule create ci deploy --issuer forge --claim ref=a --claim ref=b --scope node.read --ttl 60 --prefix robot",
    );
    ok("rule update ci deploy --ttl 600");
    assert_eq!(json("rule show ci deploy")["bound_claims"]["ref"][1], "b");
    assert!(ok("rule list ci").contains("600"));
    ok("rule delete ci deploy");
    ok("issuer delete forge");
    ok("trust add ci friend");
    assert!(ok("trust list ci").contains("friend"));
    ok("namespace set-metadata ci limits {\"cpus\":4}");
    assert_eq!(json("namespace metadata ci")["limits"]["cpus"], 4);
    assert_eq!(json("namespace show ci")["trust"]["full"][1], "friend");
    ok("trust remove ci friend");
    ok("key delete ci robot");
    assert_eq!(json("node list").as_array().unwrap().len(), 2);
    assert!(ok("node show sim-1").contains("sim-1"));
    ok("node set-metadata sim-1 rack r1");
    let status = ok("cluster upgrade status");
    assert!(status.contains("node sim-2") && status.contains("nothing to do"), "{status}");
    assert!(json("cluster upgrade status")["held_migrations"].as_array().unwrap().is_empty());
    assert!(json("cluster rebalance")["reason"].as_str().unwrap().contains("balanced"));
    ok("namespace delete ci");
    let operation = &json("operation list --target-type namespace --target ci")[0];
    let uuid = operation["uuid"].as_str().unwrap();
    assert!(ok(&format!("operation show namespace_op {uuid}")).contains(uuid));
    assert_eq!(json(&format!("operation chain {uuid}")).as_array().unwrap().len(), 1);
    ok("events namespace system --limit 5");
    ok("events node sim-1 --type resources");

    let (success, stdout, stderr) = run(&credentials, "namespace show absent");
    assert!(!success && stdout.is_empty(), "{stdout}");
    assert!(stderr.starts_with("error: namespace not found") && stderr.lines().count() == 1, "{stderr}");
    let (success, _, stderr) = run(Path::new("/nonexistent/credentials.json"), "namespace list");
    assert!(!success && stderr.contains("/nonexistent/credentials.json"), "{stderr}");
}

/// Starts a daemon whose simulated nodes have space for instances.
fn start(directory: &Path) -> Daemon {
    setup(directory).set("NODE_DISK_RESERVATION_GB", "0").start()
}

/// Runs a command that must succeed and returns its standard output and standard error.
fn ok(daemon: &Daemon, arguments: &str) -> (String, String) {
    let (success, stdout, stderr) = run(&daemon.data.join("credentials.json"), arguments);
    assert!(success, "{arguments}: {stdout}{stderr}");
    (stdout, stderr)
}

/// Runs a command that must fail and returns its standard error.
fn failure(daemon: &Daemon, arguments: &str) -> String {
    let (success, stdout, stderr) = run(&daemon.data.join("credentials.json"), arguments);
    assert!(!success, "{arguments}: {stdout}{stderr}");
    stderr
}

fn json(daemon: &Daemon, arguments: &str) -> Value {
    serde_json::from_str(&ok(daemon, &format!("--json {arguments}")).0).unwrap()
}

/// Creates an instance and returns its id.
fn create_instance(daemon: &Daemon, arguments: &str) -> String {
    json(daemon, &format!("instance create {arguments}"))["uuid"].as_str().unwrap().to_owned()
}

#[test]
fn delete_all_lists_instances_of_one_namespace_and_asks() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    ok(&daemon, "namespace create ci");
    let own = create_instance(&daemon, "web --disk 1");
    let other = create_instance(&daemon, "db --disk 1 --in-namespace ci");
    let refused = failure(&daemon, "instance delete-all");
    assert!(refused.contains(&own) && !refused.contains(&other) && refused.contains("--yes"), "{refused}");
    assert_eq!(json(&daemon, "instance list").as_array().unwrap().len(), 2);
    let (_, listed) = ok(&daemon, "instance delete-all --yes");
    assert!(listed.contains(&own) && !listed.contains(&other), "{listed}");
    let left = json(&daemon, "instance list");
    assert_eq!((left.as_array().unwrap().len(), left[0]["uuid"].as_str().unwrap()), (1, other.as_str()));
    ok(&daemon, "instance delete-all --in-namespace ci --yes");
    assert_eq!(json(&daemon, "instance list"), Value::Array(vec![]));
    assert!(ok(&daemon, "instance delete-all").1.contains("namespace system has no instances"));
}

#[test]
fn node_deletion_needs_a_drained_node_and_asks() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    create_instance(&daemon, "web --disk 1 --placed-on sim-2");
    for arguments in ["node delete sim-2", "node delete sim-2 --force", "node delete sim-2 --dead --yes"] {
        let refused = failure(&daemon, arguments);
        assert!(refused.contains("is alive and has 1 instance: web ("), "{refused}");
    }
    let refused = failure(&daemon, "node delete sim-1 --yes");
    assert!(
        refused.contains("node sim-1 is alive. Drain it first with `muster node drain sim-1`"),
        "{refused}"
    );
    ok(&daemon, "node drain sim-1");
    let question = failure(&daemon, "node delete sim-1");
    assert!(question.contains("delete node sim-1?") && question.contains("give --yes"), "{question}");
    assert_eq!(json(&daemon, "node show sim-1")["state"], "created");
    ok(&daemon, "node delete sim-1 --yes");
    assert_eq!(json(&daemon, "node show sim-1")["state"], "deleted");
    assert_eq!(json(&daemon, "instance show web")["state"], "created");
}

#[test]
fn duplicate_names_are_reported_with_the_candidates() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    // A failed create leaves an instance in state error, which does not block the name.
    failure(&daemon, "instance create web --disk 1 --memory 999999");
    let (_, warning) = ok(&daemon, "instance create web --disk 1");
    assert!(
        warning.contains("warning: namespace system already has this instance with the name web: "),
        "{warning}"
    );
    assert!(
        warning.contains("(error, created ") && warning.contains("will refer to the new one"),
        "{warning}"
    );
    let first = json(&daemon, "instance show web");
    assert_eq!(first["state"], "created");
    // The only instance that is not in error has the name.
    ok(&daemon, "instance delete web");
    assert_eq!(
        json(&daemon, &format!("instance show {}", first["uuid"].as_str().unwrap()))["state"],
        "deleted"
    );
    create_instance(&daemon, "web --disk 1");
    let first = json(&daemon, "instance show web");
    assert_eq!(first["state"], "created");

    let second = create_instance(&daemon, "web --disk 1");
    for arguments in ["instance show web", "exec web -- true", "instance poweroff web"] {
        let ambiguous = failure(&daemon, arguments);
        for part in [first["uuid"].as_str().unwrap(), &second, "(created, created ", "give a UUID"] {
            assert!(ambiguous.contains(part), "{arguments}: no {part:?} in {ambiguous}");
        }
    }
    ok(&daemon, &format!("instance poweroff {second}"));
    ok(&daemon, "network create lan 10.0.0.0/24");
    let (_, warning) = ok(&daemon, "network create lan 10.0.0.0/24");
    assert!(warning.contains("already has this network with the name lan: "), "{warning}");
    assert!(failure(&daemon, "network show lan").contains("2 networks have the name lan: "));
}

#[test]
fn network_deletion_names_attached_instances() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let (_, waited) = ok(&daemon, "network create lan 10.0.0.0/24");
    assert!(waited.is_empty() || waited.contains("waiting for network lan to be created"), "{waited}");
    let id = create_instance(&daemon, "web --disk 1 --network lan");
    let attached = format!("web ({id})");
    let reported = failure(&daemon, "network delete lan --timeout 1");
    let mut lines = reported.lines();
    assert_eq!(lines.next(), Some(format!("network lan has interfaces of instances: {attached}").as_str()));
    assert!(
        reported.contains(&format!("waiting for the deletion of the instances on network lan: {attached}"))
    );
    assert_eq!(json(&daemon, "network show lan")["network"]["state"], "delete-wait");
    let (_, waited) = ok(&daemon, "instance delete web");
    assert!(waited.contains("instance web deleted"), "{waited}");
    let (success, stdout, stderr) = run(&daemon.data.join("credentials.json"), "network delete lan");
    // The first deletion may have completed.
    assert!(success || stderr.contains("not found"), "{stdout}{stderr}");
}

#[test]
fn config_shows_sources_and_masks_secrets() {
    let output = Command::new(env!("CARGO_BIN_EXE_muster"))
        .arg("config")
        .env("MUSTER_CLEANER_DELAY", "5")
        .env("MUSTER_SYSTEM_KEY", "hunter2")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line =
        |name: &str| text.lines().find(|line| line.starts_with(&format!("{name} ="))).unwrap_or_default();
    assert!(
        line("CLEANER_DELAY").contains("= 5 ") && line("CLEANER_DELAY").contains("environment"),
        "{text}"
    );
    assert!(line("API_DRAIN_GRACE").contains("= 25 ") && line("API_DRAIN_GRACE").contains("default"));
    assert!(line("SYSTEM_KEY").contains("********") && !text.contains("hunter2"));
}
