//! What follows the deletion of a namespace: its keys and its own trusts go. That others no longer trust it
//! was part of the deletion itself.

use muster_types::operation::OperationType;

use super::{Kind, Step, Undo};
use crate::store::{keys, transaction, trusts};

pub const KIND: Kind = Kind {
    operation_type: OperationType::Namespace,
    name: "delete_namespace",
    steps: &[
        Step {
            name: "namespace_delete_keys",
            run: |app, row| {
                Box::pin(async move {
                    transaction!(app.store, |tx| { Ok(keys::soft_delete_of(tx, &row.target.id).await?) })
                })
            },
            undo: Undo::NotNeeded("a deleted namespace stays deleted, and its keys are dead with it"),
        },
        Step {
            name: "namespace_delete_trusts",
            run: |app, row| {
                Box::pin(async move {
                    transaction!(app.store, |tx| { Ok(trusts::remove_of(tx, &row.target.id).await?) })
                })
            },
            undo: Undo::NotNeeded("nobody can act on a trust of a deleted namespace"),
        },
    ],
};
