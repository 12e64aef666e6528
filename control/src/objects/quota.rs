//! Quotas: how much each namespace may use. See docs/decisions/0041.
//!
//! A limit is that of the namespace, otherwise the default of the cluster, which does not apply to `system`. A limit
//! below the usage only rejects new objects.
//!
//! Usage is compared with a limit while the namespace is locked, so concurrent requests cannot exceed a limit together.
//! A transaction that adds objects in several statements uses an [`Admission`], which locks the namespace in its last
//! statements, so that others wait only for the commit. See docs/decisions/0059. One that consists of little else locks
//! it first and calls [`require_in`].

use muster_types::event::{Event, EventType};
use muster_types::ids::UploadId;
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::object::ObjectRef;
use muster_types::quota::{NumberOrPercent, QuotaName, QuotaRecord};
use muster_types::settings::Settings;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::objects::network::address_pool::floating_pool;
use crate::scheduler::PlacementRequest;
use muster_store::{
    Read, Store, StoreError, Tx, TxError, namespaces, nodes, quotas, transaction, uploads, webhooks,
};

/// The maximum limit that can be set.
const MAX_LIMIT: i64 = 1_000_000_000_000_000;

/// Returns the limits and the usage of a namespace.
pub async fn list(app: &App, caller: &Caller, namespace: &str) -> Result<Vec<QuotaRecord>> {
    let snapshot = app.store.snapshot()?;
    require_namespace(&snapshot, caller, namespace).await?;
    records(app, &snapshot, namespace, QuotaName::ALL).await
}

/// Sets a limit of a namespace; 0 means unlimited.
pub async fn set(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    limit: Option<i64>,
) -> Result<QuotaRecord> {
    let name = parse_name(name)?;
    let limit = limit.ok_or_else(|| Error::Invalid("limit: Missing data for required field.".into()))?;
    if !(0..=MAX_LIMIT).contains(&limit) {
        let text = format!("limit: must be between 0, which means unlimited, and {MAX_LIMIT}");
        return Err(Error::Invalid(text));
    }
    change(app, caller, namespace, name, Some(limit)).await
}

/// Removes a limit of a namespace, so that the default of the cluster applies.
pub async fn reset(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<QuotaRecord> {
    change(app, caller, namespace, parse_name(name)?, None).await
}

fn parse_name(name: &str) -> Result<QuotaName> {
    name.parse().map_err(|_| {
        let names: Vec<&str> = QuotaName::ALL.iter().map(|name| name.as_str()).collect();
        Error::Invalid(format!("{name:?} is not a quota: must be one of {}", names.join(", ")))
    })
}

async fn change(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: QuotaName,
    limit: Option<i64>,
) -> Result<QuotaRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    if name == QuotaName::Webhooks && limit.is_some() {
        // Older daemons could not read any limit of the namespace.
        let older = nodes::with_older_schema(&*app.store, webhooks::SCHEMA_VERSION).await?;
        if !older.is_empty() {
            let text = format!("upgrade these nodes before you set the quota {name}: {}", older.join(", "));
            return Err(Error::Conflict(text));
        }
    }
    transaction!(app.store, |tx| {
        if !namespaces::lock(tx, namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        match limit {
            Some(limit) => quotas::set(tx, namespace, name, limit).await?,
            None => quotas::remove(tx, namespace, name).await?,
        }
        Ok(())
    })?;
    let event = Event::new(EventType::Mutate, ObjectRef::namespace(namespace), "quota changed");
    app.record(caller, event.with("quota", name.as_str()).with("limit", limit));
    let mut records = records(app, &*app.store, namespace, &[name]).await?;
    records.pop().ok_or_else(|| Error::not_found("quota"))
}

async fn records<D: Read + Copy>(
    app: &App,
    db: D,
    namespace: &str,
    names: &[QuotaName],
) -> Result<Vec<QuotaRecord>> {
    let own = quotas::of_namespace(db, namespace).await?;
    let used = quotas::used(db, namespace, names).await?;
    let mut records = Vec::with_capacity(names.len());
    for (name, used) in names.iter().zip(used) {
        records.push(QuotaRecord {
            name: *name,
            limit: limit_of(app, db, namespace, *name, &own).await?,
            used,
            is_default: own.iter().all(|(own, _)| own != name),
        });
    }
    Ok(records)
}

/// The objects that a transaction adds to a namespace, compared with the limits in its last statements.
#[derive(Debug)]
pub(crate) struct Admission<'a> {
    namespace: &'a str,
    limits: Vec<QuotaLimit>,
}

