//! `muster trust`.

use anyhow::Context as _;
use clap::Subcommand;
use muster_types::namespace::NamespaceRecord;

use super::session::Session;
use crate::api::ApiResponse;
use crate::output::Table;

/// Commands for trust between namespaces.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the namespaces that a namespace trusts
    List { namespace: String },
    /// Give another namespace access to the objects of this one
    Add {
        namespace: String,
        other: String,
        /// Check the request without changing anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Stop trusting another namespace
    Remove { namespace: String, other: String },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    let (response, is_dry_run) = match command {
        Command::List { namespace } => (client.namespace(&namespace).await?, false),
        Command::Add { namespace, other, dry_run } => {
            (client.with_dry_run(dry_run).add_trust(&namespace, &other).await?, dry_run)
        }
        Command::Remove { namespace, other } => (client.remove_trust(&namespace, &other).await?, false),
    };
    session.show_created(trusted(&response)?, is_dry_run, table)
}

fn trusted(response: &ApiResponse<NamespaceRecord>) -> anyhow::Result<ApiResponse<Vec<String>>> {
    response.part("/trust/full").context("the response does not contain the trusted namespaces")
}

fn table(names: Vec<String>) -> Table {
    Table::new(&["TRUSTS"], &[]).rows(names.into_iter().map(|name| [name]))
}
