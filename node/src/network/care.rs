//! Looks after one network: what differs from its plan is changed, until nothing does.

use std::collections::HashMap;
use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::sync::TryLockError;

use muster_types::network::{NetworkPlan, NetworkReport};
use muster_types::{Error, Result};

use super::changes::{Changes, in_router, on_node};
use super::dnsmasq::{self, Texts};
use super::names::{self, Names};
use super::netlink::Socket;
use super::nftables::{self, Family, Table, fingerprint};
use super::server::{self, Need, Server};
use super::view::{Inside, Snapshot};
use super::{Networks, conntrack, lock, namespace, rules};
use crate::command::{COMMAND_TIMEOUT, Tool};

/// How often a network is looked at and changed before it counts as failed.
const ROUNDS: usize = 5;
/// The file that says which number a network has.
pub(crate) const VXID: &str = "vxid";
/// The file that says which rule sets are in force, so that a restart need not replace them.
const RULES: &str = "rules";

/// How often a router that came up says where it is, once at every look: a word may get lost.
const ANNOUNCEMENTS: u8 = 3;

/// What is remembered of a network.
#[derive(Debug, Default)]
pub(crate) struct Known {
    generation: Option<i64>,
    read: bool,
    rules: Rules,
    server: Server,
    /// How often the router has yet to say where it is.
    announcements: u8,
    /// What was put right and nobody was told yet.
    repaired: Vec<String>,
}

/// Which rule sets are in force.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Rules {
    /// Fingerprints of the text and of what the kernel made of it.
    node: Option<[u64; 2]>,
    /// Fingerprint of the text, number of the namespace, and its count of changes.
    router: Option<[u64; 3]>,
}

/// How a network is.
#[derive(Debug)]
pub(crate) enum Health {
    Well,
    /// With the rule set for the node, if that is among what has to change.
    Ill {
        rules: Option<String>,
    },
}

/// Everything that differs from the plan.
#[derive(Debug)]
struct Difference {
    folder: bool,
    namespace: Option<Namespace>,
    node: Changes,
    router: Changes,
    node_rules: Option<String>,
    router_rules: Option<String>,
    texts: Option<Texts>,
    server: Need,
    space: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Namespace {
    Missing,
    Unwanted,
}

impl Difference {
    fn is_none(&self) -> bool {
        !self.folder
            && self.namespace.is_none()
            && self.node.is_empty()
            && self.router.is_empty()
            && self.node_rules.is_none()
            && self.router_rules.is_none()
            && matches!(self.server, Need::Nothing | Need::Pause)
    }
}

/// A look into a router: what it has, and how often its rule sets have changed.
struct Router {
    inside: Inside,
    generation: u32,
}

impl Router {
    /// Looks into the namespace of this thread.
    fn look() -> Result<Self> {
        Ok(Self {
            inside: Inside::look(&mut Socket::route()?)?,
            generation: nftables::generation(&mut Socket::netfilter()?)?,
        })
    }
}

impl Known {
    fn prepare(&mut self, plan: &NetworkPlan, folder: &Path) -> Result<()> {
        if let Some(newest) = self.generation.filter(|newest| *newest > plan.generation) {
            return Err(Error::Conflict(format!(
                "generation {} of network {} is older than {newest}, which is in force",
                plan.generation, plan.id
            )));
        }
        if !self.read {
            self.rules = Rules::read(folder);
            self.read = true;
        }
        Ok(())
    }

    /// Takes note if the same rule set is put in force again.
    fn note_change(&mut self, text: &str, table: &str) {
        if self.rules.node.is_some_and(|[old, _]| old == fingerprint(text)) {
            self.repaired.push(format!("rule set {table} had been changed"));
        }
    }

    /// Lets the router, in whose namespace this thread is, say something to everybody. The other nodes learn from
    /// it where the router is, if it was elsewhere before: its hardware address is the same.
    fn announce(&mut self, plan: &NetworkPlan) {
        const DISCARD: u16 = 9;
        if self.announcements == 0 || plan.router.is_none() {
            return;
        }
        self.announcements -= 1;
        let say = || {
            let socket = UdpSocket::bind((plan.netblock.router(), 0))?;
            socket.set_broadcast(true)?;
            socket.send_to(&[], (plan.netblock.broadcast(), DISCARD))
        };
        if let Err(error) = say() {
            tracing::debug!(network = %plan.id, %error, "router not announced");
        }
    }
}

impl Rules {
    fn read(folder: &Path) -> Self {
        let text = fs::read_to_string(folder.join(RULES)).unwrap_or_default();
        let mut rules = Self::default();
        for line in text.lines() {
            let mut words = line.split(' ');
            let name = words.next();
            let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
            match name {
                Some("node") => rules.node = numbers.try_into().ok(),
                Some("router") => rules.router = numbers.try_into().ok(),
                _ => {}
            }
        }
        rules
    }