/// A limit and the amount that a transaction adds.
#[derive(Debug, Clone, Copy)]
struct QuotaLimit {
    name: QuotaName,
    limit: i64,
    added: i64,
}

impl<'a> Admission<'a> {
    /// Reads the limits of what a transaction is going to add.
    pub(crate) async fn begin(
        app: &App,
        tx: &mut Tx,
        namespace: &'a str,
        added: &[(QuotaName, i64)],
    ) -> Result<Self, TxError> {
        let own = quotas::of_namespace(&mut *tx, namespace).await?;
        let mut limits = Vec::new();
        for (name, added) in added.iter().filter(|(_, added)| *added > 0) {
            if let Some(limit) = limit_of(app, &mut *tx, namespace, *name, &own).await? {
                limits.push(QuotaLimit { name: *name, limit, added: *added });
            }
        }
        Ok(Self { namespace, limits })
    }

    /// Rejects what exceeds one of some limits already, before the transaction adds it, so that a quota is reported
    /// rather than a lack of capacity. Concurrent requests are not considered yet.
    pub(crate) async fn reject_early(&self, tx: &mut Tx, names: &[QuotaName]) -> Result<(), TxError> {
        let limits: Vec<QuotaLimit> =
            self.limits.iter().filter(|limit| names.contains(&limit.name)).copied().collect();
        check(tx, self.namespace, &limits, false).await
    }

    /// Locks the namespace, which must exist, and rejects the added objects if a limit is exceeded. Call it last: until
    /// the transaction ends, others that add objects with a limit to the namespace wait.
    pub(crate) async fn finish(self, tx: &mut Tx) -> Result<(), TxError> {
        let is_created = if self.limits.is_empty() {
            namespaces::lock_shared(tx, self.namespace, NamespaceState::Created).await?
        } else {
            namespaces::lock(tx, self.namespace, NamespaceState::Created).await?
        };
        if !is_created {
            return Err(Error::not_found("namespace").into());
        }
        check(tx, self.namespace, &self.limits, true).await
    }
}

/// Compares the usage of a namespace with limits. It contains the added objects if they `are_added`.
async fn check(tx: &mut Tx, namespace: &str, limits: &[QuotaLimit], are_added: bool) -> Result<(), TxError> {
    let names: Vec<QuotaName> = limits.iter().map(|limit| limit.name).collect();
    let used = quotas::used(tx, namespace, &names).await?;
    for (QuotaLimit { name, limit, added }, used) in limits.iter().zip(used) {
        let used = if are_added { used.saturating_sub(*added) } else { used };
        if used.saturating_add(*added) > *limit {
            return Err(exceeded(namespace, *name, *limit, used, *added).into());
        }
    }
    Ok(())
}

/// Rejects what would exceed a limit, as part of a transaction that has locked the namespace. Each item of `requested`
/// is an amount in addition to the usage.
pub(crate) async fn require_in(
    app: &App,
    tx: &mut Tx,
    namespace: &str,
    requested: &[(QuotaName, i64)],
) -> Result<(), TxError> {
    let admission = Admission::begin(app, tx, namespace, requested).await?;
    check(tx, namespace, &admission.limits, false).await
}

/// Returns the amounts that a new instance requests, except those of its interfaces.
pub(crate) fn of_instance(request: &PlacementRequest) -> [(QuotaName, i64); 4] {
    [
        (QuotaName::Instances, 1),
        (QuotaName::Cpus, request.cpus),
        (QuotaName::MemoryMb, request.memory_mb),
        (QuotaName::DiskGb, request.disk_gb),
    ]
}

