//! Reconciles one network with its plan.

use std::collections::HashMap;
use std::fs;
use std::net::UdpSocket;
use std::path::Path;

use muster_types::network::{NetworkPlan, NetworkReport};
use muster_types::{Error, Result};

use super::address_owners::AddressOwners;
use super::changes::{Changes, host_changes, router_changes};
use super::dnsmasq_config::{self, DnsmasqConfig};
use super::dnsmasq_process::{self, DnsmasqProcess, ProcessAction};
use super::names::{self, NetworkNames};
use super::netlink::NetlinkSocket;
use super::nftables::{self, NftFamily, NftTable, fingerprint};
use super::observed::{HostSnapshot, RouterSnapshot};
use super::{Networks, conntrack, namespace, rules};
use crate::command::{COMMAND_TIMEOUT, Tool};

/// The maximum number of passes over a network before reconciling it counts as failed.
const MAX_PASSES: usize = 5;
/// The file with the VXLAN id of a network.
pub(crate) const VXID_FILE: &str = "vxid";
/// The file with the fingerprints of the applied rule sets, so that a restart does not replace them.
const RULES_FILE: &str = "rules";

/// The maximum number of leases that are released one by one. For more, the DHCP server is restarted.
const MAX_RELEASED_LEASES: usize = 100;
/// The number of times that a new router announces itself, once per pass, as a broadcast may get lost.
const ANNOUNCEMENT_COUNT: u8 = 3;

/// In-memory state kept per network between reconcile passes.
#[derive(Debug, Default)]
pub(crate) struct ReconcileState {
    generation: Option<i64>,
    /// Whether `rules` and `holders` were loaded.
    loaded: bool,
    rules: AppliedRules,
    /// The guests that the router has addresses for; `None` until they are loaded, and on nodes without the router.
    holders: Option<AddressOwners>,
    dnsmasq: DnsmasqProcess,
    /// The number of announcements that the router has yet to send.
    announcements: u8,
    /// Repairs to include in the next report.
    repaired: Vec<String>,
}

/// The rule sets that were applied.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct AppliedRules {
    /// Fingerprints of the text and of the resulting table in the kernel.
    host: Option<[u64; 2]>,
    /// Fingerprint of the text, inode of the namespace, and its generation counter.
    router: Option<[u64; 3]>,
}

/// Whether a network matches its plan.
#[derive(Debug)]
pub(crate) enum SyncStatus {
    InSync,
    /// With the rule set for the host, if it has to be replaced.
    Drifted {
        rules: Option<String>,
    },
}

/// Everything that differs from the plan.
#[derive(Debug)]
struct NetworkDiff {
    lacks_dir: bool,
    namespace: Option<NamespaceDrift>,
    host: Changes,
    router: Changes,
    host_rules: Option<String>,
    router_rules: Option<String>,
    /// The new holders of addresses, if they changed.
    holders: Option<AddressOwners>,
    dnsmasq_config: Option<DnsmasqConfig>,
    dnsmasq_action: ProcessAction,
    netns: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NamespaceDrift {
    Missing,
    Unwanted,
}

impl NetworkDiff {
    fn is_empty(&self) -> bool {
        !self.lacks_dir
            && self.namespace.is_none()
            && self.host.is_empty()
            && self.router.is_empty()
            && self.host_rules.is_none()
            && self.router_rules.is_none()
            && self.holders.is_none()
            && matches!(self.dnsmasq_action, ProcessAction::Nothing | ProcessAction::Backoff)
    }
}

/// The configuration of a router and the generation counter of its rule sets.
struct RouterObservation {
    snapshot: RouterSnapshot,
    generation: u32,
}

impl RouterObservation {
    /// Reads the namespace of this thread.
    fn read() -> Result<Self> {
        Ok(Self {
            snapshot: RouterSnapshot::read(&mut NetlinkSocket::route()?)?,
            generation: nftables::generation(&mut NetlinkSocket::netfilter()?)?,
        })
    }
}

impl ReconcileState {
    fn prepare(&mut self, plan: &NetworkPlan, dir: &Path) -> Result<()> {
        if let Some(newest) = self.generation.filter(|newest| *newest > plan.generation) {
            return Err(Error::Conflict(format!(
                "generation {} of network {} is older than {newest}, which is in force",
                plan.generation, plan.id
            )));
        }
        if !self.loaded {
            self.rules = AppliedRules::load(dir);
            self.holders = AddressOwners::load(dir);
            self.loaded = true;
        }
        Ok(())
    }

