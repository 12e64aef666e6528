//! Where an instance goes: asks the scheduler, and takes what it found from the node's ledger.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::node::NodeState;
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::json;

use super::object;
use crate::app::App;
use crate::auth::Caller;
use crate::objects::claim;
use crate::scheduler::{self, Facts, Outcome, Policy, Refusal, Wish};
use crate::state::NodeCapacity;
use muster_store::instances::InstanceRow;
use muster_store::{StoreError, Tx, TxError, instances, node_ledgers, nodes};
use muster_types::capacity::{Capacity, CommittedCapacity};

/// Candidates whose ledgers one attempt looks into.
const MOST_CANDIDATES: usize = 32;

/// The nodes as they are now.
pub(crate) async fn nodes_afresh(app: &App) -> Result<Arc<NodeCapacity>> {
    app.placement.get(&app.store, Duration::ZERO).await
}

/// Candidates, and what is known of them.
#[derive(Debug)]
pub(crate) struct Found {
    outcome: Outcome,
    nodes: Arc<NodeCapacity>,
}

/// Asks the scheduler. A refusal is not believed before the nodes were looked at afresh.
pub(crate) async fn find(app: &App, namespace: &str, wish: &Wish) -> Result<Found> {
    let found = ask(app, namespace, wish, false).await?;
    if found.outcome.result.is_ok() { Ok(found) } else { ask(app, namespace, wish, true).await }
}

/// Asks the scheduler about the nodes as they are now.
pub(crate) async fn find_afresh(app: &App, namespace: &str, wish: &Wish) -> Result<Found> {
    ask(app, namespace, wish, true).await
}

async fn ask(app: &App, namespace: &str, wish: &Wish, fresh: bool) -> Result<Found> {
    let max_age = if fresh { 0 } else { app.settings.scheduler_cache_timeout };
    let nodes = app.placement.get(&app.store, Duration::from_secs(max_age)).await?;
    let mut neighbours: HashMap<NodeId, Vec<Vec<String>>> = HashMap::new();
    if wish.affinity != muster_types::spec::Affinity::default() {
        for (node, tags) in instances::tags(&*app.store, namespace).await? {
            let tags = muster_types::spec::tags(&tags).unwrap_or_default();
            neighbours.entry(node).or_default().push(tags);
        }
    }
    let policy = Policy::from(&app.settings);
    let outcome = scheduler::candidates(wish, &nodes, &neighbours, &policy, now(), &mut dice);
    Ok(Found { outcome, nodes })
}

/// A number from 0 up to 1.
#[expect(clippy::cast_precision_loss, reason = "any number will do")]
fn dice() -> f64 {
    let bits = uuid::Uuid::new_v4().as_u128() & u128::from(u32::MAX);
    bits as f64 / (f64::from(u32::MAX) + 1.0)
}

impl Found {
    /// The candidates, or why there are none.
    pub(crate) fn candidates(&self) -> Result<&[NodeId]> {
        let result = self.outcome.result.as_ref();
        result.map(Vec::as_slice).map_err(|refusal| refusal.clone().into())
    }

    fn refused_everywhere(&self, why: &str) -> Refused {
        let all = self.outcome.result.iter().flatten().take(MOST_CANDIDATES);
        all.filter_map(|node| Some((self.facts(*node)?.name.clone(), why.to_owned()))).collect()
    }

    fn facts(&self, node: NodeId) -> Option<&Facts> {
        self.nodes.iter().find(|(facts, _)| facts.id == node).map(|(facts, _)| &**facts)
    }
}

/// What a node took over, and what its ledger says then.
#[derive(Debug, Clone)]
pub(crate) struct Taken {
    pub(crate) node: NodeId,
    pub(crate) name: String,
    pub(crate) claimed: Capacity,
    committed: CommittedCapacity,
    refused: Refused,
}

/// NodeCapacity whose ledgers had no room, and why.
pub(crate) type Refused = Vec<(String, String)>;

