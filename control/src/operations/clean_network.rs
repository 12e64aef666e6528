//! Removes every trace of a network that was deleted long enough ago, the row itself last.

use muster_types::operation::OperationType;
use muster_types::{Error, Result};

use super::{Kind, Lane, Step, Undo};
use crate::app::App;
use crate::operations::clean_namespace::clear_events;
use crate::store::operations::OperationRow;
use crate::store::{metadata, networks, transaction};

const NO_WAY_BACK: Undo = Undo::NotNeeded("what is cleaned was deleted before; the next attempt goes on");

pub const KIND: Kind = Kind {
    operation_type: OperationType::Network,
    name: "clean_network",
    removes_target: true,
    lane: Lane::Quick,
    steps: &[
        Step {
            name: "network_clean_events",
            run: |app, row| Box::pin(clean_events(app, row)),
            undo: NO_WAY_BACK,
        },
        Step {
            name: "network_clean_record",
            run: |app, row| Box::pin(clean_record(app, row)),
            undo: NO_WAY_BACK,
        },
    ],
};

async fn clean_events(app: &App, row: &OperationRow) -> Result<()> {
    clear_events(app, &row.target).await
}

async fn clean_record(app: &App, row: &OperationRow) -> Result<()> {
    let id = row.target.id.parse().map_err(|_| Error::Internal("a network's id is not one".into()))?;
    transaction!(app.store, |tx| {
        if networks::remove(tx, id).await? {
            metadata::remove_of(tx, row.target.object_type, &row.target.id).await?;
        }
        Ok(())
    })
}