    fn write(self, folder: &Path) -> Result<()> {
        let line = |name: &str, numbers: &[u64]| {
            let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
            format!("{name} {}\n", words.join(" "))
        };
        let node = self.node.map(|numbers| line("node", &numbers)).unwrap_or_default();
        let router = self.router.map(|numbers| line("router", &numbers)).unwrap_or_default();
        server::write(folder, RULES, &(node + &router))
    }
}

/// Makes the network's folder: first of all, and it is removed last. Whatever else there is can be found by it.
fn prepare_folder(plan: &NetworkPlan, folder: &Path) -> Result<()> {
    server::make_folder(folder)?;
    server::write(folder, VXID, &plan.vxid.to_string())
}

/// How a rule set on the node can be recognised that was just put in force. If somebody changed it already, it
/// counts as not in force and is replaced in the next round.
fn recognised(text: &str, table: Option<&Table>) -> [u64; 2] {
    let table = table.filter(|table| table.rules == rules::count(text));
    [fingerprint(text), table.map_or(0, |table| table.fingerprint)]
}

impl Networks {
    /// How a network is, by a look that was taken at the whole node. Moves this thread into the router.
    pub(crate) fn glance(
        &self,
        plan: &NetworkPlan,
        node: &Snapshot,
        tables: &HashMap<String, Table>,
    ) -> Result<Health> {
        let (names, folder) = (Names::new(plan.vxid), names::folder(plan.id));
        let known = self.known(plan.id);
        let mut known = match known.try_lock() {
            Ok(known) => known,
            Err(TryLockError::Poisoned(known)) => known.into_inner(),
            // Somebody works on it: wait for that and look again.
            Err(TryLockError::WouldBlock) => return Ok(Health::Ill { rules: None }),
        };
        known.prepare(plan, &folder)?;
        let space = namespace::number(plan.id);
        let router = match space.filter(|_| plan.router.is_some()) {
            Some(_) => {
                namespace::enter(plan.id)?;
                Some(Router::look()?)
            }
            None => None,
        };
        let table = tables.get(&names.table);
        let difference = self.compare(plan, &names, &folder, &mut known, node, table, space, router)?;
        if difference.is_none() && !known.server.is_failing() {
            known.generation = Some(plan.generation);
            if space.is_some() {
                known.announce(plan);
            }
            return Ok(Health::Well);
        }
        // Who has to leave must do so before the rules change.
        let rules = difference.node_rules.filter(|_| difference.node.detach.is_empty());
        Ok(Health::Ill { rules })
    }

    /// Puts the rule sets of many networks in force at once: `nft` reads all that there are each time it runs. What
    /// fails here is tried again for each network alone.
    pub(crate) fn put_together(&self, wanted: &[(&NetworkPlan, &str)]) -> Result<()> {
        let known: Vec<_> = wanted.iter().map(|(plan, _)| self.known(plan.id)).collect();
        let mut text = String::new();
        let mut held = Vec::new();
        for ((plan, rules), known) in wanted.iter().zip(&known) {
            let Ok(mut known) = known.try_lock() else { continue };
            let folder = names::folder(plan.id);
            if known.prepare(plan, &folder).is_ok() {
                known.generation = Some(plan.generation);
                prepare_folder(plan, &folder)?;
                text.push_str(rules);
                held.push((plan, rules, folder, known));
            }
        }
        self.nft(&text)?;
        let tables = nftables::tables(&mut Socket::netfilter()?, Family::Bridge, None)?;
        for (plan, rules, folder, known) in &mut held {
            let name = Names::new(plan.vxid).table;
            known.note_change(rules, &name);
            known.rules.node = Some(recognised(rules, tables.get(&name)));
            known.rules.write(folder)?;
        }
        Ok(())
    }

