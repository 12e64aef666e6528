//! `/admin`: the cluster as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::{Json, Opaque, content, named_bodies};
use muster_control::app::App;
use muster_control::objects::cluster_upgrade;
use muster_store::{leases, nodes};
use muster_types::Error;
use muster_types::cluster_upgrade::ClusterUpgradeRecord;
use muster_types::node::NodeState;

/// Lists the cluster-wide leases and their owners.
#[utoipa::path(get, path = "/admin/locks", tag = "admin", responses(
    (status = 200, description = "Owners by lease.")))]
pub(crate) async fn locks(
    State(app): State<Arc<App>>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Map<String, Value>>> {
    let owners = leases::list(&app.store).await?.into_iter().map(|lease| {
        let owner = json!({
            "node": lease.node, "pid": lease.pid, "operation": lease.name, "expires": lease.expires
        });
        (lease.name, owner)
    });
    Ok(Json(owners.collect()))
}

/// Returns the certificate authorities of the nodes' displays, with which clients verify SPICE over TLS.
#[utoipa::path(get, path = "/admin/cacert", tag = "admin", responses(
    (status = 200, description = "The certificates of all nodes in PEM, one after another; empty without any.",
     content_type = "text/plain", body = String)))]
pub(crate) async fn ca_certificate(
    State(app): State<Arc<App>>,
    _: Authenticated,
    _: Args<NoArgs>,
) -> ApiResult<Response> {
    let rows = nodes::list(&*app.store).await?.into_iter();
    let rows = rows.filter(|row| row.state != NodeState::Deleted);
    // Simulated nodes share one.
    let authorities: BTreeSet<String> =
        rows.filter_map(|row| row.report.display).map(|display| display.authority).collect();
    Ok(content("text/plain; charset=utf-8", authorities.into_iter().collect::<String>()))
}

/// The capacity of the cluster.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ClusterResources {
    /// The sums of all nodes that run instances.
    total: TotalResources,
    /// The capacity of each node, by name.
    per_node: BTreeMap<String, NodeResources>,
}

/// The capacity of all nodes together.
#[derive(Debug, Default, Serialize, ToSchema)]
struct TotalResources {
    /// The number of virtual CPUs that new instances can use.
    cpu_available: f64,
    /// The memory that new instances can use, in megabytes.
    ram_available: f64,
}

/// The capacity of a node; 0 until it has reported.
#[derive(Debug, Serialize, ToSchema)]
struct NodeResources {
    /// The number of CPU threads of the host.
    cpu_max: f64,
    /// The maximum number of virtual CPUs of one instance.
    cpu_max_per_instance: f64,
    /// The number of virtual CPUs that new instances can use.
    cpu_available: f64,
    /// The load average of one minute.
    cpu_load_1: f64,
    /// The load average of five minutes.
    cpu_load_5: f64,
    /// The load average of fifteen minutes.
    cpu_load_15: f64,
    /// The memory of the host in megabytes.
    ram_max: f64,
    /// The maximum memory of one instance in megabytes.
    ram_max_per_instance: f64,
    /// The memory that new instances can use, in megabytes.
    ram_available: f64,
    /// The free disk space in bytes.
    disk_available: f64,
}

named_bodies!(ClusterResources);

/// Returns the total and the available capacity of the nodes.
#[utoipa::path(get, path = "/admin/resources", tag = "admin", responses(
    (status = 200, description = "Capacity in `total`, and by node in `per_node`.")))]
pub(crate) async fn resources(
    State(app): State<Arc<App>>,
    _: Args<NoArgs>,
) -> ApiResult<Json<ClusterResources>> {
    let mut resources = ClusterResources::default();
    for row in nodes::list(&*app.store).await? {
        if row.state != NodeState::Created || !row.identity.is_hypervisor {
            continue;
        }
        // A node that has not reported yet has no capacity.
        let fact = |name: &str| row.report.resources.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        let node = NodeResources {
            cpu_max: fact("cpu_max"),
            cpu_max_per_instance: fact("cpu_max_per_instance"),
            cpu_available: fact("cpu_available"),
            cpu_load_1: fact("cpu_load_1"),
            cpu_load_5: fact("cpu_load_5"),
            cpu_load_15: fact("cpu_load_15"),
            ram_max: fact("memory_max"),
            ram_max_per_instance: fact("memory_max"),
            ram_available: fact("memory_available"),
            disk_available: fact("disk_free"),
        };
        resources.total.cpu_available += node.cpu_available;
        resources.total.ram_available += node.ram_available;
        resources.per_node.insert(row.identity.name, node);
    }
    Ok(Json(resources))
}

/// Returns what the nodes run, the schema versions that the database supports, and the next step of an upgrade.
#[utoipa::path(get, path = "/admin/upgrade", tag = "admin", responses(
    (status = 200, description = "The releases of the nodes, and what to do next.")))]
pub(crate) async fn upgrade(
    State(app): State<Arc<App>>,
    _: Args<NoArgs>,
) -> ApiResult<Json<ClusterUpgradeRecord>> {
    Ok(Json(cluster_upgrade::get(&app).await?))
}

/// Returns the public keys with which the console proxy verifies tokens.
#[utoipa::path(get, path = "/admin/vditokenpubkey", tag = "admin", responses(
    (status = 200, description = "The public keys."),
    (status = 404, description = "The key that signs console tokens is not configured.")))]
pub(crate) async fn console_keys(
    State(app): State<Arc<App>>,
    _: Args<NoArgs>,
) -> ApiResult<Json<Opaque<Value>>> {
    let key = app.console_key.as_ref();
    let absent =
        || Error::NotFound("kerbside signing key is not configured, set KERBSIDE_SIGNING_KEY".into());
    Ok(Json(Opaque(key.ok_or_else(absent)?.public())))
}
