//! Notifications to systemd, received in its place.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::Duration;

use muster_testing::{Daemon, DaemonSetup, MariaDb};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;

use crate::{setup, wait_for};

/// The receiving end of the notifications.
struct ServiceManager(UnixDatagram);

impl ServiceManager {
    fn at(path: &Path) -> Self {
        Self::with(UnixDatagram::bind(path).unwrap())
    }

    fn with(socket: UnixDatagram) -> Self {
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(socket)
    }

    /// Returns the lines of the next message.
    fn next(&self) -> Vec<String> {
        let mut buffer = [0; 4096];
        let length = self.0.recv(&mut buffer).expect("a notification");
        String::from_utf8(buffer[..length].to_vec()).unwrap().lines().map(str::to_owned).collect()
    }

    /// Returns the lines up to the message with this one.
    fn until(&self, line: &str) -> Vec<String> {
        let mut lines = vec![];
        while !lines.iter().any(|known: &String| known.starts_with(line)) {
            lines.extend(self.next());
        }
        lines
    }

    /// Returns the lines that have arrived already.
    fn received(&self) -> Vec<String> {
        self.0.set_nonblocking(true).unwrap();
        let mut buffer = [0; 4096];
        let mut lines = vec![];
        while let Ok(length) = self.0.recv(&mut buffer) {
            lines.extend(String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned));
        }
        self.0.set_nonblocking(false).unwrap();
        lines
    }
}

fn count(lines: &[String], line: &str) -> usize {
    lines.iter().filter(|known| *known == line).count()
}

fn notifying(directory: &Path, socket: &str, watchdog: &str) -> DaemonSetup {
    setup(directory).variable("NOTIFY_SOCKET", socket).variable("WATCHDOG_USEC", watchdog)
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_start_readiness_signs_of_life_and_stop() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("notify");
    let manager = ServiceManager::at(&socket);
    let daemon = notifying(directory.path(), socket.to_str().unwrap(), "400000").start();
    let lines = manager.until("READY=1");
    assert_eq!(lines.first().map(String::as_str), Some("STATUS=starting"), "{lines:?}");
    assert_eq!(lines.last(), Some(&format!("STATUS=serving {}", daemon.url)), "{lines:?}");
    assert_eq!(count(&lines, "WATCHDOG=1"), 0, "{lines:?}");
    assert_eq!(daemon.call("", Method::GET, "/readyz", None).await.0, 200);
    for _ in 0..3 {
        assert_eq!(manager.until("WATCHDOG=1"), ["WATCHDOG=1"]);
    }
    assert!(daemon.stop().success());
    let lines = manager.until("STOPPING=1");
    assert_eq!(count(&lines, "READY=1"), 0, "{lines:?}");
    assert_eq!(lines.last().map(String::as_str), Some("STATUS=stopping"), "{lines:?}");
    assert_eq!(manager.received(), Vec::<String>::new(), "nothing follows");
}

#[tokio::test(flavor = "multi_thread")]
async fn sends_no_signs_of_life_for_another_process() {
    let directory = tempfile::tempdir().unwrap();
    let name = format!("muster-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = ServiceManager::with(UnixDatagram::bind_addr(&address).unwrap());
    let daemon =
        notifying(directory.path(), &format!("@{name}"), "2000").variable("WATCHDOG_PID", "1").start();
    manager.until("READY=1");
    assert!(daemon.stop().success());
    let lines = manager.until("STOPPING=1");
    assert_eq!(count(&lines, "WATCHDOG=1"), 0, "{lines:?}");
}

#[test]
fn reports_why_it_does_not_start() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("notify");
    let manager = ServiceManager::at(&socket);
    let daemon = notifying(directory.path(), socket.to_str().unwrap(), "0")
        .set("DATABASE_URL", "mysql://muster:hidden@127.0.0.1:1/muster");
    assert!(!daemon.command().output().unwrap().status.success());
    let lines = manager.received();
    let last = lines.last().unwrap();
    assert!(last.starts_with("STATUS=failed to start: database mysql://muster:********@"), "{lines:?}");
    assert_eq!(count(&lines, "READY=1"), 0, "{lines:?}");
}

/// Waits until the daemon has noticed `times` times that its database does not answer.
async fn wait_for_timeouts(daemon: &Daemon, times: usize) {
    wait_for("the check of the database", async || {
        (daemon.log().matches("the database does not answer the check").count() >= times).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn signs_of_life_need_a_database_that_answers() {
    let Some(mut server) = MariaDb::start() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("notify");
    let manager = ServiceManager::at(&socket);
    let daemon = notifying(directory.path(), socket.to_str().unwrap(), "1000000")
        .set("DATABASE_URL", &server.fresh_database())
        .start();
    manager.until("WATCHDOG=1");
    let pid = Pid::from_raw(server.pid().unwrap());

    kill(pid, Signal::SIGSTOP).unwrap();
    wait_for_timeouts(&daemon, 1).await;
    manager.received();
    wait_for_timeouts(&daemon, 2).await;
    let lines = manager.received();
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(count(&lines, "WATCHDOG=1"), 0, "{lines:?}");
    manager.until("WATCHDOG=1");

    // A restart of the daemon does not help a database that is down.
    server.kill();
    daemon.allow_unfinished_operations("the database is down");
    manager.until("STATUS=not ready");
    manager.until("WATCHDOG=1");
    manager.until("WATCHDOG=1");
    daemon.kill();
}
