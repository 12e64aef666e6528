//! The networks of this host: devices, rule sets, routers, and their DHCP and DNS servers. See docs/decisions/0011 and
//! 0013.
//!
//! **Inspect in this process, change with programs**: state is read over netlink and compared with the plan by pure
//! functions; only a difference runs `ip`, `bridge`, `nft` or `dnsmasq`. After every change the state is read again,
//! until there is no difference.
//!
//! Networks keep working while this program is not running, and are recognised when it starts again: devices carry a
//! marker as their alias, and files are below `/run`, which does not survive a reboot either.
//!
//! ```text
//!  guest ── tap… ─┐                              ┌─ veth-X-o ══ veth-X-i (router, in a namespace) egr-X-i ═╗
//!  guest ── tap… ─┴─ br-vxlan-X ─────────────────┴─ vxlan-X ── other nodes                                  ║
//!                             external network ── host ── egr-br-NIC ─────────────────────────── egr-X-o ═╝
//! ```

mod address_owners;
mod changes;
mod conntrack;
mod dnsmasq_config;
mod dnsmasq_process;
mod egress;
#[cfg(test)]
mod fixtures;
mod forward_drop;
mod gate;
mod gratuitous_arp;
mod host_table;
mod mesh;
pub(crate) mod names;
mod namespace;
mod netlink;
mod nftables;
mod observed;
mod orphans;
mod reconcile;
mod rules;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use muster_types::ids::NetworkId;
use muster_types::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
use muster_types::node::FoundNetwork;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use parking_lot::Mutex;

use self::changes::{HostContext, has_egress};
pub(crate) use self::forward_drop::{ForwardDrop, forward_drop};
use self::gate::GateConfig;
use self::names::NetworkNames;
use self::netlink::NetlinkSocket;
use self::nftables::{NftFamily, NftTable};
use self::observed::HostSnapshot;
use self::reconcile::{ReconcileState, SyncStatus};
use crate::command::{COMMAND_TIMEOUT, Commands, Tool};

/// The number of networks that are reconciled concurrently.
const RECONCILE_WORKERS: usize = 4;
/// Up to this many networks are inspected one by one; for more, the state of the host is read once beforehand.
const BULK_CHECK_THRESHOLD: usize = 8;
/// The number of rule sets that are applied with one run of `nft`.
const RULE_SETS_PER_BATCH: usize = 250;
/// The MTU of Ethernet.
const DEFAULT_MTU: u32 = 1500;
const PING_COUNT: &str = "10";
const PING_TIMEOUT: Duration = Duration::from_secs(30);

/// The settings that pass bridged frames through iptables, whose rules are not meant for them.
const BRIDGE_NETFILTER_SYSCTLS: [&str; 3] =
    ["bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables", "bridge/bridge-nf-call-arptables"];

/// The networks of this host.
#[derive(Debug)]
pub(crate) struct Networks {
    commands: Commands,
    host: HostContext,
    states: Mutex<HashMap<NetworkId, Arc<Mutex<ReconcileState>>>>,
    tables: Mutex<BridgeTables>,
    egress: Mutex<egress::EgressState>,
    mesh: Mutex<mesh::MeshState>,
    gate: Mutex<gate::GateState>,
    gate_config: GateConfig,
    /// The port of the daemon's API, which guests may reach.
    api_port: OnceLock<u16>,
}

/// The rule sets of bridges as of a generation of the kernel's counter.
#[derive(Debug, Default)]
struct BridgeTables {
    generation: Option<u32>,
    tables: Arc<HashMap<String, NftTable>>,
}

impl Networks {
    pub(crate) fn new(commands: Commands, settings: &Settings) -> Self {
        let host = HostContext {
            egress_bridge: names::egress_bridge(&settings.node_egress_nic),
            ipv6: namespace::get_sysctl("ipv6/conf/all/disable_ipv6").is_some(),
        };
        Self {
            commands,
            host,
            states: Mutex::default(),
            tables: Mutex::default(),
            egress: Mutex::default(),
            mesh: Mutex::default(),
            gate: Mutex::default(),
            gate_config: GateConfig {
                nic: settings.node_egress_nic.clone(),
                virtual_ip: settings.network_virtual_ip,
                floating_network: settings.floating_network.parse().expect("the settings check it"),
            },
            api_port: OnceLock::new(),
        }
    }

    /// Sets the port of the daemon's API. Only the first call has an effect.
    pub(crate) fn set_api_port(&self, port: u16) {
        let _ = self.api_port.set(port);
    }

    pub(crate) fn commands(&self) -> &Commands {
        &self.commands
    }

