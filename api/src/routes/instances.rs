//! `/instances`: instances, their interfaces and snapshots.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::event::EventRecord;
use muster_types::ids::InstanceId;
use muster_types::instance::{ConfigDriveType, FencingPolicy, InstanceRecord, RestartPolicy, SideChannel};
use muster_types::interface::InterfaceRecord;
use muster_types::object::ObjectRef;
use muster_types::operation::OperationRecord;
use muster_types::shared_storage::StorageType;
use muster_types::spec::{self, DiskBus, DiskType, ValidationFindings, Vdi};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::arguments::{Args, ListQuery, NamespaceQuery, NoArgs, OperationsQuery};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::{Pages, in_pages};
use crate::response::Json;
use crate::routes::artifacts::max_versions;
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::create::{self, InstanceRequest};
use muster_control::objects::instance::snapshot::{self, SnapshotRecord, SnapshotRequest};
use muster_control::objects::instance::{self, delete, plug};
use muster_control::objects::operation;
use muster_store::{dry_run, run_or_check};

/// Lists the instances that the caller can see.
#[utoipa::path(get, path = "/instances", tag = "instances", params(ListQuery))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(query): Args<ListQuery>,
) -> ApiResult<Pages<InstanceRecord>> {
    let all = query.all();
    in_pages(move |after: Option<InstanceId>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { instance::list_page(&app, &caller, all, after).await }
    })
    .await
}

/// A disk of a new instance.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only describes what `spec::parse_disks` reads")]
struct NewDisk {
    /// Size in gigabytes; the size of the image by default.
    size: Option<u64>,
    /// The image: `label:NAME`, `sf://…`, a URL, or a name such as `debian:12`. Absent or `none`: a blank disk.
    base: Option<String>,
    /// The bus; the setting DISK_BUS by default.
    bus: Option<DiskBus>,
    /// Whether it is a disk, which is the default, or a CD-ROM.
    #[schema(rename = "type")]
    disk_type: Option<DiskType>,
}

/// An interface of a new instance.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only describes what `spec::parse_networks` reads")]
struct NewNetworkInterface {
    /// UUID or name of the network.
    network_uuid: String,
    /// The MAC address; absent: a random one.
    macaddress: Option<String>,
    /// An IPv4 address, or `none`. Absent: a free address is allocated.
    address: Option<String>,
    /// `virtio` (default), `e1000`, …
    model: Option<String>,
    /// Whether to assign a floating address.
    float: Option<bool>,
}

/// The video device of a new instance.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only describes what `spec::parse_video` reads")]
struct NewVideo {
    /// `cirrus`, `vga`, `qxl`, …
    model: String,
    /// Video memory in kibibytes.
    memory: u64,
    /// The remote display protocol; `spice` by default.
    vdi: Option<Vdi>,
}

