//! `/admin`: the cluster as a whole.

use std::sync::Arc;

use axum::extract::State;
use serde_json::{Map, Value, json};

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::response::ok;
use muster_control::app::App;
use muster_store::{leases, nodes};
use muster_types::Error;
use muster_types::node::NodeState;

/// Who holds which cluster-wide lease.
#[utoipa::path(get, path = "/admin/locks", tag = "admin", responses((status = 200, description = "holders by lease", body = Object)))]
pub(crate) async fn locks(State(app): State<Arc<App>>, _: Args<Nothing>) -> ApiResult {
    let held: Map<String, Value> = leases::list(&app.store)
        .await?
        .into_iter()
        .map(|lease| {
            let holder = json!({
                "node": lease.node, "pid": lease.pid, "operation": lease.name, "expires": lease.expires
            });
            (lease.name, holder)
        })
        .collect();
    Ok(ok(&held))
}

/// What the nodes have and have left.
#[utoipa::path(get, path = "/admin/resources", tag = "admin", responses((status = 200, description = "totals, and numbers by node", body = Object)))]
pub(crate) async fn resources(State(app): State<Arc<App>>, _: Args<Nothing>) -> ApiResult {
    let mut per_node = Map::new();
    let (mut cpus, mut memory) = (0.0, 0.0);
    for row in nodes::list(&*app.store).await? {
        if row.state != NodeState::Created || !row.identity.is_hypervisor {
            continue;
        }
        let fact = |name: &str| row.report.resources.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        cpus += fact("cpu_available");
        memory += fact("memory_available");
        let node = json!({
            "cpu_max": fact("cpu_max"),
            "cpu_max_per_instance": fact("cpu_max_per_instance"),
            "cpu_available": fact("cpu_available"),
            "cpu_load_1": fact("cpu_load_1"),
            "cpu_load_5": fact("cpu_load_5"),
            "cpu_load_15": fact("cpu_load_15"),
            "ram_max": fact("memory_max"),
            "ram_max_per_instance": fact("memory_max"),
            "ram_available": fact("memory_available"),
            "disk_available": fact("disk_free"),
        });
        per_node.insert(row.identity.name, node);
    }
    Ok(ok(&json!({ "total": { "cpu_available": cpus, "ram_available": memory }, "per_node": per_node })))
}

/// What the console proxy needs to check tokens.
#[utoipa::path(get, path = "/admin/vditokenpubkey", tag = "admin", responses(
    (status = 200, description = "the public keys", body = Object),
    (status = 404, description = "no key signs tokens")))]
pub(crate) async fn console_keys(State(app): State<Arc<App>>, _: Args<Nothing>) -> ApiResult {
    let key = app.console_key.as_ref();
    let absent =
        || Error::NotFound("kerbside signing key is not configured, set KERBSIDE_SIGNING_KEY".into());
    Ok(ok(&key.ok_or_else(absent)?.public()))
}
