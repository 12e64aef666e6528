//! The diagram of `muster network show`: the path from the external network to the interfaces of a network.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use muster_types::address::{AddressRecord, AddressType};
use muster_types::interface::{InterfaceRecord, InterfaceState};
use muster_types::network::{FLOATING_NETWORK_ID, NetworkRecord, NetworkState};
use muster_types::operation::OperationRecord;

use crate::output::escape_control;

/// The maximum number of reserved or quarantined addresses that are listed instead of counted.
const MAX_LISTED_ADDRESSES: usize = 20;
/// The maximum number of characters of a comment.
const MAX_COMMENT: usize = 48;
/// The number of characters of an abbreviated id.
const SHORT_ID: usize = 8;

/// The content of the diagram.
#[derive(Debug)]
pub(super) struct NetworkView<'a> {
    pub(super) network: &'a NetworkRecord,
    pub(super) interfaces: Vec<InterfaceRecord>,
    /// The allocated addresses of the network.
    pub(super) addresses: Vec<AddressRecord>,
    /// The addresses of the floating network that are routed to this network.
    pub(super) routed: Vec<String>,
    /// The unfinished operations.
    pub(super) operations: Vec<OperationRecord>,
}

/// A line of the diagram: an address and its user.
struct Branch {
    address: String,
    user: String,
}

/// Renders the diagram.
pub(super) fn render(view: &NetworkView<'_>) -> String {
    let mut text = external_path(view.network);
    let branches = branches(view);
    let width = branches.iter().map(|branch| branch.address.len()).max().unwrap_or_default();
    let mut lines: Vec<String> =
        branches.into_iter().map(|branch| format!("{:width$}  {}", branch.address, branch.user)).collect();
    lines.extend(address_counts(view));
    lines.extend(
        view.routed.iter().map(|routed| format!("routed to this network: {}", escape_control(routed))),
    );
    if lines.is_empty() {
        lines.push(no_interfaces(view.network.state).to_owned());
    }
    let last = lines.len() - 1;
    for (at, line) in lines.iter().enumerate() {
        let sign = if at == last { '└' } else { '├' };
        text.push_str(&format!(" {sign}─ {line}\n"));
    }
    text.push_str(&format!("\n{}\n", address_usage(view)));
    for operation in &view.operations {
        let (kind, id, state) = (operation.operation_type, operation.uuid, operation.state);
        text.push_str(&format!("in progress: {kind} {id}, {state}\n"));
    }
    text
}

/// Describes the path from the external network to the network.
fn external_path(network: &NetworkRecord) -> String {
    let router = network.netblock.router();
    match network.floating_gateway {
        _ if network.uuid == FLOATING_NETWORK_ID => "external network\n".to_owned(),
        Some(gateway) => format!("external network\n │  {gateway}\nrouter {router}\n"),
        None if network.provide_nat && network.state == NetworkState::Initial => {
            format!("router {router}, no NAT yet\n")
        }
        None => format!("router {router}, no NAT\n"),
    }
}

fn no_interfaces(state: NetworkState) -> &'static str {
    match state {
        NetworkState::Initial | NetworkState::Created | NetworkState::Error => "no interfaces yet",
        NetworkState::DeleteWait | NetworkState::Deleted => "no interfaces left",
    }
}

/// Returns the interfaces by address, then the other allocated addresses.
fn branches(view: &NetworkView<'_>) -> Vec<Branch> {
    let mut interfaces: Vec<&InterfaceRecord> = view.interfaces.iter().collect();
    interfaces.sort_by_key(|interface| (interface.ipv4.is_none(), interface.ipv4, interface.macaddr));
    let listed: HashSet<Ipv4Addr> = interfaces.iter().filter_map(|interface| interface.ipv4).collect();
    let mut branches: Vec<Branch> = interfaces.into_iter().map(interface_branch).collect();

    let mut addresses: Vec<&AddressRecord> = view.addresses.iter().collect();
    addresses.sort_by_key(|address| address.address);
    let others = addresses.into_iter().filter(|address| !listed.contains(&address.address));
    branches.extend(others.filter_map(|address| address_branch(view, address)));
    branches
}

fn interface_branch(interface: &InterfaceRecord) -> Branch {
    let address = interface.ipv4.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let mut user = format!("{}  instance {}", interface.macaddr, short(&interface.instance_uuid.to_string()));
    if let Some(floating) = interface.floating {
        user.push_str(&format!("  floats as {floating}"));
    }
    if interface.state != InterfaceState::Created {
        user.push_str(&format!("  ({})", interface.state));
    }
    Branch { address, user }
}

/// Returns `None` for addresses that every network has or that are only counted.
fn address_branch(view: &NetworkView<'_>, address: &AddressRecord) -> Option<Branch> {
    let owner = || match address.user.as_slice() {
        [kind, id] => format!("{} {}", escape_control(kind), short(id)),
        _ => "unknown".to_owned(),
    };
    let user = match address.kind {
        AddressType::Network | AddressType::Broadcast => return None,
        AddressType::Gateway if address.address == view.network.netblock.router() => return None,
        AddressType::Gateway => format!("NAT of {}", owner()),
        AddressType::Floating => format!("floats for {}", owner()),
        AddressType::Routed => format!("routed to {}", owner()),
        // Its interface was created or deleted between the queries.
        AddressType::Instance => format!("allocated to {}", owner()),
        AddressType::Manual | AddressType::Halo if is_only_counted(view, address.kind) => return None,
        AddressType::Manual if address.comment.is_empty() => "reserved".to_owned(),
        AddressType::Manual => format!("reserved: {}", truncate(&address.comment, MAX_COMMENT)),
        AddressType::Halo => "quarantined".to_owned(),
    };
    Some(Branch { address: address.address.to_string(), user })
}

fn count(view: &NetworkView<'_>, kind: AddressType) -> usize {
    view.addresses.iter().filter(|address| address.kind == kind).count()
}

fn is_only_counted(view: &NetworkView<'_>, kind: AddressType) -> bool {
    count(view, kind) > MAX_LISTED_ADDRESSES
}

/// Returns a line for each type of address that is only counted.
fn address_counts(view: &NetworkView<'_>) -> impl Iterator<Item = String> {
    let kinds = [(AddressType::Manual, "reserved"), (AddressType::Halo, "quarantined")];
    kinds
        .into_iter()
        .filter(|(kind, _)| is_only_counted(view, *kind))
        .map(|(kind, word)| format!("{} addresses {word}", count(view, kind)))
}

fn address_usage(view: &NetworkView<'_>) -> String {
    let quarantined = count(view, AddressType::Halo);
    let used = view.addresses.len() - quarantined;
    let size = view.network.netblock.size();
    let suffix = if quarantined == 0 { String::new() } else { format!(", {quarantined} quarantined") };
    format!("{used} of {size} addresses in use{suffix}")
}

fn short(id: &str) -> String {
    truncate(id, SHORT_ID)
}

/// Escapes and truncates foreign text.
fn truncate(text: &str, max_length: usize) -> String {
    match text.char_indices().nth(max_length) {
        Some((end, _)) => escape_control(&text[..end]) + "…",
        None => escape_control(text),
    }
}

#[cfg(test)]
mod tests;
