//! A client of the QEMU Machine Protocol (QMP). A misbehaving peer can only delay its own callers, up to a timeout.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use muster_types::Error;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// The maximum length of a line, far above any response of QEMU.
const MAX_LINE_LEN: usize = 4 << 20;

/// The capacity of the event queue.
const EVENT_QUEUE_LEN: usize = 256;

/// The timeout of a command.
pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);

/// An asynchronous event about the power state.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct QmpEvent {
    pub(super) name: String,
    pub(super) data: Value,
}

impl QmpEvent {
    /// Returns whether QEMU is exiting because of a signal.
    pub(super) fn is_signal(&self) -> bool {
        self.name == "SHUTDOWN" && self.data["reason"] == "host-signal"
    }
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum QmpError {
    /// QEMU rejected the command with this description.
    Rejected(String),
    /// The connection is closed, for this reason.
    Closed(String),
    Timeout,
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(description) => f.write_str(description),
            Self::Closed(reason) => write!(f, "the connection to QEMU is closed: {reason}"),
            Self::Timeout => f.write_str("QEMU does not respond"),
        }
    }
}

impl QmpError {
    fn into_error(self) -> Error {
        let text = self.to_string();
        match self {
            Self::Rejected(_) => Error::Conflict(text),
            Self::Closed(_) | Self::Timeout => Error::Unavailable(text),
        }
    }
}

type QmpResponse = Result<Value, QmpError>;

/// A connection, which is closed when dropped.
#[derive(Debug)]
pub(super) struct Qmp {
    shared: Arc<QmpConnection>,
    reader: AbortHandle,
}

/// The current connection to the QEMU of a VM; unset while QEMU does not respond.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedQmp(Arc<Mutex<Option<Arc<Qmp>>>>);

impl SharedQmp {
    pub(super) fn new(qmp: Option<Qmp>) -> Self {
        Self(Arc::new(Mutex::new(qmp.map(Arc::new))))
    }

    pub(super) fn get(&self) -> Option<Arc<Qmp>> {
        self.0.lock().clone()
    }

    pub(super) fn set(&self, qmp: Qmp) {
        *self.0.lock() = Some(Arc::new(qmp));
    }

    pub(super) fn take(&self) -> Option<Arc<Qmp>> {
        self.0.lock().take()
    }
}

#[derive(Debug)]
struct QmpConnection {
    stream: UnixStream,
    write_lock: tokio::sync::Mutex<()>,
    pending: Mutex<PendingCommands>,
    /// Notified when a job may have changed its status.
    jobs: Notify,
    /// Whether QEMU reported that it exits because of a signal.
    signalled: AtomicBool,
}

#[derive(Debug, Default)]
struct PendingCommands {
    last_id: u64,
    senders: HashMap<u64, oneshot::Sender<QmpResponse>>,
    /// Why the connection was closed, if it was.
    closed: Option<String>,
}

/// A message from QEMU.
#[derive(Debug, PartialEq)]
enum QmpMessage {
    Greeting,
    Response(u64, QmpResponse),
    Event(QmpEvent),
    Other,
}

