//! Trusted issuers: create, get, list, update, delete. Only for the namespace `system`.
//!
//! Rules refer to their issuer by name: they stop working when it is deleted, and work again when one with the same
//! name is created.

use muster_types::event::{Event, EventType};
use muster_types::ids::IssuerId;
use muster_types::issuer::{IssuerRecord, IssuerState, IssuerTerms, check_field, check_name};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_request;
use muster_store::issuers::IssuerRow;
use muster_store::{Read, TxError, issuers, metadata, transaction};

/// The version of the record's format.
const VERSION: i64 = 1;

/// The terms of an issuer as requested, not validated yet.
#[derive(Debug, Clone, Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewIssuerTerms)]
#[schema(example = json!({
    "issuer_url": "https://forge.example.com", "audience": "muster",
    "jwks_uri": "https://forge.example.com/.well-known/jwks"
}))]
pub struct IssuerRequest {
    /// The exact `iss` claim of its tokens; unique among issuers.
    #[schema(value_type = String)]
    pub issuer_url: Option<Value>,
    /// The HTTPS URL of the keys that sign its tokens.
    #[schema(value_type = String)]
    pub jwks_uri: Option<Value>,
    /// The `aud` claim that its tokens must have.
    #[schema(value_type = String)]
    pub audience: Option<Value>,
}

impl IssuerRequest {
    fn check(&self) -> Result<IssuerTerms> {
        let terms = IssuerTerms {
            issuer_url: check_field("issuer_url", self.issuer_url.as_ref())?,
            jwks_uri: check_field("jwks_uri", self.jwks_uri.as_ref())?,
            audience: check_field("audience", self.audience.as_ref())?,
        };
        let uri = reqwest::Url::parse(&terms.jwks_uri);
        let Some(uri) = uri.ok().filter(|uri| uri.scheme() == "https" && uri.has_host()) else {
            return Err(Error::Invalid("jwks_uri must be https".into()));
        };
        // Many callers can read the URL, and published keys need no credentials.
        if !uri.username().is_empty() || uri.password().is_some() {
            return Err(Error::Invalid("jwks_uri must not contain credentials".into()));
        }
        Ok(terms)
    }
}

/// Returns the issuers that are not deleted, by name.
pub async fn list(app: &App) -> Result<Vec<IssuerRecord>> {
    records(app, issuers::list(&*app.store).await?).await
}

/// Returns an issuer that is not deleted.
pub async fn get(app: &App, name: &str) -> Result<IssuerRecord> {
    to_record(app, issuers::by_name(&*app.store, name).await?.ok_or_else(absent)?).await
}

/// Returns the issuer as the subject of events and metadata.
pub async fn subject(app: &App, name: &str) -> Result<ObjectRef> {
    Ok(object(issuers::by_name(&*app.store, name).await?.ok_or_else(absent)?.id))
}

/// Creates an issuer. The name of a deleted one can be reused.
pub async fn create(
    app: &App,
    caller: &Caller,
    name: Option<&Value>,
    request: &IssuerRequest,
) -> Result<IssuerRecord> {
    let name = check_name(name)?;
    let terms = request.check()?;
    let (row, replaced) = transaction!(app.store, |tx| {
        require_free_url(&mut *tx, name, &terms.issuer_url).await?;
        if issuers::by_name(&mut *tx, name).await?.is_some() {
            return Err(Error::Conflict("issuer already exists".into()).into());
        }
        let replaced = issuers::deleted_of_name(&mut *tx, name).await?;
        Ok((issuers::insert(tx, name, &terms).await?, replaced))
    })?;
    app.record(caller, terms_event(caller, EventType::Audit, &row, "db record created"));
    if let Some(old) = replaced {
        let event = Event::audit(object(row.id), "replaced a deleted issuer of the same name");
        app.record(caller, caller_event(caller, &row, event).with("replaced", old.id.to_string()));
    }
    to_record(app, row).await
}

/// Replaces all terms of an issuer.
pub async fn update(app: &App, caller: &Caller, name: &str, request: &IssuerRequest) -> Result<IssuerRecord> {
    let terms = request.check()?;
    let row = transaction!(app.store, |tx| {
        let mut row = issuers::by_name(&mut *tx, name).await?.ok_or_else(absent)?;
        require_free_url(&mut *tx, name, &terms.issuer_url).await?;
        if !issuers::update(tx, row.id, &terms).await? {
            return Err(absent().into());
        }
        row.terms = terms.clone();
        Ok(row)
    })?;
    app.record(caller, terms_event(caller, EventType::Mutate, &row, "updated trusted issuer configuration"));
    to_record(app, row).await
}

