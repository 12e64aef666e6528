//! Speaks with one QEMU over its control socket. Whatever is at the other end, it can only keep waiting those who ask
//! it something, and those not for ever.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_types::Error;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// No answer of QEMU comes near this.
const LONGEST_LINE: usize = 4 << 20;

/// How many events may wait for whoever looks after the machine.
const EVENTS: usize = 256;

/// How long an answer may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// What QEMU tells unasked, as far as it is about power.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) data: Value,
}

impl Event {
    /// Whether it says that a signal ends QEMU.
    pub(super) fn is_signal(&self) -> bool {
        self.name == "SHUTDOWN" && self.data["reason"] == "host-signal"
    }
}

/// Why a command came to nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Failure {
    /// QEMU refused it, in its own words.
    Refused(String),
    /// There is nobody to ask any more.
    Lost(String),
    Late,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(words) => f.write_str(words),
            Self::Lost(why) => write!(f, "QEMU cannot be reached: {why}"),
            Self::Late => f.write_str("QEMU does not answer"),
        }
    }
}

impl Failure {
    fn error(self) -> Error {
        let text = self.to_string();
        match self {
            Self::Refused(_) => Error::Conflict(text),
            Self::Lost(_) | Self::Late => Error::Unavailable(text),
        }
    }
}

type Answer = Result<Value, Failure>;

/// A connection. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct Qmp {
    shared: Arc<Shared>,
    reader: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    stream: UnixStream,
    writing: tokio::sync::Mutex<()>,
    waiting: Mutex<Waiting>,
    /// Told when a job may have come to an end.
    jobs: Notify,
    /// Whether QEMU said that a signal ends it.
    signalled: AtomicBool,
}

#[derive(Debug, Default)]
struct Waiting {
    last: u64,
    answers: HashMap<u64, oneshot::Sender<Answer>>,
    /// Why the connection is of no use any more.
    lost: Option<String>,
}

/// What a line of QEMU is.
#[derive(Debug, PartialEq)]
enum Line {
    Greeting,
    Answer(u64, Answer),
    Event(Event),
    Other,
}

