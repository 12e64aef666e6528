//! The agent: does what a host asks for. Nothing here waits: the port is read on while anything else takes its time.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use muster_agent::packet::{self, Request};
use muster_agent::{MEMORY, PIECES, mode};
use serde_json::{Value, json};

use crate::commands::Commands;
use crate::get::Gets;
use crate::outbox::{Asker, Outbox};
use crate::port::Line;
use crate::put::Puts;
use crate::{facts, process, reason};

/// Small things that are done at a time.
const SMALL: usize = 32;

pub(crate) struct Agent {
    outbox: Arc<Outbox>,
    commands: Arc<Commands>,
    puts: Puts,
    gets: Arc<Gets>,
    small: Arc<AtomicUsize>,
    boot: String,
}

impl Agent {
    pub(crate) fn new(outbox: Arc<Outbox>, commands: Commands, boot: String) -> Self {
        let commands = Arc::new(commands);
        Self { outbox, commands, puts: Puts::default(), gets: Arc::default(), small: Arc::default(), boot }
    }

    /// A host is there: the first that it hears is who we are.
    pub(crate) fn connect(&self, line: &Arc<Line>) {
        let start = json!({
            "command": "agent-start", "message": concat!("version ", env!("CARGO_PKG_VERSION")),
            "system_boot_time": facts::boot_time(), "boot-id": self.boot, "features": [MEMORY, PIECES],
            "unique": unique(),
        });
        self.outbox.say(self.outbox.connection(), &start);
        self.outbox.connect(line);
    }

    /// The host is gone. Commands go on.
    pub(crate) fn hang_up(&self) {
        self.outbox.hang_up();
        self.puts.hang_up();
        self.gets.hang_up();
    }

    /// Does what a packet asks for, or begins to.
    pub(crate) fn handle(&self, body: &[u8]) {
        let (unique, request) = packet::read(body);
        let asker = Asker { outbox: Arc::clone(&self.outbox), connection: self.outbox.connection(), unique };
        let request = match request {
            Ok(request) => request,
            Err(fault) => {
                if let Some(fault) = fault {
                    asker.say(fault.reply(&asker.unique));
                }
                return;
            }
        };
        match request {
            Request::Ping => asker.say(json!({ "command": "pong" })),
            Request::Pong => {}
            Request::Execute(execute) => self.commands.execute(asker, execute),
            Request::ReadOutput { key, name, offset, length } => {
                self.commands.read_output(&asker, &key, name, offset, length);
            }
            Request::Cancel { key } => self.commands.cancel(asker, &key),
            Request::Forget { key } => self.commands.forget(&asker, &key),
            Request::PutFile(put) => self.puts.take(&asker, &self.commands, put),
            Request::GetFile { path, window } => self.gets.start(&asker, &path, window),
            Request::GetFileMore { offset } => self.gets.more(&asker.unique, offset),
            Request::Abandon => {
                self.puts.abandon(&asker.unique);
                self.gets.abandon(&asker.unique);
            }
            Request::IsSystemRunning => {
                let boot = self.boot.clone();
                self.aside(&asker, move || {
                    let (result, message) = facts::system_state();
                    Ok(json!({
                        "command": "is-system-running-response", "result": result, "message": message,
                        "system_boot_time": facts::boot_time(), "boot-id": boot, "features": [MEMORY, PIECES],
                    }))
                });
            }
            Request::GatherFacts => self.aside(&asker, || {
                Ok(json!({ "command": "gather-facts-response", "result": facts::gather() }))
            }),
            Request::ChangeMode { path, mode } => self.aside(&asker, move || {
                change_mode(&path, &mode)?;
                Ok(json!({ "command": "chmod-response", "path": path }))
            }),
            Request::ChangeOwner { path, user, group } => self.aside(&asker, move || {
                change_owner(&path, user.as_deref(), group.as_deref())?;
                Ok(json!({ "command": "chown-response", "path": path }))
            }),
        }
    }

    /// Does something small that may still take a while.
    fn aside(&self, asker: &Asker, work: impl FnOnce() -> Result<Value, String> + Send + 'static) {
        if self.small.fetch_add(1, Ordering::Relaxed) >= SMALL {
            self.small.fetch_sub(1, Ordering::Relaxed);
            return asker.refuse("too much is asked at once");
        }
        let (small, asker_there) = (Arc::clone(&self.small), asker.clone());
        let thread = process::start(move || {
            match work() {
                Ok(packet) => asker_there.say(packet),
                Err(message) => asker_there.refuse(&message),
            }
            small.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = thread {
            self.small.fetch_sub(1, Ordering::Relaxed);
            asker.refuse(&error.to_string());
        }
    }
}

/// What an agent says last.
pub(crate) fn farewell() -> Value {
    json!({ "command": "agent-stop", "system_boot_time": facts::boot_time(), "unique": unique() })
}

/// A name for what the agent says unasked.
fn unique() -> String {
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    time.unwrap_or_default().as_secs_f64().to_string()
}

fn change_mode(path: &str, words: &str) -> Result<(), String> {
    let told = |error: io::Error| format!("{path}: {}", reason(&error));
    let facts = fs::metadata(path).map_err(told)?;
    let mode = mode::changed(words, facts.permissions().mode(), facts.is_dir())
        .ok_or_else(|| format!("invalid mode: {words}"))?;
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(told)
}

fn change_owner(path: &str, user: Option<&str>, group: Option<&str>) -> Result<(), String> {
    let number = |file: &str, kind: &str, name: &str| {
        let known = || fs::read_to_string(file).ok().and_then(|text| number_of(&text, name));
        name.parse().ok().or_else(known).ok_or_else(|| format!("no such {kind}: {name}"))
    };
    let user = user.map(|name| number("/etc/passwd", "user", name));
    let group = group.map(|name| number("/etc/group", "group", name));
    std::os::unix::fs::chown(path, user.transpose()?, group.transpose()?)
        .map_err(|error| format!("{path}: {}", reason(&error)))
}

/// The number of a user or a group. The files are read here because a static program cannot ask the system's library.
fn number_of(text: &str, name: &str) -> Option<u32> {
    let mut rows = text.lines().map(|line| line.split(':'));
    rows.find_map(|mut row| if row.next() == Some(name) { row.nth(1)?.parse().ok() } else { None })
}
