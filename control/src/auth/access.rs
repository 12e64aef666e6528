//! Access control: what a caller may see and change.
//!
//! | action | own namespace | trusted by the owner | `system` | others |
//! |---|---|---|---|---|
//! | list and read objects, create in the namespace | yes | yes | yes | 404 |
//! | change or delete objects | yes | 404 | yes | 404 |
//! | keys, trusts, rules and metadata of the namespace itself | yes | yes | yes | 404 |
//! | webhooks of the namespace | yes | 404 | yes | 404 |
//! | administration | only `system`, else 401 | | | |
//! | cluster operations | yes | 403 | yes | 403 |
//!
//! An object that the caller may not see is reported as not found.

use muster_types::key::RESERVED_NAME_PREFIX;
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::{Error, Result};
use serde_json::Value;

use super::request_deadline::RequestDeadline;
use super::scopes;
use super::tokens::OriginalCaller;
use muster_store::namespaces::NamespaceRow;
use muster_store::{Read, StoreError, namespaces, trusts};

/// The origin and expiry of a key that was minted in exchange for an identity token.
#[derive(Debug, Clone, PartialEq)]
pub struct MintedKeyInfo {
    pub provenance: Value,
    pub expiry: Option<f64>,
}

impl MintedKeyInfo {
    /// Returns the expiry of a key that this key creates: the requested one, but not after its own. See
    /// docs/decisions/0025.
    #[must_use]
    pub fn cap_expiry(&self, requested: Option<f64>) -> Option<f64> {
        [requested, self.expiry].into_iter().flatten().min_by(f64::total_cmp)
    }
}

/// The origin of a request without a token.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The address of the caller.
    pub remote: &'a str,
    /// The address that attempts are counted for: the network of `remote` if it is an IPv6 address, else `remote`.
    pub source: &'a str,
    pub request_id: &'a str,
}

/// The lifetime of the token of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenLifetime {
    /// Unix time at which the token expires.
    pub expires: u64,
    /// Whether it is the token of a browser session.
    pub is_session: bool,
}

/// An authenticated caller.
#[derive(Debug, Clone)]
pub struct Caller {
    pub namespace: String,
    pub key_name: String,
    /// The scopes of the token; `None` is everything.
    pub scopes: Option<Vec<String>>,
    /// Set if the key was minted by an exchange, or created by such a key.
    pub minted: Option<MintedKeyInfo>,
    pub request_id: String,
    pub method: String,
    pub path: String,
    pub remote: String,
    /// How long the caller waits.
    pub deadline: RequestDeadline,
    /// The nonce of the key, if the caller has one.
    pub nonce: Option<String>,
    /// The lifetime of the caller's token; `None` if another daemon has forwarded the request.
    pub token: Option<TokenLifetime>,
    /// The namespaces that trusted the caller's when the request was authenticated; `None` if they were not read.
    pub trusting: Option<Vec<String>>,
}

impl Caller {
    /// Creates the caller of work that the daemon does by itself, as the system namespace. `task` names the work in events.
    #[must_use]
    pub(crate) fn daemon(task: &str) -> Self {
        Self {
            namespace: SYSTEM_NAMESPACE.to_owned(),
            key_name: task.to_owned(),
            scopes: None,
            minted: None,
            request_id: uuid::Uuid::now_v7().to_string(),
            method: task.to_uppercase(),
            path: "/".to_owned(),
            remote: String::new(),
            deadline: RequestDeadline::default(),
            nonce: None,
            token: None,
            trusting: None,
        }
    }

    /// Returns whether the caller administers the cluster.
    #[must_use]
    pub fn is_system(&self) -> bool {
        self.namespace == SYSTEM_NAMESPACE
    }

    /// Returns the identity that a daemon passes on with a forwarded request.
    #[must_use]
    pub fn original(&self) -> OriginalCaller {
        OriginalCaller {
            namespace: self.namespace.clone(),
            key_name: self.key_name.clone(),
            scopes: self.scopes.clone(),
            remote: self.remote.clone(),
            nonce: self.nonce.clone(),
            session_end: self.session_end(),
        }
    }

