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
    Add { namespace: String, other: String },
    /// Stop trusting another namespace
    Remove { namespace: String, other: String },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    let response = match command {
        Command::List { namespace } => client.namespace(&namespace).await?,
        Command::Add { namespace, other } => client.add_trust(&namespace, &other).await?,
        Command::Remove { namespace, other } => client.remove_trust(&namespace, &other).await?,
    };
    session.show(trusted(&response)?, table)
}

fn trusted(response: &ApiResponse<NamespaceRecord>) -> anyhow::Result<ApiResponse<Vec<String>>> {
    response.part("/trust/full").context("the response does not contain the trusted namespaces")
}

fn table(names: Vec<String>) -> Table {
    Table::new(&["TRUSTS"], &[]).rows(names.into_iter().map(|name| [name]))
}