/// A new instance.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web-1", "cpus": 2, "memory": 2048, "ssh_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI user@example",
    "disk": [{"base": "debian:12", "size": 20}, {"size": 100, "bus": "virtio", "type": "disk"}],
    "network": [{"network_uuid": "blue", "address": "10.0.0.5", "float": true}],
    "metadata": {"tags": ["web"]}
}))]
pub(crate) struct NewInstance {
    /// A DNS label, such as `web-1`.
    #[schema(value_type = String)]
    name: Option<String>,
    /// The number of virtual CPUs.
    #[schema(value_type = i64)]
    cpus: Option<i64>,
    /// Memory in megabytes.
    #[schema(value_type = i64)]
    memory: Option<i64>,
    /// The disks, in order; the first one is booted. At least one.
    #[schema(value_type = Vec<NewDisk>)]
    disk: Option<Value>,
    /// The interfaces, in order.
    #[schema(value_type = Option<Vec<NewNetworkInterface>>)]
    network: Option<Value>,
    /// The video device; `cirrus` with 16 MiB and SPICE by default.
    #[schema(value_type = Option<NewVideo>)]
    video: Option<Value>,
    /// Alias of `video`.
    #[schema(value_type = Option<NewVideo>)]
    videospec: Option<Value>,
    /// An SSH public key, which cloud-init installs in the guest.
    ssh_key: Option<String>,
    /// cloud-init user data, encoded as Base64.
    user_data: Option<String>,
    /// UUID or name of the node to place the instance on.
    placed_on: Option<String>,
    /// Defaults to the caller's. Another namespace must trust the caller's.
    namespace: Option<String>,
    /// Whether to boot with UEFI firmware; false by default.
    uefi: Option<bool>,
    /// Whether to enable UEFI secure boot; false by default. Requires `uefi`.
    secure_boot: Option<bool>,
    /// Initial content of the UEFI variables: `label:NAME` or `sf://blob/UUID`.
    nvram_template: Option<String>,
    /// How cloud-init gets its data; `openstack-disk` by default.
    #[schema(value_type = Option<ConfigDriveType>)]
    configdrive: Option<String>,
    /// Initial metadata by key. `tags` and `affinity` influence the placement.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
    /// The channels to the agent in the guest; both by default.
    #[schema(value_type = Option<Vec<SideChannel>>)]
    side_channels: Option<Vec<String>>,
    /// Whether the instance may be created again from its images when its host is lost; false by default. Everything that
    /// its disks contained is lost then.
    disposable: Option<bool>,
    /// Where its disks are; `local` by default. With `shared`, it restarts on another node with the content of its disks when
    /// its host is lost.
    #[schema(value_type = Option<StorageType>)]
    storage: Option<String>,
    /// The number of replicas of its disks on other nodes, 0 or 1; 0 by default. With 1, the changes of its disks are copied to
    /// another node every `REPLICA_INTERVAL` seconds, from which it restarts when its host is lost.
    replicas: Option<i64>,
    /// What happens when its host is lost; `manual` by default.
    #[schema(value_type = Option<RestartPolicy>)]
    restart: Option<String>,
    /// What happens when its node cannot reach the database; the policy of the cluster (`FENCING`) by default.
    #[schema(value_type = Option<FencingPolicy>)]
    fencing: Option<String>,
    /// Whether to only check the request: it is validated and placed as if it were executed, but nothing is created. False by
    /// default. The response is the record that would be created; its UUID and addresses are examples.
    dry_run: Option<bool>,
}

/// Logs findings that do not reject the request.
fn log_findings(findings: &ValidationFindings, path: &str) {
    for finding in findings.texts() {
        tracing::warn!(finding, path, "invalid request parameter");
    }
}

/// Creates an instance. It is running once its state is `created`.
///
/// The record is returned before images are fetched and disks are created. Poll it: the state ends in `created`, or in
/// `error` with the reason in `error_message`. Names need not be unique.
#[utoipa::path(post, path = "/instances", tag = "instances", request_body = NewInstance, responses((status = 400, description = "A field is missing or malformed."),
    (status = 403, description = "A quota of the namespace would be exceeded, or the token lacks the required scope."), 
    (status = 404, description = "No such namespace, node, network or image."),
    (status = 406, description = "A network is not ready."),
    (status = 409, description = "An address is in use, or no node satisfies the required affinity."),
    (status = 507, description = "No node has enough capacity, or no address is free; see `stage` and `transient`.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewInstance>,
) -> ApiResult<Json<InstanceRecord>> {
    let mut findings = ValidationFindings::new(app.settings.api_validation_mode);
    let is_dry_run = new.dry_run.unwrap_or(false);
    let request = InstanceRequest {
        name: new.name,
        cpus: new.cpus,
        memory: new.memory,
        disks: spec::parse_disks(new.disk.as_ref(), app.settings.disk_bus, &mut findings)?,
        networks: spec::parse_networks(new.network.as_ref(), &mut findings)?,
        video: spec::parse_video(new.video.as_ref(), new.videospec.as_ref(), &mut findings)?,
        ssh_key: new.ssh_key,
        user_data: new.user_data,
        placed_on: new.placed_on,
        namespace: new.namespace,
        uefi: new.uefi.unwrap_or(false),
        secure_boot: new.secure_boot.unwrap_or(false),
        nvram_template: new.nvram_template,
        configdrive: new.configdrive,
        metadata: new.metadata,
        side_channels: new.side_channels,
        disposable: new.disposable.unwrap_or(false),
        storage: new.storage,
        replicas: new.replicas,
        restart: new.restart,
        fencing: new.fencing,
    };
    log_findings(&findings, "/instances");
    let creation = create::create(&app, &caller, request);
    if is_dry_run {
        let record = dry_run(creation).await?;
        return Ok(Json(InstanceRecord { last_cluster_operation: None, ..record }));
    }
    Ok(Json(creation.await?))
}

