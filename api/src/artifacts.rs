//! `/artifacts`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, Uri};
use axum::response::Response;
use muster_types::Error;
use muster_types::artifact::{ArtifactRecord, ArtifactType, VersionRecord};
use muster_types::ids::ArtifactId;
use muster_types::object::{ObjectRef, check_name};
use muster_types::operation::OperationRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::arguments::{Args, Within};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::fields::{Boolean, Text};
use crate::guard::Authenticated;
use crate::metadata::metadata_routes;
use crate::pages::in_pages;
use crate::peer::{self, Handed};
use crate::request::Incoming;
use crate::response::{nothing, ok};
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::artifact::{self, ArtifactRequest};
use muster_control::objects::node_location::NodeLocation;
use muster_control::objects::{operation, upload, version};

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Taken for the sake of existing clients; every artifact is listed.
    #[param(value_type = Option<String>)]
    #[expect(dead_code, reason = "declared, so that it is not refused")]
    node: Option<Text>,
}

/// The artifacts that the caller can see.
#[utoipa::path(get, path = "/artifacts", tag = "artifacts", params(ListQuery),
    responses((status = 200, body = Vec<ArtifactRecord>)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    _: Args<ListQuery>,
) -> ApiResult {
    in_pages(move |after: Option<ArtifactId>| {
        let (app, caller) = (Arc::clone(&app), caller.clone());
        async move { artifact::list_page(&app, &caller, after).await }
    })
    .await
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewArtifact {
    /// Where the image is, or its name, such as `debian:12`.
    #[schema(value_type = String)]
    url: Option<Text>,
    /// Whether everybody may read it; only `system` may say so.
    #[schema(value_type = Option<bool>)]
    shared: Option<Boolean>,
    /// Where to make it; the caller's own when absent.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
}

/// Fetch an image, or look whether its source has a newer one. It is usable once its state is `created`.
#[utoipa::path(post, path = "/artifacts", tag = "artifacts", request_body = NewArtifact, responses(
    (status = 200, body = ArtifactRecord), (status = 400, description = "no URL, or not one to fetch from"),
    (status = 403, description = "only system shares"), (status = 404, description = "no such namespace")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewArtifact>,
) -> ApiResult {
    let url = new.url.ok_or_else(|| Error::Invalid("url: Missing data for required field.".into()))?;
    let request = ArtifactRequest {
        name: None,
        namespace: new.namespace.map(|text| text.0),
        artifact_type: ArtifactType::Image,
        source_url: url.0,
        shared: new.shared.is_some_and(|flag| flag.0),
        max_versions: 0,
    };
    Ok(ok(&artifact::fetch(&app, &caller, &request).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Everything {
    /// Must be true.
    #[schema(value_type = bool)]
    confirm: Option<Boolean>,
    /// `system` must name one; others may name their own.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
}

/// Delete every artifact of a namespace. The answer names them.
#[utoipa::path(delete, path = "/artifacts", tag = "artifacts", request_body = Everything, responses(
    (status = 200, body = Vec<ArtifactId>), (status = 400, description = "not confirmed, or no namespace"),
    (status = 401, description = "another namespace was named"), (status = 404, description = "no such namespace")))]
pub(crate) async fn delete_all(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(what): Args<Everything>,
) -> ApiResult {
    if !what.confirm.is_some_and(|confirm| confirm.0) {
        return Err(Error::Invalid("parameter confirm is not set true".into()).into());
    }
    let namespace = what.namespace.map(|text| text.0);
    Ok(ok(&artifact::delete_all(&app, &caller, namespace.as_deref()).await?))
}

/// One artifact, by id or name.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}", tag = "artifacts",
    params(("artifact_ref" = String, Path), Within), responses(
    (status = 200, body = ArtifactRecord), (status = 404, description = "no such artifact")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&artifact::get(&app, &caller, &reference, within.namespace()).await?))
}