    /// Records a repair if the rule set that is about to be applied is the one that was applied before.
    fn record_rule_drift(&mut self, text: &str, table: &str) {
        if self.rules.host.is_some_and(|[old, _]| old == fingerprint(text)) {
            self.repaired.push(format!("rule set {table} had been changed"));
        }
    }

    /// Sends a broadcast from the router, in whose namespace this thread is. The other nodes learn from it where the
    /// router is, if it was elsewhere before with the same MAC address.
    fn announce(&mut self, plan: &NetworkPlan) {
        const DISCARD: u16 = 9;
        if self.announcements == 0 || plan.router.is_none() {
            return;
        }
        self.announcements -= 1;
        let send = || {
            let socket = UdpSocket::bind((plan.netblock.router(), 0))?;
            socket.set_broadcast(true)?;
            socket.send_to(&[], (plan.netblock.broadcast(), DISCARD))
        };
        if let Err(error) = send() {
            tracing::debug!(network = %plan.id, %error, "failed to announce router");
        }
    }
}

impl AppliedRules {
    /// Loads the fingerprints. Missing rule sets are applied again.
    fn load(dir: &Path) -> Self {
        let text = fs::read_to_string(dir.join(RULES_FILE)).unwrap_or_default();
        let mut rules = Self::default();
        for line in text.lines() {
            let mut words = line.split(' ');
            let name = words.next();
            let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
            match name {
                Some("node") => rules.host = numbers.try_into().ok(),
                Some("router") => rules.router = numbers.try_into().ok(),
                _ => {}
            }
        }
        rules
    }

    fn save(self, dir: &Path) -> Result<()> {
        let line = |name: &str, numbers: &[u64]| {
            let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
            format!("{name} {}\n", numbers.join(" "))
        };
        let host = self.host.map(|numbers| line("node", &numbers)).unwrap_or_default();
        let router = self.router.map(|numbers| line("router", &numbers)).unwrap_or_default();
        dnsmasq_process::write(dir, RULES_FILE, &(host + &router))
    }
}

/// Creates the network's directory. It is created first and removed last, so that an incomplete network is found by it.
fn prepare_dir(plan: &NetworkPlan, dir: &Path) -> Result<()> {
    dnsmasq_process::create_dir(dir)?;
    dnsmasq_process::write(dir, VXID_FILE, &plan.vxid.to_string())
}

/// Returns the fingerprints of a rule set that was just applied. If its table was changed since, it counts as not
/// applied and is replaced in the next pass.
fn rule_fingerprints(text: &str, table: Option<&NftTable>) -> [u64; 2] {
    let table = table.filter(|table| table.rules == rules::count_rules(text));
    [fingerprint(text), table.map_or(0, |table| table.fingerprint)]
}

impl Networks {
    /// Compares a network with a snapshot of the whole host. Moves this thread into the router's namespace.
    pub(crate) fn check(
        &self,
        plan: &NetworkPlan,
        host_snapshot: &HostSnapshot,
        tables: &HashMap<String, NftTable>,
    ) -> Result<SyncStatus> {
        let (names, dir) = (NetworkNames::new(plan.vxid), names::network_dir(plan.id));
        let state = self.state(plan.id);
        let Some(mut state) = state.try_lock() else {
            // It is being reconciled. Reconciling it again waits for that.
            return Ok(SyncStatus::Drifted { rules: None });
        };
        state.prepare(plan, &dir)?;
        let netns = namespace::inode(plan.id);
        let router = match netns.filter(|_| plan.router.is_some()) {
            Some(_) => {
                namespace::enter(plan.id)?;
                Some(RouterObservation::read()?)
            }
            None => None,
        };
        let table = tables.get(&names.table);
        let diff = self.compare(plan, &names, &dir, &mut state, host_snapshot, table, netns, router)?;
        if diff.is_empty() && !state.dnsmasq.is_failing() {
            state.generation = Some(plan.generation);
            if netns.is_some() {
                state.announce(plan);
            }
            return Ok(SyncStatus::InSync);
        }
        // Devices that have to be detached are detached before the rules change.
        let rules = diff.host_rules.filter(|_| diff.host.detach.is_empty());
        Ok(SyncStatus::Drifted { rules })
    }