/// Rejects usage that already exceeds a limit because of the `added` amount, as part of a transaction that has locked
/// the namespace.
pub(crate) async fn require_within_in(
    app: &App,
    tx: &mut Tx,
    namespace: &str,
    name: QuotaName,
    added: i64,
) -> Result<(), TxError> {
    let own = quotas::of_namespace(&mut *tx, namespace).await?;
    let Some(limit) = limit_of(app, &mut *tx, namespace, name, &own).await? else { return Ok(()) };
    let used: i64 = quotas::used(tx, namespace, &[name]).await?.into_iter().sum();
    if used > limit {
        return Err(exceeded(namespace, name, limit, used.saturating_sub(added), added).into());
    }
    Ok(())
}

fn exceeded(namespace: &str, name: QuotaName, limit: i64, used: i64, requested: i64) -> Error {
    Error::Forbidden(format!(
        "quota of namespace {namespace} exceeded: {name} (limit {limit}, used {used}, requested {requested}); delete \
         something or ask the administrator of the cluster for a higher limit"
    ))
}

/// Returns the limit of a namespace; `None` means unlimited.
async fn limit_of(
    app: &App,
    db: impl Read,
    namespace: &str,
    name: QuotaName,
    own: &[(QuotaName, i64)],
) -> Result<Option<i64>, StoreError> {
    let limit = match own.iter().find(|(own, _)| *own == name) {
        Some((_, limit)) => *limit,
        None if namespace == SYSTEM_NAMESPACE => 0,
        None => {
            let default = match default_limit(&app.settings, name) {
                NumberOrPercent::Number(number) => number,
                share @ NumberOrPercent::Percent(_) => {
                    // The network, the router and the broadcast address are not available.
                    let total = floating_pool(db).await?.netblock.size().saturating_sub(3);
                    share.of(total.into())
                }
            };
            i64::try_from(default).expect("the settings bound it")
        }
    };
    Ok(Some(limit).filter(|limit| *limit > 0))
}

fn default_limit(settings: &Settings, name: QuotaName) -> NumberOrPercent {
    NumberOrPercent::Number(match name {
        QuotaName::FloatingAddresses => return settings.quota_floating_addresses,
        QuotaName::Networks => settings.quota_networks,
        QuotaName::RoutedAddresses => settings.quota_routed_addresses,
        QuotaName::Instances => settings.quota_instances,
        QuotaName::Cpus => settings.quota_cpus,
        QuotaName::MemoryMb => settings.quota_memory_mb,
        QuotaName::DiskGb => settings.quota_disk_gb,
        QuotaName::Keys => settings.quota_keys,
        QuotaName::Uploads => settings.quota_uploads,
        QuotaName::UploadBytes => settings.quota_upload_bytes,
        QuotaName::ArtifactBytes => settings.quota_artifact_bytes,
        QuotaName::Webhooks => settings.quota_webhooks,
    })
}

/// Returns the limit of the bytes of a namespace's uploads; `None` means unlimited.
pub(crate) async fn upload_bytes_limit(app: &App, namespace: &str) -> Result<Option<i64>> {
    let own = quotas::of_namespace(&*app.store, namespace).await?;
    Ok(limit_of(app, &*app.store, namespace, QuotaName::UploadBytes, &own).await?)
}

/// An upload whose size is to be reserved.
#[derive(Debug, Clone)]
pub(crate) struct UploadReservation {
    pub(crate) upload: UploadId,
    pub(crate) namespace: String,
    pub(crate) limit: Option<i64>,
}

impl UploadReservation {
    /// Reserves `wanted` bytes for the upload instead of `before`, or as many as the limit allows, but at least
    /// `needed`. Returns the new reservation.
    pub(crate) async fn grow(&self, store: &Store, before: i64, needed: i64, wanted: i64) -> Result<i64> {
        let namespace = &self.namespace;
        transaction!(store, |tx| {
            if !namespaces::lock(tx, namespace, NamespaceState::Created).await? {
                return Err(Error::not_found("namespace").into());
            }
            let mut granted = wanted;
            if let Some(limit) = self.limit {
                let name = QuotaName::UploadBytes;
                let used: i64 = quotas::used(&mut *tx, namespace, &[name]).await?.into_iter().sum();
                granted = wanted.min(limit.saturating_sub(used.saturating_sub(before)));
                if granted < needed {
                    return Err(exceeded(namespace, name, limit, used, needed - before).into());
                }
            }
            if !uploads::set_bytes(tx, self.upload, granted).await? {
                return Err(Error::not_found("upload").into());
            }
            Ok(granted)
        })
    }
}
