//! Removes all rows of a namespace that was deleted `CLEANER_DELAY` seconds ago, its own row last.

use muster_types::Result;
use muster_types::namespace::NamespaceState;
use muster_types::object::{ObjectRef, ObjectType};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::events::clear_events;
use crate::objects::claim;
use crate::queue::{CleanNamespace, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{
    blob_metadata, blob_namespaces, claims, events, idempotency_keys, keys, metadata, namespaces, quotas,
    rules, transaction, trusts,
};

const UNDO_NOT_NEEDED: Undo = Undo::NotNeeded("the namespace is already deleted; the next attempt continues");

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    CleanNamespace::KIND,
    &[
        Step {
            name: "namespace_clean_keys",
            run: |app, row| Box::pin(clean_keys(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "namespace_clean_claims",
            run: |app, row| Box::pin(clean_claims(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "namespace_clean_rules",
            run: |app, row| Box::pin(clean_rules(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "namespace_clean_metadata",
            run: |app, row| Box::pin(clean_metadata(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "namespace_clean_events",
            run: |app, row| Box::pin(clean_events(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "namespace_clean_record",
            run: |app, row| Box::pin(clean_record(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
    ],
);

/// The maximum number of rows removed in one transaction.
const BATCH: i64 = 500;

/// The state in which every change first locks the namespace: its name may be reused once its row is removed.
const DELETED: NamespaceState = NamespaceState::Deleted;

async fn clean_keys(app: &App, row: &OperationRow) -> Result<()> {
    let name = &row.target.id;
    loop {
        let keys = transaction!(app.store, |tx| {
            if !namespaces::lock(tx, name, DELETED).await? {
                return Ok(vec![]);
            }
            keys::soft_delete_of(tx, name).await?;
            Ok(keys::of_namespace(&mut *tx, name, BATCH).await?)
        })?;
        if keys.is_empty() {
            return Ok(());
        }
        for key in keys {
            let object = ObjectRef::new(ObjectType::NamespaceKey, key.id);
            clear_events(&app.store, &object).await?;
            transaction!(app.store, |tx| {
                metadata::remove_of(tx, object.object_type, &object.id).await?;
                Ok(keys::remove_deleted(tx, key.id).await?)
            })?;
        }
    }
}

async fn clean_claims(app: &App, row: &OperationRow) -> Result<()> {
    let name = &row.target.id;
    let claims = transaction!(app.store, |tx| {
        if !namespaces::lock(tx, name, DELETED).await? {
            return Ok(vec![]);
        }
        Ok(claims::list(&mut *tx, name).await?)
    })?;
    for claim in claims {
        clear_events(&app.store, &claim::object(claim.id)).await?;
        transaction!(app.store, |tx| { Ok(claims::remove(tx, claim.id).await?) })?;
    }
    Ok(())
}

async fn clean_rules(app: &App, row: &OperationRow) -> Result<()> {
    let name = &row.target.id;
    loop {
        let rules = transaction!(app.store, |tx| {
            if !namespaces::lock(tx, name, DELETED).await? {
                return Ok(vec![]);
            }
            rules::soft_delete_of(tx, name).await?;
            Ok(rules::of_namespace(&mut *tx, name, BATCH).await?)
        })?;
        if rules.is_empty() {
            return Ok(());
        }
        for id in rules {
            let object = ObjectRef::new(ObjectType::Rule, id);
            clear_events(&app.store, &object).await?;
            transaction!(app.store, |tx| {
                metadata::remove_of(tx, object.object_type, &object.id).await?;
                Ok(rules::remove_deleted(tx, id).await?)
            })?;
        }
    }
}

async fn clean_metadata(app: &App, row: &OperationRow) -> Result<()> {
    let name = &row.target.id;
    transaction!(app.store, |tx| {
        if namespaces::lock(tx, name, DELETED).await? {
            metadata::remove_of(tx, ObjectType::Namespace, name).await?;
            blob_metadata::remove_of_namespace(tx, name).await?;
            blob_namespaces::remove_of_namespace(tx, name).await?;
            quotas::remove_of_namespace(tx, name).await?;
            idempotency_keys::remove_of_namespace(tx, name).await?;
            trusts::remove_of(tx, name).await?;
            // Granted to the name after the deletion; a new namespace of the same name must not get it.
            trusts::remove_naming(tx, name).await?;
        }
        Ok(())
    })
}

async fn clean_events(app: &App, row: &OperationRow) -> Result<()> {
    loop {
        let removed = transaction!(app.store, |tx| {
            if !namespaces::lock(tx, &row.target.id, DELETED).await? {
                return Ok(0);
            }
            Ok(events::prune_object_links(tx, &row.target, BATCH).await?)
        })?;
        if removed < BATCH.unsigned_abs() {
            return Ok(());
        }
    }
}

async fn clean_record(app: &App, row: &OperationRow) -> Result<()> {
    transaction!(app.store, |tx| {
        namespaces::remove(tx, &row.target.id).await?;
        Ok(())
    })
}
