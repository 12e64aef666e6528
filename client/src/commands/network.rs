//! `muster network`.

use std::collections::BTreeSet;

use anyhow::bail;
use clap::Subcommand;
use muster_types::address::AddressRecord;
use muster_types::ids::InstanceId;
use muster_types::network::{NetworkRecord, NetworkState, PingResult};
use muster_types::object::ObjectType;
use muster_types::operation::{OperationHandle, OperationRecord, OperationState};
use serde_json::json;

use super::list::{ListOptions, ListView};
use super::lookup::{NamedType, require_unambiguous, resolve, warn_if_name_exists};
use super::network_diagram::{NetworkView, render};
use super::session::Session;
use super::wait::WaitOptions;
use super::{interface, metadata, operation, why};
use crate::api::{ApiResponse, ListQuery, NetworkDeletion, NewNetwork, ObjectPath};
use crate::exit_code::timed_out;
use crate::output::{self, Table, compact, escape_control, or_dash};
use crate::time::format_utc;

/// The maximum number of instances that a message lists.
const MAX_LISTED: usize = 10;

const LIST: ListView<NetworkRecord> = ListView {
    table,
    wide: &["vxid", "floating_gateway", "error_message"],
    order: &["namespace", "name", "uuid"],
    watched: &[ObjectType::Network],
};

const ADDRESSES: ListView<AddressRecord> = ListView {
    table: addresses,
    wide: &[],
    order: &["address"],
    watched: &[ObjectType::Network, ObjectType::Interface],
};

