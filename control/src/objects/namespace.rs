//! Namespaces: create, get, list, delete.

use muster_types::event::Event;
use muster_types::instance::InstanceState;
use muster_types::namespace::{NamespaceRecord, NamespaceState, SYSTEM_NAMESPACE, Trust, check_name};
use muster_types::network::NetworkState;
use muster_types::object::ObjectRef;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::auth::secrets::HashRequester;
use crate::objects::artifact;
use crate::objects::audit::with_request;
use crate::objects::instance::delete;
use crate::objects::key::{KeyRequest, key_event, new_key};
use crate::objects::network::enqueue_delete;
use crate::queue::{DeleteNamespace, NewOperation};
use muster_store::namespaces::{NamespaceDetails, NamespaceRow};
use muster_store::{
    Read, StoreError, Tx, TxError, artifacts, claims, instances, keys, namespaces, networks, transaction,
    trusts, uploads,
};

/// The version of the record's format. See docs/decisions/0009.
const VERSION: i64 = 7;
/// The number of namespaces in a page of a list.
const PAGE_SIZE: i64 = 500;

/// Creates a namespace and its optional first key in one transaction.
pub async fn create(
    app: &App,
    caller: &Caller,
    name: &str,
    first_key: &KeyRequest,
) -> Result<NamespaceRecord> {
    check_name(name)?;
    let sealed = if first_key.name.is_some() {
        let (key_name, secret) = first_key.check_supplied()?;
        let secret =
            app.secrets.seal(HashRequester { source: &caller.namespace, namespace: name }, &secret).await?;
        Some((key_name, new_key(caller, secret, None, caller.scopes.clone())))
    } else {
        None
    };
    let (key, record) = transaction!(app.store, |tx| {
        match namespaces::insert(tx, name).await {
            Ok(()) => {}
            Err(StoreError::Duplicate(_)) => return Err(Error::Forbidden("namespace exists".into()).into()),
            Err(error) => return Err(error.into()),
        }
        let key = match &sealed {
            Some((key_name, new)) => Some((*key_name, keys::put(tx, name, key_name, new).await?)),
            None => None,
        };
        Ok((key, record_in(tx, name).await?))
    })?;
    let object = || ObjectRef::namespace(name);
    let token_event =
        |object: ObjectRef, message: String| with_request(caller, Event::audit(object, message));
    app.record(caller, Event::audit(object(), "db record created").with("name", name));
    app.record(caller, Event::audit(object(), "creation request from REST API"));
    app.record(caller, token_event(object(), "token used to create namespace".into()));
    app.record(
        caller,
        token_event(
            ObjectRef::namespace(&caller.namespace),
            format!("token used to create namespace {name}"),
        )
        .with("created-namespace", name),
    );
    if let Some((key_name, put)) = key {
        app.record(caller, key_event(put, name, key_name));
    }
    Ok(record)
}

/// Returns the namespace if the caller may access it.
pub async fn get(app: &App, caller: &Caller, name: &str) -> Result<NamespaceRecord> {
    let snapshot = app.store.snapshot()?;
    let row = require_namespace(&snapshot, caller, name).await?;
    let mut records = records(&snapshot, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("namespace"))
}

/// Returns the next page of the namespaces that the caller may access, by name.
pub async fn list_page(
    app: &App,
    caller: &Caller,
    after: Option<&str>,
) -> Result<(Vec<NamespaceRecord>, Option<String>)> {
    let seen_by = (!caller.is_system()).then_some(caller.namespace.as_str());
    let rows = namespaces::page(&*app.store, seen_by, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.name.clone());
    Ok((records(&*app.store, rows).await?, next))
}

/// Deletes a namespace: it immediately loses all trust, and its tokens stop working.
pub async fn delete(app: &App, caller: &Caller, name: &str) -> Result<()> {
    require_namespace(&*app.store, caller, name).await?;
    if name == SYSTEM_NAMESPACE {
        return Err(Error::Forbidden("you cannot delete the system namespace".into()));
    }
    let (trusting, deleted_artifacts) = transaction!(app.store, |tx| {
        let (from, to) = (NamespaceState::Created, NamespaceState::Deleted);
        if !namespaces::set_state(tx, name, from, to).await? {
            return Err(Error::not_found("namespace").into());
        }
        for instance in instances::of_namespace(&mut *tx, name).await? {
            // An instance in error has no VM and is deleted with its namespace.
            if instance.state != InstanceState::Error {
                return Err(Error::Invalid("you cannot delete a namespace with instances".into()).into());
            }
            delete::enqueue(tx, instance.id, Some(caller)).await?;
        }
        for network in networks::of_namespace(&mut *tx, name).await? {
            // A network in error has no devices and is deleted with its namespace.
            if network.state != NetworkState::Error {
                return Err(Error::Invalid("you cannot delete a namespace with networks".into()).into());
            }
            enqueue_delete(tx, network.id, Some(caller)).await?;
        }
        uploads::end_of(tx, name).await?;
        // The claimed capacity is immediately available to others.
        claims::expire_of(tx, name).await?;
        let mut deleted_artifacts = Vec::new();
        for row in artifacts::of_namespace(&mut *tx, name).await? {
            if artifact::delete_in(tx, row.id).await? {
                deleted_artifacts.push(row.id);
            }
        }
        let trusting = trusts::trusting(&mut *tx, name).await?;
        trusts::remove_naming(tx, name).await?;
        let target = ObjectRef::namespace(name);
        let mut deletion = NewOperation::new(target, Some(name.to_owned()), DeleteNamespace {});
        deletion.request_id = Some(caller.request_id.clone());
        deletion.enqueue(tx).await?;
        Ok((trusting, deleted_artifacts))
    })?;
    app.queue.wake();
    app.record(caller, Event::audit(ObjectRef::namespace(name), "deletion request from REST API"));
    for id in deleted_artifacts {
        artifact::record_deleted(app, caller, id, "deletion request via namespace deletion from REST API");
    }
    for namespace in trusting {
        app.record(
            caller,
            Event::audit(ObjectRef::namespace(&namespace), "trust revoked, trusted namespace is gone")
                .with("trusted-namespace", name),
        );
    }
    Ok(())
}

/// Returns the record of an existing namespace as a transaction sees it.
pub(crate) async fn record_in(tx: &mut Tx, name: &str) -> Result<NamespaceRecord, TxError> {
    let row = namespaces::get(&mut *tx, name).await?;
    let details = namespaces::details(&mut *tx, name, name).await?;
    let mut records = to_records(row.into_iter().collect(), details);
    Ok(records.pop().ok_or_else(|| Error::not_found("namespace"))?)
}

/// Returns the records of rows that are sorted by name, with a constant number of queries.
async fn records<D: Read + Copy>(db: D, rows: Vec<NamespaceRow>) -> Result<Vec<NamespaceRecord>> {
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(vec![]) };
    let (first, last) = (first.name.clone(), last.name.clone());
    let details = namespaces::details(db, &first, &last).await?;
    Ok(to_records(rows, details))
}

fn to_records(rows: Vec<NamespaceRow>, mut details: NamespaceDetails) -> Vec<NamespaceRecord> {
    rows.into_iter()
        .map(|row| NamespaceRecord {
            state: row.state,
            version: VERSION,
            metadata: details.metadata.remove(&row.name).unwrap_or_default(),
            keys: details.keys.remove(&row.name).unwrap_or_default(),
            trust: Trust {
                full: std::iter::once(SYSTEM_NAMESPACE.to_owned())
                    .chain(details.trusts.remove(&row.name).unwrap_or_default())
                    .collect(),
            },
            name: row.name,
        })
        .collect()
}
