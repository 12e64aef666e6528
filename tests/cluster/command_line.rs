//! The `muster` command line against a daemon.

use std::path::Path;
use std::process::Command;

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
    assert!(ok("key list ci").contains("robot"));
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
    ok("namespace delete ci");
    let operation = &json("operation list --target-type namespace --target ci")[0];
    let uuid = operation["uuid"].as_str().unwrap();
    assert!(ok(&format!("operation show namespace_op {uuid}")).contains(uuid));
    assert_eq!(json(&format!("operation chain {uuid}")).as_array().unwrap().len(), 1);
    ok("events namespace system --limit 5");
    ok("events node sim-1 --type resources");

    let (success, stdout, stderr) = run(&credentials, "namespace show absent");
    assert!(!success && stdout.is_empty(), "{stdout}");
    assert_eq!(stderr, "error: namespace not found\n");
    let (success, _, stderr) = run(Path::new("/nonexistent/credentials.json"), "namespace list");
    assert!(!success && stderr.contains("/nonexistent/credentials.json"), "{stderr}");
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

#[test]
fn generates_completion_script_for_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let output = Command::new(env!("CARGO_BIN_EXE_muster")).args(["completion", shell]).output().unwrap();
        assert!(
            output.status.success() && String::from_utf8_lossy(&output.stdout).contains("namespace"),
            "{shell}"
        );
    }
}
