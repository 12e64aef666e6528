//! `muster up` and `muster down` with simulated nodes.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use muster_testing::free_port;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn muster(directory: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
    command
        .args(arguments.split(' '))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", directory)
        .env("MUSTER_CREDENTIALS", directory.join("data/credentials.json"))
        .stdin(Stdio::null());
    for name in ["MARIADB_GATEWAY", "RESOURCES", "CLUSTER"] {
        command.env(format!("MUSTER_{name}_METRICS_PORT"), "0");
    }
    command
}

fn output(directory: &Path, arguments: &str) -> (bool, String) {
    let Output { status, stdout, stderr } = muster(directory, arguments).output().unwrap();
    (status.success(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[test]
fn background_cluster_runs_until_down() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (dir, port) = (format!("--data-dir {}/data", directory.display()), free_port());
    let up = format!("up --background --simulate 2 --listen 127.0.0.1:{port} {dir}");
    let (success, text) = output(directory, &up);
    assert!(success, "{text}");
    assert!(text.contains(&format!("http://127.0.0.1:{port}/ui/#ticket=")), "{text}");
    assert!(text.contains(&format!("muster down {dir}")) && text.contains("muster.log"), "{text}");
    assert!(output(directory, "node list").1.contains("sim-2"));
    let (success, text) = output(directory, &up);
    assert!(!success && text.contains("a cluster already runs") && text.contains("process "), "{text}");
    let (success, text) = output(directory, &format!("down {dir}"));
    assert!(success && text.contains("stopped"), "{text}");
    assert!(!directory.join("data/muster.pid").exists());
    assert!(!output(directory, "node list").0);
    let (success, text) = output(directory, &format!("down {dir}"));
    assert!(success && text.contains("no cluster runs"), "{text}");

    // A failed start names its reason.
    let _listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (success, text) = output(directory, &up);
    assert!(!success && text.contains("the daemon ended with exit status: 1; see "), "{text}");
    assert!(std::fs::read_to_string(directory.join("data/muster.log")).unwrap().contains("cannot listen on"));
    assert!(!directory.join("data/muster.pid").exists());
}

#[test]
fn foreground_cluster_ends_with_the_terminal_signal() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let dir = format!("--data-dir {}/data", directory.display());
    let mut child = muster(directory, &format!("up --simulate 1 --listen 127.0.0.1:{} {dir}", free_port()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut text = String::new();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap());
    while !text.contains("Stop it with") {
        assert!(std::io::BufRead::read_line(&mut lines, &mut text).unwrap() > 0, "{text}");
    }
    assert!(output(directory, "node list").1.contains("sim-1"));
    kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(!directory.join("data/muster.pid").exists());
    // A daemon that was started otherwise is not stopped.
    let daemon = crate::setup(directory).start();
    let (success, text) = output(directory, &format!("down {dir}"));
    assert!(!success && text.contains("was not started by `muster up`"), "{text}");
    drop(daemon);
}
