//! Commands: queued, running, and the results of those with a key.
//!
//! ```text
//!  execute ──> queued ──> running ──> ended ──> forgotten
//!                 └──────────┴── cancel ────────────^
//! ```
//! A command without a key is forgotten as soon as its reply is queued. See docs/decisions/0022.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read as _, Seek as _};
use std::process::Stdio;
use std::sync::Arc;

use muster_agent::packet::{self, Execute, Stream};
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};

use crate::os::spawn_thread;
use crate::outbox::Responder;
use crate::output_file::OutputFile;
use crate::process::{self, ProcessTree};
use crate::spool::{Outcome, Spool};

/// The maximum number of commands that run concurrently.
const MAX_RUNNING: usize = 32;
/// The maximum number of queued commands.
const MAX_QUEUED: usize = 1000;
/// The maximum size of all queued command lines.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// The maximum number of running commands that were started without `block-for-result`.
const MAX_BACKGROUND: usize = 256;
/// The maximum number of results that are kept.
const MAX_REMEMBERED: usize = 1000;
/// The maximum number of requests that wait for the same command.
const MAX_WAITERS: usize = 16;
/// The maximum size of each stream in the reply to a command without a key.
const MAX_INLINE_OUTPUT: u64 = 5 << 20;

pub(crate) struct Commands {
    spool: Arc<Spool>,
    state: Mutex<State>,
    changed: Condvar,
    /// Locked while the output of a command is in memory, so that it is never that of several commands.
    inline_output: Mutex<()>,
}

#[derive(Default)]
struct State {
    keyed: HashMap<String, KeyedCommand>,
    /// Keys of commands that have ended, the oldest first. Some may be forgotten already.
    ended: VecDeque<String>,
    queue: VecDeque<QueuedCommand>,
    queued_bytes: usize,
    running: usize,
    background: usize,
}

struct QueuedCommand {
    line: String,
    origin: Origin,
}

/// Where the result of a command goes.
enum Origin {
    Key(String),
    Responder(Responder),
}

struct KeyedCommand {
    phase: Phase,
    waiters: VecDeque<Responder>,
    cancellers: Vec<Responder>,
    /// Whether to delete the result when the command ends.
    forget_on_end: bool,
}

impl KeyedCommand {
    fn new(phase: Phase) -> Self {
        Self { phase, waiters: VecDeque::new(), cancellers: vec![], forget_on_end: false }
    }
}

#[derive(Clone)]
enum Phase {
    Queued,
    /// The processes are set once the shell has started.
    Running(Option<Arc<ProcessTree>>),
    Ended(Outcome),
}

impl Commands {
    pub(crate) fn new(spool: Arc<Spool>, remembered: Vec<(String, Outcome)>) -> Self {
        let mut state = State::default();
        for (key, outcome) in remembered {
            state.keyed.insert(key.clone(), KeyedCommand::new(Phase::Ended(outcome)));
            state.ended.push_back(key);
        }
        Self { spool, state: Mutex::new(state), changed: Condvar::new(), inline_output: Mutex::new(()) }
    }

    pub(crate) fn execute(self: &Arc<Self>, responder: Responder, request: Execute) {
        let Execute { command_line, block_for_result, key, again } = request;
        if !block_for_result {
            return self.start_in_background(&responder, &command_line);
        }
        let mut state = self.state.lock();
        let origin = match key {
            None => Origin::Responder(responder.clone()),
            Some(key) => match state.keyed.get_mut(&key) {
                Some(KeyedCommand { phase: Phase::Ended(outcome), .. }) => {
                    return responder.reply(outcome_response(&key, &command_line, *outcome));
                }
                Some(command) => {
                    if command.waiters.len() == MAX_WAITERS {
                        command.waiters.pop_front();
                    }
                    return command.waiters.push_back(responder);
                }
                None if again => return responder.reply(failure_response(&key, &command_line, "unknown")),
                None => Origin::Key(key),
            },
        };
        if state.queue.len() >= MAX_QUEUED || state.queued_bytes + command_line.len() > MAX_QUEUED_BYTES {
            return responder.reply_error("too many queued commands");
        }
        if let Origin::Key(key) = &origin {
            let mut command = KeyedCommand::new(Phase::Queued);
            command.waiters.push_back(responder);
            state.keyed.insert(key.clone(), command);
        }
        state.queued_bytes += command_line.len();
        state.queue.push_back(QueuedCommand { line: command_line, origin });
        self.start_queued(&mut state);
    }

    /// Starts queued commands up to the limit.
    fn start_queued(self: &Arc<Self>, state: &mut State) {
        while state.running < MAX_RUNNING
            && let Some(next) = state.queue.pop_front()
        {
            state.queued_bytes -= next.line.len();
            state.running += 1;
            let key = match &next.origin {
                Origin::Key(key) => Some(key.clone()),
                Origin::Responder(_) => None,
            };
            if let Some(command) = key.as_ref().and_then(|key| state.keyed.get_mut(key)) {
                command.phase = Phase::Running(None);
            }
            let commands = Arc::clone(self);
            if let Err(error) = spawn_thread(move || commands.run(next)) {
                state.running -= 1;
                let waiters = key.and_then(|key| state.keyed.remove(&key)).map(|command| command.waiters);
                for waiter in waiters.into_iter().flatten() {
                    waiter.reply_error(&format!("failed to start a thread: {error}"));
                }
            }
        }
    }