impl Qmp {
    /// Waits for the greeting and negotiates capabilities. The receiver yields events until the connection is closed.
    pub(super) async fn negotiate(
        stream: UnixStream,
        greeting_timeout: Duration,
    ) -> Result<(Self, mpsc::Receiver<QmpEvent>), Error> {
        let (events, receiver) = mpsc::channel(EVENT_QUEUE_LEN);
        let (greeting, greeted) = oneshot::channel();
        let shared = Arc::new(QmpConnection {
            stream,
            write_lock: tokio::sync::Mutex::default(),
            pending: Mutex::default(),
            jobs: Notify::new(),
            signalled: AtomicBool::new(false),
        });
        let reader = tokio::spawn(read(shared.clone(), greeting, events)).abort_handle();
        let qmp = Self { shared, reader };
        match timeout(greeting_timeout, greeted).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(qmp.closed().into_error()),
            Err(_) => return Err(QmpError::Timeout.into_error()),
        }
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok((qmp, receiver))
    }

    /// Executes a command. [`Error::Conflict`] with QEMU's description if it rejects the command,
    /// [`Error::Unavailable`] if it does not respond.
    pub(super) async fn execute(&self, command: &str, arguments: Value) -> Result<Value, Error> {
        self.send(command, arguments, None).await.map_err(QmpError::into_error)
    }

    /// Passes a file descriptor to QEMU, which refers to it by `name`.
    pub(super) async fn send_fd(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), Error> {
        let sent = self.send("getfd", json!({ "fdname": name }), Some(fd)).await;
        sent.map(drop).map_err(QmpError::into_error)
    }

    /// Returns whether QEMU reported, before its latest response, that it exits because of a signal.
    pub(super) fn is_signalled(&self) -> bool {
        self.shared.signalled.load(Ordering::Relaxed)
    }

    /// Closes the connection and fails pending commands. QEMU serves one connection at a time, and the next may be
    /// waiting already.
    pub(super) fn close(&self) {
        self.shared.close("it is no longer needed");
        self.reader.abort();
    }

    /// Waits until a job may have changed its status.
    pub(super) async fn job_changed(&self) {
        self.shared.jobs.notified().await;
    }

    async fn send(&self, command: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) -> QmpResponse {
        let (sender, receiver) = oneshot::channel();
        let id = {
            let mut pending = self.shared.pending.lock();
            if let Some(reason) = &pending.closed {
                return Err(QmpError::Closed(reason.clone()));
            }
            pending.last_id += 1;
            let id = pending.last_id;
            pending.senders.insert(id, sender);
            id
        };
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments, "id": id }));
        let exchange = async {
            {
                let _writing = self.shared.write_lock.lock().await;
                if let Err(error) = self.shared.write(line.as_bytes(), fd).await {
                    self.shared.close(&error.to_string());
                }
            }
            receiver.await.unwrap_or_else(|_| Err(self.closed()))
        };
        let response = timeout(COMMAND_TIMEOUT, exchange).await.unwrap_or(Err(QmpError::Timeout));
        if response == Err(QmpError::Timeout) {
            // The command may have been written only in part, so the connection cannot be used further.
            self.shared.close("a command timed out");
        }
        response
    }

    fn closed(&self) -> QmpError {
        let reason = self.shared.pending.lock().closed.clone();
        QmpError::Closed(reason.unwrap_or_else(|| "the reader ended".into()))
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.close();
    }
}