    /// Applies the rule sets of many networks with one run of `nft`, which reads all existing rule sets each time. If that
    /// fails, they are applied one by one later.
    pub(crate) fn apply_rules_in_bulk(&self, wanted: &[(&NetworkPlan, &str)]) -> Result<()> {
        let state: Vec<_> = wanted.iter().map(|(plan, _)| self.state(plan.id)).collect();
        let mut text = String::new();
        let mut locked = Vec::new();
        for ((plan, rules), state) in wanted.iter().zip(&state) {
            let Some(mut state) = state.try_lock() else { continue };
            let dir = names::network_dir(plan.id);
            if state.prepare(plan, &dir).is_ok() {
                state.generation = Some(plan.generation);
                prepare_dir(plan, &dir)?;
                text.push_str(rules);
                locked.push((plan, rules, dir, state));
            }
        }
        self.nft(&text)?;
        let tables = nftables::tables(&mut NetlinkSocket::netfilter()?, NftFamily::Bridge, None)?;
        for (plan, rules, dir, state) in &mut locked {
            let name = NetworkNames::new(plan.vxid).table;
            state.record_rule_drift(rules, &name);
            state.rules.host = Some(rule_fingerprints(rules, tables.get(&name)));
            state.rules.save(dir)?;
        }
        Ok(())
    }

    /// Reconciles a network with its plan.
    pub(crate) fn reconcile(&self, plan: &NetworkPlan) -> Result<NetworkReport> {
        let (names, dir) = (NetworkNames::new(plan.vxid), names::network_dir(plan.id));
        let state = self.state(plan.id);
        let state: &mut ReconcileState = &mut state.lock();
        state.prepare(plan, &dir)?;
        let mut report = NetworkReport::default();
        let mut failure = None;
        for _ in 0..MAX_PASSES {
            let diff = self.observe(plan, &names, &dir, state)?;
            report.repaired.append(&mut state.repaired);
            if diff.is_empty() {
                state.generation = Some(plan.generation);
                if state.announcements > 0 && plan.router.is_some() {
                    namespace::inside(plan.id, || {
                        state.announce(plan);
                        Ok(())
                    })?;
                }
                if let Some(reason) = state.dnsmasq.failure() {
                    let reason = format!("dnsmasq of this network keeps dying: {reason}");
                    // The repairs are reported once dnsmasq runs again.
                    state.repaired = report.repaired;
                    return Err(Error::Unavailable(reason));
                }
                return Ok(report);
            }
            state.generation = Some(plan.generation);
            let repairs = diff.host.repaired.iter().chain(&diff.router.repaired);
            for repair in repairs {
                if !report.repaired.contains(repair) {
                    report.repaired.push(repair.clone());
                }
            }
            if let Err(error) = self.apply(plan, &names, &dir, state, diff, &mut report) {
                tracing::debug!(network = %plan.id, %error, "failed to change network");
                // It may have been a race, such as a guest whose device disappeared.
                failure = Some(error);
            }
        }
        Err(failure.unwrap_or_else(|| {
            Error::Unavailable(format!(
                "network {} still differs from its plan after several repairs: {}",
                plan.id,
                report.repaired.join(", ")
            ))
        }))
    }

    fn observe(
        &self,
        plan: &NetworkPlan,
        names: &NetworkNames,
        dir: &Path,
        state: &mut ReconcileState,
    ) -> Result<NetworkDiff> {
        let host_snapshot =
            HostSnapshot::read_network(&mut NetlinkSocket::route()?, names, &self.host.egress_bridge, plan)?;
        let mut netfilter = NetlinkSocket::netfilter()?;
        let table =
            nftables::tables(&mut netfilter, NftFamily::Bridge, Some(&names.table))?.remove(&names.table);
        let netns = namespace::inode(plan.id);
        let router = match netns.filter(|_| plan.router.is_some()) {
            Some(_) => Some(namespace::inside(plan.id, RouterObservation::read)?),
            None => None,
        };
        self.compare(plan, names, dir, state, &host_snapshot, table.as_ref(), netns, router)
    }