    fn run(self: &Arc<Self>, command: QueuedCommand) {
        match command.origin {
            Origin::Key(key) => match self.run_keyed(&key, &command.line) {
                Ok(outcome) => self.finish(&key, &command.line, outcome),
                Err(error) => self.fail(&key, &error),
            },
            Origin::Responder(responder) => {
                if let Err(error) = self.run_inline(&responder, &command.line) {
                    responder.reply_error(&run_error(&error));
                }
            }
        }
        let mut state = self.state.lock();
        state.running -= 1;
        self.start_queued(&mut state);
        self.changed.notify_all();
    }

    /// Runs a command with a key and stores its outcome.
    fn run_keyed(&self, key: &str, line: &str) -> io::Result<Outcome> {
        let mut processes = ProcessTree::new();
        let mut outputs = self.spool.begin(key, &processes)?;
        let child = processes.start(line, Stdio::piped)?;
        if let Some(shell) = processes.shell
            && let Err(error) = self.spool.store_shell(key, shell)
        {
            eprintln!("failed to store process of command {key}: {error}");
        }
        let processes = Arc::new(processes);
        if let Some(command) = self.state.lock().keyed.get_mut(key) {
            command.phase = Phase::Running(Some(Arc::clone(&processes)));
        }
        self.changed.notify_all();
        let code = process::collect_output(child, &mut outputs).inspect_err(|_| processes.terminate())?;
        let [stdout, stderr] = outputs.map(|output| output.summary);
        let outcome = Outcome::Exited { code, stdout, stderr };
        if let Err(error) = self.spool.store_outcome(key, outcome) {
            // This agent still reports it; after a restart the command is lost.
            eprintln!("failed to store outcome of command {key}: {error}");
        }
        Ok(outcome)
    }

    /// Replies to the waiters of a command that has ended.
    fn finish(&self, key: &str, line: &str, outcome: Outcome) {
        let mut state = self.state.lock();
        let Some(command) = state.keyed.get_mut(key) else { return };
        command.phase = Phase::Ended(outcome);
        if !command.cancellers.is_empty() {
            // The thread that cancels the command replies.
            return;
        }
        for waiter in command.waiters.drain(..) {
            waiter.reply(outcome_response(key, line, outcome));
        }
        if command.forget_on_end {
            state.keyed.remove(key);
            self.spool.remove(key);
            return;
        }
        state.ended.push_back(key.to_owned());
        while state.ended.len() > MAX_REMEMBERED
            && let Some(oldest) = state.ended.pop_front()
        {
            if state.keyed.remove(&oldest).is_some() {
                self.spool.remove(&oldest);
            }
        }
    }

    /// Replies to the waiters of a command that the agent could not run.
    fn fail(&self, key: &str, error: &io::Error) {
        let mut state = self.state.lock();
        if let Some(command) = state.keyed.remove(key) {
            for waiter in command.waiters {
                waiter.reply_error(&run_error(error));
            }
            for canceller in command.cancellers {
                canceller.reply(cancel_response(key));
            }
        }
        self.spool.remove(key);
    }

    /// Runs a command without a key and replies with its output.
    fn run_inline(&self, responder: &Responder, line: &str) -> io::Result<()> {
        let mut outputs = self.spool.anonymous_outputs(MAX_INLINE_OUTPUT)?;
        let code = process::collect_output(ProcessTree::new().start(line, Stdio::piped)?, &mut outputs)?;
        let _inline_output = self.inline_output.lock();
        if responder.outbox.wait_for_room(responder.connection) {
            let [stdout, stderr] = outputs;
            responder.reply_blocking(json!({
                "command": "execute-response", "command-line": line, "result": true, "return-code": code,
                "stdout": read_text(stdout)?, "stderr": read_text(stderr)?,
            }));
            responder.outbox.wait_for_room(responder.connection);
        }
        Ok(())
    }

    /// Starts a command and replies with its PID.
    fn start_in_background(self: &Arc<Self>, responder: &Responder, line: &str) {
        let mut state = self.state.lock();
        if state.background >= MAX_BACKGROUND {
            return responder.reply_error("too many background commands");
        }
        let mut child = match ProcessTree::new().start(line, Stdio::null) {
            Ok(child) => child,
            Err(error) => return responder.reply_error(&run_error(&error)),
        };
        responder.reply(json!({
            "command": "execute-response", "command-line": line, "result": true, "pid": child.id(),
        }));
        state.background += 1;
        let commands = Arc::clone(self);
        let reaper = spawn_thread(move || {
            _ = child.wait();
            commands.state.lock().background -= 1;
        });
        if reaper.is_err() {
            state.background -= 1;
        }
    }