    /// Returns the Unix time at which the browser session of the caller ends, if it has one.
    #[must_use]
    pub fn session_end(&self) -> Option<u64> {
        self.token.filter(|token| token.is_session).map(|token| token.expires)
    }

    /// Replaces the identity of a service key by the one of the caller whose request was forwarded; `minted` is that of
    /// the caller's key, and `trusting` are the namespaces that trust the caller's. Returns whether the service key may stand
    /// for that caller.
    #[must_use]
    pub fn act_for(
        &mut self,
        original: OriginalCaller,
        minted: Option<MintedKeyInfo>,
        trusting: Option<Vec<String>>,
    ) -> bool {
        let is_service = self.key_name.starts_with(RESERVED_NAME_PREFIX);
        let is_namespace = original.namespace == self.namespace || original.namespace == SYSTEM_NAMESPACE;
        self.namespace = original.namespace;
        self.key_name = original.key_name;
        self.scopes = original.scopes;
        self.remote = original.remote;
        self.nonce = original.nonce;
        self.token = original.session_end.map(|expires| TokenLifetime { expires, is_session: true });
        self.minted = minted;
        self.trusting = trusting;
        is_service && is_namespace
    }

    /// Returns whether the caller may change objects of `namespace`.
    #[must_use]
    pub fn may_change(&self, namespace: &str) -> bool {
        self.is_system() || self.namespace == namespace
    }

    /// Returns whether the caller may read objects of `namespace`, and create objects there.
    pub async fn may_see(&self, db: impl Read, namespace: &str) -> Result<bool, StoreError> {
        if self.may_change(namespace) {
            return Ok(true);
        }
        match &self.trusting {
            Some(trusting) => Ok(trusting.iter().any(|trusts| trusts == namespace)),
            None => trusts::exists(db, namespace, &self.namespace).await,
        }
    }
}

/// Returns the namespace, or "not found" if it does not exist or the caller may not see it.
pub async fn require_namespace<D: Read + Copy>(
    db: D,
    caller: &Caller,
    namespace: &str,
) -> Result<NamespaceRow> {
    let row = namespaces::get(db, namespace).await?.filter(|row| row.state == NamespaceState::Created);
    match row {
        Some(row) if caller.may_see(db, namespace).await? => Ok(row),
        _ => Err(Error::not_found("namespace")),
    }
}

/// Returns the scopes that the caller can delegate in a namespace that it may see: its own, and in a namespace that
/// only trusts it no more than the scopes of the trust. See docs/decisions/0025.
pub async fn delegable_scopes(
    db: impl Read,
    caller: &Caller,
    namespace: &str,
) -> Result<Option<Vec<String>>> {
    if caller.may_change(namespace) {
        return Ok(caller.scopes.clone());
    }
    let trust = trusts::scopes(db, namespace, &caller.namespace).await?;
    // The trust may have been removed since access was checked.
    let trusted = trust.unwrap_or(Some(vec![]));
    Ok(scopes::intersection(caller.scopes.as_deref(), trusted.as_deref()))
}

/// Returns the namespace for a request that deletes all objects of a kind: the requested one, or the caller's own.
pub async fn namespace_for_delete_all<'a>(
    db: impl Read,
    caller: &'a Caller,
    requested: Option<&'a str>,
) -> Result<&'a str> {
    let namespace = match requested.filter(|name| !name.is_empty()) {
        Some(namespace) => namespace,
        // Protects the system namespace from an accidentally omitted parameter.
        None if caller.is_system() => {
            return Err(Error::Invalid("system user must specify parameter namespace".into()));
        }
        None => &caller.namespace,
    };
    if !caller.may_change(namespace) {
        return Err(Error::Unauthenticated("you cannot delete other namespaces".into()));
    }
    if namespaces::get(db, namespace).await?.is_none_or(|row| row.state != NamespaceState::Created) {
        return Err(Error::not_found("namespace"));
    }
    Ok(namespace)
}
