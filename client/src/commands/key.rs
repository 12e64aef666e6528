//! `muster key`.

use clap::Subcommand;
use muster_types::key::Secret;

use super::arguments::{given_or_prompted, parse_secret};
use super::session::Session;
use crate::api::AddedKey;
use crate::output::{self, Table, escape_control};
use crate::time::parse_expiry;

/// Commands for the keys of a namespace.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the names of a namespace's keys
    List { namespace: String },
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
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace } => session.show(client.keys(&namespace).await?, table),
        Command::Add { namespace, name, key, expires } => {
            let key = key.map(|key| given_or_prompted(key, &name)).transpose()?;
            let response = client.add_key(&namespace, &name, key.as_ref(), expires).await?;
            if session.json {
                return output::print_json(response.json());
            }
            match response.value()? {
                AddedKey::Generated { key_name, key } => {
                    output::print(&format!("{}\n", key.expose()))?;
                    eprintln!(
                        "this is the secret of key {}; it will not be shown again",
                        escape_control(&key_name)
                    );
                }
                AddedKey::Supplied(key_name) => eprintln!("key {} set", escape_control(&key_name)),
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
    }
}

fn table(names: Vec<String>) -> Table {
    Table::new(&["NAME"], &[]).rows(names.into_iter().map(|name| [name]))
}
