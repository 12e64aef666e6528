//! Commands: which run, which wait, and what became of those that have a key.
//!
//! ```text
//!  execute ──> waiting ──> running ──> ended ──> forgotten
//!                 └────────────┴── cancel ──────────^
//! ```
//!
//! A command without a key is forgotten as soon as its answer is on its way.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read as _, Seek as _};
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use muster_agent::packet::{self, Execute, Stream};
use serde_json::{Value, json};

use crate::outbox::{Asker, lock};
use crate::process::{self, Family};
use crate::spool::{Ending, Sink, Spool};

/// Commands that run at a time.
const RUNNING: usize = 32;
/// Commands that wait for others, and the bytes of all their lines.
const WAITING: usize = 1000;
const WAITING_BYTES: usize = 8 << 20;
/// Commands that nobody waits for, and that still run.
const BACKGROUND: usize = 256;
/// Commands that are remembered after their end.
const REMEMBERED: usize = 1000;
/// Who waits for the same command.
const ASKERS: usize = 16;
/// What a host without memory gets of each stream.
const WHOLE: u64 = 5 << 20;

pub(crate) struct Commands {
    spool: Spool,
    state: Mutex<State>,
    changed: Condvar,
    /// Held while a whole output is in memory: one at a time.
    large: Mutex<()>,
}

#[derive(Default)]
struct State {
    jobs: HashMap<String, Job>,
    /// Keys of those that ended, the oldest first. Some may be forgotten already.
    ended: VecDeque<String>,
    waiting: VecDeque<Start>,
    waiting_bytes: usize,
    running: usize,
    background: usize,
}

struct Start {
    line: String,
    whose: Whose,
}

enum Whose {
    Key(String),
    Asker(Asker),
}

struct Job {
    phase: Phase,
    askers: VecDeque<Asker>,
    cancellers: Vec<Asker>,
    /// Nobody will ask for it.
    is_forgotten: bool,
}

#[derive(Clone)]
enum Phase {
    Waiting,
    /// Who does it is known once there is somebody.
    Running(Option<Arc<Family>>),
    Ended(Ending),
}

impl Commands {
    pub(crate) fn new(spool: Spool, remembered: Vec<(String, Ending)>) -> Self {
        let mut state = State::default();
        for (key, ending) in remembered {
            let job = Job {
                phase: Phase::Ended(ending),
                askers: VecDeque::new(),
                cancellers: vec![],
                is_forgotten: false,
            };
            state.jobs.insert(key.clone(), job);
            state.ended.push_back(key);
        }
        Self { spool, state: Mutex::new(state), changed: Condvar::new(), large: Mutex::new(()) }
    }

    pub(crate) fn spool(&self) -> &Spool {
        &self.spool
    }

    pub(crate) fn execute(self: &Arc<Self>, asker: Asker, request: Execute) {
        if !request.is_awaited {
            return self.background(&asker, &request.line);
        }
        let mut state = lock(&self.state);
        let whose = match request.key {
            None => Whose::Asker(asker.clone()),
            Some(key) => match state.jobs.get_mut(&key) {
                Some(Job { phase: Phase::Ended(ending), .. }) => {
                    return asker.say(response(&key, &request.line, *ending));
                }
                Some(job) => {
                    if job.askers.len() == ASKERS {
                        job.askers.pop_front();
                    }
                    return job.askers.push_back(asker);
                }
                None if request.again => return asker.say(failure(&key, &request.line, "unknown")),
                None => Whose::Key(key),
            },
        };
        if state.waiting.len() >= WAITING || state.waiting_bytes + request.line.len() > WAITING_BYTES {
            return asker.refuse("too many commands are waiting");
        }
        if let Whose::Key(key) = &whose {
            let job = Job {
                phase: Phase::Waiting,
                askers: VecDeque::from([asker]),
                cancellers: vec![],
                is_forgotten: false,
            };
            state.jobs.insert(key.clone(), job);
        }
        state.waiting_bytes += request.line.len();
        state.waiting.push_back(Start { line: request.line, whose });
        self.start_next(&mut state);
    }

    fn start_next(self: &Arc<Self>, state: &mut State) {
        while state.running < RUNNING
            && let Some(next) = state.waiting.pop_front()
        {
            state.waiting_bytes -= next.line.len();
            state.running += 1;
            let key = match &next.whose {
                Whose::Key(key) => Some(key.clone()),
                Whose::Asker(_) => None,
            };
            if let Some(job) = key.as_ref().and_then(|key| state.jobs.get_mut(key)) {
                job.phase = Phase::Running(None);
            }
            let commands = Arc::clone(self);
            if let Err(error) = process::start(move || commands.run(next)) {
                // Too many threads in the guest: those that wait for it learn it.
                state.running -= 1;
                let askers = key.and_then(|key| state.jobs.remove(&key)).map(|job| job.askers);
                askers.into_iter().flatten().for_each(|asker| asker.refuse(&error.to_string()));
            }
        }
    }

