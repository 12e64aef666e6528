//! Whether a node belongs to this daemon, and which node is the network node.

use std::net::Ipv4Addr;
use std::sync::Arc;

use muster_store::nodes::{self, NodeRow};
use muster_types::node::{NodeApi, NodeState};
use muster_types::{Error, Result};

use crate::app::App;

/// Where a node runs.
#[derive(Clone)]
pub enum NodeLocation {
    /// A node of this daemon.
    Local(Arc<dyn NodeApi>),
    /// A node of another daemon.
    Remote(Box<NodeRow>),
}

impl std::fmt::Debug for NodeLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Local(_) => "Local",
            Self::Remote(_) => "Remote",
        })
    }
}

impl NodeLocation {
    pub(crate) fn of(app: &App, node: NodeRow) -> Self {
        let here = app.nodes.iter().find(|own| own.identity().id == node.identity.id);
        here.map_or_else(|| Self::Remote(Box::new(node)), |own| Self::Local(Arc::clone(own)))
    }
}

/// Returns the node of this daemon that stores incoming content.
pub(crate) fn storage_node(app: &App) -> Result<&Arc<dyn NodeApi>> {
    app.nodes.first().ok_or_else(|| Error::Internal("this daemon has no node".into()))
}

/// Returns the node that runs the services of every network.
pub async fn network_node(app: &App) -> Result<NodeRow> {
    let rows = nodes::list(&*app.store).await?;
    let chosen = choose_network_node(app.settings.network_node_ip, rows.iter()).cloned();
    chosen.ok_or_else(|| {
        let text = match app.settings.network_node_ip {
            None => "the cluster has no network node".to_owned(),
            Some(address) => format!("no network node has the address {address} of NETWORK_NODE_IP"),
        };
        Error::Unavailable(text)
    })
}

/// Chooses the network node: the one that `NETWORK_NODE_IP` names, else the first network node that joined. An
/// unreachable one keeps the role, because two active network nodes are worse than none. The role moves when the node
/// is deleted.
#[must_use]
pub fn choose_network_node<'a>(
    address: Option<Ipv4Addr>,
    rows: impl Iterator<Item = &'a NodeRow>,
) -> Option<&'a NodeRow> {
    let able = rows.filter(|row| {
        let named = address.is_none_or(|address| row.identity.ip == address);
        named && row.identity.is_network_node && row.state != NodeState::Deleted
    });
    able.min_by(|a, b| a.created.total_cmp(&b.created).then_with(|| a.identity.id.cmp(&b.identity.id)))
}
