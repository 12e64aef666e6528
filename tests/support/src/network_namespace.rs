//! Network namespaces for hosts and guests, inside a process namespace that ends with the test.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{Shutdown, shutdown};

use crate::mariadb::wait;
use crate::skipped;

/// Set in the process that runs inside the namespaces.
const INSIDE_VARIABLE: &str = "MUSTER_TEST_INSIDE";

/// Reruns a test in its own process, network and mount namespaces and returns `false`; returns `true` inside. The
/// namespaces, their processes and devices end with that process, files with its temporary directory.
///
/// # Panics
/// When the rerun test fails.
pub fn enter_namespaces(test: &str, programs: &[&str]) -> bool {
    const UNSHARE_OPTIONS: [&str; 7] =
        ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"];
    if std::env::var_os(INSIDE_VARIABLE).is_some() {
        return true;
    }
    let succeeds = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    for program in programs {
        if !succeeds(
            Command::new("sh").args(["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}")]),
        ) {
            skipped(program);
            return false;
        }
    }
    if !succeeds(Command::new("unshare").args(UNSHARE_OPTIONS).arg("true")) {
        skipped("root, with the right to create namespaces");
        return false;
    }
    let directory = tempfile::Builder::new().prefix("muster-test-").tempdir().expect("a temporary directory");
    // The shell is the init process of the namespace: it reaps orphans.
    let mut child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(UNSHARE_OPTIONS)
        .args(["sh", "-c", "ip link set lo up; \"$@\"; exit $?", "sh"])
        .arg(std::env::current_exe().expect("a path"))
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(INSIDE_VARIABLE, "1")
        .env("TMPDIR", directory.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("setpriv");
    let mut errors = child.stderr.take().expect("a pipe");
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = errors.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    // Long tests report their progress.
    let mut has_passed = false;
    for line in BufReader::new(child.stdout.take().expect("a pipe")).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        has_passed |= line.contains("1 passed");
        println!("{line}");
    }
    let (status, stderr) = (child.wait().expect("a status"), errors.join().expect("no panic"));
    remove_cgroups(directory.path());
    assert!(status.success() && has_passed, "{stderr}");
    eprint!("{stderr}");
    false
}

/// Removes the cgroups of VMs that a failed test left in its directory. Unlike their processes they are not namespaced.
fn remove_cgroups(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if directory.ends_with("machines") {
            for hierarchy in ["", "cpu", "memory", "pids"] {
                let cgroup =
                    Path::new("/sys/fs/cgroup").join(hierarchy).join("muster").join(entry.file_name());
                let _ = std::fs::remove_dir(cgroup);
            }
        } else {
            remove_cgroups(&entry.path());
        }
    }
}

/// Polls until `check` returns a value, and returns that.
///
/// # Panics
/// When it does not within `timeout`.
pub fn wait_for<T>(what: &str, timeout: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(started.elapsed() < timeout, "timed out after {} s waiting for {what}", timeout.as_secs());
        wait(Duration::from_millis(20));
    }
}

type Task = Box<dyn FnOnce() + Send>;

/// A thread in its own network and mount namespace, with an empty `/run`. Processes that it starts share them.
#[derive(Debug)]
pub struct NetworkNamespace {
    name: String,
    tasks: mpsc::Sender<Task>,
    thread: nix::unistd::Pid,
    /// Sockets keep a namespace alive, so they are shut down with it.
    listeners: Mutex<Vec<TcpListener>>,
}

impl NetworkNamespace {
    /// Creates a namespace with a loopback device.
    ///
    /// # Panics
    /// When the kernel refuses.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let (tasks, queue) = mpsc::channel::<Task>();
        let (ready, started) = mpsc::channel();
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let none: Option<&str> = None;
                unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("namespaces");
                mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).expect("private mounts");
                mount(Some("none"), "/run", Some("tmpfs"), MsFlags::empty(), none).expect("a /run");
                let _ = ready.send(nix::unistd::gettid());
                for task in queue {
                    task();
                }
            })
            .expect("a thread");
        let thread = started.recv().expect("namespaces");
        let namespace = Self { name: name.into(), tasks, thread, listeners: Mutex::default() };
        namespace.sh("ip link set lo up");
        namespace
    }

    /// Runs a function in the namespace.
    ///
    /// # Panics
    /// When it panics.
    pub fn run<T: Send + 'static>(&self, function: impl FnOnce() -> T + Send + 'static) -> T {
        let (send, receive) = mpsc::channel();
        let task = Box::new(move || drop(send.send(function())));
        self.tasks.send(task).unwrap_or_else(|_| panic!("{}: panicked before", self.name));
        receive.recv().unwrap_or_else(|_| panic!("{}: panicked", self.name))
    }

    /// Runs a shell script and returns its status and output.
    ///
    /// # Panics
    /// When there is no shell.
    #[must_use]
    pub fn try_sh(&self, script: &str) -> Output {
        let script = script.to_owned();
        self.run(move || Command::new("sh").args(["-c", &script]).output().expect("a shell"))
    }

    /// Whether a shell script succeeds.
    #[must_use]
    pub fn succeeds(&self, script: &str) -> bool {
        self.try_sh(script).status.success()
    }

    /// Runs a shell script and returns its standard output.
    ///
    /// # Panics
    /// When it fails.
    pub fn sh(&self, script: &str) -> String {
        let output = self.try_sh(script);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}: {script}\n{stdout}{stderr}", self.name);
        stdout
    }

    /// Connects two namespaces with a veth pair.
    pub fn connect(&self, end: &str, other: &Self, other_end: &str) {
        self.sh(&format!("ip link add {end} type veth peer name {other_end} netns {}", other.thread));
    }

    /// Whether at least one of several pings is answered.
    #[must_use]
    pub fn pings(&self, address: &str) -> bool {
        self.succeeds(&format!("ping -n -c 5 -i 0.2 -W 1 {address} | grep -q 'bytes from'"))
    }

    /// Whether no ping is answered.
    #[must_use]
    pub fn cannot_ping(&self, address: &str) -> bool {
        !self.succeeds(&format!("ping -n -c 2 -i 0.2 -W 0.6 {address} | grep -q 'bytes from'"))
    }

    /// Serves TCP connections with the address of their peer.
    ///
    /// # Panics
    /// When the port is in use.
    pub fn serve_peer_address(&self, port: u16) {
        let listener = self.run(move || TcpListener::bind(("0.0.0.0", port)).expect("a free port"));
        let shared = listener.try_clone().expect("a socket");
        self.listeners.lock().expect("not poisoned").push(shared);
        std::thread::spawn(move || {
            while let Ok((mut stream, peer)) = listener.accept() {
                let _ = stream.write_all(peer.ip().to_string().as_bytes());
            }
        });
    }

    /// Returns the address that [`serve_peer_address`](Self::serve_peer_address) sees, or `None` when it is
    /// unreachable.
    ///
    /// # Panics
    /// When the address is not valid.
    #[must_use]
    pub fn address_seen_by(&self, address: &str, port: u16) -> Option<String> {
        let address: SocketAddr = format!("{address}:{port}").parse().expect("an address");
        self.run(move || {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).ok()?;
            Some(text)
        })
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        for listener in
            self.listeners.lock().into_iter().flat_map(|mut listeners| std::mem::take(&mut *listeners))
        {
            let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
        }
    }
}
