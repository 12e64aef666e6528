//! `muster-agent`: runs inside a guest and does what its host asks for over a serial port.

mod agent;
mod commands;
mod facts;
mod get;
mod outbox;
mod port;
mod process;
mod put;
mod spool;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};

use agent::Agent;
use commands::Commands;
use outbox::Outbox;
use spool::Spool;

const USAGE: &str = "usage: muster-agent [--port PATH] [--spool FOLDER] [--version]

Does what the host of this machine asks for over a serial port.

  --port PATH     the port (/dev/virtio-ports/sf-agent); a socket is connected to
  --spool FOLDER  where commands are remembered until the next boot (/run/muster-agent)
  --version       says which version this is";

/// How long it is waited for a host to hear that the agent ends.
const FAREWELL: Duration = Duration::from_millis(500);

/// What went wrong, in words.
fn reason(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => Errno::from_raw(number).desc().to_owned(),
        None => error.to_string(),
    }
}

fn main() -> ExitCode {
    let mut port = PathBuf::from("/dev/virtio-ports/sf-agent");
    let mut spool = PathBuf::from("/run/muster-agent");
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), arguments.next()) {
            ("--version", None) => {
                println!("muster-agent {}", env!("CARGO_PKG_VERSION"));
                return ExitCode::SUCCESS;
            }
            ("--help" | "-h", None) => {
                println!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            ("--port", Some(path)) => port = path.into(),
            ("--spool", Some(path)) => spool = path.into(),
            _ => {
                eprintln!("{USAGE}");
                return ExitCode::from(2);
            }
        }
    }
    match run(&port, &spool) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("{}: {error}", spool.display());
            ExitCode::FAILURE
        }
    }
}

enum Never {}

fn run(port: &Path, folder: &Path) -> io::Result<Never> {
    // Before any thread is there, so that each of them leaves these signals to the one that waits for them.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;

    let boot = facts::boot_id();
    let (spool, remembered) = Spool::open(folder, &boot)?;
    std::env::set_current_dir("/")?;
    let outbox = Arc::new(Outbox::default());
    let agent = Agent::new(Arc::clone(&outbox), Commands::new(spool, remembered), boot);

    let last = Arc::clone(&outbox);
    process::start(move || {
        while !matches!(signals.wait(), Ok(Signal::SIGTERM | Signal::SIGINT)) {}
        last.say(last.connection(), &agent::farewell());
        last.drain(FAREWELL);
        std::process::exit(0);
    })?;
    process::start(move || outbox.run())?;
    port::run(port, &agent)
}