    /// Makes a network be as its plan says.
    pub(crate) fn care(&self, plan: &NetworkPlan) -> Result<NetworkReport> {
        let (names, folder) = (Names::new(plan.vxid), names::folder(plan.id));
        let known = self.known(plan.id);
        let known: &mut Known = &mut lock(&known);
        known.prepare(plan, &folder)?;
        let mut care = NetworkReport::default();
        let mut failure = None;
        for _ in 0..ROUNDS {
            let difference = self.look(plan, &names, &folder, known)?;
            care.repaired.append(&mut known.repaired);
            if difference.is_none() {
                known.generation = Some(plan.generation);
                if known.announcements > 0 && plan.router.is_some() {
                    namespace::inside(plan.id, || {
                        known.announce(plan);
                        Ok(())
                    })?;
                }
                if let Some(why) = known.server.failure() {
                    let why = format!("dnsmasq of this network keeps dying: {why}");
                    // What was put right is told when it is well again.
                    known.repaired = care.repaired;
                    return Err(Error::Unavailable(why));
                }
                return Ok(care);
            }
            known.generation = Some(plan.generation);
            let words = difference.node.repaired.iter().chain(&difference.router.repaired);
            for word in words {
                if !care.repaired.contains(word) {
                    care.repaired.push(word.clone());
                }
            }
            if let Err(error) = self.apply(plan, &names, &folder, known, difference, &mut care) {
                tracing::debug!(network = %plan.id, %error, "network not changed");
                // Perhaps only something else came first, such as a guest that took its device away.
                failure = Some(error);
            }
        }
        Err(failure.unwrap_or_else(|| {
            Error::Unavailable(format!(
                "network {} does not stay as it should: {}",
                plan.id,
                care.repaired.join(", ")
            ))
        }))
    }

    fn look(
        &self,
        plan: &NetworkPlan,
        names: &Names,
        folder: &Path,
        known: &mut Known,
    ) -> Result<Difference> {
        let node = Snapshot::around(&mut Socket::route()?, names, &self.around.egress_bridge, plan)?;
        let mut netfilter = Socket::netfilter()?;
        let table =
            nftables::tables(&mut netfilter, Family::Bridge, Some(&names.table))?.remove(&names.table);
        let space = namespace::number(plan.id);
        let router = match space.filter(|_| plan.router.is_some()) {
            Some(_) => Some(namespace::inside(plan.id, Router::look)?),
            None => None,
        };
        self.compare(plan, names, folder, known, &node, table.as_ref(), space, router)
    }

    #[expect(clippy::too_many_arguments, reason = "everything that a network consists of")]
    fn compare(
        &self,
        plan: &NetworkPlan,
        names: &Names,
        folder: &Path,
        known: &mut Known,
        node: &Snapshot,
        table: Option<&Table>,
        space: Option<u64>,
        router: Option<Router>,
    ) -> Result<Difference> {
        let inside = router.as_ref().map(|router| &router.inside);
        let node_rules = rules::node_rules(plan, names);
        let in_force = table.map(|table| [fingerprint(&node_rules), table.fingerprint]);
        let node_rules = (in_force.is_none() || in_force != known.rules.node).then_some(node_rules);
        let mut difference = Difference {
            folder: fs::metadata(folder.join(VXID)).is_err(),
            namespace: None,
            node: on_node(plan, names, &self.around, node, inside)?,
            router: Changes::default(),
            node_rules,
            router_rules: None,
            texts: None,
            server: Need::Nothing,
            space: space.unwrap_or(0),
        };
        let Some(wanted) = &plan.router else {
            difference.namespace = namespace::is_named(plan.id).then_some(Namespace::Unwanted);
            difference.server = known.server.look(folder, None, 0);
            return Ok(difference);
        };
        let Some(router) = router else {
            difference.namespace = Some(Namespace::Missing);
            difference.router_rules = Some(rules::router_rules(plan, wanted, names));
            difference.router = in_router(plan, wanted, names, &Inside::default());
            return Ok(difference);
        };
        difference.router = in_router(plan, wanted, names, &router.inside);
        let text = rules::router_rules(plan, wanted, names);
        let in_force = [fingerprint(&text), difference.space, u64::from(router.generation)];
        difference.router_rules = (known.rules.router != Some(in_force)).then_some(text);
        // Without its device the server could not start; the next round finds it.
        if let Some(device) = router.inside.link(&names.veth_inner) {
            difference.texts = dnsmasq::texts(plan, names, folder, device.index);
            difference.server = known.server.look(folder, difference.texts.as_ref(), difference.space);
        }
        Ok(difference)
    }