/// Deletes an issuer. Rules that refer to it stay, but accept nothing.
pub async fn delete(app: &App, caller: &Caller, name: &str) -> Result<IssuerRecord> {
    let row = transaction!(app.store, |tx| {
        let mut row = issuers::by_name(&mut *tx, name).await?.ok_or_else(absent)?;
        if !issuers::soft_delete(tx, row.id).await? {
            return Err(absent().into());
        }
        row.state = IssuerState::Deleted;
        Ok(row)
    })?;
    let event = Event::audit(object(row.id), "delete issuer request from REST API");
    app.record(caller, caller_event(caller, &row, event));
    to_record(app, row).await
}

/// Rejects the URL of an issuer with another name: its tokens would belong to both.
async fn require_free_url(db: impl Read, name: &str, url: &str) -> Result<(), TxError> {
    match issuers::by_url(db, url).await? {
        Some(other) if other.name != name => {
            Err(Error::Conflict(format!("issuer {} is already configured for {url}", other.name)).into())
        }
        _ => Ok(()),
    }
}

fn absent() -> Error {
    Error::not_found("issuer")
}

fn object(id: IssuerId) -> ObjectRef {
    ObjectRef::new(ObjectType::Issuer, id)
}

/// Adds the caller to an event, which `system` keeps after the issuer is removed.
fn caller_event(caller: &Caller, row: &IssuerRow, event: Event) -> Event {
    with_request(caller, event)
        .with_object(ObjectRef::namespace(SYSTEM_NAMESPACE))
        .with("name", row.name.clone())
}

/// Returns an event with the terms of an issuer and the caller.
fn terms_event(caller: &Caller, event_type: EventType, row: &IssuerRow, message: &str) -> Event {
    let terms = &row.terms;
    caller_event(caller, row, Event::new(event_type, object(row.id), message))
        .with("issuer_url", terms.issuer_url.clone())
        .with("jwks_uri", terms.jwks_uri.clone())
        .with("audience", terms.audience.clone())
}

/// Returns the record of a row, with its metadata.
async fn to_record(app: &App, row: IssuerRow) -> Result<IssuerRecord> {
    let metadata = metadata::get(&*app.store, ObjectType::Issuer, &row.id.to_string()).await?;
    Ok(record(row, metadata))
}

/// Returns the records of rows, with their metadata.
async fn records(app: &App, rows: Vec<IssuerRow>) -> Result<Vec<IssuerRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut metadata_of = metadata::of_objects(&*app.store, ObjectType::Issuer, &ids).await?;
    let records = rows.into_iter().zip(ids);
    Ok(records.map(|(row, id)| record(row, metadata_of.remove(&id).unwrap_or_default())).collect())
}

fn record(row: IssuerRow, metadata: Map<String, Value>) -> IssuerRecord {
    IssuerRecord {
        uuid: row.id,
        state: row.state,
        version: VERSION,
        metadata,
        name: row.name,
        issuer_url: row.terms.issuer_url,
        jwks_uri: row.terms.jwks_uri,
        audience: row.terms.audience,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with_keys_at(uri: &str) -> Result<IssuerTerms> {
        let text = |text: &str| Some(json!(text));
        let request = IssuerRequest { issuer_url: text("any"), jwks_uri: text(uri), audience: text("cloud") };
        request.check()
    }

    #[test]
    fn rejects_jwks_uri_without_https_or_with_credentials() {
        for uri in ["https://host/keys", "HTTPS://host", "https://[::1]:8443/a?b"] {
            assert_eq!(with_keys_at(uri).unwrap().jwks_uri, uri, "kept as given");
        }
        for uri in
            ["http://host/keys", "host/keys", "file:///etc/passwd", "https:", "https://", "httpss://host"]
        {
            assert_eq!(with_keys_at(uri).unwrap_err().to_string(), "jwks_uri must be https", "{uri}");
        }
        for uri in ["https://user@host/keys", "https://:secret@host", "https://user:secret@host"] {
            let refused = with_keys_at(uri).unwrap_err().to_string();
            assert_eq!(refused, "jwks_uri must not contain credentials", "{uri}");
        }
    }
}
