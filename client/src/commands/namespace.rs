//! `muster namespace`.

use clap::Subcommand;
use muster_types::key::Secret;
use muster_types::namespace::NamespaceRecord;

use super::{Session, given_or_asked, metadata, parse_secret};
use crate::api::Object;
use crate::output::{Table, compact, or_dash};

/// The commands about namespaces.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the namespaces that you can reach
    List,
    /// Show one namespace
    Show { name: String },
    /// Make a namespace, with a first key if one is given
    Create {
        name: String,
        /// Name of a first key
        #[arg(long, requires = "key")]
        key_name: Option<String>,
        /// Secret of the first key, or - to be asked for it
        #[arg(long, value_name = "SECRET", requires = "key_name", value_parser = parse_secret)]
        key: Option<Secret>,
    },
    /// Delete a namespace
    Delete { name: String },
    /// Show the metadata of a namespace
    Metadata { name: String },
    /// Set an item of a namespace's metadata
    SetMetadata {
        name: String,
        #[command(flatten)]
        item: metadata::Item,
    },
    /// Delete an item of a namespace's metadata
    DeleteMetadata {
        name: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List => session.show(client.namespaces().await?, table),
        Command::Show { name } => session.show(client.namespace(&name).await?, facts),
        Command::Create { name, key_name, key } => {
            let key =
                key.map(|key| given_or_asked(key, key_name.as_deref().unwrap_or_default())).transpose()?;
            let first_key = key_name.as_deref().zip(key.as_ref());
            session.show(client.create_namespace(&name, first_key).await?, facts)
        }
        Command::Delete { name } => {
            let answer = client.delete_namespace(&name).await?;
            session.done(&answer, &format!("namespace {name} deleted"))
        }
        Command::Metadata { name } => metadata::show(session, Object::Namespace(&name)).await,
        Command::SetMetadata { name, item } => metadata::set(session, Object::Namespace(&name), &item).await,
        Command::DeleteMetadata { name, item } => {
            metadata::delete(session, Object::Namespace(&name), &item).await
        }
    }
}

fn table(namespaces: Vec<NamespaceRecord>) -> Table {
    Table::new(&["NAME", "STATE"], &["KEYS", "TRUSTS"]).rows(namespaces.into_iter().map(|namespace| {
        let keys = or_dash(namespace.keys.join(", "));
        [namespace.name, namespace.state.to_string(), keys, namespace.trust.full.join(", ")]
    }))
}

fn facts(namespace: NamespaceRecord) -> Table {
    let metadata = namespace.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let facts = [
        ("name", namespace.name),
        ("state", namespace.state.to_string()),
        ("keys", or_dash(namespace.keys.join(", "))),
        ("trusts", namespace.trust.full.join(", ")),
    ];
    Table::facts(facts.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(metadata))
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
    fn namespaces_are_listed_one_a_line() {
        let text = table(from_value(json!([example()])).unwrap()).render(None);
        assert_eq!(text, "NAME  STATE    KEYS          TRUSTS\nci    created  deploy, test  system, other\n");
    }

    #[test]
    fn one_namespace_is_shown_with_its_metadata() {
        let text = facts(from_value(example()).unwrap()).render(None);
        assert!(
            text.contains("trusts         system, other\n") && text.contains("metadata size  7\n"),
            "{text}"
        );
    }
}
