//! The commands of the command line, one file per noun. They only call the API and print; the server enforces the rules.

mod agent;
mod agent_wait;
mod api_call;
#[cfg(test)]
mod api_coverage;
mod apply;
mod arguments;
mod artifact;
mod artifact_tables;
mod artifact_transfer;
mod blob;
mod claim;
mod cluster;
pub mod complete;
mod console;
mod cp;
mod event_follower;
mod event_log;
mod events;
mod examples;
mod exec;
mod exec_stdin;
mod exec_terminal;
mod federated_login;
mod guest_facts;
mod identity_token;
mod instance;
mod instance_create;
mod instance_history;
mod instance_log;
mod instance_migrate;
mod instance_refusal;
mod instance_snapshot;
mod instance_specs;
mod instance_tables;
mod instance_vdi;
mod interface;
mod issuer;
mod key;
mod label;
mod list;
mod login;
mod lookup;
mod metadata;
mod namespace;
mod network;
mod network_diagram;
pub mod node;
mod node_drain;
mod node_join;
mod operation;
mod profile;
mod quota;
mod rebalance;
mod rule;
mod session;
mod ssh;
mod suggestion;
#[cfg(test)]
mod tests;
mod top;
mod trust;
mod ui;
mod wait;
mod webhook;
mod whoami;
mod why;

use std::process::ExitCode;

use clap::Subcommand;
use futures_util::future::LocalBoxFuture;

pub use self::examples::with_examples;
pub use self::session::Options;
use self::session::Session;
use crate::exit_code::{Outcome, error_with_outcome};

/// The commands that call the API.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Save the credentials for a cluster
    Login(login::Arguments),
    /// Delete the credentials saved by `login`
    Logout,
    /// Manage profiles: credentials for several clusters
    #[command(subcommand)]
    Profile(profile::Command),
    /// Show which cluster, namespace and key the commands use
    Whoami,
    /// Make the cluster contain the objects that files describe
    Apply(apply::Arguments),
    /// Send any request to the API and print the response
    Api(api_call::Arguments),
    /// Print the URL of the web UI, valid for one login within a minute
    Ui,
    /// Manage namespaces, the tenants of the cluster
    #[command(subcommand)]
    Namespace(namespace::Command),
    /// Manage the keys of a namespace
    #[command(subcommand)]
    Key(key::Command),
    /// Manage which namespaces a namespace trusts
    #[command(subcommand)]
    Trust(trust::Command),
    /// Manage trusted issuers of identity tokens
    #[command(subcommand)]
    Issuer(issuer::Command),
    /// Manage rules that map identity tokens to keys
    #[command(subcommand)]
    Rule(rule::Command),
    /// Manage webhooks, to which the events of a namespace are sent
    #[command(subcommand)]
    Webhook(webhook::Command),
    /// Manage capacity claims of namespaces
    #[command(subcommand)]
    Claim(claim::Command),
    /// Manage quotas of namespaces
    #[command(subcommand)]
    Quota(quota::Command),
    /// Show the cluster as a whole
    #[command(subcommand)]
    Cluster(cluster::Command),
    /// Manage the nodes of the cluster
    #[command(subcommand)]
    Node(node::Command),
    /// Manage virtual networks
    #[command(subcommand)]
    Network(network::Command),
    /// Manage instances
    #[command(subcommand)]
    Instance(instance::Command),
    /// Show which nodes and instances are busy
    Top(top::Arguments),
    /// Open an SSH session to an instance
    Ssh(ssh::Arguments),
    /// Open the serial console of an instance
    Console(console::Arguments),
    /// Explain why an instance or a network is in its state, and what to do
    Why {
        /// Name or id of an instance, or else of a network
        #[arg(value_name = "OBJECT")]
        reference: String,
    },
    /// Run a command in an instance
    Exec(exec::Arguments),
    /// Copy a file to or from an instance
    Cp(cp::Arguments),
    /// Manage agent operations, which run inside instances
    #[command(subcommand)]
    Agent(agent::Command),
    /// Manage network interfaces
    #[command(subcommand)]
    Interface(interface::Command),
    /// Manage artifacts: images and other content with versions
    #[command(subcommand)]
    Artifact(artifact::Command),
    /// Manage labels, which are names for content
    #[command(subcommand)]
    Label(label::Command),
    /// Manage blobs, the deduplicated content of artifacts
    #[command(subcommand)]
    Blob(blob::Command),
    /// Show the events of an object, newest first, or follow those of the cluster
    Events(events::Arguments),
    /// Show operations: queued and completed work
    #[command(subcommand)]
    Operation(operation::Command),
}

