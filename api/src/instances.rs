//! `/instances`: making, finding and deleting them, and what belongs to them.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::ids::InstanceId;
use muster_types::instance::InstanceRecord;
use muster_types::interface::InterfaceRecord;
use muster_types::object::ObjectRef;
use muster_types::operation::OperationRecord;
use muster_types::spec::{self, Findings};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, Nothing, Within};
use crate::artifacts::max_versions;
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::fields::{Boolean, Integer, Text};
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::pages::in_pages;
use crate::response::ok;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::instance::create::{self, InstanceRequest};
use muster_control::objects::instance::snapshot::{self, SnapshotRecord, SnapshotRequest};
use muster_control::objects::instance::{self, delete, plug};
use muster_control::objects::operation;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Whether those that ended are listed, too. Also taken from the body.
    #[param(value_type = Option<bool>)]
    all: Option<Boolean>,
}

/// The instances that the caller can see.
#[utoipa::path(get, path = "/instances", tag = "instances", params(ListQuery),
    responses((status = 200, body = Vec<InstanceRecord>)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(query): Args<ListQuery>,
) -> ApiResult {
    let all = query.all.is_some_and(|all| all.0);
    in_pages(move |after: Option<InstanceId>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { instance::list_page(&app, &caller, all, after).await }
    })
    .await
}

/// A disk to make.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only describes what `spec::disks` reads")]
struct DiskSpec {
    /// In gigabytes; absent: the size of the image.
    size: Option<u64>,
    /// `label:NAME`, `sf://…`, a URL, or a name such as `debian:12`; absent or `none`: a blank disk.
    base: Option<String>,
    /// `virtio` (usual), `sata`, `scsi`, `usb` or `nvme`.
    bus: Option<String>,
    /// `disk` (usual) or `cdrom`.
    #[schema(rename = "type")]
    disk_type: Option<String>,
}

/// An interface to make.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only describes what `spec::networks` reads")]
struct NetworkSpec {
    /// UUID or name of the network.
    network_uuid: String,
    macaddress: Option<String>,
    /// An address, or `none`; absent: any that is free.
    address: Option<String>,
    /// `virtio` (usual), `e1000`, …
    model: Option<String>,
    /// Whether it gets a floating address.
    float: Option<bool>,
}

