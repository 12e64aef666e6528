//! The executable: settings, wiring, signals and subcommands.

mod backup;
mod config;
mod database;
mod docs;
mod doctor;
mod down;
mod forward;
mod logging;
mod memory;
mod metrics;
mod node_port;
#[cfg(test)]
mod reference;
mod rootless;
mod running;
mod serve;
mod state;
mod stdout;
mod up;

use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches as _, Parser, Subcommand};
use muster_client::Command as ClientCommand;
use muster_client::commands::complete::{Shell, candidates};
use muster_client::commands::node;

use stdout::print;

/// A private cloud in one program
#[derive(Debug, Parser)]
#[command(name = "muster", version, max_term_width = 100, after_help = muster_client::Outcome::help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    options: muster_client::Options,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a single-node cluster on this host, as root or not
    Up(up::Arguments),
    /// Stop the cluster that `up` started
    Down(down::Arguments),
    /// Make an address in the network of a cluster without root reachable at a port of this host
    Forward(forward::Arguments),
    /// Run a daemon in its own namespaces
    #[command(hide = true)]
    Rootless(rootless::Arguments),
    /// Run this host as a node of a cluster, or as a single-node cluster
    Serve(serve::Arguments),
    /// Check whether this host can run a node, and print what fixes it
    Doctor(doctor::Arguments),
    /// Write the documentation as a web site
    Docs(docs::Arguments),
    /// Show all settings with their values and sources
    Config(config::Arguments),
    /// Maintain the database
    #[command(subcommand)]
    Db(database::Command),
    /// Create and check backups of the cluster on this host
    #[command(subcommand)]
    Backup(backup::Command),
    /// Restore a backup into a new cluster
    Restore(backup::Restore),
    /// Print a shell completion script
    Completion { shell: Shell },
    /// Print the words that can follow on a command line, for the completion scripts
    #[command(name = "__complete", hide = true)]
    Complete {
        #[arg(last = true)]
        words: Vec<String>,
    },
    #[command(flatten)]
    Client(muster_client::Command),
}

fn main() -> ExitCode {
    if let Some(code) = muster_node::run_watchdog(std::env::args_os()) {
        return code;
    }
    let matches = muster_client::with_examples(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            // The whole error chain in one line.
            eprintln!("error: {error:#}");
            muster_client::Outcome::of(&error).into()
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

/// Returns the words that can follow on a command line, with names from the cluster that its options select.
async fn complete(words: &[String]) -> String {
    let candidates = candidates(Cli::command(), words);
    let client = candidates.need_client().then(|| {
        let options =
            ["muster"].into_iter().chain(candidates.options.iter().map(String::as_str)).chain(["whoami"]);
        Cli::try_parse_from(options).ok()?.options.client().ok()
    });
    candidates.lines(client.flatten().as_ref()).await
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    if let Command::Completion { shell } = cli.command {
        return print(shell.script().as_bytes()).map(|()| ExitCode::SUCCESS);
    }
    let is_adoption =
        matches!(cli.command, Command::Client(ClientCommand::Node(node::Command::Adopt { .. })));
    let is_daemon = matches!(cli.command, Command::Up(_) | Command::Rootless(_) | Command::Serve(_));
    let is_maintenance = matches!(cli.command, Command::Db(_) | Command::Backup(_) | Command::Restore(_));
    if is_adoption || is_daemon || is_maintenance {
        // Files of the daemon are accessible only to its own user.
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    }
    if let Command::Config(arguments) = &cli.command {
        return config::show(arguments, cli.options.format() == muster_client::Format::Json)
            .map(|()| ExitCode::SUCCESS);
    }
    // Before there are threads, because only a process with one thread can create a user namespace.
    if let Command::Rootless(arguments) = &cli.command {
        return rootless::run(arguments);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Command::Client(ClientCommand::Node(node::Command::Adopt { data_dir, moved })) => {
                adopt(&data_dir, moved).await?;
            }
            Command::Client(command) => return muster_client::run(command, cli.options).await,
            Command::Up(arguments) => return up::run(arguments).await,
            Command::Down(arguments) => down::run(arguments).await?,
            Command::Forward(arguments) => forward::run(arguments).await?,
            Command::Doctor(arguments) => {
                return doctor::run(arguments, cli.options.format() == muster_client::Format::Json).await;
            }
            Command::Docs(arguments) => docs::run(&arguments)?,
            Command::Serve(arguments) => serve::run(arguments).await?,
            Command::Db(command) => database::run(command).await?,
            Command::Backup(command) => {
                backup::run(command, cli.options.format() == muster_client::Format::Json).await?;
            }
            Command::Restore(arguments) => backup::restore(arguments).await?,
            Command::Complete { words } => print(complete(&words).await.as_bytes())?,
            Command::Config(_) | Command::Completion { .. } | Command::Rootless(_) => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_of_every_command_has_an_example() {
        fn check(command: &clap::Command, path: &str) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.contains("Examples:"),
                "`{path}` has no example: add one to client/src/commands/examples.rs"
            );
            let inner =
                command.get_subcommands().filter(|inner| inner.get_name() != "help" && !inner.is_hide_set());
            for inner in inner {
                check(inner, &format!("{path} {}", inner.get_name()));
            }
        }
        let root = muster_client::with_examples(Cli::command());
        root.clone().debug_assert();
        check(&root, "muster");
    }
}