    /// Reconciles networks with their plans. Blocks.
    pub(crate) fn ensure(&self, plans: &[NetworkPlan]) -> Result<Vec<Result<NetworkReport>>> {
        for name in BRIDGE_NETFILTER_SYSCTLS {
            if namespace::get_sysctl(name).is_some_and(|value| value != "0") {
                namespace::try_set_sysctl(name, "0");
            }
        }
        // Without these rules every host that reaches this one could send packets to guests, so no network is changed.
        let mesh = plans.first().map(|plan| self.acquire_mesh(plan)).transpose()?;
        // Without these rules a router would answer next to that of the active network node.
        let has_router = plans.iter().any(|plan| plan.router.is_some());
        let gate = has_router.then(|| self.acquire_gate(plans)).transpose()?;
        let egress_user = plans.iter().position(has_egress);
        let egress = match egress_user.and_then(|index| plans[index].router.as_ref()) {
            Some(router) => self.acquire_egress(&router.egress),
            None => Ok(egress::EgressGuard::unused()),
        };
        let mut results: Vec<Option<Result<NetworkReport>>> = plans.iter().map(|_| None).collect();
        let all = || (0..plans.len()).collect();
        let pending: Vec<usize> = if plans.len() > BULK_CHECK_THRESHOLD {
            self.check_all(plans, &mut results).unwrap_or_else(|error| {
                tracing::warn!(%error, "failed to check networks in bulk");
                all()
            })
        } else {
            all()
        };
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(index) = pending.get(next.fetch_add(1, Ordering::Relaxed)) {
                let plan = &plans[*index];
                let report = match &egress {
                    Err(error) if has_egress(plan) => Err(clone_error(error)),
                    _ => self.reconcile(plan),
                };
                done.push((*index, report));
            }
            done
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..RECONCILE_WORKERS.min(pending.len())).map(|_| scope.spawn(work)).collect();
            for worker in workers {
                let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                for (index, report) in done {
                    results[index] = Some(report);
                }
            }
        });
        let mut results: Vec<_> =
            results.into_iter().map(|result| result.expect("every plan is in sync or reconciled")).collect();
        if let (Some(index), Ok(egress)) = (egress_user, egress)
            && let Ok(report) = &mut results[index]
        {
            report.repaired.extend(egress.repaired.iter().cloned());
        }
        if let (Some(repair), Some(Ok(report))) =
            (mesh.as_ref().and_then(|mesh| mesh.repaired.clone()), results.first_mut())
        {
            report.repaired.push(repair);
        }
        self.remove_unused(mesh.is_none(), gate.is_none(), egress_user.is_none());
        Ok(results)
    }

    /// Removes what no plan of a pass needed, unless other networks of the host need it.
    fn remove_unused(&self, mesh: bool, gate: bool, egress: bool) {
        if mesh && let Err(error) = self.remove_unused_mesh() {
            tracing::warn!(%error, "failed to remove unused mesh rules");
        }
        if gate && let Err(error) = self.remove_unused_gate() {
            tracing::warn!(%error, "failed to remove unused gate rules");
        }
        if egress && let Err(error) = self.remove_unused_egress() {
            tracing::warn!(%error, "failed to remove unused egress bridge");
        }
    }

    /// Checks all networks against one snapshot of the host and fills in the results of those that are in sync. Returns
    /// the indices of the others.
    fn check_all(
        &self,
        plans: &[NetworkPlan],
        results: &mut [Option<Result<NetworkReport>>],
    ) -> Result<Vec<usize>> {
        let mut rules: Vec<(&NetworkPlan, String)> = Vec::new();
        let drifted = namespace::in_thread(|| {
            let snapshot = HostSnapshot::read_all(&mut NetlinkSocket::route()?)?;
            let tables = self.bridge_tables(&mut NetlinkSocket::netfilter()?)?;
            let mut drifted = Vec::new();
            for (index, plan) in plans.iter().enumerate() {
                match self.check(plan, &snapshot, &tables) {
                    Ok(SyncStatus::InSync) => results[index] = Some(Ok(NetworkReport::default())),
                    Ok(SyncStatus::Drifted { rules: Some(text) }) => {
                        rules.push((plan, text));
                        drifted.push(index);
                    }
                    // Reconciling the network alone reports the error.
                    Ok(SyncStatus::Drifted { rules: None }) | Err(_) => drifted.push(index),
                }
            }
            Ok::<_, Error>(drifted)
        })?;
        for batch in rules.chunks(RULE_SETS_PER_BATCH).filter(|batch| batch.len() > 1) {
            let batch: Vec<(&NetworkPlan, &str)> =
                batch.iter().map(|(plan, text)| (*plan, text.as_str())).collect();
            if let Err(error) = self.apply_rules_in_bulk(&batch) {
                tracing::debug!(%error, "failed to apply rule sets in bulk");
            }
        }
        Ok(drifted)
    }

    /// Returns the rule sets of bridges, reading them only if the kernel's generation counter changed.
    fn bridge_tables(&self, socket: &mut NetlinkSocket) -> Result<Arc<HashMap<String, NftTable>>> {
        let mut cached = self.tables.lock();
        let generation = nftables::generation(socket)?;
        if cached.generation != Some(generation) {
            cached.tables = Arc::new(nftables::tables(socket, NftFamily::Bridge, None)?);
            cached.generation = Some(generation);
        }
        Ok(cached.tables.clone())
    }

    /// Returns the reconcile state of a network, which is locked while the network is worked on.
    fn state(&self, network: NetworkId) -> Arc<Mutex<ReconcileState>> {
        self.states.lock().entry(network).or_default().clone()
    }

    /// Pings an address from the router. Blocks for some seconds.
    pub(crate) fn ping(&self, network: NetworkId, address: Ipv4Addr) -> Result<PingResult> {
        if namespace::inode(network).is_none() {
            return Err(Error::Unavailable(format!("the router of network {network} is not on this node")));
        }
        let address = address.to_string();
        let arguments = ["-n", "-c", PING_COUNT, "-i", "0.2", "-W", "1", &address];
        let run = || self.commands.try_run(Tool::Ping, &arguments, "", PING_TIMEOUT);
        let output = namespace::inside(network, run)?;
        // Clients expect the empty string after the last newline.
        let lines = |text: &str| text.split('\n').map(str::to_owned).collect();
        Ok(PingResult { stdout: lines(&output.stdout), stderr: lines(&output.stderr) })
    }

    /// Returns the traffic between the router and the external network, or between router and network without egress.
    pub(crate) fn usage(network: FoundNetwork) -> Result<Option<NetworkUsage>> {
        let names = NetworkNames::new(network.vxid);
        let mut socket = NetlinkSocket::route()?;
        for name in [&names.egress_outer, &names.veth_outer] {
            let is_ours = observed::link(&mut socket, name)?
                .is_some_and(|link| link.alias == names::marker(network.id));
            if is_ours {
                return observed::usage_of_peer(&mut socket, name);
            }
        }
        Ok(None)
    }
}

