//! `/auth/issuers`: trusted issuers of identity tokens.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::Error;
use muster_types::event::EventRecord;
use muster_types::issuer::IssuerRecord;
use muster_types::object::ObjectRef;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::pages::Pages;
use crate::response::Json;
use crate::routes::events::{EventQuery, events_of};
use crate::routes::metadata::metadata_routes;
use muster_control::app::App;
use muster_control::auth::Caller;
use muster_control::objects::issuer::{self, IssuerRequest};
use muster_store::run_or_check;

/// Lists the trusted issuers, ordered by name.
#[utoipa::path(get, path = "/auth/issuers", tag = "auth")]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Authenticated,
    _: Args<NoArgs>,
) -> ApiResult<Pages<IssuerRecord>> {
    Pages::of(issuer::list(&app).await?)
}

/// A new trusted issuer.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "forge", "issuer_url": "https://forge.example.com", "audience": "muster",
    "jwks_uri": "https://forge.example.com/.well-known/jwks"
}))]
pub(crate) struct NewIssuer {
    /// The name by which mapping rules refer to the issuer.
    #[schema(value_type = String)]
    name: Option<Value>,
    /// The exact `iss` claim of its tokens; unique among issuers.
    #[schema(value_type = String)]
    issuer_url: Option<Value>,
    /// The HTTPS URL of the keys that sign its tokens.
    #[schema(value_type = String)]
    jwks_uri: Option<Value>,
    /// The `aud` claim that its tokens must have.
    #[schema(value_type = String)]
    audience: Option<Value>,
    /// Whether to only check the request, without creating anything; false by default. The response is the record that would
    /// be created; its UUID is an example.
    dry_run: Option<bool>,
}

/// Creates a trusted issuer.
#[utoipa::path(post, path = "/auth/issuers", tag = "auth", request_body = NewIssuer, responses((status = 400, description = "A field is missing or malformed."),
    (status = 409, description = "The name or the URL is in use."), (status = 422, description = "A field is too long.")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewIssuer>,
) -> ApiResult<Json<IssuerRecord>> {
    let request =
        IssuerRequest { issuer_url: new.issuer_url, jwks_uri: new.jwks_uri, audience: new.audience };
    let creation = issuer::create(&app, &caller, new.name.as_ref(), &request);
    Ok(Json(run_or_check(new.dry_run, creation).await?))
}

/// Returns a trusted issuer.
#[utoipa::path(get, path = "/auth/issuers/{name}", tag = "auth", params(("name" = String, Path)), responses((status = 404, description = "No such issuer.")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<IssuerRecord>> {
    Ok(Json(issuer::get(&app, &name).await?))
}

/// Replaces the terms of a trusted issuer.
#[utoipa::path(put, path = "/auth/issuers/{name}", tag = "auth", params(("name" = String, Path)),
    request_body = IssuerRequest, responses((status = 400, description = "A field is missing or malformed."),
    (status = 404, description = "No such issuer."), (status = 409, description = "The URL is in use."),
    (status = 422, description = "A field is too long.")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(request): Args<IssuerRequest>,
) -> ApiResult<Json<IssuerRecord>> {
    Ok(Json(issuer::update(&app, &caller, &name, &request).await?))
}

/// Deletes a trusted issuer. Mapping rules that refer to it are kept, and work again once an issuer of this name exists.
#[utoipa::path(delete, path = "/auth/issuers/{name}", tag = "auth", params(("name" = String, Path)), responses((status = 404, description = "No such issuer.")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Json<IssuerRecord>> {
    Ok(Json(issuer::delete(&app, &caller, &name).await?))
}

/// Lists the events of a trusted issuer, newest first.
#[utoipa::path(get, path = "/auth/issuers/{name}/events", tag = "auth", params(("name" = String, Path), EventQuery),
    responses((status = 404, description = "No such issuer.")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Path(name): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult<Pages<EventRecord>> {
    events_of(&app, &issuer::subject(&app, &name).await?, &query).await
}

/// Finds an issuer.
async fn metadata_object(app: &App, _: &Caller, name: &str) -> Result<ObjectRef, Error> {
    issuer::subject(app, name).await
}

metadata_routes!(
    "/auth/issuers/{name}/metadata",
    "/auth/issuers/{name}/metadata/{key}",
    ("name" => name: String),
    "auth",
    super::metadata_object,
    super::metadata_object
);
