//! Notifications to systemd: readiness, status, shutdown and the watchdog, in the protocol of `sd_notify(3)`. Without systemd
//! nothing is sent. See docs/decisions/0098.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use muster_control::App;

/// The interval of checks whether the daemon became ready.
const START_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The interval of checks of a ready daemon, unless the watchdog needs shorter ones.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// The connection to the service manager.
#[derive(Debug)]
pub(crate) struct Supervisor {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// Within this time the service manager expects a sign of life.
    watchdog: Option<Duration>,
}

impl Supervisor {
    /// Connects to the service manager that the environment names.
    pub(crate) fn from_environment() -> Self {
        let address = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty());
        let socket = address.and_then(|address| {
            let connection = notify_address(&address).and_then(|address| Ok((unbound_socket()?, address)));
            connection
                .inspect_err(|error| tracing::warn!(%error, ?address, "failed to use NOTIFY_SOCKET"))
                .ok()
        });
        let variable = |name| std::env::var(name).ok();
        let watchdog =
            watchdog_timeout(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"), std::process::id());
        Self { socket, watchdog }
    }

    /// Sets the text that `systemctl status` shows.
    pub(crate) fn status(&self, text: &str) {
        self.send(&status_line(text));
    }

    /// Announces that the daemon shuts down.
    pub(crate) fn stopping(&self, text: &str) {
        self.send(&format!("STOPPING=1\n{}", status_line(text)));
    }

    fn send(&self, message: &str) {
        let Some((socket, address)) = &self.socket else { return };
        if let Err(error) = socket.send_to_addr(message.as_bytes(), address) {
            tracing::debug!(%error, "failed to notify the service manager");
        }
    }

    /// Reports that the daemon is ready when `/readyz` would, then its status when it changes, and signs of life while the event
    /// loop runs and the database answers. An error of the database is an answer: restarting the daemon would not help.
    pub(crate) async fn run(&self, app: &App, url: &str) {
        if self.socket.is_none() {
            return std::future::pending().await;
        }
        let check_timeout = self.watchdog.map(|timeout| timeout / 2);
        let interval = check_timeout.map_or(POLL_INTERVAL, |timeout| timeout.min(POLL_INTERVAL));
        let mut is_started = false;
        let mut last_status = String::new();
        loop {
            let readiness = app.readiness();
            let status = match &readiness {
                Ok(()) => format!("serving {url}"),
                Err(reason) => reason.clone(),
            };
            let mut message = String::new();
            if readiness.is_ok() && !is_started {
                is_started = true;
                message.push_str("READY=1\n");
            }
            if status != last_status {
                message.push_str(&status_line(&status));
                last_status = status;
            }
            if !message.is_empty() {
                self.send(&message);
            }
            if let Some(timeout) = check_timeout.filter(|_| is_started)
                && database_answers(app, timeout).await
            {
                self.send("WATCHDOG=1\n");
            }
            tokio::time::sleep(if is_started { interval } else { START_POLL_INTERVAL }).await;
        }
    }
}

async fn database_answers(app: &App, timeout: Duration) -> bool {
    let answer = tokio::time::timeout(timeout, app.store.query("SELECT 1", &[])).await;
    if answer.is_err() {
        tracing::warn!(timeout = ?timeout, "the database does not answer the check for the watchdog");
    }
    answer.is_ok()
}

fn status_line(text: &str) -> String {
    format!("STATUS={}\n", text.replace(char::is_control, " "))
}

fn unbound_socket() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    // The daemon never waits for the service manager.
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Parses a path, or an abstract name after `@`.
fn notify_address(address: &OsStr) -> io::Result<SocketAddr> {
    match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(address),
        _ => Err(io::Error::new(io::ErrorKind::Unsupported, "neither a path nor an abstract name")),
    }
}

/// Returns the timeout of the watchdog, unless it is of another process or not enabled.
fn watchdog_timeout(usec: Option<String>, owner: Option<String>, pid: u32) -> Option<Duration> {
    if owner.is_some_and(|owner| owner.parse() != Ok(pid)) {
        return None;
    }
    let usec = usec?.parse().ok().filter(|usec| *usec > 0)?;
    Some(Duration::from_micros(usec))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchdog_belongs_to_the_named_process() {
        let timeout = |usec: &str, owner: Option<&str>| {
            watchdog_timeout(Some(usec.to_owned()), owner.map(str::to_owned), 7)
        };
        assert_eq!(timeout("3000000", None), Some(Duration::from_secs(3)));
        assert_eq!(timeout("3000000", Some("7")), Some(Duration::from_secs(3)));
        assert_eq!(timeout("3000000", Some("8")), None);
        assert_eq!(timeout("0", None), None);
        assert_eq!(timeout("soon", None), None);
        assert_eq!(watchdog_timeout(None, None, 7), None);
    }

    #[test]
    fn status_is_one_line() {
        assert_eq!(status_line("not ready:\nREADY=1"), "STATUS=not ready: READY=1\n");
    }
}
