//! `muster exec`, `muster cp` and what they ask of agents, with simulated guests.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use muster_testing::{Daemon, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{PATIENCE, setup};

/// A daemon with an instance `web`, whose agent is ready.
struct Story {
    folder: tempfile::TempDir,
    daemon: Daemon,
}

/// How a command ended, and what it wrote.
struct Ended {
    code: i32,
    out: Vec<u8>,
    err: Vec<u8>,
    said: String,
}

impl Story {
    fn begin() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let daemon = setup(folder.path()).set("NODE_DISK_RESERVATION_GB", "0").start();
        let story = Self { folder, daemon };
        story.ok(&["instance", "create", "web", "--disk", "1"]);
        assert_eq!(story.run(&["exec", "web", "--wait", "60", "--", "true"]).code, 0);
        story
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        let credentials = self.daemon.data.join("credentials.json");
        command.args(arguments).env("MUSTER_CREDENTIALS", credentials).env("HOME", self.folder.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        ended(self.command(arguments).stdin(Stdio::null()).output().unwrap())
    }

    /// What a command prints that ends well.
    fn ok(&self, arguments: &[&str]) -> String {
        let Ended { code, out, said, .. } = self.run(arguments);
        assert_eq!(code, 0, "{arguments:?}: {said}");
        String::from_utf8(out).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[&["--json"], arguments].concat())).unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn ended(output: Output) -> Ended {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ended { code: output.status.code().unwrap(), out: output.stdout, err: output.stderr, said }
}

fn mode(file: &Path) -> u32 {
    fs::metadata(file).unwrap().permissions().mode() & 0o7777
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_command_in_a_guest_is_as_if_it_ran_here() {
    let story = Story::begin();
    let ran = story.run(&["exec", "web", "--", "echo out; echo err >&2; exit 7"]);
    assert_eq!((ran.code, ran.out.as_slice(), ran.said.as_str()), (7, b"out\n".as_slice(), "err\n"));
    assert_eq!(story.ok(&["exec", "web", "--", "echo", "a  b", "it's", "$HOME;"]), "a  b it's $HOME;\n");
    let ran = story.run(&["exec", "web", "--", "nonsense"]);
    assert_eq!((ran.code, ran.said.contains("not found")), (127, true), "{}", ran.said);

    // What is long or no text is in blobs on the way.
    let numbers: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(story.ok(&["exec", "web", "--", "seq 1 20000"]), numbers);
    let ran = story.run(&["exec", "web", "--", "bytes 300 >&2; bytes 300"]);
    let bytes: Vec<u8> = (0..=u8::MAX).rev().cycle().take(300).collect();
    assert_eq!((ran.code, ran.out == bytes, ran.err == bytes), (0, true, true));

    let record = story.json(&["exec", "web", "--", "exit", "0"]);
    assert_eq!((&record["state"], &record["results"]["0"]["return-code"]), (&"complete".into(), &0.into()));
    let ran = story.run(&["exec", "absent", "--", "true"]);
    assert_eq!((ran.code, ran.said.as_str()), (125, "error: instance not found\n"));
}

#[test]
fn a_command_ends_with_its_deadline_or_with_its_caller() {
    let story = Story::begin();
    let late = story.run(&["exec", "web", "--deadline", "0.5", "--", "sleep 600"]);
    assert_eq!((late.code, late.said.contains("deadline")), (124, true), "{}", late.said);

    let arguments = ["exec", "web", "--", "sleep 600"];
    let mut command = story.command(&arguments);
    let caller: Child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let is_running = || {
        let list = story.json(&["agent", "list", "web"]);
        list.as_array().unwrap().iter().any(|operation| operation["state"] == "executing")
    };
    wait_for("the command", PATIENCE, || is_running().then_some(()));
    kill(Pid::from_raw(caller.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let ran = ended(caller.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.said.contains("was deleted")), (130, true), "{}", ran.said);
    wait_for("its end", PATIENCE, || (!is_running()).then_some(()));

    let id = story.ok(&["exec", "web", "--detach", "--", "sleep 600"]);
    let id = id.trim();
    assert!(story.ok(&["agent", "show", id]).contains("execute sleep 600"));
    assert!(story.ok(&["instance", "show", "web"]).contains(id));
    story.ok(&["agent", "delete", id]);
    let next = story.run(&["exec", "web", "--deadline", "30", "--", "true"]);
    assert_eq!(next.code, 0, "{}", next.said);
    assert!(story.ok(&["agent", "list", "web", "--all"]).contains("returned 0"));
}

#[test]
fn files_go_in_and_come_out_as_they_were() {
    let story = Story::begin();
    let (source, copy) = (story.file("source"), story.file("copy"));
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(|number| number.to_le_bytes()[..1].to_vec()).collect();
    fs::write(&source, &content).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o750)).unwrap();
    story.ok(&["cp", text(&source), "web:/tmp/file"]);
    assert_eq!(
        story.json(&["artifact", "list"]),
        serde_json::json!([]),
        "nothing is left that only carried it"
    );
    story.ok(&["cp", "web:/tmp/file", text(&copy)]);
    assert!(fs::read(&copy).unwrap() == content);
    assert_eq!(mode(&copy), 0o750);

    // Again, into folders, and with other permissions.
    story.ok(&["cp", text(&source), "web:/tmp/", "--mode", "640"]);
    let folder = story.file("folder");
    fs::create_dir(&folder).unwrap();
    story.ok(&["cp", "web:/tmp/source", text(&folder)]);
    assert!(fs::read(folder.join("source")).unwrap() == content);
    assert_eq!(mode(&folder.join("source")), 0o640);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");

    // Standard input and output.
    let mut command = story.command(&["cp", "-", "web:/tmp/typed"]);
    command.stdin(fs::File::open(&source).unwrap());
    let typed = ended(command.output().unwrap());
    assert_eq!(typed.code, 0, "{}", typed.said);
    assert!(story.run(&["cp", "web:/tmp/typed", "-"]).out == content);
    let empty = story.file("empty");
    fs::write(&empty, "").unwrap();
    story.ok(&["cp", text(&empty), "web:/tmp/empty"]);
    assert_eq!(story.run(&["cp", "web:/tmp/empty", "-"]).out, b"");

    for (arguments, expected) in [
        (["cp", "web:/absent", text(&folder)], "No such file or directory: /absent"),
        (["cp", text(&folder), "web:/tmp/x"], "is a directory"),
        (["cp", "web:/a", "web:/b"], "both files are in guests"),
        (["cp", text(&source), "absent:/tmp/x"], "instance not found"),
    ] {
        let ran = story.run(&arguments);
        assert_eq!((ran.code, ran.said.contains(expected)), (1, true), "{arguments:?}: {}", ran.said);
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left of what failed");
}

#[test]
fn a_guest_that_cannot_be_asked_is_said_to_be_so() {
    let story = Story::begin();
    let facts = story.ok(&["instance", "facts", "web"]);
    assert!(
        facts.contains("distribution") && facts.contains("MOUNTED AT") && facts.contains("ssh-"),
        "{facts}"
    );
    story.ok(&["instance", "poweroff", "web"]);
    let off = story.run(&["exec", "web", "--", "true"]);
    assert_eq!((off.code, off.said.contains("not ready")), (125, true), "{}", off.said);
    let begun = story.command(&["exec", "web", "--wait", "60", "--", "true"]).spawn().unwrap();
    story.ok(&["instance", "poweron", "web"]);
    assert_eq!(ended(begun.wait_with_output().unwrap()).code, 0, "it is waited for");
}
