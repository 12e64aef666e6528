//! The rule set that lets only nodes of the cluster send VXLAN packets to this host. It exists while the host has a
//! tunnel.

use muster_types::Result;
use muster_types::network::NetworkPlan;

use super::host_table::{HostTable, TableChange};
use super::names::{MESH_TABLE, network_of_marker};
use super::netlink::NetlinkSocket;
use super::nftables::NftFamily;
use super::{Networks, observed, rules};

/// In-memory state of the rule set.
#[derive(Debug)]
pub(crate) struct MeshState {
    /// The number of reconcile passes that need the rule set at the moment.
    users: usize,
    table: HostTable,
}

impl Default for MeshState {
    fn default() -> Self {
        Self { users: 0, table: HostTable::new(NftFamily::Ip, MESH_TABLE, "mesh-rules") }
    }
}

/// Protects the rule set from being removed.
#[derive(Debug)]
pub(crate) struct MeshGuard<'a> {
    networks: &'a Networks,
    pub(crate) repaired: Option<String>,
}

impl Drop for MeshGuard<'_> {
    fn drop(&mut self) {
        self.networks.mesh.lock().users -= 1;
    }
}

impl Networks {
    /// Applies the rule set before a tunnel exists, and protects it from removal while the guard exists.
    pub(crate) fn acquire_mesh(&self, plan: &NetworkPlan) -> Result<MeshGuard<'_>> {
        let mut state = self.mesh.lock();
        let change = state.table.ensure(self, &rules::mesh_rules(&plan.cluster_nodes))?;
        state.users += 1;
        let repaired = (change == TableChange::Repaired)
            .then(|| format!("rule set {MESH_TABLE} was missing or had been changed"));
        Ok(MeshGuard { networks: self, repaired })
    }

    /// Removes the rule set if the host has no tunnel.
    pub(crate) fn remove_unused_mesh(&self) -> Result<()> {
        let mut state = self.mesh.lock();
        if state.users > 0 || !state.table.exists()? {
            return Ok(());
        }
        let links = observed::links(&mut NetlinkSocket::route()?)?;
        let has_tunnel =
            links.iter().any(|link| link.vxlan.is_some() && network_of_marker(&link.alias).is_some());
        if has_tunnel { Ok(()) } else { state.table.remove(self) }
    }
}
