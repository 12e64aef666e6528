//! `/artifacts`: named sequences of blobs, such as images.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::artifact::{ArtifactRecord, ArtifactType, VersionRecord};
use muster_types::event::EventRecord;
use muster_types::ids::ArtifactId;
use muster_types::object::{ObjectRef, check_name};
use muster_types::operation::OperationRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, NamespaceQuery, OperationsQuery, required};
use crate::error::ApiResult;
use crate::forward::{MaybeForwarded, OriginalRequest};
use crate::guard::Authenticated;
use crate::pages::{Pages, in_pages};
use crate::response::{Json, Null};
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::artifact::{self, ArtifactRequest};
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::{operation, upload, version};
use muster_store::dry_run;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ArtifactQuery {
    /// Ignored; accepted for existing clients.
    #[expect(dead_code, reason = "declared, so that it is accepted")]
    node: Option<String>,
}

/// Lists the artifacts that the caller can see.
#[utoipa::path(get, path = "/artifacts", tag = "artifacts", params(ArtifactQuery))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<ArtifactQuery>,
) -> ApiResult<Pages<ArtifactRecord>> {
    in_pages(move |after: Option<ArtifactId>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { artifact::list_page(&app, &caller, after).await }
    })
    .await
}

/// An image to fetch.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"url": "debian:12"}))]
pub(crate) struct NewArtifact {
    /// URL of the image, or a name such as `debian:12`.
    #[schema(value_type = String)]
    url: Option<String>,
    /// Whether all namespaces may read the artifact; only `system` may set this.
    shared: Option<bool>,
    /// The namespace of the artifact; the caller's by default.
    namespace: Option<String>,
    /// Whether to only check the request, without creating or fetching anything; false by default. The response is the record
    /// of the artifact as it would be; the UUID of a new one is an example.
    dry_run: Option<bool>,
}

/// Fetches an image, or checks its source for a newer version. The artifact is usable once its state is `created`.
///
/// The same URL in the same namespace is the same artifact. A newer content becomes its next version; instances keep the
/// version that they were created from.
#[utoipa::path(post, path = "/artifacts", tag = "artifacts", request_body = NewArtifact, responses((status = 400, description = "The URL is missing or not supported."),
    (status = 403, description = "Only `system` may share artifacts, a quota of the namespace would be exceeded, or the token lacks the required scope."),
    (status = 404, description = "No such namespace.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewArtifact>,
) -> ApiResult<Json<ArtifactRecord>> {
    let request = ArtifactRequest {
        name: None,
        namespace: new.namespace,
        artifact_type: ArtifactType::Image,
        source_url: required("url", new.url)?,
        shared: new.shared.unwrap_or(false),
        max_versions: 0,
    };
    if new.dry_run.unwrap_or(false) {
        let record = dry_run(artifact::fetch(&app, &caller, &request)).await?;
        return Ok(Json(ArtifactRecord { last_cluster_operation: None, ..record }));
    }
    Ok(Json(artifact::fetch(&app, &caller, &request).await?))
}

/// Confirms the deletion of all artifacts of a namespace.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ArtifactsDeletion)]
#[schema(example = json!({"confirm": true, "namespace": "ci"}))]
pub(crate) struct DeleteAllRequest {
    /// Must be true.
    #[schema(value_type = bool)]
    confirm: Option<bool>,
    /// Required for `system`; other namespaces may name only themselves.
    namespace: Option<String>,
}

/// Deletes all artifacts of a namespace and returns their UUIDs.
#[utoipa::path(delete, path = "/artifacts", tag = "artifacts", request_body = DeleteAllRequest, responses((status = 400, description = "The request is not confirmed, or the namespace is missing."),
    (status = 401, description = "The request names another namespace."), (status = 404, description = "No such namespace.")))]
pub(crate) async fn delete_all(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(request): Args<DeleteAllRequest>,
) -> ApiResult<Json<Vec<ArtifactId>>> {
    if request.confirm != Some(true) {
        return Err(Error::Invalid("parameter confirm is not set true".into()).into());
    }
    Ok(Json(artifact::delete_all(&app, &caller, request.namespace.as_deref()).await?))
}

