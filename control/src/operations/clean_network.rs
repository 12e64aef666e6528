//! Removes all rows of a network that was deleted `CLEANER_DELAY` seconds ago, its own row last.

use muster_types::Result;

use super::step::{Implementation, Step, Undo, parse_target_id};
use crate::app::App;
use crate::events::clear_events;
use crate::queue::{CleanNetwork, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{metadata, networks, transaction};

const UNDO_NOT_NEEDED: Undo = Undo::NotNeeded("the network is already deleted; the next attempt continues");

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    CleanNetwork::KIND,
    &[
        Step {
            name: "network_clean_events",
            run: |app, row| Box::pin(clean_events(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
        Step {
            name: "network_clean_record",
            run: |app, row| Box::pin(clean_record(app, row)),
            undo: UNDO_NOT_NEEDED,
        },
    ],
);

async fn clean_events(app: &App, row: &OperationRow) -> Result<()> {
    clear_events(&app.store, &row.target).await
}

async fn clean_record(app: &App, row: &OperationRow) -> Result<()> {
    let id = parse_target_id(row)?;
    transaction!(app.store, |tx| {
        if networks::remove(tx, id).await? {
            metadata::remove_of(tx, row.target.object_type, &row.target.id).await?;
        }
        Ok(())
    })
}
