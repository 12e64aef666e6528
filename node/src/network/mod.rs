//! The networks of this machine: devices, rule sets, routers, and the servers of addresses and names.
//!
//! One rule runs through it: **look in this process, change with programs**. Everything is read over netlink and
//! compared with the plan by pure functions; only a difference starts `ip`, `bridge`, `nft` or `dnsmasq`. After
//! every change follows another look, until there is no difference left.
//!
//! What is here survives this program. Nothing is remembered that could not be found again: devices carry a marker
//! as their alias, files lie below `/run`, which goes with the machine as the devices do.
//!
//! ```text
//!  guest ── tap… ─┐                              ┌─ veth-X-o ══ veth-X-i (router, in a namespace) egr-X-i ═╗
//!  guest ── tap… ─┴─ br-vxlan-X ─────────────────┴─ vxlan-X ── other nodes                                  ║
//!                                        world ── node ── egr-br-NIC ─────────────────────────── egr-X-o ═╝
//! ```

mod care;
mod changes;
mod conntrack;
mod dnsmasq;
mod egress;
#[cfg(test)]
mod example;
mod leftovers;
pub(crate) mod names;
mod namespace;
mod netlink;
mod nftables;
mod rules;
mod server;
mod view;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use muster_types::ids::NetworkId;
use muster_types::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
use muster_types::node::FoundNetwork;
use muster_types::{Error, Result};

use self::care::{Health, Known};
use self::changes::{Surroundings, has_egress};
use self::names::Names;
use self::netlink::Socket;
use self::nftables::{Family, Table};
use self::view::Snapshot;
use crate::command::{COMMAND_TIMEOUT, Commands, Tool};

/// How many networks are worked on at the same time.
const WORKERS: usize = 4;
/// Up to so many networks are looked at one by one; for more, everything is read at once first.
const FEW: usize = 8;
/// How many rule sets are put in force at once.
const TOGETHER: usize = 250;
const PINGS: &str = "10";
const PING_LIMIT: Duration = Duration::from_secs(30);

/// Whether frames between devices of a bridge pass the rule sets of others, who never meant them.
const BRIDGE_SETTINGS: [&str; 3] =
    ["bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables", "bridge/bridge-nf-call-arptables"];

/// The networks of this machine.
#[derive(Debug)]
pub(crate) struct Networks {
    commands: Commands,
    around: Surroundings,
    known: Mutex<HashMap<NetworkId, Arc<Mutex<Known>>>>,
    tables: Mutex<NodeTables>,
    egress: Mutex<egress::State>,
    /// Where the daemon serves the API, which guests may reach.
    api_port: OnceLock<u16>,
}

/// The rule sets of the node when they were last read.
#[derive(Debug, Default)]
struct NodeTables {
    generation: Option<u32>,
    tables: Arc<HashMap<String, Table>>,
}

impl Networks {
    pub(crate) fn new(commands: Commands, egress_nic: &str) -> Self {
        let around = Surroundings {
            egress_bridge: names::egress_bridge(egress_nic),
            ipv6: namespace::get("ipv6/conf/all/disable_ipv6").is_some(),
        };
        Self {
            commands,
            around,
            known: Mutex::default(),
            tables: Mutex::default(),
            egress: Mutex::default(),
            api_port: OnceLock::new(),
        }
    }

    /// Says where the daemon serves the API; only the first word counts.
    pub(crate) fn serve_api_on(&self, port: u16) {
        let _ = self.api_port.set(port);
    }

    pub(crate) fn commands(&self) -> &Commands {
        &self.commands
    }

