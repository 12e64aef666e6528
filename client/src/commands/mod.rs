//! The commands of the command line, one file per noun. They only call the API and print; the server enforces the rules.

mod agent;
mod agent_wait;
#[cfg(test)]
mod api_coverage;
mod api_call;
mod arguments;
mod artifact;
mod artifact_tables;
mod artifact_transfer;
mod blob;
mod claim;
mod cluster;
mod console;
mod cp;
mod events;
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
mod interface;
mod issuer;
mod key;
mod label;
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
mod quota;
mod rebalance;
mod rule;
mod session;
#[cfg(test)]
mod tests;
mod trust;
mod ui;
mod wait;
mod webhook;
mod whoami;
mod why;

use std::process::ExitCode;

use clap::Subcommand;
use futures_util::future::LocalBoxFuture;

pub use self::session::Options;
use self::session::Session;

/// The commands that call the API.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Save the credentials for a cluster
    Login(login::Arguments),
    /// Delete the credentials saved by `login`
    Logout,
    /// Show which cluster, namespace and key the commands use
    Whoami,
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
    /// Show the events of an object, newest first
    #[command(subcommand)]
    Events(events::Command),
    /// Show operations: queued and completed work
    #[command(subcommand)]
    Operation(operation::Command),
}

/// Runs a command and returns the exit code of the program. Errors are one line. Boxed, so that the commands are compiled
/// with this crate and not again with its caller.
pub fn run(command: Command, options: Options) -> LocalBoxFuture<'static, anyhow::Result<ExitCode>> {
    Box::pin(dispatch(command, options))
}

async fn dispatch(command: Command, options: Options) -> anyhow::Result<ExitCode> {
    match command {
        Command::Login(arguments) => login::log_in(arguments, options).await?,
        Command::Logout => login::log_out(options)?,
        Command::Whoami => whoami::run(&Session::new(options)?).await?,
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
        Command::Console(arguments) => console::run(arguments, &Session::new(options)?).await?,
        Command::Why { reference } => why::run(&Session::new(options)?, &reference).await?,
        Command::Exec(arguments) => return Ok(exec::run(arguments, &Session::new(options)?).await.into()),
        Command::Cp(arguments) => return cp::run(arguments, &Session::new(options)?).await,
        Command::Agent(command) => agent::run(command, &Session::new(options)?).await?,
        Command::Interface(command) => interface::run(command, &Session::new(options)?).await?,
        Command::Artifact(command) => artifact::run(command, &Session::new(options)?).await?,
        Command::Label(command) => label::run(command, &Session::new(options)?).await?,
        Command::Blob(command) => blob::run(command, &Session::new(options)?).await?,
        Command::Events(command) => events::run(command, &Session::new(options)?).await?,
        Command::Operation(command) => operation::run(command, &Session::new(options)?).await?,
    }
    Ok(ExitCode::SUCCESS)
}
