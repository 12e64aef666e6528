//! Namespace keys: log in, add, replace, delete, list.

use muster_types::event::{Event, EventType};
use muster_types::key::{Secret, check_name};
use muster_types::namespace::{NamespaceState, SYSTEM};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::store::keys::{NewKey, Put};
use crate::store::{StoreError, keys, namespaces, transaction};

/// Refuses a name or a supplied secret that may not be used.
pub fn check(name: &str, secret: &Secret) -> Result<()> {
    check_name(name)?;
    secret.check_supplied()
}

/// Exchanges a secret for a token.
pub async fn log_in(app: &App, namespace: &str, secret: &Secret, request_id: &str) -> Result<String> {
    let row = namespaces::get(&*app.store, namespace).await?;
    if row.is_none_or(|row| row.state != NamespaceState::Created) {
        return Err(Error::not_found("namespace"));
    }
    let object = ObjectRef::namespace(namespace);
    let record = |mut event: Event| {
        event.request_id = Some(request_id.to_owned());
        app.events.record(event);
    };
    let mut found = None;
    // A lookalike of a generated secret is worth no comparison.
    if !secret.has_prefix() || secret.is_generated() {
        let candidates = keys::candidates(&app.store, namespace, app.secrets.tag(namespace, secret)).await?;
        let search = app.secrets.find(secret, candidates).await?;
        for name in search.damaged {
            let event = Event::audit(object.clone(), "namespace key is invalid");
            record(event.with("key_name", name).with("error", "the stored hash cannot be read"));
        }
        found = search.key;
    }
    let Some(key) = found else {
        record(Event::audit(object, "attempt to use incorrect namespace key"));
        return Err(Error::Unauthenticated("unauthorized".into()));
    };
    record(Event::audit(object, "token created from key").with("keyname", key.name.clone()));
    Ok(app.tokens.create(unix_seconds(), namespace, &key.name, &key.nonce, key.scopes.as_deref()))
}

/// The current Unix second, as tokens count.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Unix time is positive and small"
)]
pub(crate) fn unix_seconds() -> u64 {
    now() as u64
}

/// Names of the keys that have not expired.
pub async fn list(app: &App, caller: &Caller, namespace: &str) -> Result<Vec<String>> {
    require_namespace(&*app.store, caller, namespace).await?;
    Ok(keys::names(&*app.store, namespace, namespace).await?.into_iter().map(|(_, name)| name).collect())
}

/// Adds a key, or replaces the one of that name. Without a secret one is generated; the answer is the secret.
pub async fn put(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    secret: Option<Secret>,
    expiry: Option<f64>,
) -> Result<Option<Secret>> {
    require_namespace(&*app.store, caller, namespace).await?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(namespace), "create auth key request from REST API")
            .with("key", name),
    );
    check_name(name)?;
    if let Some(secret) = &secret {
        secret.check_supplied()?;
    }
    let (secret, generated) = match secret {
        Some(secret) => (secret, None),
        None => {
            let secret = Secret::generate();
            (secret.clone(), Some(secret))
        }
    };
    write(app, caller, namespace, name, &secret, expiry).await?;
    Ok(generated)
}

/// Replaces the secret of an existing key.
pub async fn update(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    secret: &Secret,
    expiry: Option<f64>,
) -> Result<()> {
    require_namespace(&*app.store, caller, namespace).await?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(namespace), "update auth key request from REST API")
            .with("key", name),
    );
    check(name, secret)?;
    if keys::find(&*app.store, namespace, name).await?.is_none() {
        return Err(Error::NotFound("key does not exist".into()));
    }
    write(app, caller, namespace, name, secret, expiry).await
}

async fn write(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    secret: &Secret,
    expiry: Option<f64>,
) -> Result<()> {
    let secret = app.secrets.seal(namespace, secret).await?;
    // A scoped caller cannot make a key that may do more than itself.
    let new = NewKey { secret, expiry, scopes: caller.scopes.clone() };
    let put = transaction!(app.store, |tx| {
        if !namespaces::hold(tx, namespace).await? {
            return Err(Error::not_found("namespace").into());
        }
        Ok(keys::put(tx, namespace, name, &new).await?)
    })?;
    let mut event = match put {
        Put::Created(id) => Event::audit(ObjectRef::new(ObjectType::NamespaceKey, id), "db record created")
            .with("namespace", namespace)
            .with("name", name),
        Put::Rotated(id) => {
            Event::new(EventType::Mutate, ObjectRef::new(ObjectType::NamespaceKey, id), "rotated key")
        }
    };
    event = event.with("expiry", expiry);
    app.record(caller, event);
    Ok(())
}

/// Deletes a key; it and its tokens stop working at once.
pub async fn delete(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<()> {
    require_namespace(&*app.store, caller, namespace).await?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(namespace), "remove auth key request from REST API")
            .with("key", name),
    );
    let removed = transaction!(app.store, |tx| { Ok(keys::remove(tx, namespace, name).await?) })?;
    if removed { Ok(()) } else { Err(Error::NotFound("key name not found in namespace".into())) }
}

/// Makes sure that the namespace `system` exists and has a key `deploy`. Says which secret was generated.
pub async fn bootstrap(app: &App, supplied: &Secret) -> Result<Option<Secret>> {
    const NAME: &str = "deploy";
    transaction!(app.store, |tx| {
        match namespaces::insert(tx, SYSTEM).await {
            Ok(()) | Err(StoreError::Duplicate(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    })?;
    if keys::find(&*app.store, SYSTEM, NAME).await?.is_some() {
        return Ok(None);
    }
    let given = !supplied.expose().is_empty();
    let secret = if given { supplied.clone() } else { Secret::generate() };
    let new = NewKey { secret: app.secrets.seal(SYSTEM, &secret).await?, expiry: None, scopes: None };
    let mine = transaction!(app.store, |tx| {
        // Two daemons may start at the same moment: the second leaves the first one's key alone.
        namespaces::hold(tx, SYSTEM).await?;
        if keys::find(&mut *tx, SYSTEM, NAME).await?.is_some() {
            return Ok(false);
        }
        keys::put(tx, SYSTEM, NAME, &new).await?;
        Ok(true)
    })?;
    if mine {
        app.events
            .record(Event::audit(ObjectRef::namespace(SYSTEM), "first key created").with("keyname", NAME));
    }
    Ok((mine && !given).then_some(secret))
}
