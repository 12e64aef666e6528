//! Namespace keys: log in, add, replace, delete, list. See docs/decisions/0003 and 0025.

use muster_types::event::{Event, EventType};
use muster_types::key::{KeyRecord, Secret, check_name};
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::Value;

use crate::app::App;
use crate::auth::access::{delegable_scopes, require_namespace};
use crate::auth::secrets::{HashRequester, Secrets};
use crate::auth::{Caller, Origin, scopes};
use crate::events::RefusalKind;
use crate::objects::quota;
use muster_store::keys::{KeyCandidate, KeyRow, NewKey, PutOutcome, StoredSecret};
use muster_store::{Store, StoreError, keys, namespaces, transaction};

/// A request to create or replace a key, not validated yet.
#[derive(Debug, Clone, Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewKey)]
#[schema(example = json!({"key_name": "robot"}))]
pub struct KeyRequest {
    /// The name of the key.
    #[serde(rename = "key_name")]
    #[schema(value_type = String)]
    pub name: Option<String>,
    /// The secret. If it is absent or empty, one is generated and returned.
    #[serde(rename = "key")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<Value>,
    /// Unix time at which the key expires.
    #[schema(value_type = Option<f64>)]
    pub expiry: Option<Value>,
    /// Whether to only check the request, without creating or replacing anything; false by default. The response is then the name
    /// of the key.
    pub dry_run: Option<bool>,
}

impl KeyRequest {
    /// Validates the name and the optional secret.
    pub fn check(&self) -> Result<(&str, Option<Secret>)> {
        let name = self.name.as_deref().unwrap_or_default();
        check_name(name)?;
        let secret = match &self.secret {
            None => None,
            Some(Value::String(text)) if text.is_empty() => None,
            Some(Value::String(text)) => Some(Secret::new(text.clone())),
            Some(_) => return Err(Error::Invalid("key is not a string".into())),
        };
        if let Some(secret) = &secret {
            secret.check_supplied()?;
        }
        Ok((name, secret))
    }

    /// Validates the name and the secret, which is required.
    pub fn check_supplied(&self) -> Result<(&str, Secret)> {
        let (name, secret) = self.check()?;
        Ok((name, secret.ok_or_else(|| Error::Invalid("no key specified".into()))?))
    }

    /// Returns when the key expires, if ever.
    fn expiry(&self) -> Result<Option<f64>> {
        let Some(value) = &self.expiry else { return Ok(None) };
        let time = value.as_f64().ok_or_else(|| Error::Invalid("expiry is not a number".into()))?;
        if time <= now() {
            return Err(Error::Invalid("expiry must be in the future".into()));
        }
        Ok(Some(time))
    }
}

/// Exchanges a secret for a token.
pub async fn log_in(app: &App, namespace: &str, secret: &Secret, origin: Origin<'_>) -> Result<String> {
    let key = authenticate(app, namespace, secret, origin).await?;
    Ok(app.tokens.create(unix_seconds(), namespace, &key.name, &key.nonce, key.scopes.as_deref()))
}

/// Returns the key that has a secret, for a new token.
pub(crate) async fn authenticate(
    app: &App,
    namespace: &str,
    secret: &Secret,
    origin: Origin<'_>,
) -> Result<KeyCandidate> {
    let row = namespaces::get(&*app.store, namespace).await?;
    if row.is_none_or(|row| row.state != NamespaceState::Created) {
        return Err(Error::not_found("namespace"));
    }
    let object = ObjectRef::namespace(namespace);
    let record = |mut event: Event| {
        event.request_id = Some(origin.request_id.to_owned());
        app.events.record(event);
    };
    let mut found = None;
    // A secret that no key can have does not match: skip the expensive comparison.
    if secret.may_exist() {
        let candidates = keys::candidates(&app.store, namespace, app.secrets.tag(namespace, secret)).await?;
        let requester = HashRequester { source: origin.source, namespace };
        let search = app.secrets.find(requester, secret, candidates).await?;
        for name in search.damaged {
            let event = Event::audit(object.clone(), "namespace key is invalid");
            record(event.with("key_name", name).with("error", "the stored hash cannot be read"));
        }
        found = search.key;
    }
    let Some(key) = found else {
        let mut event = Event::audit(object, "attempt to use incorrect namespace key");
        event.request_id = Some(origin.request_id.to_owned());
        app.events.record_refusal(RefusalKind::Login, origin.source, event);
        return Err(Error::Unauthenticated("unauthorized".into()));
    };
    app.store.membership.require_clock()?;
    record(Event::audit(object, "token created from key").with("keyname", key.name.clone()));
    Ok(key)
}

