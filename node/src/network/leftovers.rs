//! Finds and removes what there is of a network, whether it is whole, half made or half removed.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use muster_types::Result;
use muster_types::ids::NetworkId;
use muster_types::network::FLOATING;
use muster_types::node::FoundNetwork;

use super::care::{Known, VXID};
use super::changes::is_bare;
use super::names::{self, Names, marked, marker, vxid_of_device, vxid_of_table};
use super::netlink::Socket;
use super::view::Snapshot;
use super::{Networks, lock, namespace, rules, server, view};
use crate::command::Tool;

/// How often devices are looked for and removed.
const ROUNDS: usize = 4;

impl Networks {
    /// The networks of which this machine has something.
    pub(crate) fn find(&self) -> Result<Vec<FoundNetwork>> {
        let mut found: BTreeMap<NetworkId, u32> = BTreeMap::new();
        for link in view::links(&mut Socket::route()?)? {
            if let (Some(network), Some(vxid)) = (marked(&link.alias), vxid_of_device(&link.name)) {
                found.insert(network, vxid);
            }
        }
        for (name, table) in self.node_tables(&mut Socket::netfilter()?)?.iter() {
            if let (Some(network), Some(vxid)) = (marked(&table.comment), vxid_of_table(name)) {
                found.entry(network).or_insert(vxid);
            }
        }
        for network in folders() {
            let text = fs::read_to_string(names::folder(network).join(VXID)).unwrap_or_default();
            found.entry(network).or_insert_with(|| text.trim().parse().unwrap_or(0));
        }
        let routers: Vec<NetworkId> =
            namespace::named().into_iter().filter(|network| !found.contains_key(network)).collect();
        for network in routers {
            if let Some(vxid) = router_of(network)? {
                found.insert(network, vxid);
            }
        }
        found.remove(&FLOATING);
        Ok(found.into_iter().map(|(id, vxid)| FoundNetwork { id, vxid }).collect())
    }

    /// Whether there may be something of a network, by a look that needs no rights.
    pub(crate) fn has_traces(network: NetworkId) -> bool {
        names::folder(network).exists() || namespace::is_named(network)
    }

    /// Removes everything that is proven to be of a network.
    pub(crate) fn remove(&self, network: FoundNetwork) -> Result<()> {
        let known = self.known(network.id);
        {
            let mut known = lock(&known);
            let folder = names::folder(network.id);
            server::stop_all(&folder)?;
            self.remove_devices(network)?;
            if namespace::is_named(network.id) && is_ours(network.id)? {
                namespace::delete(network.id)?;
            }
            self.remove_tables(network)?;
            server::remove_folder(&folder)?;
            *known = Known::default();
        }
        self.forget(network.id, known);
        self.sweep_every_egress()
    }

    fn remove_devices(&self, network: FoundNetwork) -> Result<()> {
        let mut result = Ok(());
        for _ in 0..ROUNDS {
            let lines = lines_to_remove(network)?;
            if lines.is_empty() {
                return Ok(());
            }
            // A device may go by itself meanwhile, because its other end went.
            result = self.batch(Tool::Ip, &lines);
        }
        result
    }

    fn remove_tables(&self, network: FoundNetwork) -> Result<()> {
        let tables = self.node_tables(&mut Socket::netfilter()?)?;
        let ours = tables.iter().filter(|(_, table)| table.comment == marker(network.id));
        let text: String = ours.map(|(name, _)| rules::without("bridge", name)).collect();
        if text.is_empty() { Ok(()) } else { self.nft(&text) }
    }

    /// Drops what is remembered, unless somebody is about to use it.
    fn forget(&self, network: NetworkId, known: Arc<std::sync::Mutex<Known>>) {
        let mut all = lock(&self.known);
        drop(known);
        if all.get(&network).is_some_and(|known| Arc::strong_count(known) == 1) {
            all.remove(&network);
        }
    }
}

/// Every device with a name and the marker of this network, and those of its number that were made but not marked
/// yet.
fn lines_to_remove(network: FoundNetwork) -> Result<Vec<String>> {
    let node = Snapshot::devices(&mut Socket::route()?)?;
    let names = Names::new(network.vxid);
    let unmarked = |link: &view::Link| {
        names.devices().iter().any(|(name, kind)| link.name == *name && is_bare(&node, link, kind))
    };
    let marked = |link: &view::Link| {
        link.alias == marker(network.id) && vxid_of_device(&link.name).is_some() && !link.name.ends_with("-i")
    };
    let ours = node.links().iter().filter(|link| unmarked(link) || marked(link));
    Ok(ours.map(|link| format!("link del dev {}", link.name)).collect())
}

/// The networks that have a folder.
fn folders() -> Vec<NetworkId> {
    let entries = fs::read_dir(names::folders()).into_iter().flatten().flatten();
    let canonical = |name: String| name.parse().ok().filter(|id: &NetworkId| id.to_string() == name);
    entries.filter_map(|entry| canonical(entry.file_name().into_string().ok()?)).collect()
}

/// Whether a name of a namespace is ours: the namespace is marked, or there is none yet and the network has a folder.
fn is_ours(network: NetworkId) -> Result<bool> {
    match namespace::number(network) {
        Some(_) => Ok(router_of(network)?.is_some()),
        None => Ok(names::folder(network).exists()),
    }
}

/// The number of a network by its router, if that is marked; 0 if it cannot be known.
fn router_of(network: NetworkId) -> Result<Option<u32>> {
    if namespace::number(network).is_none() {
        return Ok(None);
    }
    let links = namespace::inside(network, || view::links(&mut Socket::route()?))?;
    let ours = links.iter().any(|link| link.name == "lo" && link.alias == marker(network));
    let vxid = links.iter().find_map(|link| vxid_of_device(&link.name)).unwrap_or(0);
    Ok(ours.then_some(vxid))
}
