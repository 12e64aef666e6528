//! `muster exec`, `muster cp` and `muster agent` with simulated guests.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use muster_testing::{Daemon, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{TIMEOUT, setup};

/// A daemon with an instance `web`, whose agent is ready.
struct Fixture {
    directory: tempfile::TempDir,
    daemon: Daemon,
}

/// The exit code and output of a command.
struct CommandOutput {
    code: i32,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    stderr_text: String,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let daemon = setup(directory.path()).set("NODE_DISK_RESERVATION_GB", "0").start();
        let fixture = Self { directory, daemon };
        fixture.ok(&["instance", "create", "web", "--disk", "1"]);
        assert_eq!(fixture.run(&["exec", "web", "--wait", "60", "--", "true"]).code, 0);
        fixture
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        let credentials = self.daemon.data.join("credentials.json");
        command.args(arguments).env("MUSTER_CREDENTIALS", credentials).env("HOME", self.directory.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        command_output(self.command(arguments).stdin(Stdio::null()).output().unwrap())
    }

    /// Runs a command that must succeed and returns its standard output.
    fn ok(&self, arguments: &[&str]) -> String {
        let CommandOutput { code, stdout, stderr_text, .. } = self.run(arguments);
        assert_eq!(code, 0, "{arguments:?}: {stderr_text}");
        String::from_utf8(stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[&["--json"], arguments].concat())).unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

fn command_output(output: Output) -> CommandOutput {
    let stderr_text = String::from_utf8_lossy(&output.stderr).into_owned();
    CommandOutput {
        code: output.status.code().unwrap(),
        stdout: output.stdout,
        stderr: output.stderr,
        stderr_text,
    }
}

fn mode(file: &Path) -> u32 {
    fs::metadata(file).unwrap().permissions().mode() & 0o7777
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn exec_forwards_output_and_exit_code() {
    let fixture = Fixture::new();
    let output = fixture.run(&["exec", "web", "--", "echo out; echo err >&2; exit 7"]);
    assert_eq!(
        (output.code, output.stdout.as_slice(), output.stderr_text.as_str()),
        (7, b"out\n".as_slice(), "err\n")
    );
    assert_eq!(fixture.ok(&["exec", "web", "--", "echo", "a  b", "it's", "$HOME;"]), "a  b it's $HOME;\n");
    let output = fixture.run(&["exec", "web", "--", "nonsense"]);
    assert_eq!(
        (output.code, output.stderr_text.contains("not found")),
        (127, true),
        "{}",
        output.stderr_text
    );

    // Large or binary output is transferred in blobs.
    let numbers: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(fixture.ok(&["exec", "web", "--", "seq 1 20000"]), numbers);
    let output = fixture.run(&["exec", "web", "--", "bytes 300 >&2; bytes 300"]);
    let bytes: Vec<u8> = (0..=u8::MAX).rev().cycle().take(300).collect();
    assert_eq!((output.code, output.stdout == bytes, output.stderr == bytes), (0, true, true));

    let record = fixture.json(&["exec", "web", "--", "exit", "0"]);
    assert_eq!((&record["state"], &record["results"]["0"]["return-code"]), (&"complete".into(), &0.into()));
    let output = fixture.run(&["exec", "absent", "--", "true"]);
    assert!(output.code == 125 && output.stderr_text.starts_with("error: instance not found"));
}

#[test]
fn exec_ends_at_deadline_or_when_interrupted() {
    let fixture = Fixture::new();
    let timed_out = fixture.run(&["exec", "web", "--deadline", "0.5", "--", "sleep 600"]);
    assert_eq!(
        (timed_out.code, timed_out.stderr_text.contains("deadline")),
        (124, true),
        "{}",
        timed_out.stderr_text
    );

    let arguments = ["exec", "web", "--", "sleep 600"];
    let mut command = fixture.command(&arguments);
    let caller: Child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let is_running = || {
        let list = fixture.json(&["agent", "list", "web"]);
        list.as_array().unwrap().iter().any(|operation| operation["state"] == "executing")
    };
    wait_for("the command to run", TIMEOUT, || is_running().then_some(()));
    kill(Pid::from_raw(caller.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let output = command_output(caller.wait_with_output().unwrap());
    assert_eq!(
        (output.code, output.stderr_text.contains("was deleted")),
        (130, true),
        "{}",
        output.stderr_text
    );
    wait_for("the command to end", TIMEOUT, || (!is_running()).then_some(()));

    let id = fixture.ok(&["exec", "web", "--detach", "--", "sleep 600"]);
    let id = id.trim();
    assert!(fixture.ok(&["agent", "show", id]).contains("execute sleep 600"));
    assert!(fixture.ok(&["instance", "show", "web"]).contains(id));
    fixture.ok(&["agent", "delete", id]);
    let next = fixture.run(&["exec", "web", "--deadline", "30", "--", "true"]);
    assert_eq!(next.code, 0, "{}", next.stderr_text);
    assert!(fixture.ok(&["agent", "list", "web", "--all"]).contains("returned 0"));
}

#[test]
fn cp_preserves_content_and_mode() {
    let fixture = Fixture::new();
    let (source, copy) = (fixture.file("source"), fixture.file("copy"));
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(|number| number.to_le_bytes()[..1].to_vec()).collect();
    fs::write(&source, &content).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o750)).unwrap();
    fixture.ok(&["cp", text(&source), "web:/tmp/file"]);
    assert_eq!(
        fixture.json(&["artifact", "list"]),
        serde_json::json!([]),
        "the temporary artifact was not deleted"
    );
    fixture.ok(&["cp", "web:/tmp/file", text(&copy)]);
    assert!(fs::read(&copy).unwrap() == content);
    assert_eq!(mode(&copy), 0o750);

    // Into directories, and with other permissions.
    fixture.ok(&["cp", text(&source), "web:/tmp/", "--mode", "640"]);
    let directory = fixture.file("folder");
    fs::create_dir(&directory).unwrap();
    fixture.ok(&["cp", "web:/tmp/source", text(&directory)]);
    assert!(fs::read(directory.join("source")).unwrap() == content);
    assert_eq!(mode(&directory.join("source")), 0o640);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "unexpected files in the directory");

    // Standard input and output.
    let mut command = fixture.command(&["cp", "-", "web:/tmp/typed"]);
    command.stdin(fs::File::open(&source).unwrap());
    let typed = command_output(command.output().unwrap());
    assert_eq!(typed.code, 0, "{}", typed.stderr_text);
    assert!(fixture.run(&["cp", "web:/tmp/typed", "-"]).stdout == content);
    let empty = fixture.file("empty");
    fs::write(&empty, "").unwrap();
    fixture.ok(&["cp", text(&empty), "web:/tmp/empty"]);
    assert_eq!(fixture.run(&["cp", "web:/tmp/empty", "-"]).stdout, b"");

    for (arguments, code, expected) in [
        (["cp", "web:/absent", text(&directory)], 1, "No such file or directory: /absent"),
        (["cp", text(&directory), "web:/tmp/x"], 1, "is a directory"),
        (["cp", "web:/a", "web:/b"], 1, "both files are in guests"),
        (["cp", text(&source), "absent:/tmp/x"], 4, "instance not found"),
    ] {
        let output = fixture.run(&arguments);
        assert_eq!(
            (output.code, output.stderr_text.contains(expected)),
            (code, true),
            "{arguments:?}: {}",
            output.stderr_text
        );
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "a failed copy left files");
}

#[test]
fn exec_fails_or_waits_if_agent_is_not_ready() {
    let fixture = Fixture::new();
    let facts = fixture.ok(&["instance", "facts", "web"]);
    assert!(
        facts.contains("distribution") && facts.contains("MOUNTED AT") && facts.contains("ssh-"),
        "{facts}"
    );
    fixture.ok(&["instance", "poweroff", "web"]);
    let off = fixture.run(&["exec", "web", "--", "true"]);
    assert_eq!((off.code, off.stderr_text.contains("not ready")), (125, true), "{}", off.stderr_text);
    let waiting = fixture.command(&["exec", "web", "--wait", "60", "--", "true"]).spawn().unwrap();
    fixture.ok(&["instance", "poweron", "web"]);
    assert_eq!(
        command_output(waiting.wait_with_output().unwrap()).code,
        0,
        "exec did not wait for the agent"
    );
}
