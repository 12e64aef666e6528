//! `muster interface`.

use clap::Subcommand;
use muster_types::interface::InterfaceRecord;
use muster_types::object::ObjectType;

use super::list::ListView;
use super::metadata;
use super::session::Session;
use crate::api::ObjectPath;
use crate::output::{Table, compact};

/// How interfaces are listed.
pub(super) const LIST: ListView<InterfaceRecord> = ListView {
    table,
    wide: &["model", "order", "network_uuid"],
    order: &["ipv4", "macaddr"],
    watched: &[ObjectType::Interface, ObjectType::Instance],
};

/// Commands for interfaces, which are given by id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show an interface
    Show { uuid: String },
    /// Assign a floating address, reachable from the external network, to an interface
    Float { uuid: String },
    /// Remove the floating address of an interface
    Defloat { uuid: String },
    /// Show the metadata of an interface
    Metadata { uuid: String },
    /// Set a metadata key of an interface
    SetMetadata {
        uuid: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of an interface
    DeleteMetadata {
        uuid: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::Show { uuid } => session.show(client.interface(&uuid).await?, details),
        Command::Float { uuid } => {
            let response = client.float_interface(&uuid).await?;
            if session.is_structured() {
                return session.confirm(&response, "");
            }
            // The response does not contain the address.
            let floating = floating(&client.interface(&uuid).await?.value()?);
            session.confirm(&response, &format!("interface {uuid} has the floating address {floating}"))
        }
        Command::Defloat { uuid } => {
            let response = client.defloat_interface(&uuid).await?;
            session.confirm(&response, &format!("interface {uuid} has no floating address"))
        }
        Command::Metadata { uuid } => metadata::show(session, ObjectPath::Interface(&uuid)).await,
        Command::SetMetadata { uuid, item } => {
            metadata::set(session, ObjectPath::Interface(&uuid), &item).await
        }
        Command::DeleteMetadata { uuid, item } => {
            metadata::delete(session, ObjectPath::Interface(&uuid), &item).await
        }
    }
}

fn address(interface: &InterfaceRecord) -> String {
    interface.ipv4.map_or_else(|| "-".to_owned(), |address| address.to_string())
}

fn floating(interface: &InterfaceRecord) -> String {
    interface.floating.map_or_else(|| "-".to_owned(), |address| address.to_string())
}

/// Lists interfaces.
pub(super) fn table(interfaces: Vec<InterfaceRecord>) -> Table {
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

/// Shows all fields of an interface.
pub(super) fn details(interface: InterfaceRecord) -> Table {
    let metadata = interface.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let details = [
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
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(metadata))
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
    fn lists_interfaces_with_their_addresses() {
        let text = table(vec![
            example(Some("10.0.0.9"), "02:00:00:00:00:02", Some("192.168.20.9")),
            example(Some("10.0.0.17"), "02:00:00:00:00:03", None),
            example(None, "02:00:00:00:00:01", None),
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
    fn shows_the_metadata_of_an_interface() {
        let text = details(example(Some("10.0.0.9"), "02:00:00:00:00:02", None)).render(None);
        assert!(text.contains("address        10.0.0.9\nfloats as      -\n"), "{text}");
        assert!(text.ends_with("metadata role  web\n"), "{text}");
    }
}
