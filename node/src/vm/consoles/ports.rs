//! The TCP ports of a VM's consoles, which forward connections to QEMU.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use muster_types::ids::InstanceId;
use muster_types::vm::ConsolePorts;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::display::DisplayProtocol;
use super::serial::SerialConsole;
use super::telnet::{self, TelnetDecoder};
use crate::console_connections::{ConnectionSampler, ConsoleConnectionLog};
use crate::vm::qmp::SharedQmp;

/// The maximum number of concurrent connections to the port of a serial console. Further ones are closed.
const MAX_SERIAL_CONNECTIONS: usize = 8;

/// The maximum number of concurrent connections to a port of a display: a SPICE viewer opens about ten.
const MAX_DISPLAY_CONNECTIONS: usize = 64;

/// The delays between attempts to open ports that are in use: doubled each time.
const MIN_BIND_DELAY: Duration = Duration::from_millis(100);
const MAX_BIND_DELAY: Duration = Duration::from_secs(30);

/// The delay after a failed accept, such as without free file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Seconds without traffic after which the kernel checks whether the peer still exists.
const KEEPALIVE_SECONDS: u32 = 60;

const BUFFER_SIZE: usize = 4096;

/// The listening sockets of a VM's consoles.
#[derive(Debug)]
pub(in crate::vm) struct ConsoleListeners {
    console: TcpListener,
    vdi: TcpListener,
    vdi_tls: Option<TcpListener>,
}

impl ConsoleListeners {
    /// Opens the ports. Call it within a runtime.
    pub(in crate::vm) fn bind(address: Ipv4Addr, ports: ConsolePorts) -> io::Result<Self> {
        let bind = |port: u16| {
            let listener = std::net::TcpListener::bind((address, port))?;
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        let vdi_tls = ports.vdi_tls.map(bind).transpose()?;
        Ok(Self { console: bind(ports.console)?, vdi: bind(ports.vdi)?, vdi_tls })
    }
}

/// Forwards the ports of one VM until it is aborted.
#[derive(Debug)]
pub(super) struct PortForwarder {
    pub(super) id: InstanceId,
    pub(super) serial: Arc<SerialConsole>,
    pub(super) qmp: SharedQmp,
    pub(super) display: DisplayProtocol,
    pub(super) connections: ConsoleConnectionLog,
}

impl PortForwarder {
    /// Opens the ports unless `listeners` has them, and serves them.
    pub(super) async fn run(
        self,
        address: Ipv4Addr,
        ports: ConsolePorts,
        listeners: Option<ConsoleListeners>,
    ) {
        let listeners = match listeners {
            Some(listeners) => listeners,
            None => self.bind(address, ports).await,
        };
        tokio::join!(
            self.serve_serial(&listeners.console),
            self.serve_display(&listeners.vdi, false),
            async {
                if let Some(listener) = &listeners.vdi_tls {
                    self.serve_display(listener, true).await;
                }
            }
        );
    }

    /// Opens the ports as soon as they are free.
    async fn bind(&self, address: Ipv4Addr, ports: ConsolePorts) -> ConsoleListeners {
        let mut delay = MIN_BIND_DELAY;
        loop {
            match ConsoleListeners::bind(address, ports) {
                Ok(listeners) => return listeners,
                Err(error) => tracing::warn!(vm = %self.id, %error, "failed to open console ports"),
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_BIND_DELAY);
        }
    }

    async fn serve_serial(&self, listener: &TcpListener) {
        let sampler = ConnectionSampler::new(self.id, self.connections.clone());
        serve(self.id, listener, MAX_SERIAL_CONNECTIONS, |stream, peer, slot| {
            sampler.record(peer);
            let (id, serial) = (self.id, self.serial.clone());
            async move {
                match serial.open(slot).await {
                    Ok(console) => forward_serial(stream, console).await,
                    Err(error) => tracing::debug!(vm = %id, %error, "failed to open the serial console"),
                }
            }
        })
        .await;
    }

    async fn serve_display(&self, listener: &TcpListener, tls: bool) {
        serve(self.id, listener, MAX_DISPLAY_CONNECTIONS, |mut stream, _, slot| {
            let (id, display, qmp) = (self.id, self.display, self.qmp.clone());
            async move {
                let _slot = slot;
                let connected = match qmp.get() {
                    Some(qmp) => display.connect(&qmp, tls).await,
                    // QEMU does not respond.
                    None => return,
                };
                match connected {
                    Ok(mut display) => {
                        // Fails when either side closes the connection.
                        let _ = tokio::io::copy_bidirectional(&mut stream, &mut display).await;
                    }
                    Err(error) => tracing::debug!(vm = %id, %error, "failed to connect to the display"),
                }
            }
        })
        .await;
    }
}

/// Accepts connections and handles up to `max` of them at a time.
async fn serve<F: Future<Output = ()> + Send + 'static>(
    vm: InstanceId,
    listener: &TcpListener,
    max: usize,
    handle: impl Fn(TcpStream, SocketAddr, OwnedSemaphorePermit) -> F,
) {
    let slots = Arc::new(Semaphore::new(max));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, peer)) => {
                let Ok(slot) = slots.clone().try_acquire_owned() else { continue };
                if let Err(error) = prepare(&stream) {
                    tracing::debug!(%vm, %error, "failed to prepare a console connection");
                }
                connections.spawn(handle(stream, peer, slot));
            }
            Err(error) => {
                tracing::warn!(%vm, %error, "failed to accept console connection");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Sends keystrokes immediately, and detects peers that no longer exist.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_SECONDS)?;
    Ok(())
}

/// Translates between Telnet and a session with the serial console, until either ends.
async fn forward_serial(stream: TcpStream, console: UnixStream) {
    let (mut client_reader, mut client_writer) = stream.into_split();
    let (mut console_reader, mut console_writer) = console.into_split();
    let receive = async {
        let (mut decoder, mut buffer) = (TelnetDecoder::default(), [0; BUFFER_SIZE]);
        while let Ok(size @ 1..) = client_reader.read(&mut buffer).await {
            if console_writer.write_all(&decoder.decode(&buffer[..size])).await.is_err() {
                return;
            }
        }
    };
    let send = async {
        let mut buffer = [0; BUFFER_SIZE];
        if client_writer.write_all(&telnet::GREETING).await.is_err() {
            return;
        }
        while let Ok(size @ 1..) = console_reader.read(&mut buffer).await {
            if client_writer.write_all(&telnet::encode(&buffer[..size])).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = receive => {}
        () = send => {}
    }
}