/// Returns the MTU towards the other nodes: that of the device with this address, or else of the device with this
/// name, or else Ethernet's.
pub(crate) fn mesh_mtu(address: Ipv4Addr, nic: &str) -> Result<u32> {
    let found = device_with(address)?;
    if let Some((_, mtu)) = found {
        return Ok(mtu);
    }
    let link = observed::link(&mut NetlinkSocket::route()?, nic)?;
    Ok(link.map_or(DEFAULT_MTU, |link| link.mtu))
}

/// Returns the name and the MTU of the device with this address.
pub(crate) fn device_with(address: Ipv4Addr) -> Result<Option<(String, u32)>> {
    let mut socket = NetlinkSocket::route()?;
    let addresses = observed::addresses(&mut socket)?;
    let index = addresses.iter().find(|(_, found, _)| *found == address).map(|(index, _, _)| *index);
    let links = observed::links(&mut socket)?;
    let link = links.into_iter().find(|link| Some(link.index) == index);
    Ok(link.map(|link| (link.name, link.mtu)))
}

/// Returns a feature that networks need and the kernel lacks. It is probed in an unnamed namespace that ends with the
/// thread. A failure of the probe itself does not count as a missing feature.
pub(crate) fn missing_kernel_feature(commands: &Commands) -> Option<String> {
    let attempt = || -> Result<Option<String>> {
        namespace::unshare_network()?;
        let mut socket = NetlinkSocket::route()?;
        for kind in ["bridge", "vxlan", "veth"] {
            if !observed::probe_link_kind(&mut socket, kind)? {
                return Ok(Some(format!("devices of kind {kind}")));
            }
        }
        let output = commands.try_run(Tool::Nft, &["-f", "-"], rules::PROBE_RULESET, COMMAND_TIMEOUT)?;
        // The exit status of `nft` does not tell errors apart.
        let is_unsupported =
            ["not supported", "No such file"].iter().any(|message| output.stderr.contains(message));
        let reason = output.stderr.lines().next().unwrap_or_default().trim();
        let is_missing = !output.status.success() && is_unsupported;
        Ok(is_missing.then(|| format!("rule sets of bridges and routers (nft: {reason})")))
    };
    namespace::in_thread(attempt).unwrap_or_else(|error| {
        tracing::debug!(%error, "failed to probe kernel features");
        None
    })
}

/// Copies an error for another network, because [`Error`] is not `Clone`. Kinds that do not occur here become
/// [`Error::Unavailable`].
fn clone_error(error: &Error) -> Error {
    match error {
        Error::Conflict(reason) => Error::Conflict(reason.clone()),
        Error::Internal(reason) => Error::Internal(reason.clone()),
        other => Error::Unavailable(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_missing_kernel_features() {
        let commands = Commands::find();
        if !nix::unistd::geteuid().is_root() || !commands.is_installed(Tool::Nft) {
            return muster_testing::skipped("root and nft");
        }
        namespace::in_thread(|| {
            namespace::unshare_network().unwrap();
            let socket = &mut NetlinkSocket::route().unwrap();
            assert!(
                observed::probe_link_kind(socket, "vxlan").unwrap()
                    && observed::probe_link_kind(socket, "bridge").unwrap()
            );
            assert!(!observed::probe_link_kind(socket, "nonsense").unwrap());
            commands.run(Tool::Nft, &["-f", "-"], rules::PROBE_RULESET, COMMAND_TIMEOUT).unwrap();
        });
        assert_eq!(missing_kernel_feature(&commands), None);
        assert!(observed::link(&mut NetlinkSocket::route().unwrap(), "vxlan").unwrap().is_none());
    }
}
