//! The one place that decides what a caller may see and change.
//!
//! | what | own namespace | trusted by the owner | `system` | anyone else |
//! |---|---|---|---|---|
//! | list and read objects, create in the namespace | yes | yes | yes | 404 |
//! | change or delete objects | yes | 404 | yes | 404 |
//! | keys, trusts, rules and metadata of the namespace itself | yes | yes | yes | 404 |
//! | administration | only `system`, else 401 | | | |
//! | cluster operations | yes | 403 | yes | 403 |
//!
//! What may not be seen is answered as if it did not exist.

use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::{Error, Result};
use serde_json::Value;

use super::scopes;
use muster_store::namespaces::NamespaceRow;
use muster_store::{Read, StoreError, namespaces, trusts};

/// A key that was given for an identity token: where it is from, and when it ends.
#[derive(Debug, Clone, PartialEq)]
pub struct MintedKeyInfo {
    pub provenance: Value,
    pub expiry: Option<f64>,
}

impl MintedKeyInfo {
    /// The end of a key that this one makes: its own at the latest, whatever is asked for.
    #[must_use]
    pub fn end(&self, asked: Option<f64>) -> Option<f64> {
        [asked, self.expiry].into_iter().flatten().min_by(f64::total_cmp)
    }
}

/// An authenticated caller.
#[derive(Debug, Clone)]
pub struct Caller {
    pub namespace: String,
    pub key_name: String,
    /// What the token may be used for; `None` is everything.
    pub scopes: Option<Vec<String>>,
    /// Of a key that an exchange made, or one that such a key made.
    pub minted: Option<MintedKeyInfo>,
    pub request_id: String,
    pub method: String,
    pub path: String,
    pub remote: String,
}

impl Caller {
    /// Whether the caller administers the cluster.
    #[must_use]
    pub fn is_system(&self) -> bool {
        self.namespace == SYSTEM_NAMESPACE
    }

    /// Whether the caller may change what belongs to `namespace`.
    #[must_use]
    pub fn may_change(&self, namespace: &str) -> bool {
        self.is_system() || self.namespace == namespace
    }

    /// Whether the caller may read what belongs to `namespace`, and create there.
    pub async fn may_see(&self, db: impl Read, namespace: &str) -> Result<bool, StoreError> {
        if self.may_change(namespace) {
            return Ok(true);
        }
        trusts::exists(db, namespace, &self.namespace).await
    }
}

/// The namespace, if it lives and the caller may reach it. Absent and invisible are refused alike.
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

/// What the caller can hand on in a namespace that it may reach: its own scopes and, where it is only trusted, no more
/// than whoever gave the trust held.
pub async fn held_in(db: impl Read, caller: &Caller, namespace: &str) -> Result<Option<Vec<String>>> {
    if caller.may_change(namespace) {
        return Ok(caller.scopes.clone());
    }
    let trust = trusts::scopes(db, namespace, &caller.namespace).await?;
    // A trust that went since we looked gives nothing.
    let given = trust.unwrap_or(Some(vec![]));
    Ok(scopes::common(caller.scopes.as_deref(), given.as_deref()))
}

/// The namespace all of whose objects of a kind a caller wants to delete: its own, unless it names one.
pub async fn namespace_to_empty<'a>(
    db: impl Read,
    caller: &'a Caller,
    named: Option<&'a str>,
) -> Result<&'a str> {
    let namespace = match named.filter(|name| !name.is_empty()) {
        Some(namespace) => namespace,
        // Too much would go by a slip.
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
