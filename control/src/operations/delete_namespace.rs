//! Deletes the keys, trusts, rules and webhooks of a deleted namespace. The request that deleted the namespace has removed the
//! trusts that others have in it.

use muster_types::Result;
use muster_types::namespace::NamespaceState;

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::queue::{DeleteNamespace, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{keys, namespaces, rules, transaction, trusts, webhooks};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    DeleteNamespace::KIND,
    &[
        Step {
            name: "namespace_delete_keys",
            run: |app, row| Box::pin(delete_keys(app, row)),
            undo: Undo::NotNeeded("the namespace stays deleted, and its keys are not accepted"),
        },
        Step {
            name: "namespace_delete_trusts",
            run: |app, row| Box::pin(delete_trusts(app, row)),
            undo: Undo::NotNeeded("a trust of a deleted namespace grants nothing"),
        },
        Step {
            name: "namespace_delete_rules",
            run: |app, row| Box::pin(delete_rules(app, row)),
            undo: Undo::NotNeeded(
                "a rule of a deleted namespace issues no keys, and a webhook sends nothing",
            ),
        },
    ],
);

async fn delete_keys(app: &App, row: &OperationRow) -> Result<()> {
    transaction!(app.store, |tx| {
        // A worker that takes over late may find a new namespace of the same name.
        if namespaces::lock(tx, &row.target.id, NamespaceState::Deleted).await? {
            keys::soft_delete_of(tx, &row.target.id).await?;
        }
        Ok(())
    })
}

async fn delete_trusts(app: &App, row: &OperationRow) -> Result<()> {
    transaction!(app.store, |tx| {
        if namespaces::lock(tx, &row.target.id, NamespaceState::Deleted).await? {
            trusts::remove_of(tx, &row.target.id).await?;
        }
        Ok(())
    })
}

async fn delete_rules(app: &App, row: &OperationRow) -> Result<()> {
    transaction!(app.store, |tx| {
        if namespaces::lock(tx, &row.target.id, NamespaceState::Deleted).await? {
            rules::soft_delete_of(tx, &row.target.id).await?;
            webhooks::remove_of_namespace(tx, &row.target.id).await?;
        }
        Ok(())
    })
}