    /// Makes networks be as their plans say. Blocks.
    pub(crate) fn ensure(&self, plans: &[NetworkPlan]) -> Result<Vec<Result<NetworkReport>>> {
        for name in BRIDGE_SETTINGS {
            if namespace::get(name).is_some_and(|value| value != "0") {
                namespace::prefer(name, "0");
            }
        }
        let user = plans.iter().position(has_egress);
        let egress = match user.and_then(|at| plans[at].router.as_ref()) {
            Some(router) => self.use_egress(&router.egress),
            None => Ok(egress::Use::nothing()),
        };
        let mut results: Vec<Option<Result<NetworkReport>>> = plans.iter().map(|_| None).collect();
        let all = || (0..plans.len()).collect();
        let rest: Vec<usize> = if plans.len() > FEW {
            self.survey(plans, &mut results).unwrap_or_else(|error| {
                tracing::warn!(%error, "networks not looked at together");
                all()
            })
        } else {
            all()
        };
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(at) = rest.get(next.fetch_add(1, Ordering::Relaxed)) {
                let plan = &plans[*at];
                let care = match &egress {
                    Err(error) if has_egress(plan) => Err(again(error)),
                    _ => self.care(plan),
                };
                done.push((*at, care));
            }
            done
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..WORKERS.min(rest.len())).map(|_| scope.spawn(work)).collect();
            for worker in workers {
                let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                for (at, care) in done {
                    results[at] = Some(care);
                }
            }
        });
        let mut results: Vec<_> = results
            .into_iter()
            .map(|result| result.unwrap_or_else(|| Ok(NetworkReport::default())))
            .collect();
        if let (Some(at), Ok(egress)) = (user, egress)
            && let Ok(care) = &mut results[at]
        {
            care.repaired.extend(egress.repaired.iter().cloned());
        }
        if user.is_none()
            && let Err(error) = self.sweep_egress()
        {
            tracing::warn!(%error, "unused way out not removed");
        }
        Ok(results)
    }

    /// Reads everything once, and answers for the networks that are as they should be. The others are left over.
    fn survey(
        &self,
        plans: &[NetworkPlan],
        results: &mut [Option<Result<NetworkReport>>],
    ) -> Result<Vec<usize>> {
        let mut rules: Vec<(&NetworkPlan, String)> = Vec::new();
        let rest = namespace::in_thread(|| {
            let node = Snapshot::whole(&mut Socket::route()?)?;
            let tables = self.node_tables(&mut Socket::netfilter()?)?;
            let mut rest = Vec::new();
            for (at, plan) in plans.iter().enumerate() {
                match self.glance(plan, &node, &tables) {
                    Ok(Health::Well) => results[at] = Some(Ok(NetworkReport::default())),
                    Ok(Health::Ill { rules: Some(text) }) => {
                        rules.push((plan, text));
                        rest.push(at);
                    }
                    // What went wrong is found again by whoever looks closer.
                    Ok(Health::Ill { rules: None }) | Err(_) => rest.push(at),
                }
            }
            Ok::<_, Error>(rest)
        })?;
        for some in rules.chunks(TOGETHER).filter(|some| some.len() > 1) {
            let some: Vec<(&NetworkPlan, &str)> =
                some.iter().map(|(plan, text)| (*plan, text.as_str())).collect();
            if let Err(error) = self.put_together(&some) {
                tracing::debug!(%error, "rule sets not put in force together");
            }
        }
        Ok(rest)
    }

    /// The rule sets of bridges on this node; read again only if something has changed.
    fn node_tables(&self, socket: &mut Socket) -> Result<Arc<HashMap<String, Table>>> {
        let mut known = lock(&self.tables);
        let generation = nftables::generation(socket)?;
        if known.generation != Some(generation) {
            known.tables = Arc::new(nftables::tables(socket, Family::Bridge, None)?);
            known.generation = Some(generation);
        }
        Ok(known.tables.clone())
    }

    /// What is remembered of a network; locked by whoever works on it.
    fn known(&self, network: NetworkId) -> Arc<Mutex<Known>> {
        lock(&self.known).entry(network).or_default().clone()
    }

    /// Pings an address from the router. Blocks for some seconds.
    pub(crate) fn ping(&self, network: NetworkId, address: Ipv4Addr) -> Result<PingResult> {
        if namespace::number(network).is_none() {
            return Err(Error::Unavailable(format!("the router of network {network} is not on this node")));
        }
        let address = address.to_string();
        let arguments = ["-n", "-c", PINGS, "-i", "0.2", "-W", "1", &address];
        let run = || self.commands.try_run(Tool::Ping, &arguments, "", PING_LIMIT);
        let output = namespace::inside(network, run)?;
        // Also what follows the last line end, which is nothing, is part of the answer.
        let lines = |text: &str| text.split('\n').map(str::to_owned).collect();
        Ok(PingResult { stdout: lines(&output.stdout), stderr: lines(&output.stderr) })
    }

    /// What passed the router towards the world, or towards the network if that is all there is.
    pub(crate) fn usage(network: FoundNetwork) -> Result<Option<NetworkUsage>> {
        let names = Names::new(network.vxid);
        let mut socket = Socket::route()?;
        for name in [&names.egress_outer, &names.veth_outer] {
            let ours =
                view::link(&mut socket, name)?.is_some_and(|link| link.alias == names::marker(network.id));
            if ours {
                return view::usage_of_peer(&mut socket, name);
            }
        }
        Ok(None)
    }
}