/// Confirms the deletion of all instances of a namespace.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = InstancesDeletion)]
#[schema(example = json!({"confirm": true}))]
pub(crate) struct DeleteAllRequest {
    /// May be omitted, but must not be false.
    confirm: Option<bool>,
    /// Defaults to the caller's. Only `system` may name another namespace.
    namespace: Option<String>,
}

/// Deletes all instances of a namespace.
#[utoipa::path(delete, path = "/instances", tag = "instances", request_body = DeleteAllRequest, responses((status = 200, description = "UUIDs of the instances that are being deleted."),
    (status = 400, description = "`confirm` is false."),
    (status = 401, description = "The request names another namespace."), (status = 404, description = "No such namespace.")))]
pub(crate) async fn delete_all(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(request): Args<DeleteAllRequest>,
) -> ApiResult<Json<Vec<String>>> {
    if request.confirm == Some(false) {
        return Err(Error::Invalid("parameter confirm is not set true".into()).into());
    }
    let deleted = delete::delete_all(&app, &caller, request.namespace.as_deref()).await?;
    Ok(Json(deleted.iter().map(ToString::to_string).collect()))
}

/// Returns an instance.
#[utoipa::path(get, path = "/instances/{instance_ref}", tag = "instances",
    params(("instance_ref" = String, Path), NamespaceQuery), responses((status = 400, description = "Several instances have this name."), (status = 404, description = "No such instance.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<InstanceRecord>> {
    Ok(Json(instance::get(&app, &caller, &reference, query.namespace.as_deref()).await?))
}

/// Deletes an instance. The deletion is complete once its state is `deleted`.
///
/// Its disks are deleted and its addresses released. The record remains readable for some time.
#[utoipa::path(delete, path = "/instances/{instance_ref}", tag = "instances",
    params(("instance_ref" = String, Path), NamespaceQuery), responses((status = 404, description = "No such instance, or it is already deleted.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<InstanceRecord>> {
    Ok(Json(delete::delete(&app, &caller, &reference, query.namespace.as_deref()).await?))
}

/// Lists the interfaces of an instance, in order.
#[utoipa::path(get, path = "/instances/{instance_ref}/interfaces", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 404, description = "No such instance.")))]
pub(crate) async fn list_interfaces(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<InterfaceRecord>> {
    Pages::of(instance::list_interfaces(&app, &caller, &reference).await?)
}

/// A new interface of an instance. Its fields are in the body itself or in `network`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"network_uuid": "blue", "address": "10.0.0.6"}))]
pub(crate) struct NewInterface {
    /// The interface, if its fields are not in the body itself.
    #[schema(value_type = Option<NewNetworkInterface>)]
    network: Option<Value>,
    /// UUID or name of the network.
    #[schema(value_type = Option<String>)]
    network_uuid: Option<Value>,
    /// The MAC address; absent: a random one.
    #[schema(value_type = Option<String>)]
    macaddress: Option<Value>,
    /// An IPv4 address, or `none`; absent: a free address is allocated.
    #[schema(value_type = Option<String>)]
    address: Option<Value>,
    /// The model of the network card; `virtio` by default.
    #[schema(value_type = Option<String>)]
    model: Option<Value>,
    /// Whether to assign a floating address.
    #[schema(value_type = Option<bool>)]
    float: Option<Value>,
    /// Whether to only check the request, without adding anything; false by default. The response is the record that would be
    /// created; its UUID and addresses are examples.
    dry_run: Option<bool>,
}

impl NewInterface {
    /// Returns the spec, which released clients wrap in `network`.
    fn spec(self) -> Value {
        let fields = [
            ("network_uuid", self.network_uuid),
            ("macaddress", self.macaddress),
            ("address", self.address),
            ("model", self.model),
            ("float", self.float),
        ];
        let direct: Map<String, Value> =
            fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
        self.network.filter(|_| direct.is_empty()).unwrap_or(Value::Object(direct))
    }
}

/// Adds an interface to an instance.
#[utoipa::path(post, path = "/instances/{instance_ref}/interfaces", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewInterface, responses((status = 400, description = "A field is missing or malformed."),
    (status = 403, description = "A quota of the namespace would be exceeded, or the token lacks the required scope."), 
    (status = 404, description = "No such instance or network."),
    (status = 406, description = "The instance or the network is not ready."),
    (status = 409, description = "An address is in use, or the instance is being migrated."),
    (status = 507, description = "No address is free.")))]
