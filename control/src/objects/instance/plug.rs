//! Adds interfaces to existing instances.

use muster_types::event::Event;
use muster_types::instance::InstanceState;
use muster_types::interface::InterfaceRecord;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::spec::NetworkSpec;
use muster_types::{Error, Result};

use super::create::{MAX_SLOTS, find_network, slots};
use super::{find_own, locate, migrate, object, operation_on};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::interface::{self, NewInterface};
use crate::objects::quota;
use crate::queue::PlugInterface;
use muster_store::{instances, interfaces, transaction};

/// The states in which an instance can get an interface.
const PLUGGABLE: &[InstanceState] =
    &[InstanceState::Initial, InstanceState::Preflight, InstanceState::Creating, InstanceState::Created];

/// Adds an interface to an instance. An operation adds it to the VM.
pub async fn plug(
    app: &App,
    caller: &Caller,
    reference: &str,
    wanted: NetworkSpec,
) -> Result<InterfaceRecord> {
    let row = find_own(app, caller, reference, None).await?;
    let not_pluggable = || Error::NotReady("instance in invalid state for hot plug".into());
    if !PLUGGABLE.contains(&row.state) {
        return Err(not_pluggable());
    }
    locate(app, &row).await?;
    let (network, wanted, address) = find_network(app, &row.namespace, wanted, "network").await?;
    let own = [row.id];
    let added = [(QuotaName::FloatingAddresses, i64::from(wanted.float))];
    let created = transaction!(app.store, |tx| {
        let admission = quota::Admission::begin(app, tx, &row.namespace, &added).await?;
        if !instances::lock(tx, row.id, PLUGGABLE).await? {
            return Err(not_pluggable().into());
        }
        migrate::require_not_migrating(&mut *tx, row.id).await?;
        let present = interfaces::of_instances(&mut *tx, &own).await?;
        if slots(&row.spec.disks, present.len() + 1) > MAX_SLOTS {
            return Err(Error::Conflict("the instance has no slot for another interface".into()).into());
        }
        let new = NewInterface {
            network: network.id,
            instance: row.id,
            namespace: row.namespace.clone(),
            hostname: row.name.clone(),
            node: row.node,
            mac: wanted.mac,
            address,
            float: wanted.float,
            model: wanted.model.clone(),
            order: present.iter().map(|interface| interface.order + 1).max().unwrap_or(0),
        };
        let created = interface::create_in(app, tx, &new).await?;
        let handle = operation_on(&row, PlugInterface { interface: created.id }, Some(&caller.request_id))
            .enqueue(tx)
            .await?;
        instances::set_operation(tx, row.id, &handle).await?;
        admission.finish(tx).await?;
        Ok(created)
    })?;
    app.networks.notify_changed();
    app.queue.wake();
    app.record(
        caller,
        Event::audit(object(row.id), "hot plug request from REST API")
            .with_object(ObjectRef::new(ObjectType::Interface, created.id))
            .with("interface_uuid", created.id.to_string())
            .with("network_uuid", created.network.to_string()),
    );
    interface::record(app, created).await
}
