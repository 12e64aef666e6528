//! Derives the plan of each network on each node from the database.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv4Addr;

use muster_types::address::{AddressType, Netblock};
use muster_types::ids::{InstanceId, NetworkId, NodeId};
use muster_types::network::{
    DhcpLease, EgressPlan, FLOATING_NETWORK_ID, InterfacePlan, NetworkPlan, RouterPlan, VXLAN_OVERHEAD,
};
use muster_types::node::NodeState;
use muster_types::settings::Settings;

use crate::objects::node_location::{NetworkNodes, network_candidate, sort_candidates};
use muster_store::interfaces::{self, InterfaceRow};
use muster_store::networks::{self, NetworkRow};
use muster_store::nodes::NodeRow;
use muster_store::{Read, StoreError, addresses, dns_entries, instance_migrations};

/// The MTU of a node that has not reported one: that of Ethernet.
const DEFAULT_MTU: u32 = 1500;
/// The smallest MTU that IPv4 allows.
const MIN_MTU: u32 = 576;

/// The rows that plans are derived from, read at the same time.
#[derive(Debug)]
pub(crate) struct NetworkFacts {
    networks: BTreeMap<NetworkId, NetworkRow>,
    interfaces: HashMap<NetworkId, Vec<InterfaceRow>>,
    /// The nodes that instances are being migrated to. Their networks are on both nodes meanwhile.
    migration_targets: HashMap<InstanceId, NodeId>,
    names: HashMap<NetworkId, Vec<(String, Ipv4Addr)>>,
    routed: HashMap<NetworkId, Vec<Ipv4Addr>>,
    floats: Netblock,
}

impl NetworkFacts {
    pub(crate) async fn read<D: Read + Copy>(db: D) -> Result<Self, StoreError> {
        // The networks are read first: rows that are read after them belong to these generations or to newer ones,
        // which are applied next.
        let networks = networks::wanted(db).await?.into_iter().map(|row| (row.id, row)).collect();
        let floating = networks::get(db, FLOATING_NETWORK_ID).await?;
        let floats =
            floating.ok_or_else(|| StoreError::Internal("there is no floating network".into()))?.netblock;
        let mut interfaces: HashMap<NetworkId, Vec<InterfaceRow>> = HashMap::new();
        for row in interfaces::list(db).await? {
            interfaces.entry(row.network).or_default().push(row);
        }
        let migrations = instance_migrations::list(db).await?;
        let migration_targets = migrations.into_iter().map(|row| (row.instance, row.target)).collect();
        let mut names: HashMap<NetworkId, Vec<(String, Ipv4Addr)>> = HashMap::new();
        for (network, name, value) in dns_entries::list(db).await? {
            names.entry(network).or_default().push((name, value));
        }
        let mut routed: HashMap<NetworkId, Vec<Ipv4Addr>> = HashMap::new();
        for (address, user) in addresses::of_kind(db, FLOATING_NETWORK_ID, AddressType::Routed).await? {
            let network = user.parse().map_err(|_| {
                StoreError::Internal(format!("the routed address {address} has the user {user:?}"))
            })?;
            routed.entry(network).or_default().push(address);
        }
        Ok(Self { networks, interfaces, migration_targets, names, routed, floats })
    }

    /// Returns the nodes of an interface: that of its instance, and that to which the instance is being migrated.
    fn nodes_of(&self, interface: &InterfaceRow) -> impl Iterator<Item = NodeId> + use<> {
        let target = self.migration_targets.get(&interface.instance).copied();
        interface.node.into_iter().chain(target)
    }
}

/// Which networks are on which nodes.
#[derive(Debug)]
pub(crate) struct NetworkTopology<'a> {
    facts: &'a NetworkFacts,
    nodes: BTreeMap<NodeId, &'a NodeRow>,
    /// The nodes that have the routers of all networks.
    routers: NetworkNodes,
    /// The nodes of each network: those with its router and those of its interfaces.
    participants: BTreeMap<NetworkId, BTreeSet<NodeId>>,
}

impl<'a> NetworkTopology<'a> {
    /// Creates the topology. `owner` is the active network node.
    pub(crate) fn new(
        facts: &'a NetworkFacts,
        rows: &'a [NodeRow],
        owner: Option<NodeId>,
        settings: &Settings,
    ) -> Self {
        let candidates = rows.iter().filter_map(network_candidate);
        let routers = NetworkNodes::choose(owner, &sort_candidates(settings.network_node_ip, candidates));
        let nodes: BTreeMap<NodeId, &NodeRow> = rows
            .iter()
            .filter(|row| row.state != NodeState::Deleted)
            .map(|row| (row.identity.id, row))
            .collect();
        let participants = facts
            .networks
            .keys()
            .map(|network| {
                let interface_nodes =
                    facts.interfaces.get(network).into_iter().flatten().flat_map(|row| facts.nodes_of(row));
                let on =
                    interface_nodes.chain(routers.iter()).filter(|node| nodes.contains_key(node)).collect();
                (*network, on)
            })
            .collect();
        Self { facts, nodes, routers, participants }
    }

