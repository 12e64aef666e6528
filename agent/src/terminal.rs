//! Interactive sessions: commands with a pseudo-terminal. Each one has a thread that moves its bytes.
//!
//! ```text
//!  terminal ──> running ──> exited ──> drained ──> ended
//!                  └── abandon, or the host disconnects ──^ (terminates the processes)
//! ```

use std::convert::Infallible;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_agent::packet::{self, OpenTerminal};
use muster_agent::{MAX_TERMINAL_INPUT, TERMINAL_INPUT_ACKNOWLEDGEMENT};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, signal};
use parking_lot::Mutex;
use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::{Value, json};

use crate::os::spawn_thread;
use crate::outbox::Responder;
use crate::process::{self, ProcessTree};

/// The maximum number of concurrent sessions.
const MAX_SESSIONS: usize = 16;
/// The maximum size of a packet's output. Small, so that other replies are not delayed.
const CHUNK_SIZE: usize = 8 << 10;
/// How long output is read after the shell has exited, while other processes keep the terminal open.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// The maximum output that is read after the shell has exited; more than the kernel buffers.
const MAX_DRAINED_OUTPUT: u64 = 128 << 10;

#[derive(Default)]
pub(crate) struct Terminals {
    sessions: Mutex<Vec<Arc<Session>>>,
}

struct Session {
    unique: Value,
    window: u64,
    terminal: OwnedFd,
    state: Mutex<SessionState>,
    waker: PipeWriter,
}

#[derive(Default)]
struct SessionState {
    /// Input that the terminal has not accepted yet.
    input: Vec<u8>,
    /// The offset up to which output may be sent.
    output_limit: u64,
    is_aborted: bool,
    /// Whether a byte is in the pipe of the waker.
    is_woken: bool,
}

/// How far the thread of a session is.
#[derive(Default)]
struct Progress {
    sent: u64,
    accepted: u64,
    acknowledged: u64,
    /// Whether no process has the terminal open.
    is_closed: bool,
    /// Set once the shell has exited.
    drain: Option<Drain>,
}

/// The end of a session: the output that was written before the shell exited is still sent.
struct Drain {
    deadline: Instant,
    /// The offset at which the output ends, if background processes keep writing.
    limit: u64,
}

impl Drain {
    fn new(sent: u64) -> Self {
        Self { deadline: Instant::now() + OUTPUT_DRAIN_TIMEOUT, limit: sent + MAX_DRAINED_OUTPUT }
    }
}

impl Terminals {
    pub(crate) fn open(self: &Arc<Self>, responder: &Responder, request: &OpenTerminal) {
        let mut sessions = self.sessions.lock();
        if sessions.len() >= MAX_SESSIONS {
            return responder.reply_error("too many concurrent terminals");
        }
        match self.start(responder, request) {
            Ok(session) => sessions.push(session),
            Err(error) => responder.reply_error(&format!("failed to open a terminal: {error}")),
        }
    }

    /// Starts the command and the thread of a session.
    fn start(self: &Arc<Self>, responder: &Responder, request: &OpenTerminal) -> io::Result<Arc<Session>> {
        let (terminal, shell_end) = open_pair()?;
        tcsetwinsize(&terminal, window_size(request.rows, request.columns))?;
        let (wakeups, waker) = io::pipe()?;
        let (exited, exit_signal) = io::pipe()?;
        let session = Arc::new(Session {
            unique: responder.unique.clone(),
            window: request.window,
            terminal,
            state: Mutex::new(SessionState { output_limit: request.window, ..SessionState::default() }),
            waker,
        });
        let mut processes = ProcessTree::new();
        let mut child = processes.start_in_terminal(&request.command_line, &request.term, shell_end)?;
        let terminate = processes.clone();
        let (all, own, responder) = (Arc::clone(self), Arc::clone(&session), responder.clone());
        let thread = spawn_thread(move || {
            let waiter = spawn_thread(move || {
                let status = child.wait();
                drop(exit_signal);
                status
            });
            responder.reply(json!({ "command": "terminal-response", "result": true }));
            let is_exited = waiter.is_ok() && own.run(&responder, &wakeups, &exited);
            if !is_exited {
                processes.terminate();
            }
            let code = waiter.and_then(|waiter| match is_exited {
                true => waiter.join().map_err(|_| io::Error::other("failed to wait for the shell"))?,
                false => Err(io::Error::other("the session was aborted")),
            });
            match code.map(process::exit_code) {
                Ok(code) => {
                    responder.reply_blocking(json!({ "command": "terminal-response", "return-code": code }));
                }
                Err(error) => responder.reply_error(&error.to_string()),
            }
            all.sessions.lock().retain(|session| !Arc::ptr_eq(session, &own));
        });
        if let Err(error) = thread {
            terminate.terminate();
            return Err(error);
        }
        Ok(session)
    }

