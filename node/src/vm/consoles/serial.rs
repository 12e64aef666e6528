//! The serial console of a VM. QEMU serves one connection at a time, so all sessions share one: every session receives
//! the output of the guest, and the guest receives the input of every session.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, broadcast, mpsc};
use tokio::task::JoinSet;

use crate::vm_socket;

/// How long QEMU may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of reads that a slow session may be behind before it loses output.
const OUTPUT_QUEUE_LEN: usize = 256;

/// The number of reads of input that wait for the guest.
const INPUT_QUEUE_LEN: usize = 16;

/// How long a session may wait for a guest that does not read its input, before it ends.
const INPUT_TIMEOUT: Duration = Duration::from_secs(10);

const BUFFER_SIZE: usize = 4096;

/// The serial console of a running VM. Dropping it ends all sessions.
#[derive(Debug)]
pub(super) struct SerialConsole {
    dir: PathBuf,
    connection: tokio::sync::Mutex<Option<SerialConnection>>,
    /// The sessions, and the connection that they share.
    tasks: Mutex<JoinSet<()>>,
}

/// The connection to QEMU. It ends with the last session.
#[derive(Debug)]
struct SerialConnection {
    /// Every session has a strong reference.
    sessions: mpsc::WeakSender<()>,
    input: mpsc::Sender<Bytes>,
    output: broadcast::Receiver<Bytes>,
}

impl SerialConsole {
    /// `dir` is the directory of the VM.
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), connection: Default::default(), tasks: Default::default() }
    }

    /// Opens a session, which has the slot until the returned stream is closed or QEMU exits.
    pub(super) async fn open(&self, slot: OwnedSemaphorePermit) -> io::Result<UnixStream> {
        let mut connection = self.connection.lock().await;
        let current = connection.as_ref().filter(|connection| !connection.input.is_closed());
        let current = current.and_then(|connection| Some((connection, connection.sessions.upgrade()?)));
        let (session, input, output) = match current {
            Some((connection, session)) => {
                (session, connection.input.clone(), connection.output.resubscribe())
            }
            None => {
                let (new, session) = self.connect().await?;
                let parts = (session, new.input.clone(), new.output.resubscribe());
                *connection = Some(new);
                parts
            }
        };
        let (ours, theirs) = UnixStream::pair()?;
        self.spawn(async move {
            let _session = (session, slot);
            relay(ours, input, output).await;
        });
        Ok(theirs)
    }

    async fn connect(&self) -> io::Result<(SerialConnection, mpsc::Sender<()>)> {
        let connecting = vm_socket::connect(&self.dir, vm_socket::CONSOLE);
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await??;
        let (session, sessions) = mpsc::channel(1);
        let (input, input_receiver) = mpsc::channel(INPUT_QUEUE_LEN);
        let (output_sender, output) = broadcast::channel(OUTPUT_QUEUE_LEN);
        self.spawn(exchange(stream, sessions, input_receiver, output_sender));
        Ok((SerialConnection { sessions: session.downgrade(), input, output }, session))
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

/// Exchanges bytes with QEMU until it closes the connection or the last session ends.
async fn exchange(
    stream: UnixStream,
    mut sessions: mpsc::Receiver<()>,
    mut input: mpsc::Receiver<Bytes>,
    output: broadcast::Sender<Bytes>,
) {
    let (mut reader, mut writer) = stream.into_split();
    let receive = async {
        let mut buffer = [0; BUFFER_SIZE];
        while let Ok(size @ 1..) = reader.read(&mut buffer).await {
            // Fails without a session.
            let _ = output.send(Bytes::copy_from_slice(&buffer[..size]));
        }
    };
    let send = async {
        while let Some(bytes) = input.recv().await {
            if writer.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = receive => {}
        () = send => {}
        _ = sessions.recv() => {}
    }
}

/// Relays one session until its peer closes it or the connection to QEMU ends.
async fn relay(stream: UnixStream, input: mpsc::Sender<Bytes>, mut output: broadcast::Receiver<Bytes>) {
    let (mut reader, mut writer) = stream.into_split();
    let receive = async {
        let mut buffer = [0; BUFFER_SIZE];
        while let Ok(size @ 1..) = reader.read(&mut buffer).await {
            let bytes = Bytes::copy_from_slice(&buffer[..size]);
            if input.send_timeout(bytes, INPUT_TIMEOUT).await.is_err() {
                return;
            }
        }
    };
    let send = async {
        loop {
            match output.recv().await {
                Ok(bytes) => {
                    if writer.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                // A slow reader must not delay the guest.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
        }
    };
    tokio::select! {
        () = receive => {}
        () = send => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::net::UnixListener;
    use tokio::sync::Semaphore;

    use super::*;

    async fn slot(slots: &Arc<Semaphore>) -> OwnedSemaphorePermit {
        slots.clone().acquire_owned().await.unwrap()
    }

    async fn read(stream: &mut UnixStream, text: &str) {
        let mut buffer = vec![0; text.len()];
        stream.read_exact(&mut buffer).await.unwrap();
        assert_eq!(buffer, text.as_bytes());
    }

    #[tokio::test]
    async fn sessions_share_one_connection_and_survive_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = vm_socket::listen(dir.path(), vm_socket::CONSOLE).unwrap();
        qemu.set_nonblocking(true).unwrap();
        let qemu = UnixListener::from_std(qemu).unwrap();
        let console = SerialConsole::new(dir.path());
        let slots = Arc::new(Semaphore::new(2));
        let mut first = console.open(slot(&slots).await).await.unwrap();
        let (mut guest, _) = qemu.accept().await.unwrap();
        let mut second = console.open(slot(&slots).await).await.unwrap();
        assert_eq!(slots.available_permits(), 0);
        guest.write_all(b"login: ").await.unwrap();
        read(&mut first, "login: ").await;
        read(&mut second, "login: ").await;
        first.write_all(b"root").await.unwrap();
        read(&mut guest, "root").await;
        // A session that ends releases its slot and does not affect the other.
        drop(first);
        let slot_again = slot(&slots).await;
        second.write_all(b"ls").await.unwrap();
        read(&mut guest, "ls").await;
        // The last session ends the connection, and the next one connects again.
        drop(second);
        assert_eq!(guest.read(&mut [0; 1]).await.unwrap(), 0);
        let mut third = console.open(slot_again).await.unwrap();
        let (guest, _) = qemu.accept().await.unwrap();
        drop(guest);
        assert_eq!(third.read(&mut [0; 1]).await.unwrap(), 0, "the end of QEMU ends its sessions");
        let _all = slots.acquire_many(2).await.unwrap();
        drop(qemu);
        let refused = console.open(slot(&Arc::new(Semaphore::new(1))).await).await;
        assert!(refused.is_err(), "a dead QEMU is an error");
    }

    #[tokio::test(start_paused = true)]
    async fn blocked_guest_does_not_keep_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let qemu = vm_socket::listen(dir.path(), vm_socket::CONSOLE).unwrap();
        qemu.set_nonblocking(true).unwrap();
        let qemu = UnixListener::from_std(qemu).unwrap();
        let console = SerialConsole::new(dir.path());
        let slots = Arc::new(Semaphore::new(1));
        let mut session = console.open(slot(&slots).await).await.unwrap();
        let (_blocked, _) = qemu.accept().await.unwrap();
        // More input than all buffers take.
        while session.write_all(&[b'x'; BUFFER_SIZE]).await.is_ok() {}
        let _next = console.open(slot(&slots).await).await.unwrap();
        qemu.accept().await.unwrap();
    }
}
