//! `muster doctor` on this host.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn doctor(directory: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .args(options)
        .arg("doctor")
        .arg("--data-dir");
    command.arg(directory.join("data"));
    command
}

fn doctor_text(directory: &Path) -> String {
    String::from_utf8(doctor(directory, &[]).output().unwrap().stdout).unwrap()
}

#[test]
fn doctor_reports_every_check_and_fails_without_the_database() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let run = |more: &[(&str, &str)]| {
        let output = doctor(directory, &["--json"]).envs(more.iter().copied()).output().unwrap();
        let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), checks)
    };
    let (code, checks) = run(&[]);
    let has_failed = checks.iter().any(|check| check["state"] == "failed");
    assert_eq!(code, Some(i32::from(has_failed)), "{checks:?}");
    for name in [
        "kvm",
        "qemu",
        "tun",
        "capabilities",
        "uplink",
        "disk",
        "firewall",
        "name-resolution",
        "database",
        "clock",
    ] {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        assert!(check["detail"].is_string() && check["affects"].is_string(), "{check}");
    }
    let database = |checks: &[Value]| {
        let check = checks.iter().find(|check| check["name"] == "database").unwrap();
        (check["state"].as_str().unwrap().to_owned(), check["detail"].as_str().unwrap().to_owned())
    };
    assert_eq!(database(&checks).0, "ok");
    let names = String::from_utf8(doctor(directory, &["-o", "name"]).output().unwrap().stdout).unwrap();
    assert_eq!(names.lines().count(), checks.len(), "{names}");
    assert!(!directory.join("data").exists(), "it changed the host");
    let url = "mysql://muster:secret@127.0.0.1:9/muster";
    let (code, checks) = run(&[("MUSTER_DATABASE_URL", url)]);
    let (state, detail) = database(&checks);
    assert_eq!((code, &*state), (Some(1), "failed"));
    assert!(detail.contains("127.0.0.1:9") && !detail.contains("secret"), "{detail}");
    let text = doctor_text(directory);
    assert!(text.contains("checks: ") && text.contains("database"), "{text}");
}
