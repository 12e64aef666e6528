//! Finds and removes the networks of this host, including partly created or partly removed ones.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use muster_types::Result;
use muster_types::ids::NetworkId;
use muster_types::network::FLOATING_NETWORK_ID;
use muster_types::node::FoundNetwork;

use super::changes::is_unmarked_and_unused;
use super::names::{self, NetworkNames, marker, network_of_marker, vxid_of_device, vxid_of_table};
use super::netlink::NetlinkSocket;
use super::observed::HostSnapshot;
use super::reconcile::{ReconcileState, VXID_FILE};
use super::{Networks, dnsmasq_process, namespace, observed, rules};
use crate::command::Tool;

/// The VXLAN id of a network of which only the id is known. No network with devices has it.
const UNKNOWN_VXID: u32 = 0;
/// The maximum number of attempts at removing all devices.
const MAX_PASSES: usize = 4;

impl Networks {
    /// Returns the networks of which this host has a device, a rule set, a directory or a namespace.
    pub(crate) fn find(&self) -> Result<Vec<FoundNetwork>> {
        let mut found: BTreeMap<NetworkId, u32> = BTreeMap::new();
        for link in observed::links(&mut NetlinkSocket::route()?)? {
            if let (Some(network), Some(vxid)) = (network_of_marker(&link.alias), vxid_of_device(&link.name))
            {
                found.insert(network, vxid);
            }
        }
        for (name, table) in self.bridge_tables(&mut NetlinkSocket::netfilter()?)?.iter() {
            if let (Some(network), Some(vxid)) = (network_of_marker(&table.comment), vxid_of_table(name)) {
                found.entry(network).or_insert(vxid);
            }
        }
        for network in networks_with_dir() {
            // Without a readable VXID only the directory and the namespace can be removed.
            let text = fs::read_to_string(names::network_dir(network).join(VXID_FILE)).unwrap_or_default();
            found.entry(network).or_insert_with(|| text.trim().parse().unwrap_or(UNKNOWN_VXID));
        }
        let routers: Vec<NetworkId> =
            namespace::list_names().into_iter().filter(|network| !found.contains_key(network)).collect();
        for network in routers {
            if let Some(vxid) = vxid_of_router(network)? {
                found.insert(network, vxid);
            }
        }
        found.remove(&FLOATING_NETWORK_ID);
        Ok(found.into_iter().map(|(id, vxid)| FoundNetwork { id, vxid }).collect())
    }

    /// Returns whether the host has a directory or a namespace of a network, which needs no privileges to check.
    pub(crate) fn has_files(network: NetworkId) -> bool {
        names::network_dir(network).exists() || namespace::name_exists(network)
    }

    /// Removes everything that provably belongs to a network.
    pub(crate) fn remove(&self, network: FoundNetwork) -> Result<()> {
        let state = self.state(network.id);
        {
            let mut state = state.lock();
            let dir = names::network_dir(network.id);
            dnsmasq_process::stop_all(&dir)?;
            self.remove_devices(network)?;
            if namespace::name_exists(network.id) && owns_namespace(network.id)? {
                namespace::delete(network.id)?;
            }
            self.remove_tables(network)?;
            dnsmasq_process::remove_dir(&dir)?;
            *state = ReconcileState::default();
        }
        self.drop_state(network.id, state);
        let (mesh, egress) = (self.remove_unused_mesh(), self.remove_unused_egress_bridges());
        mesh.and(egress).and(self.remove_unused_gate())
    }

    fn remove_devices(&self, network: FoundNetwork) -> Result<()> {
        let mut result = Ok(());
        for _ in 0..MAX_PASSES {
            let lines = removal_commands(network)?;
            if lines.is_empty() {
                return Ok(());
            }
            // A device may have been removed together with its peer meanwhile.
            result = self.batch(Tool::Ip, &lines);
        }
        result
    }

    fn remove_tables(&self, network: FoundNetwork) -> Result<()> {
        let tables = self.bridge_tables(&mut NetlinkSocket::netfilter()?)?;
        let ours = tables.iter().filter(|(_, table)| table.comment == marker(network.id));
        let text: String = ours.map(|(name, _)| rules::delete_table("bridge", name)).collect();
        if text.is_empty() { Ok(()) } else { self.nft(&text) }
    }

    /// Drops the state of a network unless it is in use.
    fn drop_state(&self, network: NetworkId, state: Arc<parking_lot::Mutex<ReconcileState>>) {
        let mut states = self.states.lock();
        drop(state);
        if states.get(&network).is_some_and(|state| Arc::strong_count(state) == 1) {
            states.remove(&network);
        }
    }
}

/// Returns the commands that delete every device with the marker of this network, and the devices with its names that
/// are not marked yet.
fn removal_commands(network: FoundNetwork) -> Result<Vec<String>> {
    let snapshot = HostSnapshot::read_devices(&mut NetlinkSocket::route()?)?;
    let names = NetworkNames::new(network.vxid);
    let unmarked = |link: &observed::Link| {
        names
            .devices()
            .iter()
            .any(|(name, kind)| link.name == *name && is_unmarked_and_unused(&snapshot, link, kind))
    };
    let marked = |link: &observed::Link| {
        link.alias == marker(network.id) && vxid_of_device(&link.name).is_some() && !link.name.ends_with("-i")
    };
    let ours = snapshot.links().iter().filter(|link| unmarked(link) || marked(link));
    Ok(ours.map(|link| format!("link del dev {}", link.name)).collect())
}

/// Returns the networks that have a directory.
fn networks_with_dir() -> Vec<NetworkId> {
    let entries = fs::read_dir(names::networks_dir()).into_iter().flatten().flatten();
    let canonical = |name: String| name.parse().ok().filter(|id: &NetworkId| id.to_string() == name);
    entries.filter_map(|entry| canonical(entry.file_name().into_string().ok()?)).collect()
}

/// Returns whether the namespace of a network is ours: it is marked, or only its name exists and the network has a
/// directory.
fn owns_namespace(network: NetworkId) -> Result<bool> {
    match namespace::inode(network) {
        Some(_) => Ok(vxid_of_router(network)?.is_some()),
        None => Ok(names::network_dir(network).exists()),
    }
}

/// Returns the VXLAN id of a network by its router's namespace, if that is marked; [`UNKNOWN_VXID`] if no device has it.
fn vxid_of_router(network: NetworkId) -> Result<Option<u32>> {
    if namespace::inode(network).is_none() {
        return Ok(None);
    }
    let links = namespace::inside(network, || observed::links(&mut NetlinkSocket::route()?))?;
    let ours = links.iter().any(|link| link.name == "lo" && link.alias == marker(network));
    let vxid = links.iter().find_map(|link| vxid_of_device(&link.name)).unwrap_or(UNKNOWN_VXID);
    Ok(ours.then_some(vxid))
}