/// A screen.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "only describes what `spec::video` reads")]
struct VideoSpec {
    /// `cirrus`, `vga`, `qxl`, …
    model: String,
    /// In kibibytes.
    memory: u64,
    /// `spice` (usual), `spiceconcurrent`, `spicedebug` or `vnc`.
    vdi: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewInstance {
    /// A DNS host label.
    #[schema(value_type = String)]
    name: Option<Text>,
    #[schema(value_type = i64)]
    cpus: Option<Integer>,
    /// In megabytes.
    #[schema(value_type = i64)]
    memory: Option<Integer>,
    #[schema(value_type = Vec<DiskSpec>)]
    disk: Option<Value>,
    #[schema(value_type = Option<Vec<NetworkSpec>>)]
    network: Option<Value>,
    #[schema(value_type = Option<VideoSpec>)]
    video: Option<Value>,
    /// The same as `video`.
    #[schema(value_type = Option<VideoSpec>)]
    videospec: Option<Value>,
    #[schema(value_type = Option<String>)]
    ssh_key: Option<Text>,
    /// Base64.
    #[schema(value_type = Option<String>)]
    user_data: Option<Text>,
    /// Name or UUID of the only node that will do.
    #[schema(value_type = Option<String>)]
    placed_on: Option<Text>,
    /// Another namespace must be one that trusts the caller's.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
    #[schema(value_type = Option<bool>)]
    uefi: Option<Boolean>,
    #[schema(value_type = Option<bool>)]
    secure_boot: Option<Boolean>,
    /// `label:NAME` or `sf://blob/UUID`.
    #[schema(value_type = Option<String>)]
    nvram_template: Option<Text>,
    /// `openstack-disk` (usual) or `none`.
    #[schema(value_type = Option<String>)]
    configdrive: Option<Text>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
    /// `sf-agent`, `sf-agent2`; absent: both.
    #[schema(value_type = Option<Vec<String>>)]
    side_channels: Option<Vec<Text>>,
}

/// Tells of what is only warned about.
fn tell(findings: &Findings, path: &str) {
    for finding in findings.texts() {
        tracing::warn!(finding, path, "request parameter");
    }
}

/// Create an instance. It runs once its state is `created`.
#[utoipa::path(post, path = "/instances", tag = "instances", request_body = NewInstance, responses(
    (status = 200, body = InstanceRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 404, description = "no such namespace, node, network or image"),
    (status = 406, description = "a network is not ready"),
    (status = 409, description = "an address is in use, or no node has the neighbours that are required"),
    (status = 507, description = "no node has room, or no address is free; `stage` and `transient` say more")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewInstance>,
) -> ApiResult {
    let text = |text: Option<Text>| text.map(|text| text.0);
    let mut findings = Findings::new(app.settings.api_validation_mode);
    let default_bus =
        app.settings.disk_bus.parse().map_err(|why| Error::Internal(format!("DISK_BUS: {why}")))?;
    let request = InstanceRequest {
        name: text(new.name),
        cpus: new.cpus.map(|number| number.0),
        memory: new.memory.map(|number| number.0),
        disks: spec::disks(new.disk.as_ref(), default_bus, &mut findings)?,
        networks: spec::networks(new.network.as_ref(), &mut findings)?,
        video: spec::video(new.video.as_ref(), new.videospec.as_ref(), &mut findings)?,
        ssh_key: text(new.ssh_key),
        user_data: text(new.user_data),
        placed_on: text(new.placed_on),
        namespace: text(new.namespace),
        uefi: new.uefi.is_some_and(|flag| flag.0),
        secure_boot: new.secure_boot.is_some_and(|flag| flag.0),
        nvram_template: text(new.nvram_template),
        configdrive: text(new.configdrive),
        metadata: new.metadata,
        side_channels: new.side_channels.map(|names| names.into_iter().map(|name| name.0).collect()),
    };
    tell(&findings, "/instances");
    Ok(ok(&create::create(&app, &caller, request).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Everything {
    /// Must be true.
    #[schema(value_type = bool)]
    confirm: Option<Boolean>,
    /// Only `system` may name another namespace than its own; `system` means every instance of the cluster.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
}

/// Delete every instance of a namespace.
#[utoipa::path(delete, path = "/instances", tag = "instances", request_body = Everything, responses(
    (status = 200, description = "those that are being deleted", body = Vec<String>),
    (status = 400, description = "not confirmed, or `system` named no namespace"),
    (status = 401, description = "another namespace was named"), (status = 404, description = "no such namespace")))]
pub(crate) async fn delete_all(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(what): Args<Everything>,
) -> ApiResult {
    let confirm = what.confirm.is_some_and(|confirm| confirm.0);
    let namespace = what.namespace.map(|text| text.0);
    Ok(ok(&delete::delete_all(&app, &caller, confirm, namespace.as_deref()).await?))
}

/// One instance, by UUID or name.
#[utoipa::path(get, path = "/instances/{instance_ref}", tag = "instances",
    params(("instance_ref" = String, Path), Within), responses((status = 200, body = InstanceRecord),
    (status = 400, description = "several have the name"), (status = 404, description = "no such instance")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&instance::get(&app, &caller, &reference, within.namespace()).await?))
}

/// Delete an instance. It is gone once its state is `deleted`.
#[utoipa::path(delete, path = "/instances/{instance_ref}", tag = "instances",
    params(("instance_ref" = String, Path), Within), responses((status = 200, body = InstanceRecord),
    (status = 404, description = "no such instance, or it is deleted")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&delete::delete(&app, &caller, &reference, within.namespace()).await?))
}

/// The interfaces of an instance, in their order.
#[utoipa::path(get, path = "/instances/{instance_ref}/interfaces", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 200, body = Vec<InterfaceRecord>),
    (status = 404, description = "no such instance")))]
pub(crate) async fn list_interfaces(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&instance::list_interfaces(&app, &caller, &reference).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewInterface {
    /// The interface, if it is not the body itself.
    #[schema(value_type = Option<NetworkSpec>)]
    network: Option<Value>,
    #[schema(value_type = Option<String>)]
    network_uuid: Option<Value>,
    #[schema(value_type = Option<String>)]
    macaddress: Option<Value>,
    #[schema(value_type = Option<String>)]
    address: Option<Value>,
    #[schema(value_type = Option<String>)]
    model: Option<Value>,
    #[schema(value_type = Option<bool>)]
    float: Option<Value>,
}

impl NewInterface {
    /// The spec, which released clients wrap.
    fn spec(self) -> Value {
        let fields = [
            ("network_uuid", self.network_uuid),
            ("macaddress", self.macaddress),
            ("address", self.address),
            ("model", self.model),
            ("float", self.float),
        ];
        let own: Map<String, Value> =
            fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
        self.network.filter(|_| own.is_empty()).unwrap_or(Value::Object(own))
    }
}

/// Give an instance another interface.
#[utoipa::path(post, path = "/instances/{instance_ref}/interfaces", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewInterface, responses(
    (status = 200, body = InterfaceRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 404, description = "no such instance or network"),
    (status = 406, description = "the instance or the network is not in a state for that"),
    (status = 409, description = "an address is in use"), (status = 507, description = "no address is free")))]