    fn run(self: &Arc<Self>, start: Start) {
        match start.whose {
            Whose::Key(key) => match self.run_key(&key, &start.line) {
                Ok(ending) => self.ended(&key, &start.line, ending),
                Err(error) => self.failed(&key, &error),
            },
            Whose::Asker(asker) => {
                if let Err(error) = self.run_plain(&asker, &start.line) {
                    asker.refuse(&format!("the command could not be run: {error}"));
                }
            }
        }
        let mut state = lock(&self.state);
        state.running -= 1;
        self.start_next(&mut state);
        self.changed.notify_all();
    }

    fn run_key(&self, key: &str, line: &str) -> io::Result<Ending> {
        let mut family = Family::new();
        let mut sinks = self.spool.begin(key, &family)?;
        let child = family.start(line, Stdio::piped)?;
        if let Some(shell) = family.shell
            && let Err(error) = self.spool.started(key, shell)
        {
            eprintln!("process of command {key} is not noted: {error}");
        }
        let family = Arc::new(family);
        if let Some(job) = lock(&self.state).jobs.get_mut(key) {
            job.phase = Phase::Running(Some(Arc::clone(&family)));
        }
        self.changed.notify_all();
        let code = process::follow(child, &mut sinks).inspect_err(|_| family.end())?;
        let [stdout, stderr] = sinks.map(|sink| sink.kept);
        let ending = Ending::Done { code, stdout, stderr };
        if let Err(error) = self.spool.end(key, ending) {
            // It is still told, but not by the next agent.
            eprintln!("end of command {key} is not noted: {error}");
        }
        Ok(ending)
    }

    fn ended(&self, key: &str, line: &str, ending: Ending) {
        let mut state = lock(&self.state);
        let Some(job) = state.jobs.get_mut(key) else { return };
        job.phase = Phase::Ended(ending);
        if !job.cancellers.is_empty() {
            // Who cancels it answers everybody.
            return;
        }
        for asker in job.askers.drain(..) {
            asker.say(response(key, line, ending));
        }
        if job.is_forgotten {
            state.jobs.remove(key);
            self.spool.forget(key);
            return;
        }
        state.ended.push_back(key.to_owned());
        while state.ended.len() > REMEMBERED
            && let Some(oldest) = state.ended.pop_front()
        {
            if state.jobs.remove(&oldest).is_some() {
                self.spool.forget(&oldest);
            }
        }
    }

    /// It could not be run, or not to its end.
    fn failed(&self, key: &str, error: &io::Error) {
        let mut state = lock(&self.state);
        if let Some(job) = state.jobs.remove(key) {
            for asker in job.askers {
                asker.refuse(&format!("the command could not be run: {error}"));
            }
            for asker in job.cancellers {
                asker.say(json!({ "command": "cancel-response", "key": key }));
            }
        }
        self.spool.forget(key);
    }

    fn run_plain(&self, asker: &Asker, line: &str) -> io::Result<()> {
        let mut sinks = self.spool.nameless(WHOLE)?;
        let code = process::follow(Family::new().start(line, Stdio::piped)?, &mut sinks)?;
        let _large = lock(&self.large);
        if asker.outbox.wait_for_room(asker.connection) {
            let [stdout, stderr] = sinks;
            asker.send(json!({
                "command": "execute-response", "command-line": line, "result": true, "return-code": code,
                "stdout": text(stdout)?, "stderr": text(stderr)?,
            }));
            asker.outbox.wait_for_room(asker.connection);
        }
        Ok(())
    }

    /// Starts a command that nobody waits for.
    fn background(self: &Arc<Self>, asker: &Asker, line: &str) {
        let mut state = lock(&self.state);
        if state.background >= BACKGROUND {
            return asker.refuse("too many commands run in the background");
        }
        let mut child = match Family::new().start(line, Stdio::null) {
            Ok(child) => child,
            Err(error) => return asker.refuse(&format!("the command could not be run: {error}")),
        };
        asker.say(json!({
            "command": "execute-response", "command-line": line, "result": true, "pid": child.id(),
        }));
        state.background += 1;
        let commands = Arc::clone(self);
        let waiter = process::start(move || {
            _ = child.wait();
            lock(&commands.state).background -= 1;
        });
        if waiter.is_err() {
            state.background -= 1;
        }
    }

