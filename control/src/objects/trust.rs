//! Trusts between namespaces. Every namespace trusts `system`, which cannot be removed.

use muster_types::event::Event;
use muster_types::namespace::{NamespaceRecord, NamespaceState, SYSTEM_NAMESPACE, check_name};
use muster_types::object::ObjectRef;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::{delegable_scopes, require_namespace};
use crate::auth::scopes::{self, TRUST_SCOPES};
use crate::objects::namespace;
use muster_store::{namespaces, transaction, trusts};

/// Lets `other` read the objects of `name` and create objects there. The caller must hold every scope that this grants.
/// Keys that `other` creates there get at most the scopes of the caller.
pub async fn add(app: &App, caller: &Caller, name: &str, other: &str) -> Result<NamespaceRecord> {
    require_namespace(&*app.store, caller, name).await?;
    check_name(other)
        .map_err(|_| Error::Invalid("external_namespace: not a possible namespace name".into()))?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(name), "add trust request from REST API")
            .with("external_namespace", other),
    );
    let held_scopes = delegable_scopes(&*app.store, caller, name).await?;
    let is_implied = other == SYSTEM_NAMESPACE;
    if !is_implied {
        require_granted(held_scopes.as_deref())?;
    }
    transaction!(app.store, |tx| {
        if !namespaces::lock(tx, name, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        if !is_implied {
            trusts::put(tx, name, other, held_scopes.as_deref()).await?;
        }
        namespace::record_in(tx, name).await
    })
}

/// Rejects a caller without a scope of [`TRUST_SCOPES`]: the keys of the other namespace could do more than its own.
fn require_granted(held: Option<&[String]>) -> Result<()> {
    let missing: Vec<&str> =
        TRUST_SCOPES.iter().copied().filter(|scope| !scopes::grants(held, scope)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Forbidden(format!("a trust cannot grant scopes you do not hold: {}", missing.join(", "))))
}

/// Removes a trust. Removing an absent one, or `system`, changes nothing.
pub async fn remove(app: &App, caller: &Caller, name: &str, other: &str) -> Result<NamespaceRecord> {
    require_namespace(&*app.store, caller, name).await?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(name), "remove trust request from REST API")
            .with("external_namespace", other),
    );
    transaction!(app.store, |tx| {
        trusts::remove(tx, name, other).await?;
        namespace::record_in(tx, name).await
    })
}
