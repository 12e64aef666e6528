//! Service keys: the credentials of requests between daemons. See docs/decisions/0043.

use muster_types::key::{RESERVED_NAME_PREFIX, Secret};
use muster_types::time::now;
use muster_types::{Error, Result};

use super::key::unix_seconds;
use crate::app::App;
use crate::auth::Caller;
use crate::auth::secrets::HashRequester;
use crate::auth::tokens::{OriginalCaller, TokenSubject};
use muster_store::keys::{self, NewKey};
use muster_store::transaction;

/// The lifetime of a service key and its token, in seconds.
const LIFETIME: u64 = 300;

/// A key for one request to another daemon.
#[derive(Debug)]
pub struct ServiceKey {
    namespace: String,
    name: String,
    token: String,
}

impl ServiceKey {
    /// Creates a key with which another daemon processes a request of `caller`. It belongs to the caller's namespace, or
    /// to the `owner` of the object that `system` requests.
    pub async fn for_caller(app: &App, caller: &Caller, owner: &str) -> Result<Self> {
        let namespace = if caller.is_system() { owner } else { &caller.namespace };
        Self::create(app, namespace, caller.scopes.clone(), Some(caller.original())).await
    }

    /// Creates a key with the given scopes for a request of the daemon itself.
    pub(crate) async fn for_daemon(app: &App, namespace: &str, scopes: Vec<String>) -> Result<Self> {
        Self::create(app, namespace, Some(scopes), None).await
    }

    async fn create(
        app: &App,
        namespace: &str,
        scopes: Option<Vec<String>>,
        caller: Option<OriginalCaller>,
    ) -> Result<Self> {
        app.store.membership.require_clock()?;
        let suffix = uuid::Uuid::new_v4().simple().to_string();
        // The names of service keys contain only letters.
        let suffix: String = suffix.bytes().map(|byte| char::from(b'a' + byte % 26)).collect();
        let name = format!("{RESERVED_NAME_PREFIX}{suffix}");
        let secret = app.secrets.seal(HashRequester::cluster(namespace), &Secret::generate()).await?;
        let nonce = secret.nonce.clone();
        let expiry = Some(now() + LIFETIME as f64);
        let new = NewKey { secret, expiry, scopes: scopes.clone(), provenance: None };
        transaction!(app.store, |tx| { Ok(keys::insert(tx, namespace, &name, &new).await?) })?;
        let subject = TokenSubject { namespace, key: &name, nonce: &nonce, scopes: scopes.as_deref() };
        let token = app.tokens.create_service(unix_seconds(), LIFETIME, subject, caller);
        Ok(Self { namespace: namespace.to_owned(), name, token })
    }

    /// Returns the token that authenticates the request.
    #[must_use]
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Removes the key after the request. A key that remains expires.
    pub async fn remove(self, app: &App) {
        let removed: Result<(), Error> =
            transaction!(app.store, |tx| { Ok(keys::remove(tx, &self.namespace, &self.name).await?) });
        if let Err(error) = removed {
            tracing::warn!(key = self.name, %error, "failed to remove service key");
        }
    }
}
