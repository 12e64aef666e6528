//! Removes for good what was soft-deleted, and what is finished, `CLEANER_DELAY` seconds ago.

use muster_types::Result;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;

use crate::app::App;
use crate::operations::clean_namespace::{self, clear_events};
use crate::operations::{Kind, Order, clean_network};
use crate::store::{
    agent_operations, artifacts, blobs, exchanges, instances, interfaces, issuers, keys, metadata,
    namespaces, networks, operations, references, rules, transaction,
};

/// Objects of a kind handled in one pass.
const PASS: i64 = 500;

/// Seconds by which the clock of another daemon may be behind this one's: a token that has expired here is still good
/// there.
const CLOCK_DIFFERENCE: f64 = 300.0;

/// One pass. Says whether there is more to do at once.
pub async fn run(app: &App) -> Result<bool> {
    #[expect(clippy::cast_precision_loss, reason = "delays are seconds")]
    let before = now() - app.settings.cleaner_delay as f64;
    let mut queued = false;
    let mut seen = 0usize;
    for row in namespaces::deleted_before(&*app.store, before, PASS).await? {
        seen += 1;
        let target = ObjectRef::namespace(&row.name);
        queued |= enqueue(app, &clean_namespace::KIND, target, Some(&row.name)).await?;
    }
    for row in networks::cleanable(&*app.store, before, PASS).await? {
        seen += 1;
        let target = ObjectRef::new(ObjectType::Network, row.id);
        queued |= enqueue(app, &clean_network::KIND, target, row.namespace.as_deref()).await?;
    }
    if queued {
        app.queue.wake();
    }
    let mut most = seen;
    let old_interfaces = interfaces::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_interfaces.len());
    for id in old_interfaces {
        let object = ObjectRef::new(ObjectType::Interface, id);
        clear_events(app, &object).await?;
        transaction!(app.store, |tx| {
            metadata::remove_of(tx, object.object_type, &object.id).await?;
            Ok(interfaces::remove(tx, id).await?)
        })?;
    }
    let old_instances = instances::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_instances.len());
    for id in old_instances {
        let object = ObjectRef::new(ObjectType::Instance, id);
        clear_events(app, &object).await?;
        transaction!(app.store, |tx| {
            if instances::remove(tx, id).await? {
                metadata::remove_of(tx, object.object_type, &object.id).await?;
            }
            Ok(())
        })?;
    }
    let ended = agent_operations::finished_before(&*app.store, before, PASS).await?;
    most = most.max(ended.len());
    for id in ended {
        let object = ObjectRef::new(ObjectType::AgentOperation, id);
        clear_events(app, &object).await?;
        transaction!(app.store, |tx| {
            if agent_operations::remove(tx, id).await? {
                references::remove_from(tx, &object).await?;
                metadata::remove_of(tx, object.object_type, &object.id).await?;
            }
            Ok(())
        })?;
    }
    let old_artifacts = artifacts::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_artifacts.len());
    for id in old_artifacts {
        let object = ObjectRef::new(ObjectType::Artifact, id);
        clear_events(app, &object).await?;
        transaction!(app.store, |tx| {
            if artifacts::remove(tx, id).await? {
                metadata::remove_of(tx, object.object_type, &object.id).await?;
            }
            Ok(())
        })?;
    }
    let old_blobs = blobs::cleanable(&*app.store, before, PASS).await?;
    most = most.max(old_blobs.len());
    for row in old_blobs {
        let object = ObjectRef::new(ObjectType::Blob, row.id);
        clear_events(app, &object).await?;
        transaction!(app.store, |tx| {
            if blobs::remove(tx, row.id).await? {
                metadata::remove_of(tx, object.object_type, &object.id).await?;
            }
            Ok(())
        })?;
    }
    let old_keys = keys::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_keys.len());
    for key in old_keys {
        clear_events(app, &ObjectRef::new(ObjectType::NamespaceKey, key.id)).await?;
        transaction!(app.store, |tx| { Ok(keys::remove_deleted(tx, key.id).await?) })?;
    }
    let old_issuers = issuers::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_issuers.len());
    for id in old_issuers {
        clear_events(app, &ObjectRef::new(ObjectType::Issuer, id)).await?;
        transaction!(app.store, |tx| { Ok(issuers::remove_deleted(tx, id).await?) })?;
    }
    let old_rules = rules::deleted_before(&*app.store, before, PASS).await?;
    most = most.max(old_rules.len());
    for id in old_rules {
        clear_events(app, &ObjectRef::new(ObjectType::Rule, id)).await?;
        transaction!(app.store, |tx| { Ok(rules::remove_deleted(tx, id).await?) })?;
    }
    let finished = operations::finished_before(&*app.store, before, PASS).await?;
    most = most.max(finished.len());
    for id in finished {
        clear_events(app, &ObjectRef::new(ObjectType::ClusterOperation, id)).await?;
        transaction!(app.store, |tx| { Ok(operations::remove(tx, id).await?) })?;
    }
    most = most.max(forget_exchanges(app).await?);
    Ok(i64::try_from(most).is_ok_and(|most| most >= PASS))
}

/// Forgets counts of minutes that are over and tokens that nobody can use any more. Says how many of one kind.
async fn forget_exchanges(app: &App) -> Result<usize> {
    let before = now() - CLOCK_DIFFERENCE;
    #[expect(clippy::cast_possible_truncation, reason = "Unix time is small")]
    let minute = (before / 60.0).floor() as i64;
    let tokens = transaction!(app.store, |tx| { Ok(exchanges::remove_tokens(tx, before, PASS).await?) })?;
    let attempts = transaction!(app.store, |tx| { Ok(exchanges::remove_attempts(tx, minute, PASS).await?) })?;
    Ok(tokens.max(attempts))
}

/// Queues the last operation of an object, unless it is queued. Says whether it was not.
async fn enqueue(app: &App, kind: &Kind, target: ObjectRef, namespace: Option<&str>) -> Result<bool> {
    transaction!(app.store, |tx| {
        if operations::is_pending(&mut *tx, &target, kind.name).await? {
            return Ok(false);
        }
        let order = Order {
            target: target.clone(),
            namespace: namespace.map(str::to_owned),
            arguments: serde_json::json!({}),
            depends_on: vec![],
            request_id: None,
            node: None,
        };
        kind.enqueue(tx, order).await?;
        Ok(true)
    })
}
