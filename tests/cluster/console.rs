//! `muster console` and `muster instance vdi` with simulated guests, whose consoles return what they receive.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;

use muster_testing::Daemon;
use serde_json::json;

use crate::command_output::{Shell, start};
use crate::multi_node::member;
use crate::{TIMEOUT, wait_for};

/// A running command.
struct Running {
    child: Child,
    input: Option<ChildStdin>,
    output: Receiver<Vec<u8>>,
    errors: Receiver<Vec<u8>>,
}

fn read_in_thread(mut source: impl std::io::Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(size @ 1..) = source.read(&mut buffer) {
            if sender.send(buffer[..size].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Receives until the text ends with `end`, or to the end without one.
fn read_until(source: &Receiver<Vec<u8>>, end: Option<&str>) -> String {
    let mut text = String::new();
    loop {
        match source.recv_timeout(TIMEOUT) {
            Ok(bytes) => text.push_str(&String::from_utf8_lossy(&bytes)),
            Err(RecvTimeoutError::Disconnected) if end.is_none() => return text,
            Err(error) => panic!("{error} before {end:?}: {text}"),
        }
        if end.is_some_and(|end| text.ends_with(end)) {
            return text;
        }
    }
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take(), read_in_thread(child.stdout.take().unwrap()));
        let errors = read_in_thread(child.stderr.take().unwrap());
        Self { child, input, output, errors }
    }

    fn write(&mut self, bytes: &[u8]) {
        let input = self.input.as_mut().unwrap();
        input.write_all(bytes).unwrap();
        input.flush().unwrap();
    }

    /// Waits for the end, and returns the exit code and the standard error.
    fn end(mut self) -> (i32, String) {
        let errors = read_until(&self.errors, None);
        (self.child.wait().unwrap().code().unwrap(), errors)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a daemon with an instance `web`.
fn start_with_instance(directory: &std::path::Path) -> Daemon {
    let daemon = start(directory);
    Shell { daemon: &daemon, home: directory }.ok("instance create web --disk 1 --video vdi=vnc");
    daemon
}

#[test]
fn console_transfers_a_script_and_its_output() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start_with_instance(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let mut console = Running::start(&mut shell.command(&["console", "web", "--linger", "1"]));
    console.write("root\nls ü\n".as_bytes());
    console.input = None;
    let output = read_until(&console.output, None);
    assert!(output.ends_with("web login: root\rls ü\r"), "{output}");
    assert_eq!(console.end(), (0, "console of web\n".to_owned()));
    let events = shell.ok("instance events web");
    assert!(events.contains("console ticket created") && events.contains("console request"), "{events}");
}

#[test]
fn escape_key_of_a_terminal_leaves_the_console() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start_with_instance(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let muster = shell.command(&[]);
    let line = format!("{} console web", muster.get_program().to_str().unwrap());
    let mut terminal = Command::new("script");
    terminal.args(["-qfec", &line, "/dev/null"]).env("SHELL", "/bin/sh");
    terminal.envs(muster.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut terminal = Running::start(&mut terminal);
    read_until(&terminal.output, Some("web login: "));
    // Raw mode: Ctrl-C reaches the guest, and only the guest echoes.
    terminal.write(b"a\x03b");
    assert_eq!(read_until(&terminal.output, Some("b")), "a\u{3}b");
    terminal.write(b"\x1d");
    assert_eq!(terminal.end().0, 0);
}

#[test]
fn lost_server_is_an_error_and_a_stopped_instance_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start_with_instance(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let console = Running::start(&mut shell.command(&["console", "web"]));
    read_until(&console.output, Some("web login: "));
    shell.ok("instance poweroff web");
    let (code, errors) = console.end();
    assert!(code == 0 && errors.contains("the console of web was closed"), "{code}: {errors}");
    let (code, errors) = shell.fail("console web");
    assert!(code == 5 && errors.contains("muster instance poweron"), "{code}: {errors}");
    let (code, errors) = shell.fail("instance vdi web --no-viewer");
    assert!(code == 5 && errors.contains("muster instance poweron"), "{code}: {errors}");

    shell.ok("instance poweron web");
    let console = Running::start(&mut shell.command(&["console", "web"]));
    read_until(&console.output, Some("web login: "));
    let screen = Running::start(&mut shell.command(&["instance", "vdi", "web", "--no-viewer"]));
    let mut viewer = connect(&screen);
    daemon.kill();
    for (lost, noun) in [(console, "console"), (screen, "screen")] {
        let (code, errors) = lost.end();
        let expected =
            format!("error: lost the {noun} of web: the server closed the connection unexpectedly\n");
        assert!(code == 6 && errors.ends_with(&expected), "{code}: {errors}");
    }
    assert!(matches!(viewer.read(&mut [0]), Ok(0) | Err(_)), "the viewer's connection ends, too");
}

/// Connects to the port that `muster instance vdi` prints, and reads the greeting of the display.
fn connect(screen: &Running) -> TcpStream {
    let printed = loop {
        let printed = read_until(&screen.output, Some("\n"));
        if printed.contains("vnc://") {
            break printed;
        }
    };
    let address = printed.lines().next().unwrap().strip_prefix("address   vnc://").unwrap();
    let mut viewer = TcpStream::connect(address).unwrap();
    viewer.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut greeting = [0; 12];
    viewer.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"RFB 003.008\n");
    viewer
}

#[test]
fn screen_is_forwarded_to_a_loopback_port() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start_with_instance(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let screen = Running::start(&mut shell.command(&["instance", "vdi", "web", "--no-viewer"]));
    let mut viewer = connect(&screen);
    let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(40_000).collect();
    let (mut writer, sent) = (viewer.try_clone().unwrap(), bytes.clone());
    let sender = thread::spawn(move || writer.write_all(&sent));
    let mut echoed = vec![0; bytes.len()];
    viewer.read_exact(&mut echoed).unwrap();
    sender.join().unwrap().unwrap();
    assert!(echoed == bytes);
    // Ctrl-C is the way to end it.
    let pid = nix::unistd::Pid::from_raw(screen.child.id().try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(screen.end().0, 0);

    // A viewer for the desktop gets a file, which is deleted at the end.
    let program = directory.path().join("viewer");
    let copy = directory.path().join("seen.vv");
    let script = format!("#!/bin/sh\ncp \"$1\" {} && exit 3\n", copy.display());
    // Written by another process: a file that this one has open for writing cannot be executed.
    let write = "printf %s \"$0\" > \"$1\" && chmod 755 \"$1\"";
    assert!(Command::new("sh").args(["-c", write, &script]).arg(&program).status().unwrap().success());
    let mut command = shell.command(&["instance", "vdi", "web", "--viewer", program.to_str().unwrap()]);
    let (code, errors) = Running::start(command.env("DISPLAY", ":7").env("TMPDIR", directory.path())).end();
    assert!(code == 1 && errors.contains("failed: exit status: 3"), "{code}: {errors}");
    let file = fs::read_to_string(&copy).unwrap();
    assert!(file.starts_with("[virt-viewer]\ntype=vnc\nhost=127.0.0.1\nport="), "{file}");
    let direct = shell.ok("instance vdi web --output -");
    let password = direct.lines().find(|line| line.starts_with("password=")).unwrap();
    assert!(file.lines().any(|line| line == password), "{file}");
    let remaining = fs::read_dir(directory.path()).unwrap();
    let names: Vec<_> = remaining.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!names.iter().any(|name| name.starts_with("muster-")), "{names:?}");
    let (code, errors) = shell.fail("instance vdi absent --no-viewer");
    assert_eq!(code, 4, "{errors}");
}

#[test]
fn console_of_another_namespace_does_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start_with_instance(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let id = shell.ok("instance list -o json");
    let id = serde_json::from_str::<serde_json::Value>(&id).unwrap()[0]["uuid"].as_str().unwrap().to_owned();
    shell.ok("namespace create ci");
    shell.ok("key add ci job --key the-secret-of-ci");
    let own = format!("--api-url {} --namespace ci --key the-secret-of-ci", daemon.url);
    for command in
        [format!("console {id}"), format!("instance vdi {id} --no-viewer"), "console web".to_owned()]
    {
        let (code, errors) = shell.fail(&format!("{own} {command}"));
        assert!(code == 4 && errors.contains("instance not found"), "{command}: {code}: {errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn consoles_work_through_every_node() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let simulating = |name: &str, first: &str| {
        let arguments = ["--simulate", "1", "--simulate-from", first];
        member(directory.path(), name, &url)
            .arguments(&arguments)
            .set("NODE_DISK_RESERVATION_GB", "0")
            .start()
    };
    let [one, other] = [("n1", "1"), ("n2", "2")].map(|(name, first)| simulating(name, first));
    let token = one.log_in("system", "the first key").await;
    let body = json!({"name": "web", "cpus": 1, "memory": 256, "disk": [{"size": 1}], "network": [],
        "placed_on": "sim-2", "video": {"model": "vga", "memory": 16384, "vdi": "vnc"}});
    let (status, record) = one.call(&token, reqwest::Method::POST, "/instances", Some(body)).await;
    assert_eq!(status, 200, "{record}");
    let path = format!("/instances/{}", record["uuid"].as_str().unwrap());
    wait_for("the instance", async || {
        let (_, record) = one.call(&token, reqwest::Method::GET, &path, None).await;
        (record["state"] == "created" && record["power_state"] == "on").then_some(())
    })
    .await;
    let connection = [
        ("MUSTER_API_URL", one.url.clone()),
        ("MUSTER_NAMESPACE", "system".into()),
        ("MUSTER_KEY", "the first key".into()),
    ];
    let command = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(arguments).env("HOME", directory.path()).envs(connection.clone());
        Running::start(&mut command)
    };
    let mut console = command(&["console", "web"]);
    read_until(&console.output, Some("web login: "));
    console.write(b"root\n");
    assert_eq!(read_until(&console.output, Some("\r")), "root\r");
    let screen = command(&["instance", "vdi", "web", "--no-viewer"]);
    let _viewer = connect(&screen);
    // The daemon of the instance's node ends, and the one that the client has reached tells it so.
    other.kill();
    for lost in [console, screen] {
        let (code, errors) = lost.end();
        assert!(
            code == 6 && errors.contains("the connection to the node of the instance failed"),
            "{code}: {errors}"
        );
    }
}
