//! What explains the state of an object besides its row, read in one statement.

use muster_types::event::EventRecord;
use muster_types::ids::{InstanceId, NetworkId, OperationId};
use muster_types::node::NodeState;
use muster_types::object::{ObjectRef, ObjectType};

use crate::events::{self, EventRow};
use crate::instances::{DetailsParts, InstanceDetails};
use crate::node_networks::NodeNetworkRow;
use crate::operations::OperationRow;
use crate::{Read, Select as _, StoreError, Union, UnionRows, Value, params, placeholders};

/// The newest events of an object that are not periodic, and the unfinished operations on it, newest first.
#[derive(Debug)]
pub struct Evidence {
    pub events: Vec<EventRecord>,
    pub operations: Vec<OperationRow>,
}

struct EvidenceParts {
    events: usize,
    operations: usize,
}

impl EvidenceParts {
    fn add(union: &mut Union, object: &ObjectRef, max_events: i64) -> Self {
        let tail =
            "FROM operations WHERE target_type = ? AND target_id = ? AND state IN ('queued', 'executing')";
        let values = params![object.object_type, &object.id];
        let operations = union.add(OperationRow::COLUMNS, tail.into(), values);
        Self { events: add_events(union, object, max_events), operations }
    }

    fn take(self, rows: &mut UnionRows) -> Result<Evidence, StoreError> {
        let mut operations: Vec<OperationRow> = rows.take(self.operations)?;
        operations.sort_by(|a, b| b.created.total_cmp(&a.created).then(a.id.cmp(&b.id)));
        Ok(Evidence { events: take_events(rows, self.events)?, operations })
    }
}

fn add_events(union: &mut Union, object: &ObjectRef, max: i64) -> usize {
    let (select, values) = events::newest_changes(object, max);
    union.add(&EventRow::columns_of("e"), format!("FROM ({select}) e"), &values)
}

fn take_events(rows: &mut UnionRows, part: usize) -> Result<Vec<EventRecord>, StoreError> {
    let found: Vec<EventRow> = rows.take(part)?;
    let mut records: Vec<EventRecord> = found.into_iter().map(EventRecord::from).collect();
    records.sort_by(|a, b| b.timestamp.total_cmp(&a.timestamp).then_with(|| b.event_uuid.cmp(&a.event_uuid)));
    Ok(records)
}

/// Returns the details of an instance and what explains its state.
pub async fn of_instance(
    db: impl Read,
    id: InstanceId,
    max_events: i64,
) -> Result<(InstanceDetails, Evidence), StoreError> {
    let mut union = Union::default();
    let details = DetailsParts::add(&mut union, &[id]);
    let evidence = EvidenceParts::add(&mut union, &ObjectRef::new(ObjectType::Instance, id), max_events);
    let mut rows = union.fetch(db).await?;
    Ok((details.take(&mut rows)?, evidence.take(&mut rows)?))
}

/// The state of a network on a node, with the name and the state of the node.
pub type NetworkOnNode = (NodeNetworkRow, String, NodeState);

/// Returns the nodes that have a network, by id, and what explains its state.
pub async fn of_network(
    db: impl Read,
    id: NetworkId,
    max_events: i64,
) -> Result<(Vec<NetworkOnNode>, Evidence), StoreError> {
    let mut union = Union::default();
    let columns = format!("{}, nodes.name, nodes.state", NodeNetworkRow::columns_of("n"));
    let tail = "FROM node_networks n JOIN nodes ON nodes.uuid = n.node_uuid WHERE n.network_uuid = ?";
    let nodes = union.add(&columns, tail.into(), params![id]);
    let evidence = EvidenceParts::add(&mut union, &ObjectRef::new(ObjectType::Network, id), max_events);
    let mut rows = union.fetch(db).await?;
    let mut nodes: Vec<NetworkOnNode> = rows.take(nodes)?;
    nodes.sort_by_key(|(row, ..)| row.node);
    Ok((nodes, evidence.take(&mut rows)?))
}

/// Returns the operations that an operation depends on, and its newest events.
pub async fn of_operation(
    db: impl Read,
    id: OperationId,
    depends_on: &[OperationId],
    max_events: i64,
) -> Result<(Vec<OperationRow>, Vec<EventRecord>), StoreError> {
    let mut union = Union::default();
    let object = ObjectRef::new(ObjectType::ClusterOperation, id);
    let events = add_events(&mut union, &object, max_events);
    let mut parents = None;
    if !depends_on.is_empty() {
        let tail = format!("FROM operations WHERE uuid IN ({})", placeholders(depends_on.len()));
        let values: Vec<Value> = depends_on.iter().map(|id| (*id).into()).collect();
        parents = Some(union.add(OperationRow::COLUMNS, tail, &values));
    }
    let mut rows = union.fetch(db).await?;
    let parents = parents.map(|part| rows.take(part)).transpose()?.unwrap_or_default();
    Ok((parents, take_events(&mut rows, events)?))
}
