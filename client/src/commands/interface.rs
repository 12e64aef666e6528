//! `muster interface`.

use clap::Subcommand;
use muster_types::interface::InterfaceRecord;

use super::{Session, metadata};
use crate::api::Object;
use crate::output::{Table, compact};

/// The commands about where instances meet networks. An interface goes by its id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show one interface
    Show { uuid: String },
    /// Give an interface a floating address, which the outside can reach
    Float { uuid: String },
    /// Take the floating address of an interface back
    Defloat { uuid: String },
    /// Show the metadata of an interface
    Metadata { uuid: String },
    /// Set an item of an interface's metadata
    SetMetadata {
        uuid: String,
        #[command(flatten)]
        item: metadata::Item,
    },
    /// Delete an item of an interface's metadata
    DeleteMetadata {
        uuid: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::Show { uuid } => session.show(client.interface(&uuid).await?, facts),
        Command::Float { uuid } => {
            let answer = client.float_interface(&uuid).await?;
            if session.json {
                return session.done(&answer, "");
            }
            // The answer does not say which address it is.
            let floating = floating(&client.interface(&uuid).await?.value()?);
            session.done(&answer, &format!("interface {uuid} floats as {floating}"))
        }
        Command::Defloat { uuid } => {
            let answer = client.defloat_interface(&uuid).await?;
            session.done(&answer, &format!("interface {uuid} does not float"))
        }
        Command::Metadata { uuid } => metadata::show(session, Object::Interface(&uuid)).await,
        Command::SetMetadata { uuid, item } => metadata::set(session, Object::Interface(&uuid), &item).await,
        Command::DeleteMetadata { uuid, item } => {
            metadata::delete(session, Object::Interface(&uuid), &item).await
        }
    }
}

fn address(interface: &InterfaceRecord) -> String {
    interface.ipv4.map_or_else(|| "-".to_owned(), |address| address.to_string())
}

fn floating(interface: &InterfaceRecord) -> String {
    interface.floating.map_or_else(|| "-".to_owned(), |address| address.to_string())
}

/// Interfaces, one a line, by address.
pub(super) fn table(mut interfaces: Vec<InterfaceRecord>) -> Table {
    interfaces.sort_by_key(|interface| (interface.ipv4.is_none(), interface.ipv4, interface.macaddr));
    let table = Table::new(&["UUID", "ADDRESS", "MAC", "FLOATS AS", "STATE", "INSTANCE"], &[]);
    table.rows(interfaces.into_iter().map(|interface| {
        [
            interface.uuid.to_string(),
            address(&interface),
            interface.macaddr.to_string(),
            floating(&interface),
            interface.state.to_string(),
            interface.instance_uuid.to_string(),
        ]
    }))
}

/// One interface, in full.
pub(super) fn facts(interface: InterfaceRecord) -> Table {
    let metadata = interface.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let facts = [
        ("uuid", interface.uuid.to_string()),
        ("state", interface.state.to_string()),
        ("address", address(&interface)),
        ("floats as", floating(&interface)),
        ("mac", interface.macaddr.to_string()),
        ("network", interface.network_uuid.to_string()),
        ("instance", interface.instance_uuid.to_string()),
        ("order", interface.order.to_string()),
        ("model", interface.model),
    ];
    Table::facts(facts.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(metadata))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn example(address: Option<&str>, mac: &str, floating: Option<&str>) -> InterfaceRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "instance_uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
            "network_uuid": "2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "macaddr": mac, "ipv4": address,
            "floating": floating, "model": "virtio", "order": 0, "state": "created", "metadata": { "role": "web" },
            "version": 3
        }))
        .unwrap()
    }

    #[test]
    fn interfaces_are_listed_by_address_and_those_without_one_last() {
        let text = table(vec![
            example(None, "02:00:00:00:00:01", None),
            example(Some("10.0.0.17"), "02:00:00:00:00:03", None),
            example(Some("10.0.0.9"), "02:00:00:00:00:02", Some("192.168.20.9")),
        ])
        .render(None);
        let expected = "\
UUID                                  ADDRESS    MAC                FLOATS AS     STATE    INSTANCE
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.9   02:00:00:00:00:02  192.168.20.9  created  1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.17  02:00:00:00:00:03  -             created  1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  -          02:00:00:00:00:01  -             created  1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01
";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_interface_is_shown_with_its_metadata() {
        let text = facts(example(Some("10.0.0.9"), "02:00:00:00:00:02", None)).render(None);
        assert!(text.contains("address        10.0.0.9\nfloats as      -\n"), "{text}");
        assert!(text.ends_with("metadata role  web\n"), "{text}");
    }
}