    #[expect(clippy::too_many_arguments, reason = "everything that a network consists of")]
    fn compare(
        &self,
        plan: &NetworkPlan,
        names: &NetworkNames,
        dir: &Path,
        state: &mut ReconcileState,
        host_snapshot: &HostSnapshot,
        table: Option<&NftTable>,
        netns: Option<u64>,
        router: Option<RouterObservation>,
    ) -> Result<NetworkDiff> {
        let snapshot = router.as_ref().map(|router| &router.snapshot);
        let host_rules = rules::host_rules(plan, names);
        let applied = table.map(|table| [fingerprint(&host_rules), table.fingerprint]);
        let host_rules = (applied.is_none() || applied != state.rules.host).then_some(host_rules);
        let mut diff = NetworkDiff {
            lacks_dir: fs::metadata(dir.join(VXID_FILE)).is_err(),
            namespace: None,
            host: host_changes(plan, names, &self.host, host_snapshot, snapshot)?,
            router: Changes::default(),
            host_rules,
            router_rules: None,
            holders: None,
            dnsmasq_config: None,
            dnsmasq_action: ProcessAction::Nothing,
            netns,
        };
        let Some(wanted) = &plan.router else {
            diff.namespace = namespace::name_exists(plan.id).then_some(NamespaceDrift::Unwanted);
            diff.dnsmasq_action = state.dnsmasq.inspect(dir, None, None);
            return Ok(diff);
        };
        let holders = AddressOwners::of_plan(wanted);
        diff.holders = (diff.lacks_dir || state.holders.as_ref() != Some(&holders)).then_some(holders);
        let Some((router, inode)) = router.zip(netns) else {
            diff.namespace = Some(NamespaceDrift::Missing);
            diff.router_rules = Some(rules::router_rules(plan, wanted, names));
            diff.router = router_changes(plan, wanted, names, &RouterSnapshot::default());
            return Ok(diff);
        };
        diff.router = router_changes(plan, wanted, names, &router.snapshot);
        let text = rules::router_rules(plan, wanted, names);
        let applied = [fingerprint(&text), inode, u64::from(router.generation)];
        diff.router_rules = (state.rules.router != Some(applied)).then_some(text);
        // Without its device dnsmasq could not start; the next pass has it.
        if let Some(device) = router.snapshot.link(&names.veth_inner) {
            let user = dnsmasq_process::dnsmasq_user().map(|user| user.name.as_str());
            diff.dnsmasq_config = dnsmasq_config::build(plan, names, dir, device.index, user);
            diff.dnsmasq_action = state.dnsmasq.inspect(dir, diff.dnsmasq_config.as_ref(), diff.netns);
            if state.holders.is_none() && diff.dnsmasq_action == ProcessAction::Reload {
                // It may have leases of unknown guests, which only a restart ends.
                diff.dnsmasq_action = ProcessAction::Stop;
            }
        }
        Ok(diff)
    }

    fn apply(
        &self,
        plan: &NetworkPlan,
        names: &NetworkNames,
        dir: &Path,
        state: &mut ReconcileState,
        mut diff: NetworkDiff,
        report: &mut NetworkReport,
    ) -> Result<()> {
        if diff.lacks_dir {
            prepare_dir(plan, dir)?;
        }
        if diff.namespace == Some(NamespaceDrift::Unwanted) {
            state.dnsmasq.stop(dir)?;
        }
        if diff.namespace == Some(NamespaceDrift::Missing) {
            state.dnsmasq.stop(dir)?;
            state.rules.router = None;
            state.holders = None;
            namespace::delete(plan.id)?;
            namespace::create(plan.id)?;
            report.repaired.push(format!("namespace {} was missing", plan.id));
        }
        self.batch(Tool::Ip, &diff.host.detach)?;
        if let Some(text) = &diff.host_rules {
            state.record_rule_drift(text, &names.table);
            state.rules.host = Some(self.apply_host_rules(names, text)?);
            state.rules.save(dir)?;
        }
        self.batch(Tool::Ip, &diff.host.ip)?;
        self.batch(Tool::Bridge, &diff.host.bridge)?;
        if diff.namespace == Some(NamespaceDrift::Unwanted) {
            namespace::delete(plan.id)?;
            state.rules.router = None;
            state.holders = None;
            AddressOwners::remove_file(dir);
            state.rules.save(dir)?;
            return Ok(());
        }
        if !diff.router.is_empty() || !diff.host.ip.is_empty() {
            state.announcements = ANNOUNCEMENT_COUNT;
        }
        if diff.router_rules.is_some() || !diff.router.is_empty() {
            let missing = || Error::Internal(format!("namespace {} is missing", plan.id));
            let netns = namespace::inode(plan.id).ok_or_else(missing)?;
            let change = || self.change_router(plan, &diff);
            let generation = namespace::inside(plan.id, change)?;
            if let (Some(text), Some(generation)) = (&diff.router_rules, generation) {
                let text = fingerprint(text);
                if state.rules.router.is_some_and(|[old, ..]| old == text) {
                    report.repaired.push("rule set of the router had been changed".into());
                }
                state.rules.router = Some([text, netns, u64::from(generation)]);
                state.rules.save(dir)?;
            }
        }
        if let Some(holders) = diff.holders.take() {
            if let Some(before) = &state.holders {
                let released = before.released(&holders);
                if released.len() > MAX_RELEASED_LEASES
                    && matches!(diff.dnsmasq_action, ProcessAction::Reload)
                {
                    // A restarted server has no leases.
                    state.dnsmasq.stop(dir)?;
                    diff.dnsmasq_action = ProcessAction::Start { died: None };
                }
                self.clear_guest_state(plan, names, &released, &diff.dnsmasq_action)?;
            }
            holders.save(dir)?;
            state.holders = Some(holders);
        }
        self.apply_dnsmasq(plan, dir, state, diff, report)
    }

