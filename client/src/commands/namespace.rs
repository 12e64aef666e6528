//! `muster namespace`.

use clap::Subcommand;
use muster_types::key::Secret;
use muster_types::namespace::NamespaceRecord;
use muster_types::object::ObjectType;

use super::arguments::{given_or_prompted, parse_secret};
use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::Session;
use super::wait::WaitOptions;
use crate::api::{ListQuery, ObjectPath};
use crate::exit_code::timed_out;
use crate::output::{Table, compact, or_dash};

const LIST: ListView<NamespaceRecord> =
    ListView { table, wide: &["version"], order: &[], watched: &[ObjectType::Namespace] };

/// Commands for namespaces.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the accessible namespaces
    List {
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a namespace
    Show { name: String },
    /// Create a namespace, optionally with a first key
    Create {
        name: String,
        /// Name of the first key
        #[arg(long, requires = "key")]
        key_name: Option<String>,
        /// Secret of the first key, or - to be prompted for it
        #[arg(long, value_name = "SECRET", requires = "key_name", value_parser = parse_secret)]
        key: Option<Secret>,
        /// Check the request without creating anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Delete a namespace
    Delete {
        name: String,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Show the metadata of a namespace
    Metadata { name: String },
    /// Set a metadata key of a namespace
    SetMetadata {
        name: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a namespace
    DeleteMetadata {
        name: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.namespaces(&query)).await
        }
        Command::Show { name } => session.show(client.namespace(&name).await?, details),
        Command::Create { name, key_name, key, dry_run } => {
            let key =
                key.map(|key| given_or_prompted(key, key_name.as_deref().unwrap_or_default())).transpose()?;
            let first_key = key_name.as_deref().zip(key.as_ref());
            let response = client.with_dry_run(dry_run).create_namespace(&name, first_key).await?;
            session.show_created(response, dry_run, details)
        }
        Command::Delete { name, wait } => {
            let response = client.delete_namespace(&name).await?;
            wait_until_clean(session, &name, wait).await?;
            session.confirm(&response, &format!("namespace {name} deleted"))
        }
        Command::Metadata { name } => metadata::show(session, ObjectPath::Namespace(&name)).await,
        Command::SetMetadata { name, item } => {
            metadata::set(session, ObjectPath::Namespace(&name), &item).await
        }
        Command::DeleteMetadata { name, item } => {
            metadata::delete(session, ObjectPath::Namespace(&name), &item).await
        }
    }
}

/// Waits until the operations on a namespace have ended: the one that removes its objects is among them.
async fn wait_until_clean(session: &Session, name: &str, wait: WaitOptions) -> anyhow::Result<()> {
    let Some(mut timer) = wait.timer() else { return Ok(()) };
    loop {
        let operations =
            session.client.operations("namespace", name, &ListQuery::default()).await?.value()?;
        if operations.iter().all(|operation| operation.state.is_final()) {
            return Ok(());
        }
        if !timer.wait_for(&format!("namespace {name} to be deleted")).await {
            return Err(timed_out(format!(
                "timed out; the deletion continues: see `muster operation list --target-type namespace --target {name}`"
            )));
        }
    }
}

fn table(namespaces: Vec<NamespaceRecord>) -> Table {
    Table::new(&["NAME", "STATE"], &["KEYS", "TRUSTS"]).rows(namespaces.into_iter().map(|namespace| {
        let keys = or_dash(namespace.keys.join(", "));
        [namespace.name, namespace.state.to_string(), keys, namespace.trust.full.join(", ")]
    }))
}

fn details(namespace: NamespaceRecord) -> Table {
    let metadata = namespace.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let details = [
        ("name", namespace.name),
        ("state", namespace.state.to_string()),
        ("keys", or_dash(namespace.keys.join(", "))),
        ("trusts", namespace.trust.full.join(", ")),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(metadata))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn example() -> Value {
        json!({ "name": "ci", "state": "created", "version": 7, "metadata": { "size": 7 }, "keys": ["deploy", "test"],
                "trust": { "full": ["system", "other"] }, "of_a_newer_server": true })
    }

    #[test]
    fn lists_namespaces() {
        let text = table(from_value(json!([example()])).unwrap()).render(None);
        assert_eq!(text, "NAME  STATE    KEYS          TRUSTS\nci    created  deploy, test  system, other\n");
    }

    #[test]
    fn shows_the_metadata_of_a_namespace() {
        let text = details(from_value(example()).unwrap()).render(None);
        assert!(
            text.contains("trusts         system, other\n") && text.contains("metadata size  7\n"),
            "{text}"
        );
    }
}
