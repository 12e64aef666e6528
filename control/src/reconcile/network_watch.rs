//! Repairs networks whose operation ended without a result.

use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::network::NetworkState;

use crate::app::App;
use crate::objects::network::{enqueue_delete, object};
use muster_store::{networks, operations, transaction};

/// Runs one pass.
pub async fn run(app: &App) -> Result<()> {
    for row in networks::without_operation(&*app.store).await? {
        let target = object(row.id);
        if row.state == NetworkState::DeleteWait {
            // Retry: the cause of the last failure may no longer exist.
            transaction!(app.store, |tx| { enqueue_delete(tx, row.id, None).await })?;
            app.queue.wake();
            continue;
        }
        let operations = operations::of_target(&*app.store, &target).await?;
        let report = operations.iter().find_map(|operation| operation.error_report.as_ref());
        let reason = report.map_or("its creation ended without a result", |report| report.message.as_str());
        let failed = transaction!(app.store, |tx| {
            let (from, to) = (NetworkState::Initial, NetworkState::Error);
            if !networks::set_state(tx, row.id, from, to, Some(reason)).await? {
                return Ok(false);
            }
            networks::set_unwanted(tx, row.id).await?;
            Ok(true)
        })?;
        if failed {
            app.networks.notify_changed();
            let event =
                Event::new(EventType::Mutate, target, EventMessage::NetworkState(NetworkState::Error));
            app.events.record(event.with("from", row.state.as_str()).with("reason", reason));
        }
    }
    Ok(())
}
