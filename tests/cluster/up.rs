//! `muster up` and `muster down` with simulated nodes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use muster_testing::{free_port, wait_for};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The directory of a cluster, and a port for its API.
struct Place {
    directory: tempfile::TempDir,
    port: u16,
}

impl Place {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), port: free_port() }
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(arguments.split(' ')).arg("--data-dir").arg(self.data());
        self.environment(&mut command);
        command
    }

    /// Gives a command an environment of its own, so that it finds no other cluster.
    fn environment(&self, command: &mut Command) {
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", self.directory.path())
            .env("MUSTER_NODE_DISK_RESERVATION_GB", "0")
            .env("MUSTER_API_DRAIN_GRACE", "0")
            .stdin(Stdio::null());
        for name in ["MARIADB_GATEWAY", "RESOURCES", "CLUSTER"] {
            command.env(format!("MUSTER_{name}_METRICS_PORT"), "0");
        }
    }

    fn up(&self) -> String {
        format!("up --simulate 2 --listen 127.0.0.1:{}", self.port)
    }

    fn run(&self, arguments: &str) -> (i32, String) {
        run(self.command(arguments))
    }

    /// Runs a command of the API.
    fn call(&self, arguments: &str) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(arguments.split(' '));
        self.environment(&mut command);
        command.env("MUSTER_CREDENTIALS", self.data().join("credentials.json"));
        run(command)
    }

    fn has_pid_file(&self) -> bool {
        self.data().join("muster.pid").exists()
    }

    /// Waits until no daemon uses the data directory.
    fn wait_until_stopped(&self) {
        wait_for("the daemon to end", TIMEOUT, || {
            let lock = std::fs::File::open(self.data().join("lock")).ok()?;
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok().map(drop)
        });
    }
}

/// Variables that select a cluster that does not exist.
const OTHER_CLUSTER: [(&str, &str); 5] = [
    ("MUSTER_API_URL", "http://127.0.0.1:1"),
    ("MUSTER_NAMESPACE", "other"),
    ("MUSTER_KEY", "other"),
    ("MUSTER_PROFILE", "other"),
    ("MUSTER_CACERT", "/nonexistent"),
];

const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the exit code and everything that a command prints.
fn run(mut command: Command) -> (i32, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().unwrap_or(-1), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[test]
fn background_cluster_runs_until_down() {
    let place = Place::new();
    let (dir, port) = (format!("--data-dir {}", place.data().display()), place.port);
    let up = format!("{} --background", place.up());
    let (code, text) = place.run(&up);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("http://127.0.0.1:{port}/ui/#ticket=")), "{text}");
    assert!(text.contains(&format!("muster down {dir}")) && text.contains("muster.log"), "{text}");
    assert!(place.call("node list").1.contains("sim-2"));
    let (code, text) = place.run(&up);
    assert!(code == 5 && text.contains("a cluster already runs") && text.contains("process "), "{text}");
    // A second cluster on the port of the first one is not mistaken for it.
    let other = Place { port, ..Place::new() };
    let (code, text) = other.run(&up);
    assert!(code == 1 && text.contains("cannot listen on") && !other.has_pid_file(), "{text}");
    let (code, text) = place.run("down");
    assert!(code == 0 && text.contains("stopped"), "{text}");
    assert!(!place.has_pid_file() && place.call("node list").0 == 6);
    let (code, text) = place.run("down");
    assert!(code == 0 && text.contains("no cluster runs"), "{text}");

    // A failed start names its reason.
    std::fs::write(place.data().join("auth_secret_seed"), "damaged").unwrap();
    let (code, text) = place.run(&up);
    assert!(code == 1 && text.contains("the daemon ended with exit status: 1; see "), "{text}");
    assert!(std::fs::read_to_string(place.data().join("muster.log")).unwrap().contains("is damaged"));
    assert!(!place.has_pid_file());
}

#[test]
fn commands_to_try_select_the_new_cluster() {
    let place = Place::new();
    let mut up = place.command(&format!("{} --background", place.up()));
    let (code, text) = run({
        up.envs(OTHER_CLUSTER);
        up
    });
    assert_eq!(code, 0, "{text}");
    let (_, commands) = text.split_once("Three things to try:\n").unwrap();
    let (commands, _) = commands.split_once("\n\n").unwrap();
    assert_eq!(commands.matches("  muster ").count(), 3, "{text}");
    let program = Path::new(env!("CARGO_BIN_EXE_muster")).parent().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", commands]);
    place.environment(&mut shell);
    shell.env("PATH", format!("{}:{}", program.display(), std::env::var("PATH").unwrap()));
    let (code, text) = run({
        shell.envs(OTHER_CLUSTER);
        shell
    });
    assert_eq!(code, 0, "{commands}: {text}");
    // `down` does not follow them to the other cluster, either.
    let mut down = place.command("down");
    let (code, text) = run({
        down.envs(OTHER_CLUSTER);
        down
    });
    assert!(code == 0 && text.contains("keep running: web"), "{text}");
    place.wait_until_stopped();
}

