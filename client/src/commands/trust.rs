//! `muster trust`.

use anyhow::Context as _;
use clap::Subcommand;
use muster_types::namespace::NamespaceRecord;

use super::Session;
use crate::api::Answer;
use crate::output::Table;

/// The commands about whom a namespace trusts.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List whom a namespace trusts
    List { namespace: String },
    /// Let another namespace see and use what belongs to this one
    Add { namespace: String, other: String },
    /// Stop trusting another namespace
    Remove { namespace: String, other: String },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    let answer = match command {
        Command::List { namespace } => client.namespace(&namespace).await?,
        Command::Add { namespace, other } => client.add_trust(&namespace, &other).await?,
        Command::Remove { namespace, other } => client.remove_trust(&namespace, &other).await?,
    };
    session.show(trusted(&answer)?, table)
}

fn trusted(answer: &Answer<NamespaceRecord>) -> anyhow::Result<Answer<Vec<String>>> {
    answer.part("/trust/full").context("the answer does not say whom the namespace trusts")
}

fn table(names: Vec<String>) -> Table {
    Table::new(&["TRUSTS"], &[]).rows(names.into_iter().map(|name| [name]))
}
