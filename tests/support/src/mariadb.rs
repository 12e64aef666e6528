//! A private MariaDB server per test process, with a fresh database for each test.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, getuid};

use crate::free_port;

/// A running server.
#[derive(Debug)]
pub struct MariaDb {
    port: u16,
    arguments: Vec<String>,
    directory: tempfile::TempDir,
    /// The shell that stops the server when its input ends, which is also when this process ends.
    guard: Child,
}

/// Exists while the directory of a killed server is kept for its restart.
const KEPT: &str = "kept";
/// The time in which a server must start.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The redo log of the default size is most of a small database.
const SMALL_LOG: &str = "--innodb-log-file-size=16M";

/// Returns the URL of an empty database, or `None` when MariaDB is not installed.
pub fn database_url() -> Option<String> {
    Some(server()?.fresh_database())
}

/// Like [`database_url`], by the server's socket, which is reachable from every network namespace.
pub fn socket_url() -> Option<String> {
    let server = server()?;
    let url = server.fresh_database();
    let socket = server.directory.path().join("s.sock");
    Some(format!("{url}?socket={}", socket.display()))
}

fn server() -> Option<&'static MariaDb> {
    static SERVER: OnceLock<Option<MariaDb>> = OnceLock::new();
    SERVER.get_or_init(MariaDb::start).as_ref()
}

impl MariaDb {
    /// Starts a server on its own socket and port.
    ///
    /// # Panics
    /// When MariaDB is installed but does not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Like [`start`](Self::start), with further arguments.
    ///
    /// # Panics
    /// When MariaDB is installed but does not start.
    #[must_use]
    pub fn start_with(arguments: &[&str]) -> Option<Self> {
        Self::start_in(&std::env::temp_dir(), arguments)
    }

    /// Like [`start_with`](Self::start_with), with its data below a directory.
    ///
    /// # Panics
    /// When MariaDB is installed but does not start.
    #[must_use]
    pub fn start_in(parent: &Path, arguments: &[&str]) -> Option<Self> {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let server = Self::spawn(install(parent)?, arguments, &[])?;
        server.wait_until_ready();
        Some(server)
    }

    /// Starts a server with its data in `directory`. The arguments in `once` are not used by a restart.
    pub(crate) fn spawn(
        directory: tempfile::TempDir,
        arguments: Vec<String>,
        once: &[String],
    ) -> Option<Self> {
        let port = free_port();
        let guard = spawn_server(directory.path(), port, &[&arguments, once].concat())?;
        Some(Self { port, arguments, directory, guard })
    }

    pub(crate) fn wait_until_ready(&self) {
        let started = Instant::now();
        while !self.run("SELECT 1") {
            assert!(started.elapsed() < START_TIMEOUT, "mariadbd did not start: {}", self.log());
            wait(Duration::from_millis(50));
        }
    }

    /// Kills the server with SIGKILL, for [`restart`](Self::restart).
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let pid = Pid::from_raw(self.pid().expect("a running server"));
        kill(pid, Signal::SIGKILL).expect("a running server");
        self.keep();
    }

    /// Keeps the data of a server that ended, for [`restart`](Self::restart).
    ///
    /// # Panics
    /// When its directory cannot be written.
    pub fn keep(&mut self) {
        std::fs::write(self.directory.path().join(KEPT), "").expect("a file");
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }

    /// Starts a killed server again, with its data. Must be called in its network namespace.
    ///
    /// # Panics
    /// When it does not start.
    pub fn restart(&mut self) {
        self.respawn(&[]);
        self.wait_until_ready();
    }

    /// Starts a killed server again and does not wait until it is ready.
    pub(crate) fn respawn(&mut self, once: &[String]) {
        std::fs::remove_file(self.directory.path().join(KEPT)).expect("a killed server");
        let guard = spawn_server(self.directory.path(), self.port, &[&self.arguments, once].concat());
        self.guard = guard.expect("a user");
    }

    /// Whether the process of the server has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let stat = |pid| std::fs::read_to_string(format!("/proc/{pid}/stat"));
        self.pid().is_some_and(|pid| stat(pid).map_or(true, |stat| stat.contains(") Z ")))
    }

    /// Creates an empty database and returns its URL.
    ///
    /// # Panics
    /// When the server refuses.
    #[must_use]
    pub fn fresh_database(&self) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("muster_test_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        assert!(self.run(&format!("CREATE DATABASE {name}")), "failed to create a database: {}", self.log());
        self.url(&name)
    }

    /// Returns `HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the URL of a database.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("mysql://root@{}/{database}", self.address())
    }

    /// Runs a statement and returns whether it succeeds.
    #[must_use]
    pub fn run(&self, sql: &str) -> bool {
        self.query(sql).is_some()
    }

    /// Runs a statement and returns its rows as text, or `None` when it fails.
    #[must_use]
    pub fn query(&self, sql: &str) -> Option<String> {
        let socket = format!("--socket={}", self.directory.path().join("s.sock").display());
        let output = Command::new("mariadb")
            .args(["--no-defaults", "--user=root", "--skip-column-names", &socket, "-e", sql])
            .stderr(Stdio::null())
            .output()
            .ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Lets clients of every address log in as root.
    ///
    /// # Panics
    /// When the server refuses.
    pub fn allow_remote_clients(&self) {
        assert!(self.run("GRANT ALL ON *.* TO root@'%' IDENTIFIED BY ''"), "{}", self.log());
    }

    /// Returns the TCP port of the server.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the process ID of the server.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        std::fs::read_to_string(self.directory.path().join("pid")).ok()?.trim().parse().ok()
    }

    pub(crate) fn log(&self) -> String {
        read_tail(&self.directory.path().join("log"))
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }
}