/// Runs a command and returns the exit code of the program. Errors are one line. Boxed, so that the commands are compiled
/// with this crate and not again with its caller.
pub fn run(command: Command, options: Options) -> LocalBoxFuture<'static, anyhow::Result<ExitCode>> {
    Box::pin(run_with_suggestion(command, options))
}

/// Runs a command, and adds a similar name to the error if an object was not found by its name.
async fn run_with_suggestion(command: Command, options: Options) -> anyhow::Result<ExitCode> {
    let error = match dispatch(command, options.clone()).await {
        Ok(code) => return Ok(code),
        Err(error) => error,
    };
    // Only objects are looked up, so the credentials are valid.
    if !matches!(Outcome::of(&error), Outcome::NotFound) {
        return Err(error);
    }
    let Ok(client) = options.client() else { return Err(error) };
    Err(match suggestion::similar_name(&client, &error).await {
        Some(name) => error_with_outcome(Outcome::NotFound, format!("{error:#}; did you mean {name}?")),
        None => error,
    })
}

async fn dispatch(command: Command, options: Options) -> anyhow::Result<ExitCode> {
    match command {
        Command::Login(arguments) => login::log_in(arguments, options).await?,
        Command::Logout => login::log_out(&options)?,
        Command::Profile(command) => profile::run(command, options).await?,
        Command::Whoami => whoami::run(&Session::new(options)?).await?,
        Command::Apply(arguments) => return apply::run(arguments, &Session::new(options)?).await,
        Command::Api(arguments) => api_call::run(&Session::new(options)?, arguments).await?,
        Command::Ui => ui::run(&Session::new(options)?).await?,
        Command::Namespace(command) => namespace::run(command, &Session::new(options)?).await?,
        Command::Key(command) => key::run(command, &Session::new(options)?).await?,
        Command::Trust(command) => trust::run(command, &Session::new(options)?).await?,
        Command::Issuer(command) => issuer::run(command, &Session::new(options)?).await?,
        Command::Rule(command) => rule::run(command, &Session::new(options)?).await?,
        Command::Webhook(command) => webhook::run(command, &Session::new(options)?).await?,
        Command::Claim(command) => claim::run(command, &Session::new(options)?).await?,
        Command::Quota(command) => quota::run(command, &Session::new(options)?).await?,
        Command::Cluster(command) => cluster::run(command, &Session::new(options)?).await?,
        Command::Node(node::Command::Join(arguments)) => node_join::run(arguments).await?,
        Command::Node(command) => node::run(command, &Session::new(options)?).await?,
        Command::Network(command) => network::run(command, &Session::new(options)?).await?,
        Command::Instance(command) => instance::run(command, &Session::new(options)?).await?,
        Command::Top(arguments) => top::run(arguments, &Session::new(options)?).await?,
        Command::Ssh(arguments) => {
            let credentials = options.credentials.clone();
            ssh::run(arguments, credentials, &Session::new(options)?).await?;
        }
        Command::Console(arguments) => console::run(arguments, &Session::new(options)?).await?,
        Command::Why { reference } => why::run(&Session::new(options)?, &reference).await?,
        Command::Exec(arguments) => return Ok(exec::run(arguments, &Session::new(options)?).await.into()),
        Command::Cp(arguments) => return cp::run(arguments, &Session::new(options)?).await,
        Command::Agent(command) => agent::run(command, &Session::new(options)?).await?,
        Command::Interface(command) => interface::run(command, &Session::new(options)?).await?,
        Command::Artifact(command) => artifact::run(command, &Session::new(options)?).await?,
        Command::Label(command) => label::run(command, &Session::new(options)?).await?,
        Command::Blob(command) => blob::run(command, &Session::new(options)?).await?,
        Command::Events(arguments) => events::run(arguments, &Session::new(options)?).await?,
        Command::Operation(command) => operation::run(command, &Session::new(options)?).await?,
    }
    Ok(ExitCode::SUCCESS)
}
