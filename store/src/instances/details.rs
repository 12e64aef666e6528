//! Everything that belongs to instances besides their rows, read in one statement.

use std::collections::HashMap;

use muster_types::ids::InstanceId;
use muster_types::object::ObjectType;
use serde_json::{Map, Value as JsonValue};

use crate::agent_operations::{self, AgentOperationRow};
use crate::attributes::{AttributeParts, ObjectAttributes};
use crate::instance_replicas::ReplicaRow;
use crate::interfaces::{self, InterfaceRow};
use crate::{Json, Read, Select as _, StoreError, Union, UnionRows, Value, placeholders};

/// The details of some instances.
#[derive(Debug, Default)]
pub struct InstanceDetails {
    /// By instance.
    pub attributes: HashMap<String, ObjectAttributes>,
    /// The names of the nodes that the instances were placed on.
    pub node_names: HashMap<InstanceId, String>,
    /// The live interfaces, in their order, with their metadata.
    pub interfaces: Vec<(InterfaceRow, Map<String, JsonValue>)>,
    /// The replicas, with the names of their nodes.
    pub replicas: Vec<(ReplicaRow, Option<String>)>,
    /// The unfinished operations of guest agents, in their order, with their attributes.
    pub agent_operations: Vec<(AgentOperationRow, ObjectAttributes)>,
}

/// Returns the details of some instances.
pub async fn details(db: impl Read, ids: &[InstanceId]) -> Result<InstanceDetails, StoreError> {
    if ids.is_empty() {
        return Ok(InstanceDetails::default());
    }
    let mut union = Union::default();
    let parts = DetailsParts::add(&mut union, ids);
    parts.take(&mut union.fetch(db).await?)
}

/// The parts of a statement that read the details of instances.
pub(crate) struct DetailsParts {
    attributes: AttributeParts,
    names: usize,
    interfaces: usize,
    metadata: usize,
    replicas: usize,
    queued: usize,
    queued_attributes: AttributeParts,
}

impl DetailsParts {
    /// Adds the parts for some instances, at least one.
    pub(crate) fn add(union: &mut Union, ids: &[InstanceId]) -> Self {
        let list = placeholders(ids.len());
        let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
        let attributes = AttributeParts::add(union, ObjectType::Instance, &list, &values);
        let tail =
            format!("FROM instances JOIN nodes ON nodes.uuid = node_uuid WHERE instances.uuid IN ({list})");
        let names = union.add("instances.uuid, nodes.name", tail, &values);
        let live = format!("FROM interfaces WHERE instance_uuid IN ({list}) AND {}", interfaces::LIVE);
        let interfaces = union.add(InterfaceRow::COLUMNS, live.clone(), &values);
        let tail =
            format!("FROM metadata WHERE object_type = 'interface' AND object_id IN (SELECT uuid {live})");
        let metadata = union.add("object_id, name, value", tail, &values);
        let tail = format!(
            "FROM instance_replicas r LEFT JOIN nodes ON nodes.uuid = r.node_uuid WHERE r.instance_uuid IN ({list})"
        );
        let columns = format!("{}, nodes.name", ReplicaRow::columns_of("r"));
        let replicas = union.add(&columns, tail, &values);
        let unfinished = format!(
            "FROM agent_operations WHERE instance_uuid IN ({list}) AND {}",
            agent_operations::UNFINISHED
        );
        let queued = union.add(AgentOperationRow::COLUMNS, unfinished.clone(), &values);
        let of_queued = format!("SELECT uuid {unfinished}");
        let queued_attributes = AttributeParts::add(union, ObjectType::AgentOperation, &of_queued, &values);
        Self { attributes, names, interfaces, metadata, replicas, queued, queued_attributes }
    }

    pub(crate) fn take(self, rows: &mut UnionRows) -> Result<InstanceDetails, StoreError> {
        let mut metadata_of: HashMap<String, Map<String, JsonValue>> = HashMap::new();
        for (object, name, Json(value)) in rows.take::<(String, String, Json<_>)>(self.metadata)? {
            metadata_of.entry(object).or_default().insert(name, value);
        }
        let mut interfaces: Vec<InterfaceRow> = rows.take(self.interfaces)?;
        interfaces.sort_by_key(|row| (row.order, row.id));
        let with_metadata = |row: InterfaceRow| {
            let metadata = metadata_of.remove(&row.id.to_string()).unwrap_or_default();
            (row, metadata)
        };
        let interfaces = interfaces.into_iter().map(with_metadata).collect();
        let mut agent_operations: Vec<AgentOperationRow> = rows.take(self.queued)?;
        agent_operations.sort_by_key(|row| row.sequence);
        let mut attributes_of = self.queued_attributes.take(rows)?;
        let with_attributes = |row: AgentOperationRow| {
            let attributes = attributes_of.remove(&row.id.to_string()).unwrap_or_default();
            (row, attributes)
        };
        Ok(InstanceDetails {
            attributes: self.attributes.take(rows)?,
            node_names: rows.take::<(InstanceId, String)>(self.names)?.into_iter().collect(),
            interfaces,
            replicas: rows.take(self.replicas)?,
            agent_operations: agent_operations.into_iter().map(with_attributes).collect(),
        })
    }
}