/// Returns an artifact.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}", tag = "artifacts",
    params(("artifact_ref" = String, Path), NamespaceQuery), responses((status = 404, description = "No such artifact.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<ArtifactRecord>> {
    Ok(Json(artifact::get(&app, &caller, &reference, query.namespace.as_deref()).await?))
}

/// Deletes an artifact. Returns `null` if it is already deleted.
#[utoipa::path(delete, path = "/artifacts/{artifact_ref}", tag = "artifacts",
    params(("artifact_ref" = String, Path), NamespaceQuery), responses((status = 404, description = "The caller has no such artifact.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<Option<ArtifactRecord>>> {
    Ok(Json(artifact::delete(&app, &caller, &reference, query.namespace.as_deref()).await?))
}

/// The content of a version: an upload or a blob.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"upload_uuid": "0b4c5e9e-6f5b-4a58-9c27-6f0f5b1d8a11", "artifact_type": "image"}))]
pub(crate) struct NewVersion {
    /// The upload that becomes the version. The upload is consumed.
    upload_uuid: Option<String>,
    /// The blob that becomes the version.
    blob_uuid: Option<String>,
    /// The recorded source; `sf://upload/<namespace>/<name>` by default.
    source_url: Option<String>,
    /// Whether all namespaces may read the artifact; only `system` may set this.
    shared: Option<bool>,
    /// The namespace of the artifact; the caller's by default.
    namespace: Option<String>,
    /// `image`, which is the default and is validated, or `other`.
    artifact_type: Option<String>,
}

/// Creates an artifact, or its next version, from an upload or a blob.
#[utoipa::path(post, path = "/artifacts/upload/{name}", tag = "artifacts", params(("name" = String, Path, description = "Name of the artifact.")),
    request_body = NewVersion, responses((status = 400, description = "Neither or both of upload and blob are given, or the image is unsafe."),
    (status = 403, description = "Only `system` may share artifacts, the type is invalid, a quota of the namespace would be exceeded, or the token lacks the required scope."),
    (status = 404, description = "No such upload, blob or namespace.")))]
pub(crate) async fn create_version(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    original: OriginalRequest,
    Args(new): Args<NewVersion>,
) -> ApiResult<MaybeForwarded<Json<ArtifactRecord>>> {
    check_name("name", &name)?;
    let artifact_type = match new.artifact_type.as_deref() {
        None | Some("image") => ArtifactType::Image,
        Some("other") => ArtifactType::Other,
        Some(_) => return Err(Error::Forbidden("invalid artifact type specified".into()).into()),
    };
    let source_url = new.source_url.filter(|url| !url.is_empty());
    let request = ArtifactRequest {
        source_url: source_url.unwrap_or_else(|| format!("sf://upload/{}/{name}", caller.namespace)),
        name: Some(name),
        namespace: new.namespace,
        artifact_type,
        shared: new.shared.unwrap_or(false),
        max_versions: 0,
    };
    let upload = match (new.upload_uuid, new.blob_uuid) {
        (Some(_), Some(_)) => {
            return Err(Error::Invalid("only specify one of upload_uuid and blob_uuid".into()).into());
        }
        (None, None) => return Err(Error::Invalid("specify one of upload_uuid and blob_uuid".into()).into()),
        (None, Some(blob)) => {
            return match artifact::inspecting_node(&app, &request, &blob).await? {
                None => {
                    let record = artifact::from_blob(&app, &caller, &request, &blob).await?;
                    Ok(MaybeForwarded::Local(Json(record)))
                }
                Some(node) => original
                    .forward(&app, &node, &caller, &caller.namespace)
                    .await
                    .map(MaybeForwarded::Forwarded),
            };
        }
        (Some(upload), None) => upload::find(&app, &caller, &upload).await?,
    };
    match upload::locate(&app, &upload).await? {
        NodeLocation::Local(node) => {
            let record = artifact::from_upload(&app, &caller, &request, &node, &upload).await?;
            Ok(MaybeForwarded::Local(Json(record)))
        }
        NodeLocation::Remote(node) => {
            original.forward(&app, &node, &caller, &upload.namespace).await.map(MaybeForwarded::Forwarded)
        }
    }
}

/// Lists the versions of an artifact, oldest first.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}/versions", tag = "artifacts",
    params(("artifact_ref" = String, Path), NamespaceQuery), responses((status = 404, description = "No such artifact.")))]
