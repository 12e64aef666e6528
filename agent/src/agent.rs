//! Dispatches requests. Nothing here blocks: the port is read while earlier requests are still in progress.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use muster_agent::mode::{FileMode, Radix};
use muster_agent::packet::{self, Request};
use muster_agent::{FEATURE_MEMORY, FEATURE_PIECES, FEATURE_TERMINAL};
use serde_json::{Value, json};

use crate::commands::Commands;
use crate::facts;
use crate::get_file::GetTransfers;
use crate::os::{error_text, spawn_thread};
use crate::outbox::{Outbox, Responder};
use crate::port::Port;
use crate::put_file::PutTransfers;
use crate::spool::{Outcome, Spool};
use crate::terminal::Terminals;

/// The extensions of this agent.
const FEATURES: [&str; 3] = [FEATURE_MEMORY, FEATURE_PIECES, FEATURE_TERMINAL];
/// The maximum number of short requests that run concurrently.
const MAX_SHORT_REQUESTS: usize = 32;

pub(crate) struct Agent {
    outbox: Arc<Outbox>,
    commands: Arc<Commands>,
    puts: PutTransfers,
    gets: Arc<GetTransfers>,
    terminals: Arc<Terminals>,
    short_requests: Arc<AtomicUsize>,
    boot_id: String,
}

impl Agent {
    pub(crate) fn new(
        outbox: Arc<Outbox>,
        spool: Spool,
        remembered: Vec<(String, Outcome)>,
        boot_id: String,
    ) -> Self {
        let spool = Arc::new(spool);
        Self {
            outbox,
            commands: Arc::new(Commands::new(Arc::clone(&spool), remembered)),
            puts: PutTransfers::new(spool),
            gets: Arc::default(),
            terminals: Arc::default(),
            short_requests: Arc::default(),
            boot_id,
        }
    }

    /// Starts a connection. Its first packet is `agent-start`.
    pub(crate) fn connect(&self, port: &Arc<Port>) {
        let start = json!({
            "command": "agent-start", "message": concat!("version ", env!("CARGO_PKG_VERSION")),
            "system_boot_time": facts::boot_time(), "boot-id": self.boot_id,
            "features": FEATURES, "unique": new_unique(),
        });
        self.outbox.enqueue_or_drop(self.outbox.connection(), &start);
        self.outbox.connect(port);
    }

    /// Ends the connection: aborts transfers and terminals, and drops replies. Commands continue.
    pub(crate) fn disconnect(&self) {
        self.outbox.disconnect();
        self.puts.abort_all();
        self.gets.abort_all();
        self.terminals.abort_all();
    }

