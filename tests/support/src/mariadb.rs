//! A private MariaDB server per test process, with a fresh database for each test.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::free_port;

/// A running server.
#[derive(Debug)]
pub struct MariaDb {
    port: u16,
    directory: tempfile::TempDir,
    // Closes the pipe to the shell that stops the server.
    _guard: Child,
}

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
        let directory =
            tempfile::Builder::new().prefix("muster-mariadb-").tempdir().expect("a temporary directory");
        let data = directory.path().join("data");
        // On its start a server removes all temporary tables in its temporary directory, so it cannot be shared.
        let temporary = format!("--tmpdir={}", directory.path().join("tmp").display());
        std::fs::create_dir(directory.path().join("tmp")).expect("a directory");
        let user = format!("--user={}", nix::unistd::User::from_uid(nix::unistd::getuid()).ok()??.name);
        let installed = Command::new("mariadb-install-db")
            .args([&user, "--auth-root-authentication-method=normal", "--skip-test-db", "--no-defaults"])
            .args([&format!("--datadir={}", data.display()), &temporary])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .ok()?;
        assert!(installed.success(), "mariadb-install-db failed");
        let port = free_port();
        // The shell's input ends with this process; then it stops the server.
        let guard = Command::new("sh")
            .args(["-c", "\"$@\" >\"$LOG\" 2>&1 & server=$!; cat >/dev/null; kill $server 2>/dev/null; wait $server; rm -rf \"$DIR\"", "sh"])
            .arg("mariadbd")
            .args(["--no-defaults", &user, "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M"])
            .args(["--performance-schema=OFF", "--skip-log-bin", "--max-connections=500"])
            .args([&format!("--datadir={}", data.display()), &temporary])
            .arg(format!("--socket={}", directory.path().join("s.sock").display()))
            .arg(format!("--pid-file={}", directory.path().join("pid").display()))
            .arg(format!("--port={port}"))
            .env("LOG", directory.path().join("log"))
            .env("DIR", directory.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        let server = Self { port, directory, _guard: guard };
        let started = Instant::now();
        while !server.run("SELECT 1") {
            assert!(started.elapsed() < Duration::from_secs(60), "mariadbd did not start: {}", server.log());
            wait(Duration::from_millis(50));
        }
        Some(server)
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
        format!("mysql://root@127.0.0.1:{}/{name}", self.port)
    }

    /// Whether a statement succeeds.
    fn run(&self, sql: &str) -> bool {
        let socket = format!("--socket={}", self.directory.path().join("s.sock").display());
        Command::new("mariadb")
            .args(["--no-defaults", "--user=root", &socket, "-e", sql])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    /// Returns the process ID of the server.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        std::fs::read_to_string(self.directory.path().join("pid")).ok()?.trim().parse().ok()
    }

    fn log(&self) -> String {
        read_tail(&self.directory.path().join("log"))
    }
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
