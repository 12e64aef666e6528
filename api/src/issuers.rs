//! `/auth/issuers`.

use std::sync::Arc;

use axum::extract::{Path, State};
use muster_types::issuer::IssuerRecord;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::arguments::{Args, Nothing};
use crate::error::ApiResult;
use crate::events::{EventQuery, answer};
use crate::guard::Authenticated;
use crate::response::ok;
use muster_control::app::App;
use muster_control::objects::issuer::{self, IssuerRequest};

/// The trusted issuers, by name.
#[utoipa::path(get, path = "/auth/issuers", tag = "auth", responses((status = 200, body = Vec<IssuerRecord>)))]
pub(crate) async fn list(State(app): State<Arc<App>>, _: Authenticated, _: Args<Nothing>) -> ApiResult {
    Ok(ok(&issuer::list(&app).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewIssuer {
    #[schema(value_type = String)]
    name: Option<Value>,
    /// What a token must name as its issuer, to the letter; of no other issuer.
    #[schema(value_type = String)]
    issuer_url: Option<Value>,
    /// Where the keys are that sign its tokens; HTTPS.
    #[schema(value_type = String)]
    jwks_uri: Option<Value>,
    /// Whom a token must be made for.
    #[schema(value_type = String)]
    audience: Option<Value>,
}

/// Trust an issuer.
#[utoipa::path(post, path = "/auth/issuers", tag = "auth", request_body = NewIssuer, responses(
    (status = 200, body = IssuerRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 409, description = "the name or the URL is taken"), (status = 422, description = "a field is too long")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Args(new): Args<NewIssuer>,
) -> ApiResult {
    let request =
        IssuerRequest { issuer_url: new.issuer_url, jwks_uri: new.jwks_uri, audience: new.audience };
    Ok(ok(&issuer::create(&app, &caller, new.name.as_ref(), &request).await?))
}

/// One trusted issuer.
#[utoipa::path(get, path = "/auth/issuers/{name}", tag = "auth", params(("name" = String, Path)), responses(
    (status = 200, body = IssuerRecord), (status = 404, description = "no such issuer")))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&issuer::get(&app, &name).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewIssuerTerms {
    /// What a token must name as its issuer, to the letter; of no other issuer.
    #[schema(value_type = String)]
    issuer_url: Option<Value>,
    /// Where the keys are that sign its tokens; HTTPS.
    #[schema(value_type = String)]
    jwks_uri: Option<Value>,
    /// Whom a token must be made for.
    #[schema(value_type = String)]
    audience: Option<Value>,
}

/// Replace all that is known of an issuer.
#[utoipa::path(put, path = "/auth/issuers/{name}", tag = "auth", params(("name" = String, Path)),
    request_body = NewIssuerTerms, responses(
    (status = 200, body = IssuerRecord), (status = 400, description = "a field is missing or malformed"),
    (status = 404, description = "no such issuer"), (status = 409, description = "the URL is taken"),
    (status = 422, description = "a field is too long")))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    Args(new): Args<NewIssuerTerms>,
) -> ApiResult {
    let request =
        IssuerRequest { issuer_url: new.issuer_url, jwks_uri: new.jwks_uri, audience: new.audience };
    Ok(ok(&issuer::update(&app, &caller, &name, &request).await?))
}

/// Stop trusting an issuer. Rules that name it stay, and work again if an issuer of this name is made.
#[utoipa::path(delete, path = "/auth/issuers/{name}", tag = "auth", params(("name" = String, Path)), responses(
    (status = 200, body = IssuerRecord), (status = 404, description = "no such issuer")))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
    _: Args<Nothing>,
) -> ApiResult {
    Ok(ok(&issuer::delete(&app, &caller, &name).await?))
}

/// Events of a trusted issuer, newest first.
#[utoipa::path(get, path = "/auth/issuers/{name}/events", tag = "auth", params(("name" = String, Path), EventQuery),
    responses((status = 200, body = Vec<muster_types::event::EventRecord>),
    (status = 404, description = "no such issuer")))]
pub(crate) async fn list_events(
    State(app): State<Arc<App>>,
    _: Authenticated,
    Path(name): Path<String>,
    Args(query): Args<EventQuery>,
) -> ApiResult {
    let subject = issuer::subject(&app, &name).await?;
    answer(&app, &subject, &query).await
}