    /// Handles a packet, or starts to.
    pub(crate) fn handle(&self, body: &[u8]) {
        let (unique, request) = packet::parse(body);
        let responder =
            Responder { outbox: Arc::clone(&self.outbox), connection: self.outbox.connection(), unique };
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                if let Some(error) = error {
                    responder.reply(error.to_reply(&responder.unique));
                }
                return;
            }
        };
        match request {
            Request::Ping => responder.reply(json!({ "command": "pong" })),
            Request::Pong => {}
            Request::Execute(execute) => self.commands.execute(responder, execute),
            Request::ReadOutput { key, stream, offset, length } => {
                self.commands.read_output(&responder, &key, stream, offset, length);
            }
            Request::Cancel { key } => self.commands.cancel(responder, &key),
            Request::Forget { key } => self.commands.forget(&responder, &key),
            Request::PutFile(put) => self.puts.receive(&responder, put),
            Request::GetFile { path, window } => self.gets.start(&responder, &path, window),
            Request::GetFileMore { offset } => self.gets.acknowledge(&responder.unique, offset),
            Request::Abandon => {
                self.puts.abort(&responder.unique);
                self.gets.abort(&responder.unique);
                self.terminals.abort(&responder.unique);
            }
            Request::Terminal(request) => self.terminals.open(&responder, &request),
            Request::TerminalInput { bytes } => self.terminals.input(&responder.unique, &bytes),
            Request::TerminalMore { offset } => self.terminals.acknowledge(&responder.unique, offset),
            Request::TerminalResize { rows, columns } => {
                self.terminals.resize(&responder.unique, rows, columns);
            }
            Request::IsSystemRunning => {
                let boot_id = self.boot_id.clone();
                self.run_short(&responder, move || {
                    let (result, message) = facts::system_state();
                    Ok(json!({
                        "command": "is-system-running-response", "result": result, "message": message,
                        "system_boot_time": facts::boot_time(), "boot-id": boot_id,
                        "features": FEATURES,
                    }))
                });
            }
            Request::GatherFacts => self.run_short(&responder, || {
                Ok(json!({ "command": "gather-facts-response", "result": facts::gather() }))
            }),
            Request::ChangeMode { path, mode } => self.run_short(&responder, move || {
                change_mode(&path, &mode)?;
                Ok(json!({ "command": "chmod-response", "path": path }))
            }),
            Request::ChangeOwner { path, user, group } => self.run_short(&responder, move || {
                change_owner(&path, user.as_deref(), group.as_deref())?;
                Ok(json!({ "command": "chown-response", "path": path }))
            }),
        }
    }

    /// Runs a short request on its own thread, because even a short one may block on a slow disk.
    fn run_short(
        &self,
        responder: &Responder,
        work: impl FnOnce() -> Result<Value, String> + Send + 'static,
    ) {
        if self.short_requests.fetch_add(1, Ordering::Relaxed) >= MAX_SHORT_REQUESTS {
            self.short_requests.fetch_sub(1, Ordering::Relaxed);
            return responder.reply_error("too many concurrent requests");
        }
        let (short_requests, thread_responder) = (Arc::clone(&self.short_requests), responder.clone());
        let thread = spawn_thread(move || {
            match work() {
                Ok(packet) => thread_responder.reply(packet),
                Err(message) => thread_responder.reply_error(&message),
            }
            short_requests.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = thread {
            self.short_requests.fetch_sub(1, Ordering::Relaxed);
            responder.reply_error(&format!("failed to start a thread: {error}"));
        }
    }
}

/// Returns the last packet of an agent that is stopped.
pub(crate) fn stop_packet() -> Value {
    json!({ "command": "agent-stop", "system_boot_time": facts::boot_time(), "unique": new_unique() })
}

/// Returns a `unique` for a packet that is not a reply.
fn new_unique() -> String {
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    time.expect("Linux refuses to set the clock before 1970").as_secs_f64().to_string()
}

fn change_mode(path: &str, text: &str) -> Result<(), String> {
    let with_path = |error: io::Error| format!("{path}: {}", error_text(&error));
    let metadata = fs::metadata(path).map_err(with_path)?;
    // Decimal, as every number of the protocol.
    let mode = FileMode::parse(text, Radix::Decimal).ok_or_else(|| format!("invalid mode: {text}"))?;
    let mode = mode.apply(metadata.permissions().mode(), metadata.is_dir());
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(with_path)
}

fn change_owner(path: &str, user: Option<&str>, group: Option<&str>) -> Result<(), String> {
    let resolve = |database: &str, kind: &str, name: &str| {
        let lookup = || fs::read_to_string(database).ok().and_then(|text| find_id(&text, name));
        name.parse().ok().or_else(lookup).ok_or_else(|| format!("no such {kind}: {name}"))
    };
    let user = user.map(|name| resolve("/etc/passwd", "user", name));
    let group = group.map(|name| resolve("/etc/group", "group", name));
    std::os::unix::fs::chown(path, user.transpose()?, group.transpose()?)
        .map_err(|error| format!("{path}: {}", error_text(&error)))
}

/// Returns the ID of a user or group in the text of `/etc/passwd` or `/etc/group`. A static program cannot use the
/// name service of the C library.
fn find_id(text: &str, name: &str) -> Option<u32> {
    let mut rows = text.lines().map(|line| line.split(':'));
    rows.find_map(|mut row| if row.next() == Some(name) { row.nth(1)?.parse().ok() } else { None })
}