    /// Returns whether a network is on a node.
    pub(crate) fn takes_part(&self, network: NetworkId, node: NodeId) -> bool {
        self.participants.get(&network).is_some_and(|on| on.contains(&node))
    }

    /// Returns the networks on a node.
    pub(crate) fn networks_on(&self, node: NodeId) -> impl Iterator<Item = &NetworkRow> {
        let on = self.participants.iter().filter(move |(_, on)| on.contains(&node));
        on.filter_map(|(network, _)| self.facts.networks.get(network))
    }

    /// Returns whether there are no networks.
    pub(crate) fn is_empty(&self) -> bool {
        self.facts.networks.is_empty()
    }

    /// Returns the plan of a network on one of its nodes.
    pub(crate) fn plan(
        &self,
        network: &NetworkRow,
        node: NodeId,
        settings: &Settings,
    ) -> Option<NetworkPlan> {
        let address = |node: &NodeId| self.nodes.get(node).map(|row| row.identity.ip);
        let interfaces = self.facts.interfaces.get(&network.id).map(Vec::as_slice).unwrap_or_default();
        let here = interfaces.iter().filter(|row| self.facts.nodes_of(row).any(|own| own == node));
        Some(NetworkPlan {
            id: network.id,
            vxid: network.vxid,
            generation: network.generation,
            netblock: network.netblock,
            mtu: mtu(self.nodes.values().copied(), settings),
            mesh_address: address(&node)?,
            peers: self
                .participants
                .get(&network.id)
                .into_iter()
                .flatten()
                .filter(|peer| **peer != node)
                .filter_map(address)
                .collect(),
            cluster_nodes: self.node_addresses().into_iter().collect(),
            ports: here
                .map(|row| InterfacePlan { interface: row.id, mac: row.mac, address: row.ipv4 })
                .collect(),
            routed: self.facts.routed.get(&network.id).cloned().unwrap_or_default(),
            check_senders: settings.network_check_senders,
            router: self
                .routers
                .iter()
                .any(|router| router == node)
                .then(|| self.router(network, node, interfaces, settings)),
        })
    }

    /// Returns the addresses of all nodes. A node that is down keeps its place: its VMs may still run.
    fn node_addresses(&self) -> BTreeSet<Ipv4Addr> {
        self.nodes.values().map(|row| row.identity.ip).collect()
    }

    /// Returns the sorted addresses of all nodes except one.
    fn other_node_addresses(&self, node: NodeId) -> Vec<Ipv4Addr> {
        let mut addresses = self.node_addresses();
        if let Some(own) = self.nodes.get(&node) {
            addresses.remove(&own.identity.ip);
        }
        addresses.into_iter().collect()
    }

    /// Returns the plan of a router on a node.
    fn router(
        &self,
        network: &NetworkRow,
        node: NodeId,
        interfaces: &[InterfaceRow],
        settings: &Settings,
    ) -> RouterPlan {
        let namespace = network.namespace.as_deref().unwrap_or_default();
        RouterPlan {
            dhcp: network.provide_dhcp,
            dns: network.provide_dns,
            nat: network.provide_nat,
            domain: domain(namespace, &settings.zone),
            dns_server: settings.dns_server,
            leases: interfaces
                .iter()
                .filter_map(|row| {
                    Some(DhcpLease { mac: row.mac, address: row.ipv4?, name: row.hostname.clone() })
                })
                .collect(),
            names: self.facts.names.get(&network.id).cloned().unwrap_or_default(),
            egress: EgressPlan {
                netblock: self.facts.floats,
                gateway: network.floating_gateway,
                floating: interfaces.iter().filter_map(|row| Some((row.floating?, row.ipv4?))).collect(),
                masquerade: settings.network_masquerade,
                nodes: self.other_node_addresses(node),
            },
        }
    }
}

/// Returns the largest MTU that fits into the tunnels between all nodes.
pub(crate) fn mtu<'a>(nodes: impl Iterator<Item = &'a NodeRow>, settings: &Settings) -> u32 {
    let present = nodes.filter(|node| node.state != NodeState::Deleted);
    let mtus = present.map(|node| node.report.mesh_mtu.unwrap_or(DEFAULT_MTU));
    let max = u32::try_from(settings.max_hypervisor_mtu).expect("the settings bound it");
    let smallest = mtus.min().unwrap_or(DEFAULT_MTU).min(max);
    smallest.saturating_sub(VXLAN_OVERHEAD).max(MIN_MTU)
}

/// Returns the DNS domain of a namespace's networks. Characters that host names cannot contain are replaced.
pub(crate) fn domain(namespace: &str, zone: &str) -> String {
    let label = |text: &str| -> String {
        let kept: String = text
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .take(63)
            .collect();
        kept.trim_matches('-').to_owned()
    };
    let labels = std::iter::once(label(namespace)).chain(zone.split('.').map(label));
    labels.filter(|label| !label.is_empty()).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_replaces_characters_that_host_names_cannot_contain() {
        assert_eq!(domain("ci", "shakenfist"), "ci.shakenfist");
        assert_eq!(domain("Team A\n", "example.org"), "team-a.example.org");
        assert_eq!(domain("日本", "zone"), "zone");
    }
}
