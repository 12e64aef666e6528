//! Tells what passed through the routers of networks, from the kernel's own counters.

use muster_types::Result;
use muster_types::event::{Event, EventType};
use muster_types::network::NetworkState;
use muster_types::node::FoundNetwork;
use serde_json::json;

use crate::app::App;
use crate::objects::network::object;
use crate::objects::node_location::network_node;
use muster_store::networks;

/// One event for each network whose router is on a node of this daemon.
pub async fn run(app: &App) -> Result<()> {
    let chosen = network_node(app).await?.identity.id;
    let Some(node) = app.nodes.iter().find(|node| node.identity().id == chosen) else { return Ok(()) };
    for row in networks::wanted(&*app.store).await? {
        if row.state != NetworkState::Created {
            continue;
        }
        let found = FoundNetwork { id: row.id, vxid: u32::try_from(row.vxid).unwrap_or(0) };
        let usage = node.network_usage(found).await.unwrap_or_else(|error| {
            tracing::warn!(network = %row.id, %error, "usage of a network is not known");
            None
        });
        if let Some(usage) = usage {
            let event = Event::new(EventType::Usage, object(row.id), "usage");
            app.events.record(event.with("rx", json!(usage.rx)).with("tx", json!(usage.tx)));
        }
    }
    Ok(())
}