    /// Queues input for a session. A host that exceeds the limit ends it.
    pub(crate) fn input(&self, unique: &Value, bytes: &[u8]) {
        self.update(unique, |_, state| {
            if state.input.len() + bytes.len() > MAX_TERMINAL_INPUT {
                state.is_aborted = true;
            } else {
                state.input.extend_from_slice(bytes);
            }
        });
    }

    /// Records that the host has read output up to `offset`.
    pub(crate) fn acknowledge(&self, unique: &Value, offset: u64) {
        self.update(unique, |session, state| {
            state.output_limit = state.output_limit.max(offset.saturating_add(session.window));
        });
    }

    pub(crate) fn resize(&self, unique: &Value, rows: u16, columns: u16) {
        for session in self.sessions.lock().iter().filter(|session| session.unique == *unique) {
            // The kernel sends SIGWINCH.
            _ = tcsetwinsize(&session.terminal, window_size(rows, columns));
        }
    }

    pub(crate) fn abort(&self, unique: &Value) {
        self.update(unique, |_, state| state.is_aborted = true);
    }

    pub(crate) fn abort_all(&self) {
        for session in self.sessions.lock().iter() {
            session.update(|state| state.is_aborted = true);
        }
    }

    fn update(&self, unique: &Value, change: impl Fn(&Session, &mut SessionState)) {
        for session in self.sessions.lock().iter().filter(|session| session.unique == *unique) {
            session.update(|state| change(session, state));
        }
    }
}

impl Session {
    /// Changes the state and wakes the thread of the session.
    fn update(&self, change: impl FnOnce(&mut SessionState)) {
        let mut state = self.state.lock();
        change(&mut state);
        // At most one byte is in the pipe, so that this never blocks.
        if !std::mem::replace(&mut state.is_woken, true) {
            _ = (&self.waker).write(&[0]);
        }
    }

    /// Moves bytes until the shell has exited and its output is sent. Returns false if the session was aborted.
    fn run(&self, responder: &Responder, mut wakeups: &PipeReader, exited: &PipeReader) -> bool {
        let mut progress = Progress::default();
        let mut buffer = vec![0; CHUNK_SIZE];
        loop {
            let (window, has_input) = {
                let state = self.state.lock();
                if state.is_aborted {
                    return false;
                }
                (state.output_limit.saturating_sub(progress.sent), !state.input.is_empty())
            };
            if progress.is_drained(window) {
                return true;
            }
            let mut awaited = PollFlags::empty();
            awaited.set(PollFlags::POLLIN, window > 0 && !progress.is_closed);
            awaited.set(PollFlags::POLLOUT, has_input && !progress.is_closed);
            let timeout = progress.drain.as_ref().filter(|_| window > 0).map(|drain| drain.deadline);
            let exited = progress.drain.is_none().then_some(exited);
            let [wakeup, terminal, exit] = self.poll(awaited, wakeups, exited, timeout);
            if !wakeup.is_empty() {
                let mut state = self.state.lock();
                state.is_woken = false;
                _ = wakeups.read(&mut [0]);
            }
            if terminal.contains(PollFlags::POLLOUT) {
                self.write_input(responder, &mut progress);
            }
            if terminal.intersects(PollFlags::POLLIN | PollFlags::POLLHUP) && window > 0 {
                let length = window.min(CHUNK_SIZE as u64) as usize;
                if !self.send_output(responder, &mut buffer[..length], &mut progress) {
                    return false;
                }
            }
            if !exit.is_empty() {
                progress.drain = Some(Drain::new(progress.sent));
            }
        }
    }

