//! A private MariaDB server, one for each test process, with a fresh database for each test.

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
    folder: tempfile::TempDir,
    // Its death closes the pipe to the shell that guards the server.
    _guard: Child,
}

/// The URL of a fresh, empty database, or nothing when MariaDB is not installed.
pub fn database_url() -> Option<String> {
    Some(server()?.fresh_database())
}

/// The same by the server's socket, which can be reached from every network namespace.
pub fn socket_url() -> Option<String> {
    let server = server()?;
    let url = server.fresh_database();
    let socket = server.folder.path().join("s.sock");
    Some(format!("{url}?socket={}", socket.display()))
}

fn server() -> Option<&'static MariaDb> {
    static SERVER: OnceLock<Option<MariaDb>> = OnceLock::new();
    SERVER.get_or_init(MariaDb::start).as_ref()
}

impl MariaDb {
    /// Starts a server on a socket and port of its own.
    ///
    /// # Panics
    /// When MariaDB is installed but does not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        let folder =
            tempfile::Builder::new().prefix("muster-mariadb-").tempdir().expect("a temporary folder");
        let data = folder.path().join("data");
        // A server that starts removes the temporary tables of all that share its folder for them.
        let temporary = format!("--tmpdir={}", folder.path().join("tmp").display());
        std::fs::create_dir(folder.path().join("tmp")).expect("a folder");
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
        // The shell waits for the end of its input, which comes when this process ends, and then stops the server.
        let guard = Command::new("sh")
            .args(["-c", "\"$@\" >\"$LOG\" 2>&1 & server=$!; cat >/dev/null; kill $server 2>/dev/null; wait $server; rm -rf \"$DIR\"", "sh"])
            .arg("mariadbd")
            .args(["--no-defaults", &user, "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M"])
            .args(["--performance-schema=OFF", "--skip-log-bin", "--max-connections=500"])
            .args([&format!("--datadir={}", data.display()), &temporary])
            .arg(format!("--socket={}", folder.path().join("s.sock").display()))
            .arg(format!("--pid-file={}", folder.path().join("pid").display()))
            .arg(format!("--port={port}"))
            .env("LOG", folder.path().join("log"))
            .env("DIR", folder.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        let server = Self { port, folder, _guard: guard };
        let started = Instant::now();
        while !server.run("SELECT 1") {
            assert!(started.elapsed() < Duration::from_secs(60), "mariadbd did not start: {}", server.log());
            wait(Duration::from_millis(50));
        }
        Some(server)
    }

    /// The URL of a new, empty database.
    ///
    /// # Panics
    /// When the server does not make one.
    #[must_use]
    pub fn fresh_database(&self) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("muster_test_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        assert!(self.run(&format!("CREATE DATABASE {name}")), "no database: {}", self.log());
        format!("mysql://root@127.0.0.1:{}/{name}", self.port)
    }

    /// Runs a statement as the administrator.
    fn run(&self, sql: &str) -> bool {
        let socket = format!("--socket={}", self.folder.path().join("s.sock").display());
        Command::new("mariadb")
            .args(["--no-defaults", "--user=root", &socket, "-e", sql])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        std::fs::read_to_string(self.folder.path().join("pid")).ok()?.trim().parse().ok()
    }

    fn log(&self) -> String {
        read_tail(&self.folder.path().join("log"))
    }
}

fn read_tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().rev().take(20).collect::<Vec<_>>().join("\n")
}

/// Waits a moment between two looks at something outside this process.
#[expect(clippy::disallowed_methods, reason = "there is nothing to wait on but the server itself")]
pub fn wait(pause: Duration) {
    std::thread::sleep(pause);
}