/// Creates a directory for a server below `parent`, with an empty database, or returns `None` when MariaDB is not installed.
pub(crate) fn install(parent: &Path) -> Option<tempfile::TempDir> {
    let directory = create_directory(parent);
    let installed = Command::new("mariadb-install-db")
        .args(["--auth-root-authentication-method=normal", "--skip-test-db", "--no-defaults"])
        .args([user_option()?, data_option(directory.path()), tmpdir_option(directory.path())])
        .arg(SMALL_LOG)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .ok()?;
    assert!(installed.success(), "mariadb-install-db failed");
    Some(directory)
}

/// Creates a directory for the files of a server.
pub(crate) fn create_directory(parent: &Path) -> tempfile::TempDir {
    let directory =
        tempfile::Builder::new().prefix("muster-mariadb-").tempdir_in(parent).expect("a temporary directory");
    // On its start a server removes all temporary tables in its temporary directory, so it cannot be shared.
    std::fs::create_dir(directory.path().join("tmp")).expect("a directory");
    directory
}

/// Returns the arguments of a server, without its user.
pub(crate) fn server_arguments(directory: &Path, port: u16) -> Vec<String> {
    // No test survives a loss of power, so nothing is synced. What a killed server has written stays in the page cache.
    let fixed = [
        "--no-defaults",
        "--innodb-buffer-pool-size=64M",
        "--performance-schema=OFF",
        "--skip-log-bin",
        "--debug-no-sync",
        "--innodb-flush-method=nosync",
    ];
    let path = |option: &str, name: &str| format!("--{option}={}", directory.join(name).display());
    let mut arguments: Vec<String> = fixed.iter().map(|argument| (*argument).to_owned()).collect();
    arguments.extend([tmpdir_option(directory), data_option(directory), SMALL_LOG.into()]);
    arguments.extend([path("socket", "s.sock"), format!("--port={port}")]);
    arguments.extend(["--max-connections=500".into(), "--bind-address=127.0.0.1".into()]);
    arguments
}

fn user_option() -> Option<String> {
    Some(format!("--user={}", User::from_uid(getuid()).ok()??.name))
}

fn data_option(directory: &Path) -> String {
    format!("--datadir={}", directory.join("data").display())
}

fn tmpdir_option(directory: &Path) -> String {
    format!("--tmpdir={}", directory.join("tmp").display())
}

/// Starts a server and a shell that stops it when its input ends.
fn spawn_server(directory: &Path, port: u16, arguments: &[String]) -> Option<Child> {
    const GUARD: &str = "\"$@\" >>\"$LOG\" 2>&1 & server=$!; echo $server >\"$DIR/pid\"; cat >/dev/null; \
                         kill $server 2>/dev/null; wait $server; [ -e \"$DIR/kept\" ] || rm -rf \"$DIR\"";
    // That of the previous process.
    let _ = std::fs::remove_file(directory.join("pid"));
    let guard = Command::new("sh")
        .args(["-c", GUARD, "sh", "mariadbd"])
        .args(server_arguments(directory, port))
        .args(arguments)
        // The first user counts.
        .arg(user_option()?)
        .env("LOG", directory.join("log"))
        .env("DIR", directory)
        // For the scripts of the server, which may run as another user.
        .env("TMPDIR", directory.join("tmp"))
        .stdin(Stdio::piped())
        .spawn();
    Some(guard.expect("a shell"))
}

fn read_tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().rev().take(20).collect::<Vec<_>>().join("\n")
}

/// Sleeps between two polls of something outside this process.
#[expect(clippy::disallowed_methods, reason = "there is no event to wait on")]
pub fn wait(pause: Duration) {
    std::thread::sleep(pause);
}