pub(crate) async fn plug(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewInterface>,
) -> ApiResult<Json<InterfaceRecord>> {
    let mut findings = ValidationFindings::new(app.settings.api_validation_mode);
    let only_check = new.dry_run;
    let interface = spec::parse_network(&new.spec(), "network", &mut findings)?;
    log_findings(&findings, "/instances/{instance_ref}/interfaces");
    let addition = plug::plug(&app, &caller, &reference, interface);
    Ok(Json(run_or_check(only_check, addition).await?))
}

/// The disks to copy.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"all": true, "max_versions": 3}))]
pub(crate) struct NewSnapshot {
    /// Whether to copy all disks; only the first by default.
    all: Option<bool>,
    /// The device to copy, such as `vdb` or `nvram`.
    device: Option<String>,
    /// The maximum number of snapshots to keep; 0 or absent: ARTIFACT_MAX_VERSIONS_DEFAULT.
    #[schema(value_type = Option<i64>)]
    max_versions: Option<Value>,
    /// Whether to copy only the difference from the image.
    thin: Option<bool>,
}

/// Creates a snapshot of disks of an instance. All disks are copied at the same point in time.
///
/// Each disk becomes the next version of an artifact. The copies are complete once the operations of the instance are; until
/// then their blobs have the state `initial`.
#[utoipa::path(post, path = "/instances/{instance_ref}/snapshot", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewSnapshot, responses((status = 200, description = "The snapshots, by device."),
    (status = 400, description = "A field is malformed."), (status = 404, description = "No such instance."),
    (status = 406, description = "The instance is not ready."),
    (status = 409, description = "The instance is being migrated.")))]
pub(crate) async fn create_snapshot(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewSnapshot>,
) -> ApiResult<Json<std::collections::BTreeMap<String, SnapshotRecord>>> {
    let max_versions = max_versions(new.max_versions.as_ref())?;
    let request = SnapshotRequest {
        all: new.all.unwrap_or(false),
        device: new.device.filter(|text| !text.is_empty()),
        max_versions,
        thin: new.thin.unwrap_or(false),
    };
    Ok(Json(snapshot::create(&app, &caller, &reference, &request).await?))
}

/// Lists the snapshots of an instance.
#[utoipa::path(get, path = "/instances/{instance_ref}/snapshot", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 200, description = "Artifacts with their blobs."),
    (status = 404, description = "No such instance.")))]
pub(crate) async fn list_snapshots(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Pages<Map<String, Value>>> {
    Pages::of(snapshot::list(&app, &caller, &reference).await?)
}

/// Lists the events of an instance, newest first.
#[utoipa::path(get, path = "/instances/{instance_ref}/events", tag = "instances",
    params(("instance_ref" = String, Path), EventQuery), responses((status = 404, description = "No such instance.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    events_of(&app, &object(&app, &caller, &reference).await?, &query).await
}

/// Lists the operations on an instance, newest first.
#[utoipa::path(get, path = "/instances/{instance_ref}/clusteroperations", tag = "instances",
    params(("instance_ref" = String, Path), OperationsQuery), responses((status = 404, description = "No such instance.")))]
pub(crate) async fn list_operations(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<OperationsQuery>,
) -> ApiResult<Pages<OperationRecord>> {
    let target = own_object(&app, &caller, &reference).await?;
    Pages::of(operation::of_object(&app, &target, query.all()).await?)
}

/// Finds an instance that the caller may read.
async fn object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(instance::object(instance::find(&*app.store, caller, reference, None).await?.id))
}

/// Finds an instance that the caller may change.
async fn own_object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(instance::object(instance::find_own(app, caller, reference, None).await?.id))
}

metadata_routes!(
    "/instances/{instance_ref}/metadata",
    "/instances/{instance_ref}/metadata/{key}",
    ("instance_ref" => instance_ref: String),
    "instances",
    super::object,
    super::own_object
);