    /// Makes the router forget guests that lost their addresses.
    fn clear_guest_state(
        &self,
        plan: &NetworkPlan,
        names: &NetworkNames,
        guests: &AddressOwners,
        dnsmasq_action: &ProcessAction,
    ) -> Result<()> {
        if guests.is_empty() {
            return Ok(());
        }
        let device = &names.veth_inner;
        namespace::inside(plan.id, || {
            let is_starting = matches!(dnsmasq_action, ProcessAction::Start { .. });
            if !is_starting && plan.router.as_ref().is_some_and(|router| router.dhcp) {
                guests.release_leases(plan.netblock.router(), device).map_err(|error| {
                    Error::Unavailable(format!(
                        "failed to release DHCP leases of network {}: {error}",
                        plan.id
                    ))
                })?;
            }
            self.batch(Tool::Ip, &guests.flush_arp_entries(device))?;
            conntrack::delete_flows(&mut NetlinkSocket::netfilter()?, |flow| guests.has_flow(flow))
        })
    }

    fn apply_dnsmasq(
        &self,
        plan: &NetworkPlan,
        dir: &Path,
        state: &mut ReconcileState,
        diff: NetworkDiff,
        report: &mut NetworkReport,
    ) -> Result<()> {
        match (diff.dnsmasq_action, &diff.dnsmasq_config) {
            (ProcessAction::Stop, _) => state.dnsmasq.stop(dir),
            (ProcessAction::Reload, Some(config)) => state.dnsmasq.reload(dir, config),
            (ProcessAction::Start { died }, Some(config)) => {
                if let Some(reason) = died {
                    report.server_died = Some(reason);
                    state.dnsmasq.record_exit(dir);
                    if state.dnsmasq.is_backing_off() {
                        return Ok(());
                    }
                }
                state.dnsmasq.start(&self.commands, plan.id, dir, config, diff.netns)
            }
            (ProcessAction::Nothing | ProcessAction::Backoff, _) | (_, None) => Ok(()),
        }
    }

    /// Replaces the rule set on the host and returns its fingerprints.
    fn apply_host_rules(&self, names: &NetworkNames, text: &str) -> Result<[u64; 2]> {
        self.nft(text)?;
        let mut socket = NetlinkSocket::netfilter()?;
        let table =
            nftables::tables(&mut socket, NftFamily::Bridge, Some(&names.table))?.remove(&names.table);
        Ok(rule_fingerprints(text, table.as_ref()))
    }

    /// Changes the configuration of a router, in whose namespace this thread is: first the rules, so that no packet
    /// passes without them.
    fn change_router(&self, plan: &NetworkPlan, diff: &NetworkDiff) -> Result<Option<u32>> {
        let mut generation = None;
        if let Some(text) = &diff.router_rules {
            self.nft(text)?;
            let mut socket = NetlinkSocket::netfilter()?;
            generation = Some(nftables::generation(&mut socket)?);
            if let Some(router) = &plan.router
                && let Err(error) = conntrack::delete_flows(&mut socket, |flow| {
                    !conntrack::matches_nat_plan(flow, plan, router)
                })
            {
                tracing::warn!(network = %plan.id, %error, "failed to delete stale connections");
            }
        }
        for (name, value) in &diff.router.settings {
            namespace::set_sysctl(name, value)?;
        }
        self.batch(Tool::Ip, &diff.router.ip)?;
        Ok(generation)
    }

    /// Runs commands of `ip` or `bridge` in one batch; runs nothing if there are none.
    pub(crate) fn batch(&self, tool: Tool, lines: &[String]) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let input = lines.join("\n") + "\n";
        self.commands.run(tool, &["-batch", "-"], &input, COMMAND_TIMEOUT).map(|_| ())
    }
}
