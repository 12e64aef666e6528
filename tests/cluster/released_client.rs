//! The released Python client, unchanged, against Muster.

use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output};
use std::sync::OnceLock;

use muster_testing::Daemon;
use serde_json::Value;

use crate::setup;

/// Returns the client's command, installed once into the build directory, or `None` if it cannot be installed.
pub(crate) fn installed() -> Option<PathBuf> {
    static COMMAND: OnceLock<Option<PathBuf>> = OnceLock::new();
    COMMAND.get_or_init(install).clone()
}

fn install() -> Option<PathBuf> {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("sf-client");
    let command = directory.join("bin/sf-client");
    if !command.exists() {
        Command::new("python3")
            .args(["-m", "venv"])
            .arg(&directory)
            .status()
            .ok()
            .filter(ExitStatus::success)?;
        let pip = directory.join("bin/pip");
        let quiet = ["install", "--quiet", "--disable-pip-version-check", "shakenfist-client"];
        Command::new(pip).args(quiet).status().ok().filter(ExitStatus::success)?;
    }
    Some(command)
}

pub(crate) fn run(
    command: &PathBuf,
    daemon: &Daemon,
    namespace: &str,
    key: &str,
    arguments: &str,
) -> (bool, String) {
    run_at(command, &daemon.url, namespace, key, arguments)
}

pub(crate) fn run_at(
    command: &PathBuf,
    url: &str,
    namespace: &str,
    key: &str,
    arguments: &str,
) -> (bool, String) {
    let Output { status, stdout, stderr } = Command::new(command)
        .args(arguments.split_whitespace())
        .env("SHAKENFIST_API_URL", url)
        .env("SHAKENFIST_NAMESPACE", namespace)
        .env("SHAKENFIST_KEY", key)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&stdout).into_owned();
    (status.success(), if status.success() { text } else { text + &String::from_utf8_lossy(&stderr) })
}

#[test]
fn released_client_manages_networks() {
    let Some(client) = installed() else { return muster_testing::skipped("the released client from PyPI") };
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    let key = daemon.system_key();
    let ok = |arguments: &str| {
        let (success, output) = run(&client, &daemon, "system", &key, arguments);
        assert!(success, "{arguments}: {output}");
        output
    };
    ok("namespace create ci");
    let created = ok("network create blue 10.0.0.0/24 --no-dhcp");
    assert!(created.contains("created") && created.contains("provide dhcp    : False"), "{created}");
    assert!(ok("network list").contains("blue"));
    assert!(ok("network show blue").contains("vxlan id"));
    ok("network create blue 10.0.0.0/24 --namespace ci");
    assert!(ok("network show blue").contains("namespace       : system"), "its own comes first");
    ok("network create green 10.0.0.0/24 --namespace ci");
    ok("network create green 10.0.0.0/24 --namespace ci");
    let (success, output) = run(&client, &daemon, "system", &key, "network show green");
    assert!(!success && output.contains("multiple networks have the name"), "{output}");
    ok("network delete-all --confirm --namespace ci");
    assert!(ok("--simple network addresses blue").contains("10.0.0.1,gateway"));
    let address = ok("network add-routed blue");
    assert!(address.starts_with("192.168.20."), "{address}");
    ok(&format!("network delete-routed blue {}", address.trim()));
    // Including an address in quarantine.
    let floating = "f10a7f10-a7f1-4a7f-a10a-7f10a7f10a7f";
    assert!(ok(&format!("--simple network addresses {floating}")).contains("deletion-halo"));
    assert!(ok("--json network ping blue 10.0.0.1").contains("10 packets transmitted"));
    ok("network set-metadata blue colour navy");
    assert!(ok("network show blue").contains("navy"));
    ok("network delete-metadata blue colour");
    assert!(ok("network events blue").contains("route address request"));
    assert!(ok("network instances blue").len() < 400);
    ok("network delete blue");
    assert!(!ok("network list").contains("blue"));
    ok("namespace delete ci");
}

#[test]
fn released_client_manages_namespaces_keys_trusts_and_metadata() {
    let Some(client) = installed() else { return muster_testing::skipped("the released client from PyPI") };
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).start();
    let key = daemon.system_key();
    let ok = |arguments: &str| {
        let (success, output) = run(&client, &daemon, "system", &key, arguments);
        assert!(success, "{arguments}: {output}");
        output
    };
    let json =
        |arguments: &str| -> Value { serde_json::from_str(&ok(&format!("--json {arguments}"))).unwrap() };

    assert!(ok("namespace list").contains("system"));
    ok("namespace create ci");
    assert!(ok("namespace show ci").contains("created"));
    ok("namespace add-key ci robot first-secret");
    assert!(ok("namespace show ci").contains("robot"));
    assert!(run(&client, &daemon, "ci", "first-secret", "namespace list").0);
    ok("namespace update-key ci robot second-secret");
    assert!(!run(&client, &daemon, "ci", "first-secret", "namespace list").0, "the old secret still works");
    assert!(run(&client, &daemon, "ci", "second-secret", "namespace list").0);

    ok("namespace create friend");
    ok("namespace add-key friend f friend-secret");
    ok("namespace add-trust ci friend");
    assert!(run(&client, &daemon, "friend", "friend-secret", "namespace list").1.contains("ci"));
    ok("namespace remove-trust ci friend");
    assert!(!run(&client, &daemon, "friend", "friend-secret", "namespace list").1.contains("ci"));

    ok("namespace set-metadata ci colour blue");
    assert!(ok("namespace get-metadata ci").contains("blue"));
    ok("namespace delete-metadata ci colour");
    assert!(!ok("namespace get-metadata ci").contains("blue"));

    ok("namespace delete-key ci robot");
    assert!(!run(&client, &daemon, "ci", "second-secret", "namespace list").0);
    assert!(ok("node list").contains("sim-1"));
    assert!(ok("node show sim-1").contains("created"));
    assert!(json("node resources sim-1")["cpu_max"].as_u64().unwrap() > 0);
    ok("node events sim-1 -l 10");
    ok("namespace delete ci");
    let (success, output) = run(&client, &daemon, "system", &key, "namespace show ci");
    assert!(!success && output.contains("not found"), "{output}");
}