impl Qmp {
    /// Waits for the greeting and takes up the conversation. The events come from then on, and end with the
    /// connection.
    pub(super) async fn greet(
        stream: UnixStream,
        limit: Duration,
    ) -> Result<(Self, mpsc::Receiver<Event>), Error> {
        let (events, heard) = mpsc::channel(EVENTS);
        let (greeting, greeted) = oneshot::channel();
        let shared = Arc::new(Shared {
            stream,
            writing: tokio::sync::Mutex::default(),
            waiting: Mutex::default(),
            jobs: Notify::new(),
            signalled: AtomicBool::new(false),
        });
        let reader = tokio::spawn(read(shared.clone(), greeting, events)).abort_handle();
        let qmp = Self { shared, reader };
        match timeout(limit, greeted).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(Failure::Lost(qmp.lost()).error()),
            Err(_) => return Err(Failure::Late.error()),
        }
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok((qmp, heard))
    }

    /// Tells QEMU to do something and waits for its answer. [`Error::Conflict`] in its own words if it refuses,
    /// [`Error::Unavailable`] if it does not answer.
    pub(super) async fn execute(&self, command: &str, arguments: Value) -> Result<Value, Error> {
        self.send(command, arguments, None).await.map_err(Failure::error)
    }

    /// Hands QEMU a file, by which it is called `name` from then on.
    pub(super) async fn give(&self, name: &str, file: BorrowedFd<'_>) -> Result<(), Error> {
        self.send("getfd", json!({ "fdname": name }), Some(file)).await.map(drop).map_err(Failure::error)
    }

    /// Whether QEMU said, before whatever it answered last, that a signal ends it.
    pub(super) fn is_signalled(&self) -> bool {
        self.shared.signalled.load(Ordering::Relaxed)
    }

    /// Ends the conversation, whoever is in the midst of it. QEMU listens to one at a time, and the next may be waiting
    /// already.
    pub(super) fn close(&self) {
        self.shared.lose("nobody needs it any more");
        self.reader.abort();
    }

    /// Waits until a job may have come to an end.
    pub(super) async fn job_moved(&self) {
        self.shared.jobs.notified().await;
    }

    async fn send(&self, command: &str, arguments: Value, file: Option<BorrowedFd<'_>>) -> Answer {
        let (answer, answered) = oneshot::channel();
        let number = {
            let mut waiting = self.shared.waiting();
            if let Some(lost) = &waiting.lost {
                return Err(Failure::Lost(lost.clone()));
            }
            waiting.last += 1;
            let number = waiting.last;
            waiting.answers.insert(number, answer);
            number
        };
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments, "id": number }));
        let talk = async {
            {
                let _alone = self.shared.writing.lock().await;
                if let Err(error) = self.shared.write(line.as_bytes(), file).await {
                    self.shared.lose(&error.to_string());
                }
            }
            answered.await.unwrap_or_else(|_| Err(Failure::Lost(self.lost())))
        };
        let result = timeout(PATIENCE, talk).await.unwrap_or(Err(Failure::Late));
        if result == Err(Failure::Late) {
            // What was sent may have been cut short: nothing more can be said on this line.
            self.shared.lose("it did not answer");
        }
        result
    }

    fn lost(&self) -> String {
        self.shared.waiting().lost.clone().unwrap_or_else(|| "the connection ended".into())
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the conversation.
    fn lose(&self, why: &str) {
        let mut waiting = self.waiting();
        if waiting.lost.is_none() {
            waiting.lost = Some(why.to_owned());
            let _ = nix::sys::socket::shutdown(self.stream.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        }
        for (_, answer) in waiting.answers.drain() {
            let _ = answer.send(Err(Failure::Lost(why.to_owned())));
        }
        self.jobs.notify_one();
    }

    async fn write(&self, mut data: &[u8], mut file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        while !data.is_empty() {
            let written = self.stream.async_io(Interest::WRITABLE, || {
                let files: Vec<i32> = file.iter().map(AsRawFd::as_raw_fd).collect();
                let rights = [ControlMessage::ScmRights(&files)];
                let rights = if files.is_empty() { &rights[..0] } else { &rights[..] };
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                let sent =
                    sendmsg::<UnixAddr>(self.stream.as_raw_fd(), &[IoSlice::new(data)], rights, flags, None);
                sent.map_err(io::Error::from)
            });
            let written = written.await?;
            file = None;
            data = &data[written..];
        }
        Ok(())
    }

    /// Receives the next lines; none any more: why.
    async fn receive(&self, buffer: &mut Vec<u8>) -> Result<Vec<Line>, String> {
        loop {
            self.stream.readable().await.map_err(|error| error.to_string())?;
            let before = buffer.len();
            buffer.reserve(8192);
            match self.stream.try_read_buf(buffer) {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error.to_string()),
            }
            let Some(end) = buffer[before..].iter().rposition(|byte| *byte == b'\n') else {
                if buffer.len() > LONGEST_LINE {
                    return Err("it speaks without an end".into());
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

async fn read(shared: Arc<Shared>, greeting: oneshot::Sender<()>, events: mpsc::Sender<Event>) {
    let mut greeting = Some(greeting);
    let mut buffer = Vec::new();
    let why = 'all: loop {
        let lines = match shared.receive(&mut buffer).await {
            Ok(lines) => lines,
            Err(why) => break why,
        };
        for line in lines {
            match line {
                Line::Greeting => {
                    let _ = greeting.take().map(|greeting| greeting.send(()));
                }
                Line::Answer(number, answer) => {
                    let waiting = shared.waiting().answers.remove(&number);
                    let _ = waiting.map(|waiting| waiting.send(answer));
                }
                Line::Event(event) if event.name.contains("JOB") => shared.jobs.notify_one(),
                Line::Event(event) if concerns_power(&event.name) => {
                    if event.is_signal() {
                        shared.signalled.store(true, Ordering::Relaxed);
                    }
                    if events.try_send(event).is_err() {
                        break 'all "it tells too much".to_owned();
                    }
                }
                Line::Event(_) | Line::Other => {}
            }
        }
        // What a machine that idles keeps for this is not worth speaking of.
        if buffer.is_empty() {
            buffer = Vec::new();
        }
    };
    shared.lose(&why);
}

fn concerns_power(event: &str) -> bool {
    matches!(event, "SHUTDOWN" | "STOP" | "RESUME" | "RESET" | "GUEST_PANICKED" | "SUSPEND" | "WAKEUP")
}

fn parse(line: &[u8]) -> Line {
    let Ok(Value::Object(mut line)) = serde_json::from_slice(line) else { return Line::Other };
    if line.contains_key("QMP") {
        return Line::Greeting;
    }
    if let Some(Value::String(name)) = line.get("event") {
        let name = name.clone();
        return Line::Event(Event { name, data: line.remove("data").unwrap_or_default() });
    }
    let Some(number) = line.get("id").and_then(Value::as_u64) else { return Line::Other };
    if let Some(answer) = line.remove("return") {
        return Line::Answer(number, Ok(answer));
    }
    let words = line.get("error").and_then(|error| error.get("desc")).and_then(Value::as_str);
    Line::Answer(number, Err(Failure::Refused(words.unwrap_or("it refuses and does not say why").into())))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixStream as Blocking;

    use super::*;

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;

    #[test]
    fn lines_are_told_apart() {
        assert_eq!(parse(GREETING.as_bytes()), Line::Greeting);
        assert_eq!(parse(br#"{"return": {"a": 1}, "id": 7}"#), Line::Answer(7, Ok(json!({ "a": 1 }))));
        let refused = parse(br#"{"id": 8, "error": {"class": "GenericError", "desc": "no"}}"#);
        assert_eq!(refused, Line::Answer(8, Err(Failure::Refused("no".into()))));
        let event = parse(br#"{"timestamp": {}, "event": "SHUTDOWN", "data": {"guest": true}}"#);
        let expected = Event { name: "SHUTDOWN".into(), data: json!({ "guest": true }) };
        assert_eq!(event, Line::Event(expected));
        for other in ["", "[]", "nonsense", r#"{"return": {}}"#, r#"{"id": "x", "return": {}}"#] {
            assert_eq!(parse(other.as_bytes()), Line::Other, "{other}");
        }
    }

    /// A QEMU that does as `script` says with each line, after its greeting.
    async fn with(
        mut script: impl FnMut(&Value, &mut Blocking) + Send + 'static,
    ) -> (Qmp, mpsc::Receiver<Event>) {
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
        Qmp::greet(ours, PATIENCE).await.unwrap()
    }

    #[tokio::test]
    async fn answers_find_their_question_and_events_are_heard() {
        let (qmp, mut events) = with(|request, line| {
            let id = &request["id"];
            let answer = match request["execute"].as_str() {
                Some("good") => json!({ "return": request["arguments"], "id": id }),
                _ => json!({ "error": { "desc": "Bad model" }, "id": id }),
            };
            let event = json!({ "event": "RESET", "data": {} });
            let strange = json!({ "event": "RTC_CHANGE", "data": {} });
            write!(line, "{strange}\r\n{event}\r\n{answer}\r\n").unwrap();
        })
        .await;
        assert_eq!(qmp.execute("good", json!({ "a": 2 })).await.unwrap(), json!({ "a": 2 }));
        let refused = qmp.execute("bad", json!({})).await.unwrap_err();
        assert!(matches!(refused, Error::Conflict(words) if words == "Bad model"));
        assert_eq!(events.recv().await.unwrap().name, "RESET");
    }

    #[tokio::test]
    async fn a_connection_that_ends_ends_every_question() {
        let (qmp, mut events) = with(|_, line| line.shutdown(std::net::Shutdown::Both).unwrap()).await;
        assert!(matches!(qmp.execute("die", json!({})).await, Err(Error::Unavailable(_))));
        assert!(matches!(qmp.execute("again", json!({})).await, Err(Error::Unavailable(_))));
        assert_eq!(events.recv().await, None);
    }

    #[tokio::test]
    async fn one_that_speaks_without_an_end_is_not_listened_to() {
        let (qmp, _events) = with(|_, line| while line.write_all(&[b'x'; 65536]).is_ok() {}).await;
        let failure = qmp.execute("flood", json!({})).await.unwrap_err();
        assert!(failure.to_string().contains("it speaks without an end"), "{failure}");
    }

    #[tokio::test]
    async fn a_file_reaches_the_other_end() {
        use std::os::fd::AsFd;
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = theirs.into_std().unwrap();
        theirs.set_nonblocking(false).unwrap();
        let got = std::thread::spawn(move || {
            writeln!(&theirs, "{GREETING}").unwrap();
            for number in 1..=2 {
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
                writeln!(&theirs, "{}", json!({ "return": {}, "id": number })).unwrap();
                if files > 0 {
                    return true;
                }
            }
            false
        });
        let (qmp, _events) = Qmp::greet(ours, PATIENCE).await.unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        qmp.give("file", file.as_fd()).await.unwrap();
        assert!(got.join().unwrap());
    }
}
