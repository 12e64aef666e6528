//! One simulated guest: its boots, its agent and what that remembers.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use muster_types::guest::{AgentState, CommandKey, CommandOutput, CommandResult, GuestError, GuestReport};
use muster_types::time::now;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

use super::files::Files;
use super::shell::{self, Ran};

/// What is not longer than this comes with the result of a command.
const SHORT: usize = 32 << 10;

/// How many different command lines are counted.
const MOST_LINES: usize = 1000;

/// The connection to an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Link {
    /// Another number is another connection.
    pub(super) session: u64,
    pub(super) ready: bool,
    /// Whatever is said to it is heard later.
    pub(super) deaf: bool,
}

/// Ends when a connection is no more.
pub(super) async fn broken(link: &mut watch::Receiver<Link>, session: u64) {
    // Nobody is left who could tell: it is no more, either.
    let _ = link.wait_for(|link| link.session != session).await;
}

/// A command that runs or ran.
#[derive(Debug)]
pub(super) struct Job {
    /// What it did, once it has ended.
    pub(super) ran: watch::Sender<Option<Ran>>,
    pub(super) running: Option<AbortHandle>,
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) link: watch::Sender<Link>,
    pub(super) paused: bool,
    boot: String,
    booted: f64,
    agent_started: f64,
    pub(super) files: Files,
    pub(super) jobs: BTreeMap<CommandKey, Job>,
    /// What ran when the agent ended.
    pub(super) lost: BTreeSet<CommandKey>,
    /// How often each command line was started.
    pub(super) executions: BTreeMap<String, u64>,
    /// How many transfers were begun.
    pub(super) transfers: u64,
}

impl Guest {
    pub(super) fn new(name: &str) -> Self {
        Self {
            link: watch::Sender::default(),
            paused: false,
            boot: String::new(),
            booted: 0.0,
            agent_started: 0.0,
            files: Files::new(name),
            jobs: BTreeMap::new(),
            lost: BTreeSet::new(),
            executions: BTreeMap::new(),
            transfers: 0,
        }
    }

    /// Starts the guest, again or for the first time: what ran is no more, and is forgotten.
    pub(super) fn boot(&mut self) {
        self.jobs.clear();
        self.lost.clear();
        self.boot = Uuid::new_v4().to_string();
        self.booted = now();
        self.connect();
    }

    /// Starts the agent again: what ran is no more, but what ended is remembered unless the agent is one that does not.
    pub(super) fn restart_agent(&mut self, forgetful: bool) {
        let Self { jobs, lost, .. } = self;
        jobs.retain(|key, job| {
            let stays = !forgetful && job.ran.borrow().is_some();
            if !stays {
                lost.insert(*key);
            }
            stays
        });
        self.connect();
    }

    fn connect(&mut self) {
        self.agent_started = now();
        self.link.send_modify(|link| *link = Link { session: link.session + 1, ready: false, ..*link });
    }

    pub(super) fn set_deaf(&self, silent: bool) {
        let deaf = silent || self.paused;
        self.link.send_if_modified(|link| std::mem::replace(&mut link.deaf, deaf) != deaf);
    }

    pub(super) fn is_on(&self) -> bool {
        !self.boot.is_empty()
    }

    /// The machine was switched off: the files stay.
    pub(super) fn switch_off(&mut self) {
        self.jobs.clear();
        self.boot.clear();
        self.paused = false;
        self.link.send_modify(|link| *link = Link { session: link.session + 1, ..Link::default() });
    }

    pub(super) fn report(&self, forgetful: bool) -> GuestReport {
        let link = *self.link.borrow();
        let state = match link {
            Link { ready: false, .. } => return GuestReport::default(),
            Link { deaf: true, .. } => AgentState::Unresponsive,
            Link { .. } => AgentState::Ready,
        };
        GuestReport {
            state,
            agent_start_time: Some(self.agent_started),
            system_boot_time: Some(self.booted),
            boot: Some(self.boot.clone()),
            version: Some(if forgetful { "0.4.1".into() } else { env!("CARGO_PKG_VERSION").into() }),
        }
    }

    /// Whether a command that may have been sent during `boot` can be gone on with.
    pub(super) fn require_known(
        &self,
        key: CommandKey,
        boot: &str,
        forgetful: bool,
    ) -> Result<(), GuestError> {
        if boot != self.boot {
            return Err(GuestError::Restarted("the guest was restarted".into()));
        }
        if forgetful {
            return Err(GuestError::Forgetful);
        }
        if self.lost.contains(&key) {
            return Err(GuestError::Restarted("the agent was restarted".into()));
        }
        if self.jobs.contains_key(&key) { Ok(()) } else { Err(GuestError::Unknown) }
    }

    pub(super) fn count(&mut self, line: &str) {
        if self.executions.len() < MOST_LINES || self.executions.contains_key(line) {
            *self.executions.entry(line.to_owned()).or_default() += 1;
        }
    }

    /// Says what a command did.
    pub(super) fn end(&self, key: CommandKey, ran: Ran) {
        if let Some(job) = self.jobs.get(&key) {
            job.ran.send_replace(Some(ran));
        }
    }
}

/// The result of a command, as an agent answers it.
pub(super) fn executed(ran: &Ran, forgetful: bool) -> CommandResult {
    let output = |bytes: &Vec<u8>| {
        let kept = kept(bytes);
        if forgetful || kept.len() <= SHORT {
            return CommandOutput::Here(Bytes::copy_from_slice(kept));
        }
        CommandOutput::There { size: kept.len() as u64, cut: kept.len() < bytes.len() }
    };
    CommandResult { return_code: ran.code, stdout: output(&ran.stdout), stderr: output(&ran.stderr) }
}

/// What an agent keeps of an output.
pub(super) fn kept(output: &[u8]) -> &[u8] {
    &output[..output.len().min(shell::MOST)]
}
