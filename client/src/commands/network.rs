//! `muster network`.

use anyhow::bail;
use clap::Subcommand;
use muster_types::address::AddressRecord;
use muster_types::network::{NetworkRecord, NetworkState, PingResult};
use muster_types::operation::{OperationHandle, OperationRecord, OperationState};
use serde_json::json;

use super::network_drawing::{Scene, draw};
use super::wait::Waiting;
use super::{Session, interface, metadata, operation};
use crate::api::{Answer, DeletedNetworks, NetworkDeletion, NewNetwork, Object};
use crate::output::{self, Table, compact, or_dash, visible};
use crate::time::iso;

/// The commands about virtual networks. A network goes by its name or its id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the networks that you can see
    List {
        /// With those that are deleted
        #[arg(long)]
        all: bool,
    },
    /// Show one network, and who is on it
    Show { network: String },
    /// Make a network
    Create {
        name: String,
        /// Its addresses, such as 10.0.0.0/24
        netblock: String,
        /// Instances do not get their addresses by DHCP
        #[arg(long)]
        no_dhcp: bool,
        /// Instances do not reach the world
        #[arg(long)]
        no_nat: bool,
        /// The router resolves names
        #[arg(long)]
        dns: bool,
        /// Namespace that it is for, if not the one that you act as
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Delete a network; one with interfaces goes when they are gone
    Delete {
        network: String,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Delete every network of a namespace
    DeleteAll {
        /// Namespace that loses its networks, if not the one that you act as
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Delete networks with interfaces, too, as soon as those are gone
        #[arg(long)]
        clean_wait: bool,
        /// Say that you mean it
        #[arg(long, required = true)]
        yes: bool,
    },
    /// List the interfaces on a network
    Interfaces { network: String },
    /// List the addresses of a network that are not free
    Addresses { network: String },
    /// Reserve an address: nobody is given it until it is released
    Reserve {
        network: String,
        address: String,
        /// What it is for
        #[arg(long, value_name = "TEXT")]
        comment: Option<String>,
    },
    /// Release an address that was reserved
    Release { network: String, address: String },
    /// Route an address of the floating network to a network
    Route { network: String },
    /// Take a routed address back
    Unroute { network: String, address: String },
    /// Ping an address from the router of its network
    Ping { network: String, address: String },
    /// Tell the network's resolver a name, or another address for it
    SetName { network: String, name: String, address: String },
    /// Make the network's resolver forget a name
    DeleteName { network: String, name: String },
    /// List the operations on a network that have not ended, newest first
    Operations {
        network: String,
        /// With those that have ended
        #[arg(long)]
        all: bool,
    },
    /// Show the metadata of a network
    Metadata { network: String },
    /// Set an item of a network's metadata
    SetMetadata {
        network: String,
        #[command(flatten)]
        item: metadata::Item,
    },
    /// Delete an item of a network's metadata
    DeleteMetadata {
        network: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { all } => session.show(client.networks(all).await?, table),
        Command::Show { network } => show(session, &network).await,
        Command::Create { name, netblock, no_dhcp, no_nat, dns, in_namespace, waiting } => {
            let new = NewNetwork {
                name,
                netblock,
                provide_dhcp: !no_dhcp,
                provide_nat: !no_nat,
                provide_dns: dns,
                namespace: in_namespace,
            };
            create(session, &new, waiting).await
        }
        Command::Delete { network, waiting } => delete(session, &network, waiting).await,
        Command::DeleteAll { in_namespace, clean_wait, yes: _ } => {
            delete_all(session, client.delete_networks(in_namespace.as_deref(), clean_wait).await?)
        }
        Command::Interfaces { network } => {
            session.show(client.network_interfaces(&network).await?, interface::table)
        }
        Command::Addresses { network } => session.show(client.network_addresses(&network).await?, addresses),
        Command::Reserve { network, address, comment } => {
            let answer = client.reserve_address(&network, &address, comment.as_deref()).await?;
            session.done(&answer, &format!("address {address} reserved"))
        }
        Command::Release { network, address } => {
            let answer = client.release_address(&network, &address).await?;
            session.done(&answer, &format!("address {address} released"))
        }
        Command::Route { network } => {
            let answer = client.route_address(&network).await?;
            if session.json {
                return output::print_json(answer.json());
            }
            output::print(&format!("{}\n", answer.value()?))
        }
        Command::Unroute { network, address } => {
            let answer = client.unroute_address(&network, &address).await?;
            session.done(&answer, &format!("address {address} no longer routed to network {network}"))
        }
        Command::Ping { network, address } => ping(session, client.ping(&network, &address).await?),
        Command::SetName { network, name, address } => {
            let answer = client.set_network_name(&network, &name, &address).await?;
            session.done(&answer, &format!("name {name} stands for {address}"))
        }
        Command::DeleteName { network, name } => {
            let answer = client.delete_network_name(&network, &name).await?;
            session.done(&answer, &format!("name {name} deleted"))
        }
        Command::Operations { network, all } => {
            session.show(client.network_operations(&network, all).await?, operation::table)
        }
        Command::Metadata { network } => metadata::show(session, Object::Network(&network)).await,
        Command::SetMetadata { network, item } => {
            metadata::set(session, Object::Network(&network), &item).await
        }
        Command::DeleteMetadata { network, item } => {
            metadata::delete(session, Object::Network(&network), &item).await
        }
    }
}

async fn show(session: &Session, network: &str) -> anyhow::Result<()> {
    let client = &session.client;
    let answer = client.network(network).await?;
    let network = answer.clone().value()?;
    let id = network.uuid.to_string();
    let (interfaces, addresses) =
        tokio::try_join!(client.network_interfaces(&id), client.network_addresses(&id))?;
    if session.json {
        return output::print_json(&json!({
            "network": answer.json(), "interfaces": interfaces.json(), "addresses": addresses.json()
        }));
    }
    let (routed, operations) = (routed(&network), operations(session, &id).await);
    let (interfaces, addresses) = (interfaces.value()?, addresses.value()?);
    let scene = Scene { network: &network, interfaces, addresses, routed, operations };
    let drawing = draw(&scene);
    output::print_table(&facts(network))?;
    output::print(&format!("\n{drawing}"))
}

/// The addresses that are routed to a network, as its record names them.
fn routed(network: &NetworkRecord) -> Vec<String> {
    let references = network.references_from.get("routed_address").into_iter().flatten();
    references.filter_map(|reference| reference.relationship_value.clone()).collect()
}

/// The operations that have not ended; none that the caller may not see.
async fn operations(session: &Session, network: &str) -> Vec<OperationRecord> {
    let answer = session.client.network_operations(network, false).await;
    answer.and_then(Answer::value).unwrap_or_default()
}

async fn create(session: &Session, new: &NewNetwork, waiting: Waiting) -> anyhow::Result<()> {
    let mut answer = session.client.create_network(new).await?;
    let mut network = answer.clone().value()?;
    if let Some(mut patience) = waiting.patience() {
        while network.state == NetworkState::Initial {
            if !patience.lasts().await {
                let (id, seconds) = (network.uuid, waiting.timeout);
                bail!("network {id} is not ready after {seconds} seconds; it may become so later");
            }
            answer = session.client.network(&network.uuid.to_string()).await?;
            network = answer.clone().value()?;
        }
    }
    session.show(answer, facts)?;
    if network.state == NetworkState::Error {
        let why = network.error_message.unwrap_or_else(|| "the server does not say why".to_owned());
        bail!("network {} cannot be used: {}", network.uuid, visible(&why));
    }
    Ok(())
}

async fn delete(session: &Session, network: &str, waiting: Waiting) -> anyhow::Result<()> {
    let answer = session.client.delete_network(network).await?;
    let Some(mut patience) = waiting.patience() else {
        return session.done(&answer, &format!("network {network} is being deleted"));
    };
    let OperationHandle { op_type, op_uuid } = answer.value()?;
    loop {
        let answer = session.client.operation(op_type.as_str(), &op_uuid.to_string()).await?;
        let operation = answer.clone().value()?;
        match operation.state {
            OperationState::Queued | OperationState::Executing => {}
            OperationState::Complete => {
                return session.done(&answer, &format!("network {network} deleted"));
            }
            OperationState::Error | OperationState::Abort => {
                if session.json {
                    output::print_json(answer.json())?;
                }
                let why = operation::error(&operation);
                bail!("network {} is not deleted: {}", visible(network), visible(&why));
            }
        }
        if !patience.lasts().await {
            let (network, seconds) = (visible(network), waiting.timeout);
            bail!(
                "network {network} is not deleted after {seconds} seconds; operation {op_type} {op_uuid} goes on"
            );
        }
    }
}

fn delete_all(session: &Session, answer: Answer<DeletedNetworks>) -> anyhow::Result<()> {
    let unable = match answer.clone().value()? {
        DeletedNetworks::All(_) => vec![],
        DeletedNetworks::Partly { unable, .. } => unable,
    };
    session.show(answer, deletions)?;
    if unable.is_empty() {
        return Ok(());
    }
    let unable: Vec<String> = unable.iter().map(ToString::to_string).collect();
    bail!("left because they have interfaces: {}", unable.join(", "))
}

fn ping(session: &Session, answer: Answer<PingResult>) -> anyhow::Result<()> {
    if session.json {
        return output::print_json(answer.json());
    }
    let PingResult { stdout, stderr } = answer.value()?;
    eprint!("{}", lines(&stderr));
    output::print(&lines(&stdout))
}

/// The lines of a program's output, whose last may be what followed the last line break: nothing.
fn lines(lines: &[String]) -> String {
    let lines = match lines {
        [rest @ .., last] if last.is_empty() => rest,
        all => all,
    };
    lines.iter().map(|line| visible(line) + "\n").collect()
}

fn provides(network: &NetworkRecord) -> String {
    let services =
        [(network.provide_dhcp, "dhcp"), (network.provide_nat, "nat"), (network.provide_dns, "dns")];
    let services: Vec<&str> = services.into_iter().filter_map(|(has, name)| has.then_some(name)).collect();
    or_dash(services.join(", "))
}

fn table(mut networks: Vec<NetworkRecord>) -> Table {
    networks.sort_by(|a, b| (&a.namespace, &a.name, a.uuid).cmp(&(&b.namespace, &b.name, b.uuid)));
    let table = Table::new(&["NAME", "UUID", "NETBLOCK", "STATE", "NAMESPACE"], &["PROVIDES"]);
    table.rows(networks.into_iter().map(|network| {
        let provides = provides(&network);
        [
            network.name,
            network.uuid.to_string(),
            network.netblock.to_string(),
            network.state.to_string(),
            or_dash(network.namespace.unwrap_or_default()),
            provides,
        ]
    }))
}

fn facts(network: NetworkRecord) -> Table {
    let metadata = network.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let provides = provides(&network);
    let gateway = network.floating_gateway.map_or_else(|| "-".to_owned(), |gateway| gateway.to_string());
    let error = network.error_message.map(|why| ("error".to_owned(), why));
    let facts = [
        ("name", network.name),
        ("uuid", network.uuid.to_string()),
        ("namespace", or_dash(network.namespace.unwrap_or_default())),
        ("netblock", network.netblock.to_string()),
        ("provides", provides),
        ("gateway", gateway),
        ("vxlan", network.vxid.to_string()),
        ("state", network.state.to_string()),
    ];
    let facts = facts.map(|(name, value)| (name.to_owned(), value));
    Table::facts(facts.into_iter().chain(error).chain(metadata))
}

fn addresses(mut addresses: Vec<AddressRecord>) -> Table {
    addresses.sort_by_key(|address| address.address);
    let table = Table::new(&["ADDRESS", "TYPE", "USER", "SINCE"], &["COMMENT"]);
    table.rows(addresses.into_iter().map(|address| {
        let user = address.user.join(" ");
        [
            address.address.to_string(),
            address.kind.to_string(),
            or_dash(user),
            iso(address.when),
            or_dash(address.comment),
        ]
    }))
}

fn deletions(outcome: DeletedNetworks) -> Table {
    let (DeletedNetworks::All(deleted) | DeletedNetworks::Partly { deleted, .. }) = outcome;
    Table::new(&["NETWORK", "OPERATION"], &[]).rows(deleted.into_iter().map(
        |NetworkDeletion { network_uuid, operation }| {
            [network_uuid.to_string(), format!("{} {}", operation.op_type, operation.op_uuid)]
        },
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    fn example(name: &str, namespace: &str, error: Option<&str>) -> NetworkRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": name, "namespace": namespace,
            "netblock": "10.0.0.0/24", "provide_dhcp": true, "provide_nat": true, "provide_dns": false,
            "floating_gateway": "192.168.20.7", "vxid": 77, "vxlan_id": 77,
            "state": if error.is_some() { "error" } else { "created" }, "error_message": error,
            "last_cluster_operation": null, "metadata": { "size": 7 }, "version": 1, "references_to": {},
            "references_from": {}
        }))
        .unwrap()
    }

    fn address(address: &str, kind: &str, user: Option<[&str; 2]>, comment: &str) -> AddressRecord {
        from_value(json!({
            "address": address, "type": kind, "reservation_type": kind, "user": user.map_or(vec![], |user| user.to_vec()), "user_type": user.map(|user| user[0]),
            "user_uuid": user.map(|user| user[1]), "comment": comment, "when": 1_767_225_600.0, "reserved_at": 1_767_225_600.0,
            "ipam_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"
        }))
        .unwrap()
    }

    #[test]
    fn networks_are_listed_by_namespace_and_name() {
        let text = table(vec![
            example("lan", "production", None),
            example("web", "ci", Some("it broke")),
            example("db", "production", None),
        ])
        .render(None);
        let expected = "\
NAME  UUID                                  NETBLOCK     STATE    NAMESPACE   PROVIDES
web   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.0/24  error    ci          dhcp, nat
db    5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.0/24  created  production  dhcp, nat
lan   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  10.0.0.0/24  created  production  dhcp, nat
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_network_in_error_says_why() {
        let text = facts(example("lan", "ci", Some("no address is free"))).render(None);
        let expected = "\
name           lan
uuid           5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01
namespace      ci
netblock       10.0.0.0/24
provides       dhcp, nat
gateway        192.168.20.7
vxlan          77
state          error
error          no address is free
metadata size  7
";
        assert_eq!(text, expected);
    }

    #[test]
    fn addresses_are_listed_by_number_with_their_users() {
        let text = addresses(vec![
            address("10.0.0.50", "manual", Some(["network", "n-1"]), "printer"),
            address("10.0.0.9", "deletion-halo", None, ""),
        ])
        .render(None);
        let expected = "\
ADDRESS    TYPE           USER         SINCE                     COMMENT
10.0.0.9   deletion-halo  -            2026-01-01T00:00:00.000Z  -
10.0.0.50  manual         network n-1  2026-01-01T00:00:00.000Z  printer
";
        assert_eq!(text, expected);
    }

    #[test]
    fn routed_addresses_are_in_the_record() {
        let mut network = example("lan", "ci", None);
        assert!(routed(&network).is_empty());
        let reference = json!({ "source_object_type": "network", "source_uuid": "n", "relationship": "routed_address",
            "relationship_value": "192.168.20.44", "target_object_type": "network", "target_uuid": "f", "created": 0.0,
            "last_active": 0.0 });
        network.references_from.insert("routed_address".into(), vec![from_value(reference).unwrap()]);
        assert_eq!(routed(&network), ["192.168.20.44"]);
    }

    #[test]
    fn deleting_all_says_which_operation_deletes_which_network() {
        let deleted = json!([{ "network_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "op_type": "net_op",
                               "op_uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01" }]);
        let expected = "\
NETWORK                               OPERATION
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  net_op 1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01
";
        assert_eq!(deletions(from_value(deleted.clone()).unwrap()).render(None), expected);
        let partly = json!({ "deleted": deleted, "unable": ["2d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"] });
        assert_eq!(deletions(from_value(partly).unwrap()).render(None), expected);
    }

    #[test]
    fn the_end_of_a_pings_output_is_not_a_line() {
        let text = |given: &[&str]| lines(&given.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(text(&["PING", "", "64 bytes\u{1b}", ""]), "PING\n\n64 bytes\\u{1b}\n");
        assert_eq!((text(&["PING"]), text(&[])), ("PING\n".into(), String::new()));
    }
}
