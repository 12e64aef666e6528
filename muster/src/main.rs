//! The executable: settings, wiring, signals and subcommands.

mod config;
mod database;
mod logging;
mod metrics;
mod serve;
mod state;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// A private cloud in one program
#[derive(Debug, Parser)]
#[command(name = "muster", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    options: muster_client::Options,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run this host as a node of a cluster, or as a single-node cluster
    Serve(serve::Arguments),
    /// Show all settings with their values and sources
    Config(config::Arguments),
    /// Maintain the database
    #[command(subcommand)]
    Db(database::Command),
    /// Print a shell completion script
    Completion { shell: clap_complete::Shell },
    #[command(flatten)]
    Client(muster_client::Command),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            // The whole error chain in one line.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output. A closed pipe is not an error.
fn print(text: &[u8]) -> anyhow::Result<()> {
    use std::io::Write as _;
    match std::io::stdout().write_all(text) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    if let Command::Completion { shell } = cli.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "muster", &mut script);
        return print(&script).map(|()| ExitCode::SUCCESS);
    }
    if matches!(cli.command, Command::Serve(_) | Command::Db(_)) {
        // Files of the daemon are accessible only to its own user.
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    }
    if let Command::Config(arguments) = &cli.command {
        return config::show(arguments, cli.options.json).map(|()| ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Command::Client(command) => return muster_client::run(command, cli.options).await,
            Command::Serve(arguments) => serve::run(arguments).await?,
            Command::Db(command) => database::run(command).await?,
            Command::Config(_) | Command::Completion { .. } => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}