    fn apply(
        &self,
        plan: &NetworkPlan,
        names: &Names,
        folder: &Path,
        known: &mut Known,
        difference: Difference,
        care: &mut NetworkReport,
    ) -> Result<()> {
        if difference.folder {
            prepare_folder(plan, folder)?;
        }
        if difference.namespace == Some(Namespace::Unwanted) {
            known.server.stop(folder)?;
        }
        if difference.namespace == Some(Namespace::Missing) {
            known.server.stop(folder)?;
            known.rules.router = None;
            namespace::delete(plan.id)?;
            namespace::create(plan.id)?;
            care.repaired.push(format!("namespace {} was missing", plan.id));
        }
        self.batch(Tool::Ip, &difference.node.detach)?;
        if let Some(text) = &difference.node_rules {
            known.note_change(text, &names.table);
            known.rules.node = Some(self.put_node_rules(names, text)?);
            known.rules.write(folder)?;
        }
        self.batch(Tool::Ip, &difference.node.ip)?;
        self.batch(Tool::Bridge, &difference.node.bridge)?;
        if difference.namespace == Some(Namespace::Unwanted) {
            namespace::delete(plan.id)?;
            known.rules.router = None;
            known.rules.write(folder)?;
            return Ok(());
        }
        if !difference.router.is_empty() || !difference.node.ip.is_empty() {
            known.announcements = ANNOUNCEMENTS;
        }
        if difference.router_rules.is_some() || !difference.router.is_empty() {
            let space = namespace::number(plan.id).unwrap_or(0);
            let put = || self.change_router(plan, &difference);
            let generation = namespace::inside(plan.id, put)?;
            if let (Some(text), Some(generation)) = (&difference.router_rules, generation) {
                let text = fingerprint(text);
                if known.rules.router.is_some_and(|[old, ..]| old == text) {
                    care.repaired.push("rule set of the router had been changed".into());
                }
                known.rules.router = Some([text, space, u64::from(generation)]);
                known.rules.write(folder)?;
            }
        }
        match (difference.server, &difference.texts) {
            (Need::Stop, _) => known.server.stop(folder),
            (Need::Reload, Some(texts)) => known.server.reload(folder, texts),
            (Need::Start { died }, Some(texts)) => {
                if let Some(why) = died {
                    care.server_died = Some(why);
                    known.server.bury(folder);
                    if known.server.is_paused() {
                        return Ok(());
                    }
                }
                known.server.start(&self.commands, plan.id, folder, texts, difference.space)
            }
            (Need::Nothing | Need::Pause | Need::Reload | Need::Start { .. }, _) => Ok(()),
        }
    }

    /// Replaces the rule set on the node and says how it can be recognised.
    fn put_node_rules(&self, names: &Names, text: &str) -> Result<[u64; 2]> {
        self.nft(text)?;
        let mut socket = Socket::netfilter()?;
        let table = nftables::tables(&mut socket, Family::Bridge, Some(&names.table))?.remove(&names.table);
        // If somebody was quicker than we, it counts as not in force and is replaced in the next round.
        let mark =
            table.filter(|table| table.rules == rules::count(text)).map_or(0, |table| table.fingerprint);
        Ok([fingerprint(text), mark])
    }

    /// Changes what is inside a router, in whose namespace this thread is: first the rules, so that nothing passes
    /// before them.
    fn change_router(&self, plan: &NetworkPlan, difference: &Difference) -> Result<Option<u32>> {
        let mut generation = None;
        if let Some(text) = &difference.router_rules {
            self.nft(text)?;
            let mut socket = Socket::netfilter()?;
            generation = Some(nftables::generation(&mut socket)?);
            if let Some(router) = &plan.router
                && let Err(error) =
                    conntrack::forget(&mut socket, |flow| !conntrack::is_meant(flow, plan, router))
            {
                tracing::warn!(network = %plan.id, %error, "old connections not ended");
            }
        }
        for (name, value) in &difference.router.settings {
            namespace::set(name, value)?;
        }
        self.batch(Tool::Ip, &difference.router.ip)?;
        Ok(generation)
    }

    /// Runs many commands of `ip` or `bridge` at once; none of none.
    pub(crate) fn batch(&self, tool: Tool, lines: &[String]) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let input = lines.join("\n") + "\n";
        self.commands.run(tool, &["-batch", "-"], &input, COMMAND_TIMEOUT).map(|_| ())
    }
}