/// The largest frame on the way to the other nodes: that of the device with this address, or of this name.
pub(crate) fn mesh_mtu(address: Option<Ipv4Addr>, nic: &str) -> Result<u32> {
    let mut socket = Socket::route()?;
    let addresses = view::addresses(&mut socket)?;
    let index = addresses.iter().find(|(_, found, _)| Some(*found) == address).map(|(index, _, _)| *index);
    let links = view::links(&mut socket)?;
    let link = links
        .iter()
        .find(|link| Some(link.index) == index)
        .or_else(|| links.iter().find(|link| link.name == nic));
    Ok(link.map_or(1500, |link| link.mtu))
}

/// What the kernel lacks that networks need. It is tried in a namespace that nobody ever sees and that ends with the
/// thread. Whatever else goes wrong there is no reason against networks.
pub(crate) fn lacking(commands: &Commands) -> Option<String> {
    let attempt = || -> Result<Option<String>> {
        namespace::leave()?;
        let mut socket = Socket::route()?;
        for kind in ["bridge", "vxlan", "veth"] {
            if !view::try_kind(&mut socket, kind)? {
                return Ok(Some(format!("devices of kind {kind}")));
            }
        }
        let tried = commands.run(Tool::Nft, &["-f", "-"], rules::SAMPLE, COMMAND_TIMEOUT);
        let unknown =
            |why: &Error| ["not supported", "No such file"].iter().any(|word| why.to_string().contains(word));
        match tried {
            Err(error) if unknown(&error) => Ok(Some(format!("rule sets of bridges and routers ({error})"))),
            tried => tried.map(|_| None),
        }
    };
    namespace::in_thread(attempt).unwrap_or_else(|error| {
        tracing::debug!(%error, "abilities of the kernel not tried");
        None
    })
}

/// The same error for another network.
fn again(error: &Error) -> Error {
    match error {
        Error::Conflict(why) => Error::Conflict(why.clone()),
        Error::Internal(why) => Error::Internal(why.clone()),
        other => Error::Unavailable(other.to_string()),
    }
}

/// A lock whose holder may have panicked: what it guards is checked against the kernel anyway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_has_is_told_from_what_it_lacks() {
        let commands = Commands::find();
        if !nix::unistd::geteuid().is_root() || !commands.has(Tool::Nft) {
            return muster_testing::skipped("root and nft");
        }
        namespace::in_thread(|| {
            namespace::leave().unwrap();
            let socket = &mut Socket::route().unwrap();
            assert!(view::try_kind(socket, "vxlan").unwrap() && view::try_kind(socket, "bridge").unwrap());
            assert!(!view::try_kind(socket, "nonsense").unwrap());
            commands.run(Tool::Nft, &["-f", "-"], rules::SAMPLE, COMMAND_TIMEOUT).unwrap();
        });
        assert_eq!(lacking(&commands), None);
        assert!(view::link(&mut Socket::route().unwrap(), "vxlan").unwrap().is_none());
    }
}