    /// Waits for the waker, for the awaited events of the terminal, and for the exit of the shell. Returns their events.
    fn poll(
        &self,
        awaited: PollFlags,
        wakeups: &PipeReader,
        exited: Option<&PipeReader>,
        deadline: Option<Instant>,
    ) -> [PollFlags; 3] {
        let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
            let remaining = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            PollTimeout::try_from(remaining).expect("the drain timeout is short")
        });
        // A closed terminal, and the pipe after the exit, would end every wait immediately.
        let terminal = (!awaited.is_empty()).then_some(self.terminal.as_fd());
        let fds = [
            Some((wakeups.as_fd(), PollFlags::POLLIN)),
            terminal.map(|terminal| (terminal, awaited)),
            exited.map(|exited| (exited.as_fd(), PollFlags::POLLIN)),
        ];
        let mut polled: Vec<_> = fds.iter().flatten().map(|(fd, events)| PollFd::new(*fd, *events)).collect();
        if poll(&mut polled, timeout).is_err() {
            return [PollFlags::empty(); 3];
        }
        let mut polled = polled.iter();
        let events = |fd: Option<_>| fd.and_then(|_| polled.next()?.revents()).unwrap_or(PollFlags::empty());
        fds.map(events)
    }

    /// Writes input to the terminal and acknowledges it.
    fn write_input(&self, responder: &Responder, progress: &mut Progress) {
        let mut state = self.state.lock();
        match nix::unistd::write(&self.terminal, &state.input) {
            Ok(count) => {
                state.input.drain(..count);
                progress.accepted += count as u64;
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => progress.is_closed = true,
        }
        if progress.accepted - progress.acknowledged >= TERMINAL_INPUT_ACKNOWLEDGEMENT as u64 {
            progress.acknowledged = progress.accepted;
            responder.reply(json!({ "command": "terminal-response", "accepted": progress.accepted }));
        }
    }

    /// Reads output and sends it. Returns false if the host has disconnected.
    fn send_output(&self, responder: &Responder, buffer: &mut [u8], progress: &mut Progress) -> bool {
        let count = match nix::unistd::read(&self.terminal, buffer) {
            Err(Errno::EAGAIN | Errno::EINTR) => return true,
            Ok(0) | Err(_) => {
                progress.is_closed = true;
                return true;
            }
            Ok(count) => count,
        };
        let packet = json!({
            "command": "terminal-response", "offset": progress.sent, "encoding": "base64",
            "chunk": packet::encode_chunk(&buffer[..count]),
        });
        progress.sent += count as u64;
        responder.reply_chunk_blocking(packet)
    }
}

impl Progress {
    /// Returns whether all output was sent that was written before the shell exited. `window` is how much may be sent.
    fn is_drained(&mut self, window: u64) -> bool {
        let Some(drain) = &mut self.drain else { return false };
        if window == 0 {
            // The time does not count while the host does not read.
            drain.deadline = Instant::now() + OUTPUT_DRAIN_TIMEOUT;
        }
        self.is_closed || self.sent >= drain.limit || Instant::now() >= drain.deadline
    }
}

fn window_size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Opens a pseudo-terminal: the agent's end, which does not block, and the end of the shell.
fn open_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = openpt(flags)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    let shell_end = ioctl_tiocgptpeer(&terminal, flags)?;
    fcntl(&terminal, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok((terminal, shell_end))
}

/// Makes this process the leader of a session with standard input as its controlling terminal, and runs the shell. The agent
/// starts itself for this, because it must not run code between fork and exec.
#[expect(unsafe_code, reason = "nix cannot tell handlers from the default action")]
pub(crate) fn run_shell(command_line: &str) -> io::Result<Infallible> {
    setsid()?;
    ioctl_tiocsctty(io::stdin())?;
    // A shell cannot trap signals that its parent ignores.
    for key in [Signal::SIGINT, Signal::SIGQUIT] {
        // SAFETY: The default action does not call a function of this process.
        unsafe { signal(key, SigHandler::SigDfl) }?;
    }
    Err(Command::new("/bin/sh").arg("-c").arg(process::shell_line(command_line)).exec())
}