impl QmpConnection {
    /// Closes the connection and fails pending commands.
    fn close(&self, reason: &str) {
        let mut pending = self.pending.lock();
        if pending.closed.is_none() {
            pending.closed = Some(reason.to_owned());
            let _ = nix::sys::socket::shutdown(self.stream.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        }
        for (_, sender) in pending.senders.drain() {
            let _ = sender.send(Err(QmpError::Closed(reason.to_owned())));
        }
        self.jobs.notify_one();
    }

    async fn write(&self, mut data: &[u8], mut fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        while !data.is_empty() {
            let written = self.stream.async_io(Interest::WRITABLE, || {
                let fds: Vec<i32> = fd.iter().map(AsRawFd::as_raw_fd).collect();
                let rights = [ControlMessage::ScmRights(&fds)];
                let rights = if fds.is_empty() { &rights[..0] } else { &rights[..] };
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                let sent =
                    sendmsg::<UnixAddr>(self.stream.as_raw_fd(), &[IoSlice::new(data)], rights, flags, None);
                sent.map_err(io::Error::from)
            });
            let written = written.await?;
            fd = None;
            data = &data[written..];
        }
        Ok(())
    }

    /// Receives the next messages, or returns why the connection ended. `buffer` keeps an incomplete line.
    async fn receive(&self, buffer: &mut Vec<u8>) -> Result<Vec<QmpMessage>, String> {
        loop {
            self.stream.readable().await.map_err(|error| error.to_string())?;
            let before = buffer.len();
            buffer.reserve(8192);
            match self.stream.try_read_buf(buffer) {
                Ok(0) => return Err("QEMU closed it".into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error.to_string()),
            }
            let Some(end) = buffer[before..].iter().rposition(|byte| *byte == b'\n') else {
                if buffer.len() > MAX_LINE_LEN {
                    return Err("QEMU sent a line that is too long".into());
                }
                continue;
            };
            let rest = buffer.split_off(before + end + 1);
            let lines = buffer.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
            let lines = lines.filter(|line| !line.is_empty()).map(parse).collect();
            *buffer = rest;
            return Ok(lines);
        }
    }
}

async fn read(shared: Arc<QmpConnection>, greeting: oneshot::Sender<()>, events: mpsc::Sender<QmpEvent>) {
    let mut greeting = Some(greeting);
    let mut buffer = Vec::new();
    let reason = 'all: loop {
        let messages = match shared.receive(&mut buffer).await {
            Ok(messages) => messages,
            Err(reason) => break reason,
        };
        for message in messages {
            match message {
                QmpMessage::Greeting => {
                    let _ = greeting.take().map(|greeting| greeting.send(()));
                }
                QmpMessage::Response(id, response) => {
                    let sender = shared.pending.lock().senders.remove(&id);
                    let _ = sender.map(|sender| sender.send(response));
                }
                QmpMessage::Event(event) if event.name.contains("JOB") => shared.jobs.notify_one(),
                QmpMessage::Event(event) if is_power_event(&event.name) => {
                    if event.is_signal() {
                        shared.signalled.store(true, Ordering::Relaxed);
                    }
                    if events.try_send(event).is_err() {
                        break 'all "too many unhandled events".to_owned();
                    }
                }
                QmpMessage::Event(_) | QmpMessage::Other => {}
            }
        }
        // An idle VM needs no buffer.
        if buffer.is_empty() {
            buffer = Vec::new();
        }
    };
    shared.close(&reason);
}

fn is_power_event(event: &str) -> bool {
    matches!(event, "SHUTDOWN" | "STOP" | "RESUME" | "RESET" | "GUEST_PANICKED" | "SUSPEND" | "WAKEUP")
}

