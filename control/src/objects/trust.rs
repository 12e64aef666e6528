//! Trusts between namespaces. Everyone trusts `system`, and that cannot be removed.

use muster_types::event::Event;
use muster_types::namespace::{NamespaceRecord, NamespaceState, SYSTEM, check_name};
use muster_types::object::ObjectRef;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::objects::namespace;
use crate::store::{StoreError, namespaces, transaction, trusts};

/// Lets `other` read what belongs to `name`, and create there. Doing it again changes nothing.
pub async fn add(app: &App, caller: &Caller, name: &str, other: &str) -> Result<NamespaceRecord> {
    require_namespace(&*app.store, caller, name).await?;
    check_name(other)
        .map_err(|_| Error::Invalid("external_namespace: not a possible namespace name".into()))?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(name), "add trust request from REST API")
            .with("external_namespace", other),
    );
    if other != SYSTEM {
        transaction!(app.store, |tx| {
            if !namespaces::hold(tx, name, NamespaceState::Created).await? {
                return Err(Error::not_found("namespace").into());
            }
            match trusts::insert(tx, name, other).await {
                Ok(()) | Err(StoreError::Duplicate(_)) => Ok(()),
                Err(error) => Err(error.into()),
            }
        })?;
    }
    namespace::record(app, name).await
}

/// Takes a trust back. What is not there, and `system`, change nothing.
pub async fn remove(app: &App, caller: &Caller, name: &str, other: &str) -> Result<NamespaceRecord> {
    require_namespace(&*app.store, caller, name).await?;
    app.record(
        caller,
        Event::audit(ObjectRef::namespace(name), "remove trust request from REST API")
            .with("external_namespace", other),
    );
    transaction!(app.store, |tx| { Ok(trusts::remove(tx, name, other).await?) })?;
    namespace::record(app, name).await
}
