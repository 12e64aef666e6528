//! Places with a network and a `/run` of their own, in a world that goes with the test however it ends.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::mariadb::wait;
use crate::skipped;

const INSIDE: &str = "MUSTER_TEST_INSIDE";

/// Runs a test again in namespaces of its own; false in the process that only waits for it. With the first process
/// in there end all others, with those the namespaces, with those the devices; files go with the temporary folder.
///
/// # Panics
/// When the test fails in there.
pub fn enter(test: &str, programs: &[&str]) -> bool {
    const OWN: [&str; 7] =
        ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"];
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let can = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    for program in programs {
        if !can(Command::new("sh").args(["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}")]))
        {
            skipped(program);
            return false;
        }
    }
    if !can(Command::new("unshare").args(OWN).arg("true")) {
        skipped("root, with the right to make namespaces");
        return false;
    }
    let folder = tempfile::Builder::new().prefix("muster-world-").tempdir().expect("a temporary folder");
    // The shell buries whatever loses its parent in there, as the first process of a machine does.
    let output = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(OWN)
        .args(["sh", "-c", "ip link set lo up; \"$@\"; exit $?", "sh"])
        .arg(std::env::current_exe().expect("a path"))
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(INSIDE, "1")
        .env("TMPDIR", folder.path())
        .output()
        .expect("setpriv");
    remove_groups(folder.path());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}\n{stderr}");
    print!("{stdout}");
    eprint!("{stderr}");
    false
}

/// Removes the resource groups of machines that a test left in its folder. Their processes ended with the world, but
/// groups are the whole host's.
fn remove_groups(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if folder.ends_with("machines") {
            for hierarchy in ["", "cpu", "memory", "pids"] {
                let group =
                    Path::new("/sys/fs/cgroup").join(hierarchy).join("muster").join(entry.file_name());
                let _ = std::fs::remove_dir(group);
            }
        } else {
            remove_groups(&entry.path());
        }
    }
}

/// Looks again and again until there is something, but not for ever.
///
/// # Panics
/// When there is nothing within the time.
pub fn wait_for<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < limit, "waited {} s in vain for {what}", limit.as_secs());
        wait(Duration::from_millis(20));
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// A thread in a network and a file system of its own. What it starts is there, too.
#[derive(Debug)]
pub struct Place {
    name: String,
    work: mpsc::Sender<Work>,
    thread: nix::unistd::Pid,
}

impl Place {
    /// A new place, with nothing but a loopback device.
    ///
    /// # Panics
    /// When the kernel does not make one.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let (work, todo) = mpsc::channel::<Work>();
        let (ready, told) = mpsc::channel();
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let nothing: Option<&str> = None;
                unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("namespaces");
                mount(nothing, "/", nothing, MsFlags::MS_PRIVATE | MsFlags::MS_REC, nothing)
                    .expect("private mounts");
                mount(Some("none"), "/run", Some("tmpfs"), MsFlags::empty(), nothing).expect("a /run");
                let _ = ready.send(nix::unistd::gettid());
                for work in todo {
                    work();
                }
            })
            .expect("a thread");
        let place = Self { name: name.into(), work, thread: told.recv().expect("a place") };
        place.sh("ip link set lo up");
        place
    }

    /// Does something there.
    ///
    /// # Panics
    /// When that panics.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (send, receive) = mpsc::channel();
        let work = Box::new(move || drop(send.send(work())));
        self.work.send(work).unwrap_or_else(|_| panic!("{}: panicked before", self.name));
        receive.recv().unwrap_or_else(|_| panic!("{}: panicked", self.name))
    }

    /// Runs a script.
    ///
    /// # Panics
    /// When there is no shell.
    #[must_use]
    pub fn try_sh(&self, script: &str) -> Output {
        let script = script.to_owned();
        self.run(move || Command::new("sh").args(["-c", &script]).output().expect("a shell"))
    }

    /// Whether a script succeeds.
    #[must_use]
    pub fn does(&self, script: &str) -> bool {
        self.try_sh(script).status.success()
    }

    /// Runs a script that must succeed, and answers what it printed.
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

    /// A cable between two places.
    pub fn cable(&self, end: &str, other: &Self, other_end: &str) {
        self.sh(&format!("ip link add {end} type veth peer name {other_end} netns {}", other.thread));
    }

    /// Whether somebody answers a ping.
    #[must_use]
    pub fn pings(&self, address: &str) -> bool {
        self.does(&format!("ping -n -c 5 -i 0.2 -W 1 {address} | grep -q 'bytes from'"))
    }

    /// Whether nobody answers a ping.
    #[must_use]
    pub fn pings_not(&self, address: &str) -> bool {
        !self.does(&format!("ping -n -c 2 -i 0.2 -W 0.6 {address} | grep -q 'bytes from'"))
    }

    /// Answers everybody on this port with the address that they came from.
    ///
    /// # Panics
    /// When the port is taken.
    pub fn answer(&self, port: u16) {
        let listener = self.run(move || TcpListener::bind(("0.0.0.0", port)).expect("a free port"));
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                if let Ok(from) = stream.peer_addr() {
                    let _ = stream.write_all(from.ip().to_string().as_bytes());
                }
            }
        });
    }

    /// As whom an answering place sees this one; nothing if it cannot be reached.
    ///
    /// # Panics
    /// When the address is none.
    #[must_use]
    pub fn seen_by(&self, address: &str, port: u16) -> Option<String> {
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