pub(crate) async fn plug(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewInterface>,
) -> ApiResult {
    let mut findings = Findings::new(app.settings.api_validation_mode);
    let wanted = spec::network(&new.spec(), "network", &mut findings)?;
    tell(&findings, "/instances/{instance_ref}/interfaces");
    Ok(ok(&plug::plug(&app, &caller, &reference, wanted).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewSnapshot {
    /// Whether all disks are copied; absent: only the first.
    #[schema(value_type = Option<bool>)]
    all: Option<Boolean>,
    /// The one to copy, such as `vdb` or `nvram`.
    #[schema(value_type = Option<String>)]
    device: Option<Text>,
    /// How many copies are kept; 0 or absent: ARTIFACT_MAX_VERSIONS_DEFAULT.
    #[schema(value_type = Option<i64>)]
    max_versions: Option<Value>,
    /// Whether only what differs from the image is copied.
    #[schema(value_type = Option<bool>)]
    thin: Option<Boolean>,
}

/// Copy disks of an instance, all as they are at one moment.
#[utoipa::path(post, path = "/instances/{instance_ref}/snapshot", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewSnapshot, responses(
    (status = 200, description = "the copies that will be there, by device",
        body = std::collections::BTreeMap<String, SnapshotRecord>),
    (status = 400, description = "a field is malformed"), (status = 404, description = "no such instance"),
    (status = 406, description = "the instance is not ready")))]
pub(crate) async fn create_snapshot(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewSnapshot>,
) -> ApiResult {
    let max_versions = new.max_versions.as_ref().map_or(Ok(0), max_versions)?;
    let request = SnapshotRequest {
        all: new.all.is_some_and(|flag| flag.0),
        device: new.device.map(|text| text.0).filter(|text| !text.is_empty()),
        max_versions,
        thin: new.thin.is_some_and(|flag| flag.0),
    };
    Ok(ok(&snapshot::create(&app, &caller, &reference, &request).await?))
}

/// The copies of the disks of an instance.
#[utoipa::path(get, path = "/instances/{instance_ref}/snapshot", tag = "instances",
    params(("instance_ref" = String, Path)), responses(
    (status = 200, description = "artifacts and their contents in one", body = Vec<Object>),
    (status = 404, description = "no such instance")))]
pub(crate) async fn list_snapshots(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&snapshot::list(&app, &caller, &reference).await?))
}

/// The events of an instance, newest first.
#[utoipa::path(get, path = "/instances/{instance_ref}/events", tag = "instances",
    params(("instance_ref" = String, Path), EventQuery), responses(
    (status = 200, description = "events", body = Vec<Object>), (status = 404, description = "no such instance")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let object = object(&app, &caller, &reference).await?;
    answer(&app, &object, &query).await
}

/// The operations on an instance, newest first: those that have not ended, or all.
#[utoipa::path(get, path = "/instances/{instance_ref}/clusteroperations", tag = "instances",
    params(("instance_ref" = String, Path), ListQuery), responses(
    (status = 200, body = Vec<OperationRecord>), (status = 404, description = "no such instance")))]
pub(crate) async fn list_operations(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<ListQuery>,
) -> ApiResult {
    let target = own_object(&app, &caller, &reference).await?;
    Ok(ok(&operation::of_object(&app, &target, query.all.is_some_and(|all| all.0)).await?))
}

/// The instance that a call reads about.
async fn object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(instance::object(instance::find(&*app.store, caller, reference, None).await?.id))
}

/// The instance that a call changes.
async fn own_object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(instance::object(instance::find_own(app, caller, reference, None).await?.id))
}

metadata_routes!(
    "/instances/{instance_ref}/metadata",
    "/instances/{instance_ref}/metadata/{key}",
    "instance_ref",
    "instances",
    super::object,
    super::own_object
);
