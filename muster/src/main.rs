//! The executable: settings, wiring, signals and subcommands.

mod config;
mod database;
mod logging;
mod memory;
mod metrics;
mod node_port;
mod serve;
mod state;

use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use muster_client::Command as ClientCommand;
use muster_client::commands::node;

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
    if let Some(code) = muster_node::run_watchdog(std::env::args_os()) {
        return code;
    }
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

/// Gives the nodes of a data directory new ids, or lets a directory that was moved to this host keep them.
async fn adopt(data_dir: &Path, moved: bool) -> anyhow::Result<()> {
    let data = state::DataDir::open(data_dir).await?;
    if moved {
        data.mark_moved()?;
        eprintln!(
            "{} keeps its nodes at the next start. The host that it comes from must stay off: its VMs would run twice",
            data.path().display()
        );
        return Ok(());
    }
    data.replace_node_ids()?;
    eprintln!(
        "{} joins as a new node at the next start: set NODE_NAME if another node has the name of this host, and remove \
         NODE_UUID from the settings",
        data.path().display()
    );
    Ok(())
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
    let is_adoption =
        matches!(cli.command, Command::Client(ClientCommand::Node(node::Command::Adopt { .. })));
    if is_adoption || matches!(cli.command, Command::Serve(_) | Command::Db(_)) {
        // Files of the daemon are accessible only to its own user.
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    }
    if let Command::Config(arguments) = &cli.command {
        return config::show(arguments, cli.options.json).map(|()| ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Command::Client(ClientCommand::Node(node::Command::Adopt { data_dir, moved })) => {
                adopt(&data_dir, moved).await?;
            }
            Command::Client(command) => return muster_client::run(command, cli.options).await,
            Command::Serve(arguments) => serve::run(arguments).await?,
            Command::Db(command) => database::run(command).await?,
            Command::Config(_) | Command::Completion { .. } => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}
