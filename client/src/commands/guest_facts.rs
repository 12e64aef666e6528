//! `muster instance facts`: facts reported by the agent in a guest, which are not trusted.

use serde_json::{Map, Value};

use super::session::Session;
use crate::output::{self, Table, compact, or_dash};

/// The fields of a mount that are shown.
const MOUNT_FIELDS: [&str; 3] = ["device", "mount_point", "vfs_type"];

pub(super) async fn show(session: &Session, instance: &str) -> anyhow::Result<()> {
    let response = session.client.guest_facts(instance).await?;
    if session.is_structured() {
        return session.print_value(response.json());
    }
    for (at, table) in tables(&response.value()?).iter().enumerate() {
        if at > 0 {
            output::print("\n")?;
        }
        output::print_table(table)?;
    }
    Ok(())
}

/// Returns a table of simple facts, and one each for mounts and SSH host keys.
fn tables(facts: &Map<String, Value>) -> Vec<Table> {
    let (mut plain, mut tables) = (vec![], vec![]);
    let format = |value: &Value| or_dash(compact(value));
    for (name, value) in facts {
        match (name.as_str(), value) {
            ("mounts", Value::Array(mounts)) => tables.push(mount_table(mounts)),
            ("ssh-host-keys", Value::Object(keys)) => {
                let keys = keys.iter().map(|(kind, key)| [kind.clone(), compact(key).trim().to_owned()]);
                tables.push(Table::new(&["SSH HOST KEY"], &["PUBLIC KEY"]).rows(keys));
            }
            (_, Value::Object(inner)) => {
                plain.extend(inner.iter().map(|(key, value)| (format!("{name} {key}"), format(value))));
            }
            (_, value) => plain.push((name.clone(), format(value))),
        }
    }
    tables.insert(0, Table::key_values(plain));
    tables
}

fn mount_table(mounts: &[Value]) -> Table {
    let text = |mount: &Value, name: &str| or_dash(mount.get(name).map(compact).unwrap_or_default());
    let rows = mounts.iter().map(|mount| MOUNT_FIELDS.map(|name| text(mount, name)));
    Table::new(&["DEVICE", "MOUNTED AT", "TYPE"], &[]).rows(rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shows_facts_as_tables() {
        let facts = json!({
            "distribution": { "name": "Debian", "version": "" },
            "mounts": [{ "device": "/dev/vda1", "mount_point": "/", "vfs_type": "ext4" }, 7],
            "ssh-host-keys": { "ed25519": "ssh-ed25519 AAAA root@a\n" }, "more": [1]
        });
        let rendered: String =
            tables(facts.as_object().unwrap()).iter().map(|table| table.render(None) + "\n").collect();
        let expected = "\
distribution name     Debian
distribution version  -
more                  [1]

DEVICE     MOUNTED AT  TYPE
/dev/vda1  /           ext4
-          -           -

SSH HOST KEY  PUBLIC KEY
ed25519       ssh-ed25519 AAAA root@a

";
        assert_eq!(rendered, expected);
    }
}
