//! `muster key`.

use clap::Subcommand;
use muster_types::key::Secret;

use super::{Session, given_or_asked, parse_secret};
use crate::api::AddedKey;
use crate::output::{self, Table, visible};
use crate::time::expiry;

/// The commands about the keys of a namespace.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the names of a namespace's keys
    List { namespace: String },
    /// Add a key, or replace the one of that name; prints the secret if it was generated
    Add {
        namespace: String,
        name: String,
        /// The secret, or - to be asked for it; without it one is generated
        #[arg(long, value_name = "SECRET", value_parser = parse_secret)]
        key: Option<Secret>,
        /// When it stops working: 2h, 30d, or a Unix time; without it never
        #[arg(long, value_name = "WHEN", value_parser = expiry)]
        expires: Option<f64>,
    },
    /// Replace the secret of a key
    Update {
        namespace: String,
        name: String,
        /// The new secret; without it, or with -, it is asked for
        #[arg(long, value_name = "SECRET", value_parser = parse_secret, default_value = "-", hide_default_value = true)]
        key: Secret,
        /// When it stops working: 2h, 30d, or a Unix time; without it never
        #[arg(long, value_name = "WHEN", value_parser = expiry)]
        expires: Option<f64>,
    },
    /// Delete a key; it and its tokens stop working at once
    Delete { namespace: String, name: String },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace } => session.show(client.keys(&namespace).await?, table),
        Command::Add { namespace, name, key, expires } => {
            let key = key.map(|key| given_or_asked(key, &name)).transpose()?;
            let answer = client.add_key(&namespace, &name, key.as_ref(), expires).await?;
            if session.json {
                return output::print_json(answer.json());
            }
            match answer.value()? {
                AddedKey::Generated { key_name, key } => {
                    output::print(&format!("{}\n", key.expose()))?;
                    eprintln!("this is the secret of key {}; it is not shown again", visible(&key_name));
                }
                AddedKey::Supplied(key_name) => eprintln!("key {} set", visible(&key_name)),
            }
            Ok(())
        }
        Command::Update { namespace, name, key, expires } => {
            let key = given_or_asked(key, &name)?;
            let answer = client.update_key(&namespace, &name, &key, expires).await?;
            session.done(&answer, &format!("key {name} updated"))
        }
        Command::Delete { namespace, name } => {
            let answer = client.delete_key(&namespace, &name).await?;
            session.done(&answer, &format!("key {name} deleted"))
        }
    }
}

fn table(names: Vec<String>) -> Table {
    Table::new(&["NAME"], &[]).rows(names.into_iter().map(|name| [name]))
}
