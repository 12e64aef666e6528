//! Why a network is in its state.

use muster_types::Result;
use muster_types::event_message::EventMessage;
use muster_types::explanation::{AwaitedObject, Explanation, NextStep};
use muster_types::network::NetworkState;
use muster_types::object::ObjectType;

use super::{MAX_EVENTS, awaited, last};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::network;
use muster_store::explanations::{self, Evidence, NetworkOnNode};
use muster_store::networks::NetworkRow;
use muster_store::node_networks::NodeNetworkRow;

/// Explains a network that the caller may change.
pub async fn explain_network(app: &App, caller: &Caller, reference: &str) -> Result<Explanation> {
    let row = network::find_own(app, caller, reference, None).await?;
    let (nodes, Evidence { events, operations }) =
        explanations::of_network(&*app.store, row.id, MAX_EVENTS).await?;
    let behind = nodes_behind(&row, nodes);
    let mut waits_for: Vec<AwaitedObject> = operations.into_iter().map(awaited).collect();
    let failure = behind.iter().find(|node| node.has_failed).map(|node| node.awaited.text.clone());
    let why = match row.state {
        NetworkState::Initial => "it is being set up on the network node".to_owned(),
        NetworkState::Created if failure.is_some() => {
            "it is set up, but a node failed to apply the last change".to_owned()
        }
        NetworkState::Created if !behind.is_empty() => {
            "it is set up; a change is being applied to its nodes".to_owned()
        }
        NetworkState::Created => "it is set up on every node that needs it".to_owned(),
        NetworkState::Error => {
            let reason = row.error_message.clone().or(failure);
            format!("it failed: {}", reason.as_deref().unwrap_or("no reason was recorded, see its events"))
        }
        NetworkState::DeleteWait => "it is deleted as soon as it has no interfaces".to_owned(),
        NetworkState::Deleted => "it was deleted".to_owned(),
    };
    waits_for.extend(behind.into_iter().map(|node| node.awaited));
    let next = match row.state {
        NetworkState::Error => {
            vec![NextStep::command("delete it", format!("muster network delete {}", row.id))]
        }
        NetworkState::DeleteWait => vec![NextStep::command(
            "list the interfaces that still use it",
            format!("muster network interfaces {}", row.id),
        )],
        NetworkState::Initial | NetworkState::Created | NetworkState::Deleted => vec![],
    };
    Ok(Explanation {
        object_type: ObjectType::Network.to_string(),
        uuid: row.id.to_string(),
        name: Some(row.name.clone()),
        state: row.state.to_string(),
        since: last(&events, &EventMessage::NetworkState(row.state)).map(|event| event.timestamp),
        why,
        waits_for,
        next,
        placement: vec![],
    })
}

/// A node that has not applied the newest change of a network.
struct NodeBehind {
    awaited: AwaitedObject,
    /// Whether it has tried.
    has_failed: bool,
}

/// Returns the nodes that have not applied the newest change of a network.
fn nodes_behind(row: &NetworkRow, nodes: Vec<NetworkOnNode>) -> Vec<NodeBehind> {
    let is_behind = |applied: &NodeNetworkRow| applied.error.is_some() || applied.generation < row.generation;
    let behind = nodes.into_iter().filter(|(applied, ..)| is_behind(applied));
    let describe = |(applied, name, node_state): NetworkOnNode| {
        let has_failed = applied.error.is_some();
        let (state, text) = match applied.error {
            Some(error) => ("failed".to_owned(), format!("node {name} failed to apply it: {error}")),
            None => (node_state.to_string(), format!("node {name} is applying it")),
        };
        let awaited = AwaitedObject { object_type: ObjectType::Node.to_string(), uuid: name, state, text };
        NodeBehind { awaited, has_failed }
    };
    behind.map(describe).collect()
}
