//! Removes every trace of a network that was deleted long enough ago, the row itself last.

use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::events::clear_events;
use crate::queue::{CleanNetwork, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{metadata, networks, transaction};

const NO_WAY_BACK: Undo = Undo::NotNeeded("what is cleaned was deleted before; the next attempt goes on");

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    CleanNetwork::KIND,
    &[
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
);

async fn clean_events(app: &App, row: &OperationRow) -> Result<()> {
    clear_events(&app.store, &row.target).await
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