    pub(crate) fn forget(&self, asker: &Asker, key: &str) {
        let mut state = lock(&self.state);
        match state.jobs.get_mut(key) {
            Some(Job { phase: Phase::Ended(_), cancellers, .. }) if cancellers.is_empty() => {
                state.jobs.remove(key);
                state.ended.retain(|ended| ended != key);
                self.spool.forget(key);
            }
            Some(job) => job.is_forgotten = true,
            None => {}
        }
        asker.say(json!({ "command": "forget-response", "key": key }));
    }

    pub(crate) fn cancel(self: &Arc<Self>, asker: Asker, key: &str) {
        let mut state = lock(&self.state);
        let Some(job) = state.jobs.get_mut(key) else {
            return asker.say(json!({ "command": "cancel-response", "key": key }));
        };
        match job.phase {
            Phase::Ended(_) if job.cancellers.is_empty() => {
                state.jobs.remove(key);
                state.ended.retain(|ended| ended != key);
                self.spool.forget(key);
                asker.say(json!({ "command": "cancel-response", "key": key }));
            }
            Phase::Waiting => {
                let is_it = |start: &Start| matches!(&start.whose, Whose::Key(whose) if whose == key);
                if let Some(index) = state.waiting.iter().position(is_it)
                    && let Some(start) = state.waiting.remove(index)
                {
                    state.waiting_bytes -= start.line.len();
                }
                let askers = state.jobs.remove(key).map(|job| job.askers);
                for waiting in askers.into_iter().flatten() {
                    waiting.say(failure(key, "", "cancelled"));
                }
                asker.say(json!({ "command": "cancel-response", "key": key }));
            }
            Phase::Running(_) | Phase::Ended(_) => {
                let is_first = job.cancellers.is_empty();
                if job.cancellers.len() < ASKERS {
                    job.cancellers.push(asker);
                }
                let (commands, key) = (Arc::clone(self), key.to_owned());
                if is_first && process::start(move || commands.end(&key)).is_err() {
                    job.cancellers.drain(..).for_each(|asker| asker.refuse("too many threads"));
                }
            }
        }
    }

    /// Ends a command that runs, and forgets it.
    fn end(&self, key: &str) {
        let mut state = lock(&self.state);
        let mut is_told = false;
        loop {
            match state.jobs.get(key).map(|job| job.phase.clone()) {
                Some(Phase::Running(Some(family))) if !is_told => {
                    drop(state);
                    family.end();
                    state = lock(&self.state);
                    is_told = true;
                }
                Some(Phase::Waiting | Phase::Running(_)) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Some(Phase::Ended(_)) => break,
                None => return,
            }
        }
        self.spool.forget(key);
        if let Some(job) = state.jobs.remove(key) {
            for asker in job.askers {
                asker.say(failure(key, "", "cancelled"));
            }
            for asker in job.cancellers {
                asker.say(json!({ "command": "cancel-response", "key": key }));
            }
        }
    }

    pub(crate) fn read_output(&self, asker: &Asker, key: &str, name: Stream, offset: u64, length: usize) {
        match self.spool.read(key, name, offset, length) {
            Ok(bytes) => asker.say_much(json!({
                "command": "read-output-response", "key": key, "name": name.name(),
                "offset": offset, "encoding": "base64", "chunk": packet::chunk(&bytes),
            })),
            Err(error) => asker.refuse(&format!("{} of command {key}: {error}", name.name())),
        }
    }
}

/// The answer to an `execute` with a key.
fn response(key: &str, line: &str, ending: Ending) -> Value {
    match ending {
        Ending::Lost => failure(key, line, "lost"),
        Ending::Done { code, stdout, stderr } => {
            let mut packet = json!({
                "command": "execute-response", "command-line": line, "key": key, "result": true, "return-code": code,
                "stdout-size": stdout.size, "stderr-size": stderr.size,
            });
            for (name, kept) in [("stdout-cut", stdout), ("stderr-cut", stderr)] {
                if kept.cut {
                    packet[name] = json!(true);
                }
            }
            packet
        }
    }
}

fn failure(key: &str, line: &str, reason: &str) -> Value {
    json!({ "command": "execute-response", "command-line": line, "key": key, "result": false, "reason": reason })
}

fn text(mut sink: Sink) -> io::Result<String> {
    let mut bytes = Vec::new();
    sink.file.rewind()?;
    sink.file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}
