//! Records the traffic of network routers from the kernel's counters.

use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::network::NetworkState;
use serde_json::json;

use super::networks::{network_on_node, recent_owner};
use crate::app::App;
use crate::objects::network::object;
use crate::objects::node_location::network_node;
use muster_store::networks;

/// Records one event for each network whose router is on a node of this daemon.
pub async fn run(app: &App) -> Result<()> {
    let owner = match recent_owner(app).await? {
        Some(owner) => owner,
        None => network_node(app).await?.identity.id,
    };
    let Some(node) = app.nodes.iter().find(|node| node.identity().id == owner) else { return Ok(()) };
    for row in networks::wanted(&*app.store).await? {
        if row.state != NetworkState::Created {
            continue;
        }
        match node.network_usage(network_on_node(&row)).await {
            Ok(Some(usage)) => {
                let event = Event::new(EventType::Usage, object(row.id), "usage");
                app.events.record(event.with("rx", json!(usage.rx)).with("tx", json!(usage.tx)));
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(network = %row.id, %error, "failed to read the usage of a network"),
        }
    }
    Ok(())
}