/// Delete an artifact. The answer is its record, or `null` if it was deleted before.
#[utoipa::path(delete, path = "/artifacts/{artifact_ref}", tag = "artifacts",
    params(("artifact_ref" = String, Path), Within), responses(
    (status = 200, body = Option<ArtifactRecord>), (status = 404, description = "no such artifact of yours")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&artifact::delete(&app, &caller, &reference, within.namespace()).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewVersion {
    /// An upload whose bytes become the version; it is used up.
    #[schema(value_type = Option<String>)]
    upload_uuid: Option<Text>,
    /// A blob that becomes the version.
    #[schema(value_type = Option<String>)]
    blob_uuid: Option<Text>,
    /// Where it is said to come from; `sf://upload/<namespace>/<name>` when absent.
    #[schema(value_type = Option<String>)]
    source_url: Option<Text>,
    /// Whether everybody may read it; only `system` may say so.
    #[schema(value_type = Option<bool>)]
    shared: Option<Boolean>,
    /// Where to make it; the caller's own when absent.
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
    /// `image`, which is the default and is looked at, or `other`.
    #[schema(value_type = Option<String>)]
    artifact_type: Option<Text>,
}

/// Make an upload or a blob a version of an artifact.
#[utoipa::path(post, path = "/artifacts/upload/{name}", tag = "artifacts", params(("name" = String, Path)),
    request_body = NewVersion, responses((status = 200, body = ArtifactRecord),
    (status = 400, description = "neither or both of upload and blob, or an image that nobody should use"),
    (status = 403, description = "only system shares, or not a type"),
    (status = 404, description = "no such upload, blob or namespace")))]
pub(crate) async fn create_version(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    uri: Uri,
    headers: HeaderMap,
    Extension(incoming): Extension<Incoming>,
    Args(new): Args<NewVersion>,
) -> ApiResult {
    check_name("name", &name)?;
    let artifact_type = match new.artifact_type.as_ref().map(|text| text.0.as_str()) {
        None | Some("image") => ArtifactType::Image,
        Some("other") => ArtifactType::Other,
        Some(_) => return Err(Error::Forbidden("invalid artifact type specified".into()).into()),
    };
    let given = new.source_url.map(|text| text.0).filter(|url| !url.is_empty());
    let request = ArtifactRequest {
        source_url: given.unwrap_or_else(|| format!("sf://upload/{}/{name}", caller.namespace)),
        name: Some(name),
        namespace: new.namespace.map(|text| text.0),
        artifact_type,
        shared: new.shared.is_some_and(|flag| flag.0),
        max_versions: 0,
    };
    let from = match (new.upload_uuid, new.blob_uuid) {
        (Some(_), Some(_)) => {
            return Err(Error::Invalid("only specify one of upload_uuid and blob_uuid".into()).into());
        }
        (None, None) => return Err(Error::Invalid("specify one of upload_uuid and blob_uuid".into()).into()),
        (None, Some(blob)) => {
            return match artifact::inspecting_node(&app, &request, &blob.0).await? {
                None => Ok(ok(&artifact::from_blob(&app, &caller, &request, &blob.0).await?)),
                Some(node) => peer::ask(&app, &node, &caller, handed(&uri, &headers, incoming)).await,
            };
        }
        (Some(upload), None) => upload::find(&app, &caller, &upload.0).await?,
    };
    match upload::locate(&app, &from).await? {
        NodeLocation::Local(node) => {
            Ok(ok(&artifact::from_upload(&app, &caller, &request, &node, &from).await?))
        }
        NodeLocation::Remote(node) => peer::ask(&app, &node, &caller, handed(&uri, &headers, incoming)).await,
    }
}

/// The same request for another daemon.
fn handed<'a>(uri: &'a Uri, headers: &'a HeaderMap, incoming: Incoming) -> Handed<'a> {
    Handed { method: Method::POST, uri, headers, body: reqwest::Body::from(incoming.body) }
}

/// The versions of an artifact, oldest first.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}/versions", tag = "artifacts",
    params(("artifact_ref" = String, Path), Within), responses(
    (status = 200, body = Vec<VersionRecord>), (status = 404, description = "no such artifact")))]
pub(crate) async fn list_versions(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&version::list(&app, &caller, &reference, within.namespace()).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MostVersions {
    /// 0 and absent are the default.
    #[schema(value_type = Option<i64>)]
    max_versions: Option<Value>,
    #[schema(value_type = Option<String>)]
    namespace: Option<Text>,
}

/// A number of versions, in the words of the existing API.
pub(crate) fn max_versions(value: &Value) -> Result<i64, Error> {
    let text = value.as_str().and_then(|text| text.trim().parse().ok());
    let number = value.as_i64().or(text);
    let number = number.ok_or_else(|| Error::Invalid("max version is not an integer".into()))?;
    if number < 0 { Err(Error::Invalid("max version cannot be negative".into())) } else { Ok(number) }
}

/// Set how many versions of an artifact are kept. Older ones go at once.
#[utoipa::path(post, path = "/artifacts/{artifact_ref}/versions", tag = "artifacts",
    params(("artifact_ref" = String, Path)), request_body = MostVersions, responses(
    (status = 200, description = "`null`"), (status = 400, description = "not a number of versions"),
    (status = 404, description = "no such artifact of yours")))]