    /// Deletes the result of a command, when it ends if it is still running.
    pub(crate) fn forget(&self, responder: &Responder, key: &str) {
        let mut state = self.state.lock();
        match state.keyed.get_mut(key) {
            Some(KeyedCommand { phase: Phase::Ended(_), cancellers, .. }) if cancellers.is_empty() => {
                self.remove_ended(&mut state, key);
            }
            Some(command) => command.forget_on_end = true,
            None => {}
        }
        responder.reply(json!({ "command": "forget-response", "key": key }));
    }

    fn remove_ended(&self, state: &mut State, key: &str) {
        state.keyed.remove(key);
        state.ended.retain(|ended| ended != key);
        self.spool.remove(key);
    }

    /// Removes a command from the queue, or terminates it, and deletes its result.
    pub(crate) fn cancel(self: &Arc<Self>, responder: Responder, key: &str) {
        let mut state = self.state.lock();
        let Some(command) = state.keyed.get_mut(key) else {
            return responder.reply(cancel_response(key));
        };
        match command.phase {
            Phase::Ended(_) if command.cancellers.is_empty() => {
                self.remove_ended(&mut state, key);
                responder.reply(cancel_response(key));
            }
            Phase::Queued => {
                let has_key =
                    |queued: &QueuedCommand| matches!(&queued.origin, Origin::Key(other) if other == key);
                if let Some(index) = state.queue.iter().position(has_key)
                    && let Some(queued) = state.queue.remove(index)
                {
                    state.queued_bytes -= queued.line.len();
                }
                let waiters = state.keyed.remove(key).map(|command| command.waiters);
                for waiter in waiters.into_iter().flatten() {
                    waiter.reply(failure_response(key, "", "cancelled"));
                }
                responder.reply(cancel_response(key));
            }
            Phase::Running(_) | Phase::Ended(_) => {
                let is_first = command.cancellers.is_empty();
                if command.cancellers.len() < MAX_WAITERS {
                    command.cancellers.push(responder);
                }
                let (commands, key) = (Arc::clone(self), key.to_owned());
                if is_first && let Err(error) = spawn_thread(move || commands.terminate(&key)) {
                    for canceller in command.cancellers.drain(..) {
                        canceller.reply_error(&format!("failed to start a thread: {error}"));
                    }
                }
            }
        }
    }

    /// Terminates a running command and deletes it.
    fn terminate(&self, key: &str) {
        let mut state = self.state.lock();
        let mut is_terminated = false;
        loop {
            match state.keyed.get(key).map(|command| command.phase.clone()) {
                Some(Phase::Running(Some(processes))) if !is_terminated => {
                    drop(state);
                    processes.terminate();
                    state = self.state.lock();
                    is_terminated = true;
                }
                Some(Phase::Queued | Phase::Running(_)) => self.changed.wait(&mut state),
                Some(Phase::Ended(_)) => break,
                None => return,
            }
        }
        self.spool.remove(key);
        if let Some(command) = state.keyed.remove(key) {
            for waiter in command.waiters {
                waiter.reply(failure_response(key, "", "cancelled"));
            }
            for canceller in command.cancellers {
                canceller.reply(cancel_response(key));
            }
        }
    }

    pub(crate) fn read_output(
        &self,
        responder: &Responder,
        key: &str,
        stream: Stream,
        offset: u64,
        length: usize,
    ) {
        match self.spool.read_output(key, stream, offset, length) {
            Ok(bytes) => responder.reply_chunk(json!({
                "command": "read-output-response", "key": key, "name": stream.name(),
                "offset": offset, "encoding": "base64", "chunk": packet::encode_chunk(&bytes),
            })),
            Err(error) => {
                responder.reply_error(&format!("failed to read {} of command {key}: {error}", stream.name()));
            }
        }
    }
}

fn run_error(error: &io::Error) -> String {
    format!("failed to run the command: {error}")
}

/// Returns the reply to an `execute` with a key whose command has ended.
fn outcome_response(key: &str, line: &str, outcome: Outcome) -> Value {
    match outcome {
        Outcome::Lost => failure_response(key, line, "lost"),
        Outcome::Exited { code, stdout, stderr } => {
            let mut packet = json!({
                "command": "execute-response", "command-line": line, "key": key, "result": true, "return-code": code,
                "stdout-size": stdout.size, "stderr-size": stderr.size,
            });
            for (name, summary) in [("stdout-cut", stdout), ("stderr-cut", stderr)] {
                if summary.truncated {
                    packet[name] = json!(true);
                }
            }
            packet
        }
    }
}

fn failure_response(key: &str, line: &str, reason: &str) -> Value {
    json!({ "command": "execute-response", "command-line": line, "key": key, "result": false, "reason": reason })
}

fn cancel_response(key: &str) -> Value {
    json!({ "command": "cancel-response", "key": key })
}

fn read_text(mut output: OutputFile) -> io::Result<String> {
    let mut bytes = Vec::new();
    output.file.rewind()?;
    output.file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}
