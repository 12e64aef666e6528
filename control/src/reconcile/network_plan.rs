//! Renders what networks need on a node from what the database says. Reads only; the rest is plain functions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv4Addr;

use muster_types::address::{AddressType, Netblock};
use muster_types::ids::{NetworkId, NodeId};
use muster_types::network::{Egress, FLOATING, Lease, NetworkPlan, Port, Router, VXLAN_OVERHEAD};
use muster_types::node::NodeState;
use muster_types::settings::Settings;

use crate::objects::node::choose_network_node;
use crate::store::interfaces::{self, InterfaceRow};
use crate::store::networks::{self, NetworkRow};
use crate::store::nodes::{self, NodeRow};
use crate::store::{Read, StoreError, addresses, dns_entries};

/// What a node without an answer is taken to carry: plain Ethernet.
const USUAL_MTU: u32 = 1500;
/// The smallest that IPv4 allows itself.
const SMALLEST_MTU: u32 = 576;

/// Everything that plans are made of, read at one moment.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) networks: BTreeMap<NetworkId, NetworkRow>,
    interfaces: HashMap<NetworkId, Vec<InterfaceRow>>,
    names: HashMap<NetworkId, Vec<(String, Ipv4Addr)>>,
    routed: HashMap<NetworkId, Vec<Ipv4Addr>>,
    floats: Netblock,
    nodes: BTreeMap<NodeId, NodeRow>,
    network_node: Option<NodeId>,
}

impl Picture {
    pub(super) async fn read<D: Read + Copy>(db: D, settings: &Settings) -> Result<Self, StoreError> {
        let rows = nodes::list(db).await?;
        let network_node =
            choose_network_node(&settings.network_node_ip, rows.iter()).map(|row| row.identity.id);
        let floating = networks::get(db, FLOATING).await?;
        let floats =
            floating.ok_or_else(|| StoreError::Broken("there is no floating network".into()))?.netblock;
        let mut interfaces: HashMap<NetworkId, Vec<InterfaceRow>> = HashMap::new();
        for row in interfaces::list(db, None).await? {
            interfaces.entry(row.network).or_default().push(row);
        }
        let mut names: HashMap<NetworkId, Vec<(String, Ipv4Addr)>> = HashMap::new();
        for (network, name, value) in dns_entries::list(db, None).await? {
            names.entry(network).or_default().push((name, value));
        }
        let mut routed: HashMap<NetworkId, Vec<Ipv4Addr>> = HashMap::new();
        for (address, user) in addresses::held_as(db, FLOATING, AddressType::Routed).await? {
            if let Ok(network) = user.parse() {
                routed.entry(network).or_default().push(address);
            }
        }
        Ok(Self {
            networks: networks::wanted(db).await?.into_iter().map(|row| (row.id, row)).collect(),
            interfaces,
            names,
            routed,
            floats,
            nodes: rows
                .into_iter()
                .filter(|row| row.state != NodeState::Deleted)
                .map(|row| (row.identity.id, row))
                .collect(),
            network_node,
        })
    }

    /// Whether a network has anything to do on a node.
    pub(super) fn takes_part(&self, network: NetworkId, node: NodeId) -> bool {
        self.networks.contains_key(&network) && self.participants(network).contains(&node)
    }

    /// The nodes that a network is on: the network node, and where its interfaces are.
    fn participants(&self, network: NetworkId) -> BTreeSet<NodeId> {
        let places = self.interfaces.get(&network).into_iter().flatten().filter_map(|row| row.node);
        places.chain(self.network_node).filter(|node| self.nodes.contains_key(node)).collect()
    }

    /// The largest packet that fits into the tunnels between all nodes.
    fn mtu(&self, settings: &Settings) -> u32 {
        let ways = self.nodes.values().map(|node| node.report.mesh_mtu.unwrap_or(USUAL_MTU));
        let most = u32::try_from(settings.max_hypervisor_mtu).unwrap_or(u32::MAX);
        let narrowest = ways.min().unwrap_or(USUAL_MTU).min(most);
        narrowest.saturating_sub(VXLAN_OVERHEAD).max(SMALLEST_MTU)
    }

    /// What the network needs on a node that it is on.
    pub(super) fn plan(
        &self,
        network: &NetworkRow,
        node: NodeId,
        settings: &Settings,
    ) -> Option<NetworkPlan> {
        let address = |node: &NodeId| self.nodes.get(node).and_then(|row| row.identity.ip.parse().ok());
        let interfaces = self.interfaces.get(&network.id).map(Vec::as_slice).unwrap_or_default();
        let here = interfaces.iter().filter(|row| row.node == Some(node));
        Some(NetworkPlan {
            id: network.id,
            vxid: u32::try_from(network.vxid).ok()?,
            generation: network.generation,
            netblock: network.netblock,
            mtu: self.mtu(settings),
            mesh_address: address(&node)?,
            peers: self
                .participants(network.id)
                .iter()
                .filter(|peer| **peer != node)
                .filter_map(address)
                .collect(),
            ports: here.map(|row| Port { interface: row.id, mac: row.mac, address: row.ipv4 }).collect(),
            routed: self.routed.get(&network.id).cloned().unwrap_or_default(),
            check_senders: settings.network_check_senders,
            router: (self.network_node == Some(node)).then(|| self.router(network, interfaces, settings)),
        })
    }

    fn router(&self, network: &NetworkRow, interfaces: &[InterfaceRow], settings: &Settings) -> Router {
        let namespace = network.namespace.as_deref().unwrap_or_default();
        Router {
            dhcp: network.provide_dhcp,
            dns: network.provide_dns,
            nat: network.provide_nat,
            domain: domain(namespace, &settings.zone),
            dns_server: settings.dns_server.clone(),
            leases: interfaces
                .iter()
                .filter_map(|row| {
                    Some(Lease { mac: row.mac, address: row.ipv4?, name: row.hostname.clone() })
                })
                .collect(),
            names: self.names.get(&network.id).cloned().unwrap_or_default(),
            egress: Egress {
                netblock: self.floats,
                gateway: network.floating_gateway,
                floating: interfaces.iter().filter_map(|row| Some((row.floating?, row.ipv4?))).collect(),
                masquerade: settings.network_masquerade,
            },
        }
    }
}

/// The DNS domain of a namespace's networks. A namespace may have a name that no host name can hold.
fn domain(namespace: &str, zone: &str) -> String {
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
    fn a_domain_is_made_of_labels_whatever_the_namespace_is_called() {
        assert_eq!(domain("ci", "shakenfist"), "ci.shakenfist");
        assert_eq!(domain("Team A\n", "example.org"), "team-a.example.org");
        assert_eq!(domain("日本", "zone"), "zone");
    }
}
