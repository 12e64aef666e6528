//! Records the resource usage of instances from the counters of their VMs.

use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::instance::{InstanceState, PowerState};

use crate::app::App;
use crate::objects::instance::object;
use muster_store::instances;

/// Records one event for each running instance.
pub async fn run(app: &App) -> Result<()> {
    for node in &app.nodes {
        for row in instances::of_node(&*app.store, node.identity().id).await? {
            if row.state != InstanceState::Created || row.power_state == PowerState::Off {
                continue;
            }
            match node.vms().usage(row.id).await {
                Ok(Some(usage)) => {
                    let mut event = Event::new(EventType::Usage, object(row.id), "usage");
                    event.extra = usage.into_event_extra();
                    app.events.record(event);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(instance = %row.id, %error, "failed to read the usage of an instance");
                }
            }
        }
    }
    Ok(())
}