/// Returns the current Unix time in whole seconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Unix time is positive and small"
)]
pub fn unix_seconds() -> u64 {
    now() as u64
}

/// Returns the names of the keys that have not expired.
pub async fn list(app: &App, caller: &Caller, namespace: &str) -> Result<Vec<String>> {
    require_namespace(&*app.store, caller, namespace).await?;
    Ok(keys::names(&*app.store, namespace, namespace).await?.into_iter().map(|(_, name)| name).collect())
}

/// Returns a key that has not expired.
pub async fn get(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<KeyRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let row = keys::get(&*app.store, namespace, name).await?;
    let (KeyRow { name, expiry, scopes, .. }, metadata) =
        row.ok_or_else(|| Error::NotFound("key does not exist".into()))?;
    Ok(KeyRecord { key_name: name, expiry, scopes, metadata })
}

/// Returns the key as the subject of metadata.
pub async fn subject(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<ObjectRef> {
    require_namespace(&*app.store, caller, namespace).await?;
    let id = keys::find(&*app.store, namespace, name).await?;
    let id = id.ok_or_else(|| Error::NotFound("key does not exist".into()))?;
    Ok(ObjectRef::new(ObjectType::NamespaceKey, id))
}

/// Creates or replaces a key. Without a secret, generates one and returns it.
pub async fn put(
    app: &App,
    caller: &Caller,
    namespace: &str,
    request: &KeyRequest,
) -> Result<Option<Secret>> {
    require_namespace(&*app.store, caller, namespace).await?;
    record_request(app, caller, namespace, "create auth key request from REST API", request.name.as_deref());
    let (name, supplied) = request.check()?;
    let expiry = request.expiry()?;
    let generated = if supplied.is_none() { Some(Secret::generate()) } else { None };
    if let Some(secret) = generated.as_ref().or(supplied.as_ref()) {
        write(app, caller, namespace, name, secret, expiry).await?;
    }
    Ok(generated)
}

/// Replaces the secret of an existing key.
pub async fn update(app: &App, caller: &Caller, namespace: &str, request: &KeyRequest) -> Result<()> {
    require_namespace(&*app.store, caller, namespace).await?;
    record_request(app, caller, namespace, "update auth key request from REST API", request.name.as_deref());
    let (name, secret) = request.check_supplied()?;
    let expiry = request.expiry()?;
    if keys::find(&*app.store, namespace, name).await?.is_none() {
        return Err(Error::NotFound("key does not exist".into()));
    }
    write(app, caller, namespace, name, &secret, expiry).await
}

/// Records a request before it is validated.
fn record_request(app: &App, caller: &Caller, namespace: &str, message: &str, name: Option<&str>) {
    let name: Option<String> = name.map(|name| name.chars().take(255).collect());
    app.record(caller, Event::audit(ObjectRef::namespace(namespace), message).with("key", name));
}

/// Builds a key with at most the scopes of the caller. A key that was created with a federated key expires with it.
pub(crate) fn new_key(
    caller: &Caller,
    secret: StoredSecret,
    expiry: Option<f64>,
    held_scopes: Option<Vec<String>>,
) -> NewKey {
    let expiry = caller.minted.as_ref().map_or(expiry, |minted| minted.cap_expiry(expiry));
    let provenance = caller.minted.as_ref().map(|minted| minted.provenance.clone());
    NewKey { secret, expiry, scopes: held_scopes, provenance }
}

async fn write(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    secret: &Secret,
    expiry: Option<f64>,
) -> Result<()> {
    let requester = HashRequester { source: &caller.namespace, namespace };
    let secret = app.secrets.seal(requester, secret).await?;
    let held_scopes = delegable_scopes(&*app.store, caller, namespace).await?;
    let new = new_key(caller, secret, expiry, held_scopes);
    let put = transaction!(app.store, |tx| {
        if !namespaces::lock(tx, namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        let before = keys::scopes(&mut *tx, namespace, name).await?;
        let is_new = before.is_none();
        if before.is_some_and(|before| !scopes::covers(new.scopes.as_deref(), before.as_deref())) {
            let text = "a key cannot be replaced by a token that is scoped for less";
            return Err(Error::Forbidden(text.into()).into());
        }
        if is_new {
            quota::require_in(app, tx, namespace, &[(QuotaName::Keys, 1)]).await?;
        }
        Ok(keys::put(tx, namespace, name, &new).await?)
    })?;
    app.record(caller, key_event(put, namespace, name).with("expiry", new.expiry));
    Ok(())
}

/// Returns the event of a created or replaced key.
pub(crate) fn key_event(put: PutOutcome, namespace: &str, name: &str) -> Event {
    match put {
        PutOutcome::Created(id) => {
            Event::audit(ObjectRef::new(ObjectType::NamespaceKey, id), "db record created")
                .with("namespace", namespace)
                .with("name", name)
        }
        PutOutcome::Rotated(id) => {
            Event::new(EventType::Mutate, ObjectRef::new(ObjectType::NamespaceKey, id), "rotated key")
        }
    }
}

/// Deletes a key; it and its tokens stop working immediately.
pub async fn delete(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<()> {
    require_namespace(&*app.store, caller, namespace).await?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(namespace), "remove auth key request from REST API")
            .with("key", name),
    );
    let deleted = transaction!(app.store, |tx| { Ok(keys::soft_delete(tx, namespace, name).await?) })?;
    if deleted { Ok(()) } else { Err(Error::NotFound("key name not found in namespace".into())) }
}

/// The name of the first key of the namespace `system`.
pub(crate) const FIRST_KEY_NAME: &str = "deploy";

/// Replaces the secret of the first key, or creates the key again: the recovery for an operator who can stop the daemon
/// and read its seed. The new secret is passed to `save_secret` before it replaces the old one.
pub async fn recover(
    store: &Store,
    secrets: &Secrets,
    save_secret: impl FnOnce(&Secret) -> std::result::Result<(), String>,
) -> Result<()> {
    let secret = Secret::generate();
    save_secret(&secret).map_err(Error::Internal)?;
    let new = NewKey {
        secret: secrets.seal(HashRequester::cluster(SYSTEM_NAMESPACE), &secret).await?,
        expiry: None,
        scopes: None,
        provenance: None,
    };
    transaction!(store, |tx| {
        if !namespaces::lock(tx, SYSTEM_NAMESPACE, NamespaceState::Created).await? {
            return Err(Error::Conflict("this cluster has never been started".into()).into());
        }
        keys::put(tx, SYSTEM_NAMESPACE, FIRST_KEY_NAME, &new).await?;
        Ok(())
    })
}

/// Creates the namespace `system` and its key `deploy` on the first start of a cluster. Returns whether it was the
/// first start: a key that was deleted later stays deleted. A generated secret is passed to `save_secret` before the
/// key exists, because without it no caller could log in.
pub async fn bootstrap(
    app: &App,
    supplied: &Secret,
    save_secret: impl FnOnce(&Secret) -> std::result::Result<(), String>,
) -> Result<bool> {
    if namespaces::get(&*app.store, SYSTEM_NAMESPACE).await?.is_some() {
        return Ok(false);
    }
    let secret = if supplied.expose().is_empty() {
        let secret = Secret::generate();
        save_secret(&secret).map_err(Error::Internal)?;
        secret
    } else {
        supplied.clone()
    };
    let new = NewKey {
        secret: app.secrets.seal(HashRequester::cluster(SYSTEM_NAMESPACE), &secret).await?,
        expiry: None,
        scopes: None,
        provenance: None,
    };
    let first = transaction!(app.store, |tx| {
        match namespaces::insert(tx, SYSTEM_NAMESPACE).await {
            Ok(()) => {}
            // Another daemon started concurrently and was first.
            Err(StoreError::Duplicate(_)) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        keys::put(tx, SYSTEM_NAMESPACE, FIRST_KEY_NAME, &new).await?;
        Ok(true)
    })?;
    if first {
        app.events.record(
            Event::audit(ObjectRef::namespace(SYSTEM_NAMESPACE), "first key created")
                .with("keyname", FIRST_KEY_NAME),
        );
    }
    Ok(first)
}