/// Commands for networks, which are given by name or id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the visible networks
    List {
        /// Include deleted networks
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a network and its interfaces and addresses
    Show { network: String },
    /// Explain the state of a network, and what to do
    Why { network: String },
    /// Create a network
    Create {
        name: String,
        /// Address block in CIDR notation, such as 10.0.0.0/24
        netblock: String,
        /// Do not provide DHCP
        #[arg(long)]
        no_dhcp: bool,
        /// Do not provide NAT to the external network
        #[arg(long)]
        no_nat: bool,
        /// Provide DNS
        #[arg(long)]
        dns: bool,
        /// Namespace to create it in, if not your own
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Check the request without creating the network
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Delete a network once it has no interfaces
    Delete {
        network: String,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Delete all networks of a namespace; those with interfaces once the interfaces are deleted
    DeleteAll {
        /// Namespace to delete the networks of, if not your own
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Confirm the deletion
        #[arg(long, required = true)]
        yes: bool,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// List the interfaces on a network
    Interfaces {
        network: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// List the allocated addresses of a network
    Addresses {
        network: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Reserve an address, so that it is not allocated
    Reserve {
        network: String,
        address: String,
        /// Purpose of the reservation
        #[arg(long, value_name = "TEXT")]
        comment: Option<String>,
    },
    /// Release a reserved address
    Release { network: String, address: String },
    /// Route an address of the floating network to a network
    Route { network: String },
    /// Stop routing an address
    Unroute { network: String, address: String },
    /// Ping an address from the router of the network
    Ping { network: String, address: String },
    /// Set the address of a name in the network's DNS
    SetName { network: String, name: String, address: String },
    /// Delete a name from the network's DNS
    DeleteName { network: String, name: String },
    /// List the unfinished operations on a network, newest first
    Operations {
        network: String,
        /// Include finished operations
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show the metadata of a network
    Metadata { network: String },
    /// Set a metadata key of a network
    SetMetadata {
        network: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a network
    DeleteMetadata {
        network: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

impl Command {
    /// Returns the network that the command is for, unless it deletes or creates it.
    fn network_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::List { .. } | Self::Create { .. } | Self::Delete { .. } | Self::DeleteAll { .. } => None,
            Self::Show { network }
            | Self::Why { network }
            | Self::Interfaces { network, .. }
            | Self::Addresses { network, .. }
            | Self::Reserve { network, .. }
            | Self::Release { network, .. }
            | Self::Route { network }
            | Self::Unroute { network, .. }
            | Self::Ping { network, .. }
            | Self::SetName { network, .. }
            | Self::DeleteName { network, .. }
            | Self::Operations { network, .. }
            | Self::Metadata { network }
            | Self::SetMetadata { network, .. }
            | Self::DeleteMetadata { network, .. } => Some(network),
        }
    }
}

pub(super) async fn run(mut command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    if let Some(network) = command.network_mut() {
        resolve(client, NamedType::Network, network, None).await?;
    }
    match command {
        Command::List { all, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.networks(all, &query)).await
        }
        Command::Show { network } => show(session, &network).await,
        Command::Why { network } => why::explain(session, ObjectPath::Network(&network)).await,
        Command::Create { name, netblock, no_dhcp, no_nat, dns, in_namespace, dry_run, wait } => {
            let new = NewNetwork {
                name,
                netblock,
                provide_dhcp: !no_dhcp,
                provide_nat: !no_nat,
                provide_dns: dns,
                namespace: in_namespace,
                dry_run,
            };
            create(session, &new, wait).await
        }
        Command::Delete { network, wait } => delete(session, &network, wait).await,
        Command::DeleteAll { in_namespace, yes: _, wait } => {
            let response = client.delete_networks(in_namespace.as_deref()).await?;
            session.show(response.clone(), deletions)?;
            wait_for_deletions(session, response.value()?, wait).await
        }
        Command::Interfaces { network, list } => {
            let query = list.query();
            session.list(&list, &interface::LIST, || client.network_interfaces(&network, &query)).await
        }
        Command::Addresses { network, list } => {
            let query = list.query();
            session.list(&list, &ADDRESSES, || client.network_addresses(&network, &query)).await
        }
        Command::Reserve { network, address, comment } => {
            let response = client.reserve_address(&network, &address, comment.as_deref()).await?;
            session.confirm(&response, &format!("address {address} reserved"))
        }
        Command::Release { network, address } => {
            let response = client.release_address(&network, &address).await?;
            session.confirm(&response, &format!("address {address} released"))
        }
        Command::Route { network } => route(session, &network).await,
        Command::Unroute { network, address } => {
            let response = client.unroute_address(&network, &address).await?;
            session.confirm(&response, &format!("address {address} is no longer routed to network {network}"))
        }
        Command::Ping { network, address } => ping(session, client.ping(&network, &address).await?),
        Command::SetName { network, name, address } => {
            let response = client.set_network_name(&network, &name, &address).await?;
            session.confirm(&response, &format!("name {name} resolves to {address}"))
        }
        Command::DeleteName { network, name } => {
            let response = client.delete_network_name(&network, &name).await?;
            session.confirm(&response, &format!("name {name} deleted"))
        }
        Command::Operations { network, all, list } => {
            let query = list.query();
            session.list(&list, &operation::LIST, || client.network_operations(&network, all, &query)).await
        }
        Command::Metadata { network } => metadata::show(session, ObjectPath::Network(&network)).await,
        Command::SetMetadata { network, item } => {
            metadata::set(session, ObjectPath::Network(&network), &item).await
        }
        Command::DeleteMetadata { network, item } => {
            metadata::delete(session, ObjectPath::Network(&network), &item).await
        }
    }
}

async fn show(session: &Session, network: &str) -> anyhow::Result<()> {
    let client = &session.client;
    let response = client.network(network).await?;
    let network = response.clone().value()?;
    let (id, all) = (network.uuid.to_string(), ListQuery::default());
    let (interfaces, addresses) =
        tokio::try_join!(client.network_interfaces(&id, &all), client.network_addresses(&id, &all))?;
    if session.is_structured() {
        return session.print_value(&json!({
            "network": response.json(), "interfaces": interfaces.json(), "addresses": addresses.json()
        }));
    }
    let (routed, operations) = (routed(&network), unfinished_operations(session, &id).await);
    let (interfaces, addresses) = (interfaces.value()?, addresses.value()?);
    let view = NetworkView { network: &network, interfaces, addresses, routed, operations };
    let diagram = render(&view);
    output::print_table(&details(network))?;
    output::print(&format!("\n{diagram}"))
}

/// Returns the addresses that are routed to a network.
fn routed(network: &NetworkRecord) -> Vec<String> {
    let references = network.references_from.get("routed_address").into_iter().flatten();
    references.filter_map(|reference| reference.relationship_value.clone()).collect()
}

/// Returns the unfinished operations that the caller may see.
async fn unfinished_operations(session: &Session, network: &str) -> Vec<OperationRecord> {
    let response = session.client.network_operations(network, false, &ListQuery::default()).await;
    response.and_then(ApiResponse::value).unwrap_or_default()
}

async fn create(session: &Session, new: &NewNetwork, wait: WaitOptions) -> anyhow::Result<()> {
    warn_if_name_exists(&session.client, NamedType::Network, &new.name, new.namespace.as_deref()).await;
    let mut response = session.client.create_network(new).await?;
    if new.dry_run {
        return session.show_created(response, true, details);
    }
    let mut network = response.clone().value()?;
    if let Some(mut timer) = wait.timer() {
        while network.state == NetworkState::Initial {
            if !timer.wait_for(&format!("network {} to be created", new.name)).await {
                let (id, seconds) = (network.uuid, wait.timeout);
                return Err(timed_out(format!(
                    "network {id} is not ready after {seconds} seconds; see `muster network show {id}`"
                )));
            }
            response = session.client.network(&network.uuid.to_string()).await?;
            network = response.clone().value()?;
        }
    }
    session.show(response, details)?;
    if network.state == NetworkState::Error {
        let reason = network.error_message.unwrap_or_else(|| "the server gives no reason".to_owned());
        bail!("network {} failed: {}", network.uuid, escape_control(&reason));
    }
    Ok(())
}

async fn delete(session: &Session, network: &str, wait: WaitOptions) -> anyhow::Result<()> {
    require_unambiguous(&session.client, NamedType::Network, network, None).await?;
    let attached = attached_instances(session, network).await;
    let response = session.client.delete_network(network).await?;
    let mut condition = format!("network {network} to be deleted");
    if !attached.is_empty() {
        let attached = attached.join(", ");
        crate::message!("network {} has interfaces of instances: {attached}", escape_control(network));
        crate::message!("it will be deleted once they are; new instances can no longer use it");
        condition = format!("the deletion of the instances on network {network}: {attached}");
    }
    let Some(mut timer) = wait.timer() else {
        return session.confirm(&response, &format!("network {network} is being deleted"));
    };
    let OperationHandle { op_type, op_uuid } = response.value()?;
    loop {
        let response = session.client.operation(op_type.as_str(), &op_uuid.to_string()).await?;
        let operation = response.clone().value()?;
        match operation.state {
            OperationState::Queued | OperationState::Executing => {}
            OperationState::Complete => {
                return session.confirm(&response, &format!("network {network} deleted"));
            }
            OperationState::Error | OperationState::Abort => {
                if session.is_structured() {
                    session.print_value(response.json())?;
                }
                let reason = operation::error(&operation);
                bail!("failed to delete network {}: {}", escape_control(network), escape_control(&reason));
            }
        }
        if !timer.wait_for(&condition).await {
            let seconds = wait.timeout;
            return Err(timed_out(format!(
                "still waiting for {} after {seconds} seconds; the deletion continues: see `muster operation show {op_type} \
                 {op_uuid}`",
                escape_control(&condition)
            )));
        }
    }
}

/// Waits until networks are deleted that have no interfaces; the others are deleted when their instances are.
async fn wait_for_deletions(
    session: &Session,
    deletions: Vec<NetworkDeletion>,
    wait: WaitOptions,
) -> anyhow::Result<()> {
    for NetworkDeletion { network_uuid, operation, reason } in deletions {
        let (Some(timer), None) = (wait.timer(), reason) else { continue };
        let consequence = format!("the deletion continues: see `muster network why {network_uuid}`");
        let failed = operation::wait_until_complete(&session.client, &operation, timer, &consequence).await?;
        if let Some(reason) = failed {
            bail!("failed to delete network {network_uuid}: {reason}");
        }
    }
    Ok(())
}

/// Returns the names and ids of the instances with interfaces on a network, as far as the caller may see them.
async fn attached_instances(session: &Session, network: &str) -> Vec<String> {
    let client = &session.client;
    let interfaces =
        client.network_interfaces(network, &ListQuery::default()).await.and_then(ApiResponse::value);
    let ids: BTreeSet<InstanceId> =
        interfaces.unwrap_or_default().into_iter().map(|interface| interface.instance_uuid).collect();
    let mut attached = vec![];
    for id in ids.iter().take(MAX_LISTED) {
        let record = client.instance(&id.to_string()).await.and_then(ApiResponse::value);
        attached.push(
            record
                .map_or_else(|_| id.to_string(), |record| format!("{} ({id})", escape_control(&record.name))),
        );
    }
    if ids.len() > MAX_LISTED {
        attached.push(format!("and {} more", ids.len() - MAX_LISTED));
    }
    attached
}

async fn route(session: &Session, network: &str) -> anyhow::Result<()> {
    let response = session.client.route_address(network).await?;
    if session.is_structured() {
        return session.print_value(response.json());
    }
    output::print(&format!("{}\n", response.value()?))
}

fn ping(session: &Session, response: ApiResponse<PingResult>) -> anyhow::Result<()> {
    if session.is_structured() {
        return session.print_value(response.json());
    }
    let PingResult { stdout, stderr } = response.value()?;
    crate::message!("{}", join_lines(&stderr).trim_end());
    output::print(&join_lines(&stdout))
}

/// Joins lines of a program's output. The text after the last line break may be an empty last line.
fn join_lines(lines: &[String]) -> String {
    let lines = match lines {
        [rest @ .., last] if last.is_empty() => rest,
        all => all,
    };
    lines.iter().map(|line| escape_control(line) + "\n").collect()
}

fn provides(network: &NetworkRecord) -> String {
    let services =
        [(network.provide_dhcp, "dhcp"), (network.provide_nat, "nat"), (network.provide_dns, "dns")];
    let services: Vec<&str> = services.into_iter().filter_map(|(has, name)| has.then_some(name)).collect();
    or_dash(services.join(", "))
}

fn table(networks: Vec<NetworkRecord>) -> Table {
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

fn details(network: NetworkRecord) -> Table {
    let metadata = network.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let provides = provides(&network);
    let gateway = network.floating_gateway.map_or_else(|| "-".to_owned(), |gateway| gateway.to_string());
    let error = network.error_message.map(|reason| ("error".to_owned(), reason));
    let details = [
        ("name", network.name),
        ("uuid", network.uuid.to_string()),
        ("namespace", or_dash(network.namespace.unwrap_or_default())),
        ("netblock", network.netblock.to_string()),
        ("provides", provides),
        ("gateway", gateway),
        ("vxlan", network.vxid.to_string()),
        ("state", network.state.to_string()),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value));
    Table::key_values(details.into_iter().chain(error).chain(metadata))
}

fn addresses(addresses: Vec<AddressRecord>) -> Table {
    let table = Table::new(&["ADDRESS", "TYPE", "USER", "SINCE"], &["COMMENT"]);
    table.rows(addresses.into_iter().map(|address| {
        let user = address.user.join(" ");
        [
            address.address.to_string(),
            address.kind.to_string(),
            or_dash(user),
            format_utc(address.when),
            or_dash(address.comment),
        ]
    }))
}

fn deletions(deletions: Vec<NetworkDeletion>) -> Table {
    let table = Table::new(&["NETWORK", "OPERATION"], &["WAITS"]);
    table.rows(deletions.into_iter().map(|NetworkDeletion { network_uuid, operation, reason }| {
        let operation = format!("{} {}", operation.op_type, operation.op_uuid);
        [network_uuid.to_string(), operation, or_dash(reason.unwrap_or_default())]
    }))
}

#[cfg(test)]
mod tests;