pub(crate) async fn set_max_versions(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(what): Args<MostVersions>,
) -> ApiResult {
    let most = what.max_versions.as_ref().map_or(Ok(0), max_versions)?;
    let namespace = what.namespace.map(|text| text.0);
    version::set_max_versions(&app, &caller, &reference, namespace.as_deref(), most).await?;
    Ok(nothing())
}

/// Delete one version. With the last of them the artifact goes.
#[utoipa::path(delete, path = "/artifacts/{artifact_ref}/versions/{index}", tag = "artifacts",
    params(("artifact_ref" = String, Path), ("index" = String, Path), Within), responses(
    (status = 200, body = ArtifactRecord), (status = 400, description = "not a number"),
    (status = 404, description = "no such artifact of yours, or no such version")))]
pub(crate) async fn delete_version(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path((reference, index)): Path<(String, String)>,
    Args(within): Args<Within>,
) -> ApiResult {
    Ok(ok(&version::delete(&app, &caller, &reference, within.namespace(), &index).await?))
}

/// Let everybody read an artifact of `system`.
#[utoipa::path(post, path = "/artifacts/{artifact_ref}/share", tag = "artifacts",
    params(("artifact_ref" = String, Path), Within), responses((status = 200, body = ArtifactRecord),
    (status = 403, description = "not an artifact of system"), (status = 404, description = "no such artifact of yours")))]
pub(crate) async fn share(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    set_shared(&app, &caller, &reference, &within, true).await
}

/// Let only those read an artifact who otherwise may.
#[utoipa::path(post, path = "/artifacts/{artifact_ref}/unshare", tag = "artifacts",
    params(("artifact_ref" = String, Path), Within), responses((status = 200, body = ArtifactRecord),
    (status = 403, description = "it is not shared"), (status = 404, description = "no such artifact of yours")))]
pub(crate) async fn unshare(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(within): Args<Within>,
) -> ApiResult {
    set_shared(&app, &caller, &reference, &within, false).await
}

async fn set_shared(
    app: &App,
    caller: &Caller,
    reference: &str,
    within: &Within,
    shared: bool,
) -> ApiResult<Response> {
    Ok(ok(&artifact::set_shared(app, caller, reference, within.namespace(), shared).await?))
}

/// Events of an artifact, newest first.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}/events", tag = "artifacts",
    params(("artifact_ref" = String, Path), EventQuery), responses(
    (status = 200, body = Vec<muster_types::event::EventRecord>), (status = 404, description = "no such artifact")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let id = artifact::find(&app, &caller, &reference, None).await?.id;
    answer(&app, &artifact::object(id), &query).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct OperationQuery {
    /// Whether those that have ended are listed, too. Also taken from the body.
    #[param(value_type = Option<bool>)]
    all: Option<Boolean>,
}

/// The operations on an artifact, newest first: those that have not ended, or all.
#[utoipa::path(get, path = "/artifacts/{artifact_ref}/clusteroperations", tag = "artifacts",
    params(("artifact_ref" = String, Path), OperationQuery), responses(
    (status = 200, body = Vec<OperationRecord>), (status = 404, description = "no such artifact")))]
pub(crate) async fn list_operations(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(query): Args<OperationQuery>,
) -> ApiResult {
    let target = artifact::object(artifact::find(&app, &caller, &reference, None).await?.id);
    Ok(ok(&operation::of_object(&app, &target, query.all.is_some_and(|all| all.0)).await?))
}

/// The artifact that a call changes. Its metadata is for its owner, even to read.
async fn own_object(app: &App, caller: &Caller, reference: &str) -> Result<ObjectRef, Error> {
    Ok(artifact::object(artifact::find_own(app, caller, reference, None).await?.id))
}

metadata_routes!(
    "/artifacts/{artifact_ref}/metadata",
    "/artifacts/{artifact_ref}/metadata/{key}",
    "artifact_ref",
    "artifacts",
    super::own_object,
    super::own_object
);