#[test]
fn one_of_two_concurrent_starts_succeeds() {
    let place = Place::new();
    let start = |port: u16| {
        let mut command = place.command(&format!("up --background --simulate 1 --listen 127.0.0.1:{port}"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let starts = [start(place.port), start(free_port())].map(|child| child.wait_with_output().unwrap());
    let mut codes = starts.map(|output| output.status.code().unwrap());
    codes.sort_unstable();
    assert_eq!(codes, [0, 5]);
    assert!(place.call("node list").1.contains("sim-1"));
    let (code, text) = place.run("down");
    assert!(code == 0 && text.contains("stopped") && !place.has_pid_file(), "{text}");
}

#[test]
fn down_signals_only_the_process_of_its_cluster() {
    let place = Place::new();
    let daemon = crate::setup(place.directory.path()).start();
    let mut other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    // The former cluster had this process id.
    std::fs::write(place.data().join("muster.pid"), format!("{}\nanother-boot 1\n", other.id())).unwrap();
    let (code, text) = place.run("down");
    assert!(code == 1 && text.contains("was not started by `muster up`"), "{text}");
    assert!(other.try_wait().unwrap().is_none());
    drop(daemon);
    place.wait_until_stopped();
    let (code, text) = place.run("down");
    assert!(code == 0 && text.contains("no cluster runs") && !place.has_pid_file(), "{text}");
    assert!(other.try_wait().unwrap().is_none());
    drop(other.stdin.take());
    other.wait().unwrap();
}

#[test]
fn down_ends_without_the_instances_and_in_time() {
    let place = Place::new();
    assert_eq!(place.run(&format!("{} --background", place.up())).0, 0);
    let text = std::fs::read_to_string(place.data().join("muster.pid")).unwrap();
    let pid = Pid::from_raw(text.lines().next().unwrap().parse().unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let (code, text) = place.run("down --timeout 1");
    assert!(code == 7 && text.contains("has not stopped after 1 s"), "{text}");
    kill(pid, Signal::SIGCONT).unwrap();
    place.wait_until_stopped();
    // Instances that cannot be powered off do not keep the daemon running.
    assert_eq!(place.run(&format!("{} --background", place.up())).0, 0);
    std::fs::remove_file(place.data().join("credentials.json")).unwrap();
    let (code, text) = place.run("down --guests");
    assert!(code == 1 && text.contains("failed to list the instances") && text.contains("stopped"), "{text}");
    place.wait_until_stopped();
}

/// Starts a cluster in the foreground, and returns when it shows how to stop it.
fn foreground(place: &Place) -> Child {
    let mut child = place.command(&place.up()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut text = String::new();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap());
    while !text.contains("Stop it with") {
        assert!(std::io::BufRead::read_line(&mut lines, &mut text).unwrap() > 0, "{text}");
    }
    child
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
}

#[test]
fn foreground_cluster_ends_with_the_terminal_signal() {
    let place = Place::new();
    let mut child = foreground(&place);
    assert!(place.call("node list").1.contains("sim-1"));
    signal(&child, Signal::SIGINT);
    assert!(child.wait().unwrap().success());
    assert!(!place.has_pid_file());
    place.wait_until_stopped();
    // Even if it is killed.
    let mut child = foreground(&place);
    signal(&child, Signal::SIGKILL);
    child.wait().unwrap();
    place.wait_until_stopped();
    // During the start, too.
    let mut child = place.command(&place.up()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let old = std::fs::read_to_string(place.data().join("muster.pid")).unwrap();
    wait_for("the daemon to start", TIMEOUT, || {
        let text = std::fs::read_to_string(place.data().join("muster.pid")).ok()?;
        (text != old).then_some(())
    });
    signal(&child, Signal::SIGTERM);
    assert!(matches!(child.wait().unwrap().code(), Some(0 | 130)));
    assert!(!place.has_pid_file());
    place.wait_until_stopped();
}
