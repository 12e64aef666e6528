//! Whether a node belongs to this daemon, and which node is the network node.

use std::net::Ipv4Addr;
use std::sync::Arc;

use muster_store::leases::{self, NETWORK_NODE_LEASE};
use muster_store::nodes::{self, NetworkCandidate, NodeRow};
use muster_types::ids::NodeId;
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

/// Returns the node that runs the services of every network: the owner of the lease. While no node owns it, this is the
/// candidate that is expected to acquire it.
pub async fn network_node(app: &App) -> Result<NodeRow> {
    let (owner, rows) = (network_owner(app).await?, nodes::list(&*app.store).await?);
    let candidates = rows.iter().filter_map(network_candidate);
    let candidates = sort_candidates(app.settings.network_node_ip, candidates);
    let chosen = NetworkNodes::choose(owner, &candidates);
    let chosen = chosen.owner.or(chosen.standby).or_else(|| Some(candidates.first()?.id));
    let row = chosen.and_then(|id| rows.into_iter().find(|row| row.identity.id == id));
    row.ok_or_else(|| {
        let text = match app.settings.network_node_ip {
            None => "the cluster has no network node".to_owned(),
            Some(address) => format!("no network node has the address {address} of NETWORK_NODE_IP"),
        };
        Error::Unavailable(text)
    })
}

/// Returns the node that owns the lease of the active network node.
pub(crate) async fn network_owner(app: &App) -> Result<Option<NodeId>> {
    let owner = leases::owner_id(&app.store, NETWORK_NODE_LEASE).await?;
    let invalid = |id: &String| Error::Internal(format!("the network node lease has the owner {id:?}"));
    owner.map(|id| id.parse().map_err(|_| invalid(&id))).transpose()
}

/// Returns a node as a candidate, if it may run routers.
pub(crate) fn network_candidate(row: &NodeRow) -> Option<NetworkCandidate> {
    let is_candidate = row.identity.is_network_node && row.state != NodeState::Deleted;
    is_candidate.then(|| row.into())
}

/// Returns the candidates in order of preference: those that joined first. With `address`, which is `NETWORK_NODE_IP`,
/// only the node with this address is a candidate.
pub(crate) fn sort_candidates(
    address: Option<Ipv4Addr>,
    candidates: impl IntoIterator<Item = NetworkCandidate>,
) -> Vec<NetworkCandidate> {
    let is_named = |candidate: &NetworkCandidate| address.is_none_or(|address| candidate.ip == address);
    let mut candidates: Vec<_> = candidates.into_iter().filter(is_named).collect();
    candidates.sort_by(|a, b| a.created.total_cmp(&b.created).then_with(|| a.id.cmp(&b.id)));
    candidates
}

/// Returns whether a candidate is fit to become the active network node.
pub(crate) fn is_able(candidate: &NetworkCandidate) -> bool {
    candidate.state == NodeState::Created && !candidate.is_degraded
}

/// The nodes that have routers. Only those of the owner send and receive packets. See docs/decisions/0054.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NetworkNodes {
    /// The active network node.
    pub(crate) owner: Option<NodeId>,
    /// The node that takes over next. It has all routers already.
    pub(crate) standby: Option<NodeId>,
    /// The node that takes over if the standby is down. Set only while the lease has no owner.
    pub(crate) second_standby: Option<NodeId>,
}

impl NetworkNodes {
    /// Chooses the nodes. `owner` is the owner of the lease, `candidates` are in order of preference.
    pub(crate) fn choose(owner: Option<NodeId>, candidates: &[NetworkCandidate]) -> Self {
        let owner = owner.filter(|owner| candidates.iter().any(|candidate| candidate.id == *owner));
        let mut others =
            candidates.iter().filter(|candidate| Some(candidate.id) != owner && is_able(candidate));
        let standby = others.next().map(|candidate| candidate.id);
        if owner.is_none() && standby.is_none() {
            // A node that is down keeps its routers until another one is able to replace it.
            return Self { standby: candidates.first().map(|candidate| candidate.id), ..Self::default() };
        }
        // The lease of an owner expires before the node counts as missing. Its standby keeps its routers meanwhile.
        let second_standby = others.next().filter(|_| owner.is_none()).map(|candidate| candidate.id);
        Self { owner, standby, second_standby }
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = NodeId> {
        [self.owner, self.standby, self.second_standby].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standby_keeps_its_routers_while_the_lease_has_no_owner() {
        let candidate = |number: u8, state| NetworkCandidate {
            id: NodeId::new(),
            ip: Ipv4Addr::new(10, 0, 0, number),
            state,
            is_degraded: false,
            created: number.into(),
        };
        let [a, b, c] = [1, 2, 3].map(|number| candidate(number, NodeState::Created));
        let all = sort_candidates(None, [c, a, b]);
        assert_eq!(all, [a, b, c]);
        assert_eq!(sort_candidates(Some(b.ip), [a, b, c]), [b]);
        for owner in [a, b, c] {
            let nodes = NetworkNodes::choose(Some(owner.id), &all);
            let expired = NetworkNodes::choose(None, &all);
            assert_eq!(nodes.iter().count(), 2);
            assert!(expired.iter().any(|id| Some(id) == nodes.standby));
        }
        let missing = NetworkCandidate { state: NodeState::Missing, ..a };
        assert_eq!(NetworkNodes::choose(Some(b.id), &[missing, b, c]).standby, Some(c.id));
        assert_eq!(NetworkNodes::choose(Some(b.id), &[missing]).standby, Some(missing.id));
    }
}
