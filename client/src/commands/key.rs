//! `muster key`.

use clap::Subcommand;
use muster_types::key::{KeyRecord, Secret};
use muster_types::object::ObjectType;

use super::arguments::{given_or_prompted, parse_secret};
use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::{NOT_CREATED, Session};
use crate::api::{AddedKey, ObjectPath};
use crate::output::{self, Table, compact, escape_control, or_dash};
use crate::time::{format_utc, parse_expiry};

const LIST: ListView<KeyRecord> = ListView {
    table,
    wide: &["metadata"],
    order: &[],
    watched: &[ObjectType::Namespace, ObjectType::NamespaceKey],
};

/// Commands for the keys of a namespace.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List a namespace's keys, when they expire and which scopes they have
    List {
        namespace: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a key without its secret
    Show { namespace: String, name: String },
    /// Add a key or replace the one with the same name; prints a generated secret
    Add {
        namespace: String,
        name: String,
        /// Secret, or - to be prompted for it; generated if not given
        #[arg(long, value_name = "SECRET", value_parser = parse_secret)]
        key: Option<Secret>,
        /// When it expires: a duration such as 2h or 30d, or a Unix time; never if not given
        #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
        expires: Option<f64>,
        /// Check the request without creating anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Replace the secret of a key
    Update {
        namespace: String,
        name: String,
        /// New secret; prompted for if not given or -
        #[arg(long, value_name = "SECRET", value_parser = parse_secret, default_value = "-", hide_default_value = true)]
        key: Secret,
        /// When it expires: a duration such as 2h or 30d, or a Unix time; never if not given
        #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
        expires: Option<f64>,
    },
    /// Delete a key; it and its tokens become invalid immediately
    Delete { namespace: String, name: String },
    /// Show the metadata of a key
    Metadata { namespace: String, name: String },
    /// Set a metadata key of a key
    SetMetadata {
        namespace: String,
        name: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a key
    DeleteMetadata {
        namespace: String,
        name: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.key_records(&namespace, &query)).await
        }
        Command::Show { namespace, name } => session.show(client.key(&namespace, &name).await?, details),
        Command::Add { namespace, name, key, expires, dry_run } => {
            let key = key.map(|key| given_or_prompted(key, &name)).transpose()?;
            let creator = client.with_dry_run(dry_run);
            let response = creator.add_key(&namespace, &name, key.as_ref(), expires).await?;
            // A generated secret of a key that does not exist is of no use.
            if dry_run {
                return session.confirm(&response, NOT_CREATED);
            }
            if session.is_structured() {
                return session.print_value(response.json());
            }
            match response.value()? {
                AddedKey::Generated { key_name, key } => {
                    output::print(&format!("{}\n", key.expose()))?;
                    crate::message!(
                        "this is the secret of key {}; it will not be shown again",
                        escape_control(&key_name)
                    );
                }
                AddedKey::Supplied(key_name) => output::status(&format!("key {key_name} set")),
            }
            Ok(())
        }
        Command::Update { namespace, name, key, expires } => {
            let key = given_or_prompted(key, &name)?;
            let response = client.update_key(&namespace, &name, &key, expires).await?;
            session.confirm(&response, &format!("key {name} updated"))
        }
        Command::Delete { namespace, name } => {
            let response = client.delete_key(&namespace, &name).await?;
            session.confirm(&response, &format!("key {name} deleted"))
        }
        Command::Metadata { namespace, name } => {
            metadata::show(session, ObjectPath::Key(&namespace, &name)).await
        }
        Command::SetMetadata { namespace, name, item } => {
            metadata::set(session, ObjectPath::Key(&namespace, &name), &item).await
        }
        Command::DeleteMetadata { namespace, name, item } => {
            metadata::delete(session, ObjectPath::Key(&namespace, &name), &item).await
        }
    }
}

fn expires(key: &KeyRecord) -> String {
    key.expiry.map_or_else(|| "never".to_owned(), format_utc)
}

fn scopes(key: &KeyRecord) -> String {
    key.scopes.as_ref().map_or_else(|| "all".to_owned(), |scopes| or_dash(scopes.join(", ")))
}

fn table(keys: Vec<KeyRecord>) -> Table {
    let table = Table::new(&["NAME", "EXPIRES"], &["SCOPES"]);
    table.rows(keys.into_iter().map(|key| [key.key_name.clone(), expires(&key), scopes(&key)]))
}

fn details(key: KeyRecord) -> Table {
    let (expires, scopes) = (expires(&key), scopes(&key));
    let metadata = key.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let details = [("name", key.key_name), ("expires", expires), ("scopes", scopes)];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(metadata))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_expiry_and_scopes() {
        let key = |name: &str, expiry, scopes: Option<&[&str]>| KeyRecord {
            key_name: name.into(),
            expiry,
            scopes: scopes.map(|scopes| scopes.iter().map(|scope| (*scope).to_owned()).collect()),
            metadata: serde_json::Map::new(),
        };
        let text = table(vec![
            key("deploy", None, None),
            key("robot", Some(1_767_225_600.0), Some(&["network.*", "node.read"])),
        ])
        .render(None);
        let expected = "\
NAME    EXPIRES                   SCOPES
deploy  never                     all
robot   2026-01-01T00:00:00.000Z  network.*, node.read
";
        assert_eq!(text, expected);
    }
}