pub(crate) async fn list_versions(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Pages<VersionRecord>> {
    Pages::of(version::list(&app, &caller, &reference, query.namespace.as_deref()).await?)
}

/// The number of versions that an artifact keeps.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = MostVersions)]
#[schema(example = json!({"max_versions": 3}))]
pub(crate) struct MaxVersionsRequest {
    /// The maximum number of versions; 0 or absent: ARTIFACT_MAX_VERSIONS_DEFAULT.
    #[schema(value_type = Option<i64>)]
    max_versions: Option<Value>,
    /// The namespace that the name of the artifact is looked up in; the caller's by default.
    namespace: Option<String>,
}

/// Parses a maximum number of versions, which is 0 by default.
pub(crate) fn max_versions(value: Option<&Value>) -> Result<i64, Error> {
    let Some(value) = value else { return Ok(0) };
    let text = value.as_str().and_then(|text| text.trim().parse().ok());
    let number = value.as_i64().or(text);
    let number = number.ok_or_else(|| Error::Invalid("max version is not an integer".into()))?;
    if number < 0 { Err(Error::Invalid("max version cannot be negative".into())) } else { Ok(number) }
}

/// Sets the maximum number of versions of an artifact. Older versions are deleted immediately.
#[utoipa::path(post, path = "/artifacts/{artifact_ref}/versions", tag = "artifacts",
    params(("artifact_ref" = String, Path)), request_body = MaxVersionsRequest, responses((status = 400, description = "The number of versions is invalid."),
    (status = 404, description = "The caller has no such artifact.")))]
pub(crate) async fn set_max_versions(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(request): Args<MaxVersionsRequest>,
) -> ApiResult<Null> {
    let max_versions = max_versions(request.max_versions.as_ref())?;
    version::set_max_versions(&app, &caller, &reference, request.namespace.as_deref(), max_versions).await?;
    Ok(Null)
}

/// Deletes a version. Deleting the last version deletes the artifact.
#[utoipa::path(delete, path = "/artifacts/{artifact_ref}/versions/{index}", tag = "artifacts",
    params(("artifact_ref" = String, Path), ("index" = String, Path), NamespaceQuery), responses((status = 400, description = "The index is not a number."),
    (status = 404, description = "The caller has no such artifact, or it has no such version.")))]
pub(crate) async fn delete_version(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, index)): Path<(String, String)>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<ArtifactRecord>> {
    Ok(Json(version::delete(&app, &caller, &reference, query.namespace.as_deref(), &index).await?))
}

/// Shares an artifact of `system` with all namespaces.
#[utoipa::path(post, path = "/artifacts/{artifact_ref}/share", tag = "artifacts",
    params(("artifact_ref" = String, Path), NamespaceQuery), responses((status = 403, description = "The artifact does not belong to `system`."), (status = 404, description = "The caller has no such artifact.")))]
pub(crate) async fn share(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<ArtifactRecord>> {
    set_shared(&app, &caller, &reference, &query, true).await
}

/// Stops sharing an artifact with all namespaces.
#[utoipa::path(post, path = "/artifacts/{artifact_ref}/unshare", tag = "artifacts",
    params(("artifact_ref" = String, Path), NamespaceQuery), responses((status = 403, description = "The artifact is not shared."), (status = 404, description = "The caller has no such artifact.")))]
pub(crate) async fn unshare(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<NamespaceQuery>,
) -> ApiResult<Json<ArtifactRecord>> {
    set_shared(&app, &caller, &reference, &query, false).await
}

async fn set_shared(
    app: &App,
    caller: &Caller,
    reference: &str,
    query: &NamespaceQuery,
    shared: bool,
) -> ApiResult<Json<ArtifactRecord>> {
    Ok(Json(artifact::set_shared(app, caller, reference, query.namespace.as_deref(), shared).await?))
}

/// Lists the events of an artifact, newest first.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}/events", tag = "artifacts",
    params(("artifact_ref" = String, Path), EventQuery), responses((status = 404, description = "No such artifact.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    let id = artifact::find(&app, &caller, &reference, None).await?.id;
    events_of(&app, &artifact::object(id), &query).await
}

/// Lists the operations on an artifact, newest first.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}/clusteroperations", tag = "artifacts",
    params(("artifact_ref" = String, Path), OperationsQuery), responses((status = 404, description = "No such artifact.")))]
pub(crate) async fn list_operations(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<OperationsQuery>,
) -> ApiResult<Pages<OperationRecord>> {
    let target = artifact::object(artifact::find(&app, &caller, &reference, None).await?.id);
    Pages::of(operation::of_object(&app, &target, query.all()).await?)
}

/// Finds an artifact of the caller. Its metadata is private to its owner.
async fn own_object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(artifact::object(artifact::find_own(app, caller, reference, None).await?.id))
}

metadata_routes!(
    "/artifacts/{artifact_ref}/metadata",
    "/artifacts/{artifact_ref}/metadata/{key}",
    ("artifact_ref" => artifact_ref: String),
    "artifacts",
    super::own_object,
    super::own_object
);
