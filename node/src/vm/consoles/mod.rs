//! Access to the consoles of a running VM. QEMU has no network ports: the daemon opens them and forwards connections.
//! See docs/decisions/0040.
//!
//! ```text
//! API session ─────────────────────▶ serial ──▶ the UNIX socket `console` of the VM
//! TCP port of the console ─▶ telnet ──▲
//! TCP ports of the display ─▶ display ─────────▶ QEMU, which receives one end of a socket pair for each connection
//! ```

mod display;
mod ports;
mod serial;
mod telnet;

use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use muster_types::ids::InstanceId;
use muster_types::vm::ConsolePorts;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

pub(super) use self::display::DisplayProtocol;
pub(super) use self::ports::ConsoleListeners;
use self::ports::PortForwarder;
use self::serial::SerialConsole;
use super::qmp::SharedQmp;
use crate::console_connections::ConsoleConnectionLog;

/// The maximum number of concurrent sessions of the API with one serial console.
const MAX_API_SESSIONS: usize = 8;
/// The maximum number of concurrent connections of the API to one display: a SPICE viewer opens about ten.
const MAX_API_DISPLAYS: usize = 64;

/// How the consoles of a VM are reached from outside of it.
#[derive(Debug, Clone)]
pub(super) struct ConsoleAccess {
    /// The address of the TCP ports; unset if they are closed.
    pub(super) address: Option<Ipv4Addr>,
    pub(super) connections: ConsoleConnectionLog,
}

/// The consoles of a running VM. Dropping it closes the ports and ends all sessions.
#[derive(Debug)]
pub(super) struct Consoles {
    serial: Arc<SerialConsole>,
    api_slots: Arc<Semaphore>,
    qmp: SharedQmp,
    display: DisplayProtocol,
    display_slots: Arc<Semaphore>,
    /// Unset if the ports are closed.
    forwarder: Mutex<Option<JoinHandle<()>>>,
}

/// The VM that consoles belong to.
#[derive(Debug)]
pub(super) struct ConsoleTarget<'a> {
    pub(super) id: InstanceId,
    pub(super) dir: &'a Path,
    pub(super) ports: ConsolePorts,
    pub(super) display: DisplayProtocol,
    pub(super) qmp: SharedQmp,
}

impl Consoles {
    /// Opens the consoles of a VM. Without `listeners`, its ports are opened as soon as they are free.
    pub(super) fn open(
        target: ConsoleTarget<'_>,
        access: &ConsoleAccess,
        listeners: Option<ConsoleListeners>,
    ) -> Self {
        let serial = Arc::new(SerialConsole::new(target.dir));
        let (qmp, display) = (target.qmp.clone(), target.display);
        let forwarder = access.address.map(|address| {
            let forwarder = PortForwarder {
                id: target.id,
                serial: serial.clone(),
                qmp: target.qmp,
                display: target.display,
                connections: access.connections.clone(),
            };
            tokio::spawn(forwarder.run(address, target.ports, listeners))
        });
        let api_slots = Arc::new(Semaphore::new(MAX_API_SESSIONS));
        let display_slots = Arc::new(Semaphore::new(MAX_API_DISPLAYS));
        Self { serial, api_slots, qmp, display, display_slots, forwarder: Mutex::new(forwarder) }
    }

    /// Closes the ports, so that the next start can open them.
    pub(super) async fn close_ports(&self) {
        let forwarder = self.forwarder.lock().take();
        if let Some(forwarder) = forwarder {
            forwarder.abort();
            let _ = forwarder.await;
        }
    }

    /// Opens a session with the serial console: a stream of the bytes that the guest and the user send.
    pub(super) async fn open_serial(&self) -> Result<UnixStream> {
        let slot = self.api_slots.clone().try_acquire_owned().map_err(|_| {
            Error::Unavailable(format!(
                "the console already has {MAX_API_SESSIONS} sessions, close one of them"
            ))
        })?;
        let opened = self.serial.open(slot).await.and_then(tokio::net::UnixStream::into_std);
        opened.map_err(|error| Error::Unavailable(format!("failed to open the console: {error}")))
    }

    /// Opens a connection to the display.
    pub(super) async fn open_display(&self) -> Result<UnixStream> {
        let slot = self.display_slots.clone().try_acquire_owned().map_err(|_| {
            Error::Unavailable(format!(
                "the display already has {MAX_API_DISPLAYS} connections, close one of them"
            ))
        })?;
        let qmp = self.qmp.get().ok_or_else(|| Error::Unavailable("QEMU does not respond".into()))?;
        let mut display = self.display.connect(&qmp, false).await?;
        let failed =
            |error: std::io::Error| Error::Unavailable(format!("failed to open the display: {error}"));
        let (mut ours, theirs) = tokio::net::UnixStream::pair().map_err(failed)?;
        tokio::spawn(async move {
            let _slot = slot;
            // Fails when either side closes the connection.
            let _ = tokio::io::copy_bidirectional(&mut ours, &mut display).await;
        });
        theirs.into_std().map_err(failed)
    }
}

impl Drop for Consoles {
    fn drop(&mut self) {
        if let Some(forwarder) = self.forwarder.lock().take() {
            forwarder.abort();
        }
    }
}
