//! Interactive sessions in guests. They are not queued as operations and do not survive the daemon: a session belongs to the
//! connection of its client. See docs/decisions/0044.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_types::event::Event;
use muster_types::guest::{GuestError, GuestTerminal};
use muster_types::ids::InstanceId;
use muster_types::node::NodeApi;
use muster_types::terminal::TerminalRequest;
use muster_types::{Error, Result};

use super::{MAX_COMMAND_LINE_BYTES, check_text, guest_error, require_ready};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_request;
use crate::objects::instance;
use crate::state::SessionPermit;
use muster_store::instances::InstanceRow;

/// The maximum length of a terminal type.
const MAX_TERM_LENGTH: usize = 64;
/// The maximum length of a command line in an event, in characters.
const MAX_RECORDED_COMMAND: usize = 1024;
/// How long an agent may take to open a terminal.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// A session that was opened, and what its end is recorded with.
#[derive(Debug)]
pub struct TerminalSession {
    app: Arc<App>,
    caller: Caller,
    instance: InstanceId,
    command_line: String,
    started: Instant,
    _permit: SessionPermit,
}

/// Checks the parameters of a session.
pub fn check(request: &TerminalRequest) -> Result<()> {
    check_text("command_line", &request.command_line, MAX_COMMAND_LINE_BYTES)?;
    check_text("term", &request.term, MAX_TERM_LENGTH)?;
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte);
    if !request.term.bytes().all(is_name) {
        return Err(Error::Invalid("term: must consist of letters, digits, and the characters -_.+".into()));
    }
    Ok(())
}

/// Runs a command with a terminal in an instance that the caller may change. Call it on the daemon of the instance's node.
pub async fn open(
    app: &Arc<App>,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    request: &TerminalRequest,
) -> Result<(GuestTerminal, TerminalSession)> {
    require_ready(row)?;
    check(request)?;
    let permit = app.terminal_sessions.acquire(&caller.namespace)?;
    let opened = tokio::time::timeout(OPEN_TIMEOUT, node.guests().terminal(row.id, request)).await;
    let unresponsive = || GuestError::Unreachable("the agent of the instance does not respond".into());
    let terminal = opened.unwrap_or_else(|_| Err(unresponsive())).map_err(guest_error)?;
    let session = TerminalSession {
        app: Arc::clone(app),
        caller: caller.clone(),
        instance: row.id,
        command_line: request.command_line.chars().take(MAX_RECORDED_COMMAND).collect(),
        started: Instant::now(),
        _permit: permit,
    };
    session.record(session.event("interactive session started"));
    Ok((terminal, session))
}

impl TerminalSession {
    /// Ends the session. The result is the exit code, or the reason why there is none.
    pub fn end(self, result: Result<i32, String>) {
        let mut event = self.event("interactive session ended");
        event = match result {
            Ok(code) => event.with("return-code", code),
            Err(reason) => event.with("reason", reason),
        };
        event.duration = Some(self.started.elapsed().as_secs_f64());
        self.record(event);
    }

    fn event(&self, message: &str) -> Event {
        Event::audit(instance::object(self.instance), message)
            .with("caller", self.caller.namespace.clone())
            .with("command-line", self.command_line.clone())
    }

    fn record(&self, event: Event) {
        self.app.record(&self.caller, with_request(&self.caller, event));
    }
}
