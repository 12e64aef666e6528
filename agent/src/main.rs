//! `muster-agent`: runs inside a guest and serves the requests of its host over a serial port.
//!
//! ```text
//!  main ─> serve ─> agent ─> commands, put_file, get_file, terminal, facts
//!                               └─> outbox ─> port
//!                               └─> spool ─> process ─> output_file
//! ```
//!
//! Imports go only in the direction of the arrows; `os` is used by all of them.

mod agent;
mod commands;
mod facts;
mod get_file;
mod os;
mod outbox;
mod output_file;
mod port;
mod process;
mod put_file;
mod serve;
mod spool;
mod terminal;

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

use agent::Agent;
use outbox::Outbox;
use spool::Spool;

const USAGE: &str = "usage: muster-agent [--port PATH] [--spool DIRECTORY] [--version]

Runs commands, transfers files and reports facts for the host of this guest.

  --port PATH        the serial port, or a Unix socket to connect to (default: /dev/virtio-ports/sf-agent)
  --spool DIRECTORY  where results of commands are kept until the next boot (default: /run/muster-agent)
  --version          print the version";

/// How long the agent waits on exit for `agent-stop` to be written.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

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
            (process::SHELL_OPTION, Some(line)) => {
                let Err(error) = terminal::run_shell(&line);
                eprintln!("failed to start the shell: {error}");
                return ExitCode::from(126);
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

fn run(port: &Path, spool_directory: &Path) -> io::Result<Infallible> {
    // Blocked before the first thread starts: threads inherit the mask, so only the signal thread receives these.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;

    let boot_id = facts::boot_id();
    let (spool, remembered) = Spool::open(spool_directory, &boot_id)?;
    std::env::set_current_dir("/")?;
    let outbox = Arc::new(Outbox::default());
    let agent = Agent::new(Arc::clone(&outbox), spool, remembered, boot_id);

    let shutdown_outbox = Arc::clone(&outbox);
    os::spawn_thread(move || {
        while !matches!(signals.wait(), Ok(Signal::SIGTERM | Signal::SIGINT)) {}
        shutdown_outbox.enqueue_or_drop(shutdown_outbox.connection(), &agent::stop_packet());
        shutdown_outbox.flush(SHUTDOWN_GRACE);
        std::process::exit(0);
    })?;
    os::spawn_thread(move || outbox.run())?;
    serve::run(port, &agent)
}