fn parse(line: &[u8]) -> QmpMessage {
    let Ok(Value::Object(mut line)) = serde_json::from_slice(line) else { return QmpMessage::Other };
    if line.contains_key("QMP") {
        return QmpMessage::Greeting;
    }
    if let Some(Value::String(name)) = line.get("event") {
        let name = name.clone();
        return QmpMessage::Event(QmpEvent { name, data: line.remove("data").unwrap_or_default() });
    }
    let Some(id) = line.get("id").and_then(Value::as_u64) else { return QmpMessage::Other };
    if let Some(value) = line.remove("return") {
        return QmpMessage::Response(id, Ok(value));
    }
    let description = line.get("error").and_then(|error| error.get("desc")).and_then(Value::as_str);
    let description = description.unwrap_or("QEMU rejected the command without a description");
    QmpMessage::Response(id, Err(QmpError::Rejected(description.into())))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixStream as Blocking;

    use super::*;

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;

    #[test]
    fn parses_messages() {
        assert_eq!(parse(GREETING.as_bytes()), QmpMessage::Greeting);
        assert_eq!(
            parse(br#"{"return": {"a": 1}, "id": 7}"#),
            QmpMessage::Response(7, Ok(json!({ "a": 1 })))
        );
        let rejected = parse(br#"{"id": 8, "error": {"class": "GenericError", "desc": "no"}}"#);
        assert_eq!(rejected, QmpMessage::Response(8, Err(QmpError::Rejected("no".into()))));
        let event = parse(br#"{"timestamp": {}, "event": "SHUTDOWN", "data": {"guest": true}}"#);
        let expected = QmpEvent { name: "SHUTDOWN".into(), data: json!({ "guest": true }) };
        assert_eq!(event, QmpMessage::Event(expected));
        for other in ["", "[]", "nonsense", r#"{"return": {}}"#, r#"{"id": "x", "return": {}}"#] {
            assert_eq!(parse(other.as_bytes()), QmpMessage::Other, "{other}");
        }
    }

    /// Connects to a fake QEMU that runs `script` for each command after the negotiation.
    async fn fake_qemu(
        mut script: impl FnMut(&Value, &mut Blocking) + Send + 'static,
    ) -> (Qmp, mpsc::Receiver<QmpEvent>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = theirs.into_std().unwrap();
        theirs.set_nonblocking(false).unwrap();
        std::thread::spawn(move || {
            writeln!(theirs, "{GREETING}").unwrap();
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            while let Some(Ok(line)) = lines.next() {
                let request: Value = serde_json::from_str(&line).unwrap();
                match request["execute"].as_str() {
                    Some("qmp_capabilities") => {
                        writeln!(theirs, "{}", json!({ "return": {}, "id": request["id"] })).unwrap();
                    }
                    _ => script(&request, &mut theirs),
                }
            }
        });
        Qmp::negotiate(ours, COMMAND_TIMEOUT).await.unwrap()
    }

    #[tokio::test]
    async fn matches_responses_to_commands_and_delivers_events() {
        let (qmp, mut events) = fake_qemu(|request, line| {
            let id = &request["id"];
            let answer = match request["execute"].as_str() {
                Some("good") => json!({ "return": request["arguments"], "id": id }),
                _ => json!({ "error": { "desc": "Bad model" }, "id": id }),
            };
            let event = json!({ "event": "RESET", "data": {} });
            let ignored = json!({ "event": "RTC_CHANGE", "data": {} });
            write!(line, "{ignored}\r\n{event}\r\n{answer}\r\n").unwrap();
        })
        .await;
        assert_eq!(qmp.execute("good", json!({ "a": 2 })).await.unwrap(), json!({ "a": 2 }));
        let rejected = qmp.execute("bad", json!({})).await.unwrap_err();
        assert!(matches!(rejected, Error::Conflict(description) if description == "Bad model"));
        assert_eq!(events.recv().await.unwrap().name, "RESET");
    }

    #[tokio::test]
    async fn closed_connection_fails_every_command() {
        let (qmp, mut events) = fake_qemu(|_, line| line.shutdown(std::net::Shutdown::Both).unwrap()).await;
        assert!(matches!(qmp.execute("die", json!({})).await, Err(Error::Unavailable(_))));
        assert!(matches!(qmp.execute("again", json!({})).await, Err(Error::Unavailable(_))));
        assert_eq!(events.recv().await, None);
    }

    #[tokio::test]
    async fn closes_connection_after_endless_line() {
        let (qmp, _events) = fake_qemu(|_, line| while line.write_all(&[b'x'; 65536]).is_ok() {}).await;
        let failure = qmp.execute("flood", json!({})).await.unwrap_err();
        assert!(failure.to_string().contains("too long"), "{failure}");
    }

    #[tokio::test]
    async fn passes_file_descriptor() {
        use std::os::fd::AsFd;
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = theirs.into_std().unwrap();
        theirs.set_nonblocking(false).unwrap();
        let received = std::thread::spawn(move || {
            writeln!(&theirs, "{GREETING}").unwrap();
            for id in 1..=2 {
                let mut data = [0; 4096];
                let mut space = nix::cmsg_space!([i32; 1]);
                let mut part = [io::IoSliceMut::new(&mut data)];
                let message = nix::sys::socket::recvmsg::<UnixAddr>(
                    theirs.as_raw_fd(),
                    &mut part,
                    Some(&mut space),
                    MsgFlags::empty(),
                )
                .unwrap();
                let files = message.cmsgs().unwrap().count();
                writeln!(&theirs, "{}", json!({ "return": {}, "id": id })).unwrap();
                if files > 0 {
                    return true;
                }
            }
            false
        });
        let (qmp, _events) = Qmp::negotiate(ours, COMMAND_TIMEOUT).await.unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        qmp.send_fd("file", file.as_fd()).await.unwrap();
        assert!(received.join().unwrap());
    }
}