/// Takes room for an instance from the first candidate that has it, as part of the transaction that makes the
/// instance. If none has, the answer is why.
pub(crate) async fn take_in(
    app: &App,
    tx: &mut Tx,
    namespace: &str,
    wish: &Wish,
    found: &Found,
) -> Result<Result<Taken, Refused>, TxError> {
    let policy = Policy::from(&app.settings);
    let mut refused = Vec::new();
    let candidates = found.candidates()?;
    let wanted = Capacity { cpus: wish.cpus, memory_mb: wish.memory_mb, disk_gb: wish.disk_gb };
    // The load that is only expected may be ignored when it is all that is in the way.
    for heed_demand in [true, false] {
        let mut demanding = false;
        for node in candidates.iter().take(MOST_CANDIDATES) {
            let Some(facts) = found.facts(*node) else { continue };
            let ledger = node_ledgers::lock(tx, *node).await?;
            // Whoever deletes a node waits for this ledger before looking at what is there.
            let state = nodes::state(&mut *tx, *node).await?;
            if state != Some(NodeState::Created) {
                let state = state.unwrap_or(NodeState::Deleted);
                refused.push((facts.name.clone(), format!("its state is {state}")));
                continue;
            }
            match scheduler::claim(wish, facts, &ledger, &policy, now(), heed_demand) {
                Ok(committed) => {
                    // After the ledger: whoever makes a claim waits for all of them.
                    match claim::charge_in(app, tx, namespace, &wanted, &found.nodes).await? {
                        Ok(()) => {}
                        // It is the same on every node.
                        Err(why) => return Ok(Err(found.refused_everywhere(&why))),
                    }
                    node_ledgers::set(tx, *node, &committed).await?;
                    let name = facts.name.clone();
                    // The load that is expected there may have been in the way first.
                    refused.retain(|(node, _)| *node != name);
                    return Ok(Ok(Taken { node: *node, name, claimed: wanted, committed, refused }));
                }
                Err(denied) => {
                    demanding |= denied.only_demand;
                    refused.push((facts.name.clone(), denied.reason));
                }
            }
        }
        if !demanding {
            break;
        }
    }
    Ok(Err(refused))
}

/// What a caller is told when no candidate had room.
pub(crate) fn full(refused: &Refused) -> Error {
    let nodes: BTreeSet<&str> = refused.iter().map(|(node, _)| node.as_str()).collect();
    Refusal::full(nodes.len()).into()
}

/// What is known of the nodes follows a ledger that was changed and committed.
pub(crate) fn taken(app: &App, taken: &Taken) {
    app.placement.update(taken.node, taken.committed);
}

/// Gives back what a node promised to an instance, as part of a transaction. The answer is for [`Known::correct`].
pub(crate) async fn give_back_in(
    tx: &mut Tx,
    row: &InstanceRow,
) -> Result<Option<(NodeId, CommittedCapacity)>, StoreError> {
    let (Some(node), claimed) = (row.node, row.committed) else { return Ok(None) };
    if claimed == Capacity::default() {
        return Ok(None);
    }
    let ledger = node_ledgers::lock(tx, node).await?;
    let committed = scheduler::release(&ledger, claimed.cpus, claimed.memory_mb, claimed.disk_gb);
    node_ledgers::set(tx, node, &committed).await?;
    claim::give_back_in(tx, &row.namespace, &claimed).await?;
    instances::clear_committed(tx, row.id).await?;
    Ok(Some((node, committed)))
}

/// Tells how an instance was placed, or why it was not, node by node.
pub(crate) fn tell(
    app: &App,
    caller: &Caller,
    id: InstanceId,
    wish: &Wish,
    found: &Found,
    taken: Result<&Taken, &Refused>,
) {
    let event = |message: EventMessage| Event::new(EventType::Status, object(id), message);
    let names = |ids: &[NodeId]| -> Vec<String> {
        ids.iter().take(50).filter_map(|id| Some(found.facts(*id)?.name.clone())).collect()
    };
    app.record(caller, event(EventMessage::SchedulingStarted));
    app.record(
        caller,
        event(EventMessage::SchedulingInputs)
            .with("cpus", wish.cpus)
            .with("memory", wish.memory_mb)
            .with("disk_gb", wish.disk_gb)
            .with("placed_on", wish.only.map(|node| node.to_string()))
            .with("require_with_tag", wish.affinity.require_with.clone())
            .with("require_without_tag", wish.affinity.require_without.clone())
            .with("prefer_with_tag", wish.affinity.prefer_with.clone())
            .with("prefer_without_tag", wish.affinity.prefer_without.clone()),
    );
    app.record(
        caller,
        event(EventMessage::SchedulingInitialCandidates).with("candidates", found.nodes.len()),
    );
    for stage in &found.outcome.stages {
        let dropped: serde_json::Map<String, serde_json::Value> =
            stage.dropped.iter().map(|(node, why)| (node.clone(), json!(why))).collect();
        app.record(
            caller,
            event(EventMessage::SchedulingStage(stage.stage))
                .with("remaining", stage.kept)
                .with("dropped", dropped),
        );
    }
    match &found.outcome.result {
        Err(refusal) => {
            let message = EventMessage::SchedulingAborted(refusal.stage);
            app.record(caller, event(message).with("reason", refusal.text.clone()));
        }
        Ok(candidates) => {
            let mut last =
                event(EventMessage::SchedulingFinalCandidates).with("candidates", names(candidates));
            let (chosen, refused) = match taken {
                Ok(taken) => (Some(taken.name.clone()), &taken.refused),
                Err(refused) => (None, refused),
            };
            let refused: serde_json::Map<String, serde_json::Value> =
                refused.iter().map(|(node, why)| (node.clone(), json!(why))).collect();
            last = last.with("chosen", chosen.clone()).with("refused", refused);
            app.record(caller, last);
            if let Some(chosen) = chosen {
                let complete = Event::new(EventType::Status, object(id), "schedule complete");
                app.record(caller, complete.with("node", chosen));
            }
        }
    }
}
