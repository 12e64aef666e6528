//! Artifacts: named, versioned content. Fetched, uploaded, labelled, shared, deleted. See docs/decisions/0017.
//!
//! | what | own namespace | trusted by the owner | `system` | anyone else |
//! |---|---|---|---|---|
//! | list and read | yes | yes | yes | if it is shared, else 404 |
//! | create the first version from a source | yes | yes | yes | 404 |
//! | add a version, delete, share, change metadata | yes | 404 | yes | 404 |

use std::sync::Arc;

use muster_types::artifact::{ArtifactRecord, ArtifactState, ArtifactType, ArtifactVersion};
use muster_types::blob::CopyState;
use muster_types::event::{Event, EventType};
use muster_types::ids::{ArtifactId, BlobId, OperationId};
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::node::NodeApi;
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::operation::{OperationHandle, OperationType};
use muster_types::quota::QuotaName;
use muster_types::storage::Draft;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::namespace_for_delete_all;
use crate::objects::blob::{self, BlobSource};
use crate::objects::lookup::{SearchScope, only_match, search_order};
use crate::objects::node_location::NodeLocation;
use crate::objects::{quota, upload, version};
use crate::queue::{ConvertImage, FetchArtifact, NewOperation, Operation as _};
use muster_store::artifacts::{self, ArtifactRow, NewArtifact};
use muster_store::attributes::ObjectAttributes;
use muster_store::blobs::{self, BlobRow};
use muster_store::nodes::NodeRow;
use muster_store::references::References;
use muster_store::uploads::UploadRow;
use muster_store::{
    Read, StoreError, Tx, TxError, blob_locations, blob_namespaces, namespaces, operations, transaction,
    uploads,
};

/// The version of the record's format.
const VERSION: i64 = 9;
/// The number of artifacts in a page of a list.
const PAGE_SIZE: i64 = 500;
/// The maximum length of a source URL.
const MAX_URL_BYTES: usize = 2048;

/// Returns the artifact as the subject of events.
pub fn object(id: ArtifactId) -> ObjectRef {
    ObjectRef::new(ObjectType::Artifact, id)
}

/// A request to create an artifact or to add a version.
#[derive(Debug, Clone)]
pub struct ArtifactRequest {
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub artifact_type: ArtifactType,
    pub source_url: String,
    pub shared: bool,
    /// 0 means the default.
    pub max_versions: i64,
}

impl ArtifactRequest {
    /// Returns the name, by default the last segment of the source.
    fn name(&self) -> String {
        let last = || self.source_url.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
        let name = self.name.as_deref().unwrap_or_else(last);
        name.chars().filter(|c| !c.is_control()).take(255).collect()
    }

    fn check(&self, caller: &Caller) -> Result<()> {
        let url = &self.source_url;
        if url.is_empty() {
            return Err(Error::Invalid("source_url: must not be empty".into()));
        }
        if url.len() > MAX_URL_BYTES {
            return Err(Error::Invalid(format!("source_url: must be at most {MAX_URL_BYTES} bytes")));
        }
        if url.chars().any(char::is_control) {
            return Err(Error::Invalid("source_url: must not contain control characters".into()));
        }
        if self.shared && !caller.is_system() {
            return Err(Error::Forbidden("only the system namespace can create shared artifacts".into()));
        }
        if self.shared && self.namespace(caller) != SYSTEM_NAMESPACE {
            return Err(not_shareable());
        }
        Ok(())
    }

    fn namespace(&self, caller: &Caller) -> String {
        let named = self.namespace.clone().filter(|name| !name.is_empty());
        named.unwrap_or_else(|| caller.namespace.clone())
    }
}

fn not_shareable() -> Error {
    Error::Forbidden("only artifacts in the system namespace can be shared".into())
}

/// Rejects early what [`ensure_in`] would reject.
async fn check_request(app: &App, caller: &Caller, request: &ArtifactRequest) -> Result<String> {
    request.check(caller)?;
    let namespace = request.namespace(caller);
    let row = namespaces::get(&*app.store, &namespace).await?;
    let exists = row.is_some_and(|row| row.state == NamespaceState::Created);
    if !exists || !caller.may_see(&*app.store, &namespace).await? {
        return Err(Error::not_found("namespace"));
    }
    require_first_version(&*app.store, caller, &namespace, &request.source_url).await?;
    Ok(namespace)
}

/// Rejects a second version by a namespace that is only trusted.
async fn require_first_version(db: impl Read, caller: &Caller, namespace: &str, url: &str) -> Result<()> {
    if !caller.may_change(namespace) && artifacts::has_source(db, namespace, url).await? {
        return Err(Error::not_found("namespace"));
    }
    Ok(())
}

/// Locks an existing namespace until the transaction ends.
pub(crate) async fn lock_namespace(tx: &mut Tx, namespace: &str) -> Result<(), TxError> {
    if namespaces::lock(tx, namespace, NamespaceState::Created).await? {
        return Ok(());
    }
    Err(Error::not_found("namespace").into())
}

/// Finds or creates the artifact of a source, as part of a transaction. Returns whether it is new.
pub(crate) async fn ensure_in(
    app: &App,
    tx: &mut Tx,
    caller: &Caller,
    namespace: &str,
    request: &ArtifactRequest,
) -> Result<(ArtifactRow, bool), TxError> {
    lock_namespace(tx, namespace).await?;
    let (kind, url) = (request.artifact_type, &request.source_url);
    require_first_version(&mut *tx, caller, namespace, url).await?;
    if let Some(row) = artifacts::by_source(&mut *tx, namespace, kind, url).await? {
        if request.shared && !row.shared {
            artifacts::set_shared(tx, row.id, true).await?;
        }
        if request.max_versions > 0 {
            artifacts::set_max_versions(tx, row.id, request.max_versions).await?;
        }
        let row = artifacts::get(&mut *tx, row.id).await?;
        return row.map(|row| (row, false)).ok_or_else(|| Error::not_found("artifact").into());
    }
    let new = NewArtifact {
        id: ArtifactId::new(),
        name: request.name(),
        namespace: namespace.to_owned(),
        artifact_type: kind,
        source_url: url.clone(),
        shared: request.shared,
        max_versions: if request.max_versions > 0 {
            request.max_versions
        } else {
            version::default_max_versions(app)
        },
    };
    match artifacts::insert(tx, &new).await {
        Ok(row) => Ok((row, true)),
        // Another transaction created it first: retry.
        Err(StoreError::Duplicate(reason)) => Err(StoreError::Conflict(reason).into()),
        Err(error) => Err(error.into()),
    }
}

fn record_created(app: &App, caller: &Caller, row: &ArtifactRow, new: bool) {
    if new {
        app.record(
            caller,
            Event::audit(object(row.id), "db record created")
                .with("name", row.name.clone())
                .with("source_url", row.source_url.clone()),
        );
    }
    app.record(caller, Event::audit(object(row.id), "creation request from REST API"));
}

/// Fetches an image, or checks whether its source has a newer one.
pub async fn fetch(app: &App, caller: &Caller, request: &ArtifactRequest) -> Result<ArtifactRecord> {
    crate::fetch::check(&app.settings, "url", &request.source_url)?;
    let namespace = check_request(app, caller, request).await?;
    let (row, new) = transaction!(app.store, |tx| {
        let (row, new) = ensure_in(app, tx, caller, &namespace, request).await?;
        if operations::is_pending(&mut *tx, &object(row.id), FetchArtifact::KIND.name).await? {
            return Ok((row, new));
        }
        // The size is not known yet.
        quota::require_in(app, tx, &namespace, &[(QuotaName::ArtifactBytes, 1)]).await?;
        let parameters = FetchArtifact { url: row.source_url.clone() };
        let mut fetch = NewOperation::new(object(row.id), Some(namespace.clone()), parameters);
        fetch.request_id = Some(caller.request_id.clone());
        let handle = fetch.enqueue(tx).await?;
        artifacts::set_operation(tx, row.id, handle.op_uuid).await?;
        Ok((ArtifactRow { last_operation: Some(handle.op_uuid), ..row }, new))
    })?;
    app.queue.wake();
    record_created(app, caller, &row, new);
    to_record(&*app.store, caller, row).await
}

/// Adds an upload as a version of an artifact. Call it on the daemon that stores the upload.
pub async fn from_upload(
    app: &App,
    caller: &Caller,
    request: &ArtifactRequest,
    node: &Arc<dyn NodeApi>,
    from: &UploadRow,
) -> Result<ArtifactRecord> {
    let namespace = check_request(app, caller, request).await?;
    let draft = Draft::Upload(from.id);
    if node.storage().draft_size(draft).await?.is_none() {
        // An upload without data is empty content.
        let empty = Box::pin(futures_util::stream::empty());
        node.storage().append(draft, Some(0), upload::max_content_bytes(app), empty).await?;
    }
    let is_image = request.artifact_type == ArtifactType::Image;
    let source = BlobSource { draft, namespace: namespace.clone(), is_image, modified: None };
    let prepared = blob::prepare(app, node, &source).await?;
    let outcome = transaction!(app.store, |tx| {
        lock_namespace(tx, &namespace).await?;
        if !uploads::end(tx, from.id).await? {
            return Err(Error::not_found("upload").into());
        }
        let blob = blob::commit_in(tx, &prepared).await?;
        if namespace != caller.namespace {
            blob_namespaces::receive(tx, blob, &caller.namespace, None).await?;
        }
        let (row, new) = ensure_in(app, tx, caller, &namespace, request).await?;
        let added = version::add_in(app, tx, &row, blob).await?;
        if is_image && added.is_some() {
            enqueue_conversion(tx, blob, &row, Some(&caller.request_id)).await?;
        }
        Ok((blob, row.id, new, added))
    });
    let (blob, id, new, added) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            blob::discard(app, &prepared).await;
            return Err(error);
        }
    };
    blob::finish_commit(app, &prepared, blob).await;
    drop(prepared);
    app.queue.wake();
    if let Err(error) = upload::remove_ended(app, node, from.id).await {
        tracing::warn!(upload = %from.id, %error, "failed to remove used upload");
    }
    record_version(app, caller, id, new, added, blob).await
}

/// Returns the remote node that must inspect a blob before it can become an image, if any.
pub async fn inspecting_node(
    app: &App,
    request: &ArtifactRequest,
    blob: &str,
) -> Result<Option<Box<NodeRow>>> {
    let (row, location) = blob::locate(app, blob).await?;
    Ok(match location {
        NodeLocation::Remote(node) if request.artifact_type == ArtifactType::Image && row.image.is_none() => {
            Some(node)
        }
        _ => None,
    })
}

/// Adds an existing blob as a version of an artifact.
pub async fn from_blob(
    app: &App,
    caller: &Caller,
    request: &ArtifactRequest,
    blob: &str,
) -> Result<ArtifactRecord> {
    let namespace = check_request(app, caller, request).await?;
    let (row, location) = blob::locate(app, blob).await?;
    let blob = row.id;
    let mut image = None;
    if request.artifact_type == ArtifactType::Image
        && row.image.is_none()
        && let NodeLocation::Local(node) = &location
    {
        image = Some(node.storage().inspect(&namespace, blob).await?);
    }
    let (id, new, added) = transaction!(app.store, |tx| {
        lock_namespace(tx, &namespace).await?;
        if !blobs::lock(tx, blob).await? {
            return Err(Error::not_found("blob").into());
        }
        if let Some(image) = &image {
            blobs::set_image(tx, blob, image).await?;
        }
        let (row, new) = ensure_in(app, tx, caller, &namespace, request).await?;
        let added = version::add_in(app, tx, &row, blob).await?;
        if request.artifact_type == ArtifactType::Image && added.is_some() {
            enqueue_conversion(tx, blob, &row, Some(&caller.request_id)).await?;
        }
        Ok((row.id, new, added))
    })?;
    app.queue.wake();
    record_version(app, caller, id, new, added, blob).await
}

/// Records the events of a new version and returns the artifact.
async fn record_version(
    app: &App,
    caller: &Caller,
    id: ArtifactId,
    new: bool,
    added: Option<i64>,
    blob: BlobId,
) -> Result<ArtifactRecord> {
    let row = artifacts::get(&*app.store, id).await?.ok_or_else(|| Error::not_found("artifact"))?;
    record_created(app, caller, &row, new);
    if let Some(index) = added {
        let mut event = version::added_event(id, index, blob);
        event.request_id = Some(caller.request_id.clone());
        app.events.record(event);
    }
    to_record(&*app.store, caller, row).await
}

/// Queues the conversion of an image for use by VMs, on a node that has the image.
pub(crate) async fn enqueue_conversion(
    tx: &mut Tx,
    blob: BlobId,
    artifact: &ArtifactRow,
    request_id: Option<&str>,
) -> Result<(), StoreError> {
    let target = blob::object(blob);
    if operations::is_pending(&mut *tx, &target, ConvertImage::KIND.name).await? {
        return Ok(());
    }
    let copies = blob_locations::of_blob(&mut *tx, blob).await?;
    let Some(node) = copies.iter().find(|copy| copy.state == CopyState::Complete).map(|copy| copy.node)
    else {
        return Ok(());
    };
    let mut conversion = NewOperation::new(target, Some(artifact.namespace.clone()), ConvertImage { node });
    conversion.request_id = request_id.map(str::to_owned);
    conversion.node = Some(node);
    conversion.enqueue(tx).await?;
    Ok(())
}

/// Deletes an artifact as part of a transaction. Returns `false` if it was already deleted.
pub(crate) async fn delete_in(tx: &mut Tx, id: ArtifactId) -> Result<bool, StoreError> {
    let Some(row) = artifacts::get(&mut *tx, id).await? else { return Ok(false) };
    if row.state == ArtifactState::Deleted {
        return Ok(false);
    }
    if !artifacts::set_state(tx, id, row.state, ArtifactState::Deleted).await? {
        return Err(StoreError::Conflict("the artifact changed".into()));
    }
    let versions = version::versions_in(&mut *tx, id).await?;
    let blobs_of = blobs::by_ids(&mut *tx, &versions.values().copied().collect::<Vec<_>>()).await?;
    let deleted =
        versions.iter().filter_map(|(index, blob)| Some((*index, version_of(blobs_of.get(blob)?, None))));
    artifacts::set_deleted_versions(tx, id, &deleted.collect()).await?;
    for (index, blob) in versions {
        version::drop_in(tx, id, index, blob).await?;
    }
    Ok(true)
}

/// Returns an artifact by id or name that the caller may read.
pub async fn find(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<ArtifactRow> {
    find_in(&*app.store, caller, reference, namespace).await
}

async fn find_in<D: Read + Copy>(
    db: D,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<ArtifactRow> {
    let absent = || Error::not_found("artifact");
    let namespace = namespace.filter(|name| !name.is_empty());
    let row = match NameOrId::parse(reference) {
        NameOrId::Id(id) => artifacts::get(db, id).await?,
        NameOrId::Name(name) => by_name(db, caller, &name, namespace).await?,
    };
    let row = row.ok_or_else(absent)?;
    if namespace.is_some_and(|wanted| row.namespace != wanted) {
        return Err(absent());
    }
    if row.shared || caller.may_see(db, &row.namespace).await? { Ok(row) } else { Err(absent()) }
}

/// Finds an artifact by name: one of the caller's namespace, otherwise one that `system` shares. `system` itself also
/// finds those of all namespaces.
async fn by_name<D: Read + Copy>(
    db: D,
    caller: &Caller,
    name: &str,
    namespace: Option<&str>,
) -> Result<Option<ArtifactRow>> {
    for scope in search_order(caller, namespace) {
        let found = match scope {
            SearchScope::Namespace(namespace) => artifacts::by_name(db, name, Some(namespace)).await?,
            SearchScope::AllNamespaces => artifacts::by_name(db, name, None).await?,
            SearchScope::Shared => artifacts::by_name_shared(db, name).await?,
        };
        if let Some(row) = only_match(found, "artifacts", name)? {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

/// Returns an artifact by id or name that the caller may change. A name refers to the caller's namespace.
pub async fn find_own(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<ArtifactRow> {
    let is_name = matches!(NameOrId::<ArtifactId>::parse(reference), NameOrId::Name(_));
    let own = (is_name && !caller.is_system()).then_some(caller.namespace.as_str());
    let row = find(app, caller, reference, namespace.or(own)).await?;
    if caller.may_change(&row.namespace) { Ok(row) } else { Err(Error::not_found("artifact")) }
}

pub async fn get(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<ArtifactRecord> {
    let snapshot = app.store.snapshot()?;
    let row = find_in(&snapshot, caller, reference, namespace).await?;
    to_record(&snapshot, caller, row).await
}

/// Returns the next page of the artifacts that the caller may read, by id.
pub async fn list_page(
    app: &App,
    caller: &Caller,
    after: Option<ArtifactId>,
) -> Result<(Vec<ArtifactRecord>, Option<ArtifactId>)> {
    let seen_by = (!caller.is_system()).then_some(caller.namespace.as_str());
    let rows = artifacts::page(&*app.store, seen_by, after, PAGE_SIZE).await?;
    let full = i64::try_from(rows.len()).is_ok_and(|count| count == PAGE_SIZE);
    let next = rows.last().filter(|_| full).map(|row| row.id);
    let mut records = records(&*app.store, caller, rows).await?;
    records.iter_mut().flat_map(|record| record.blobs.values_mut()).for_each(|blob| blob.instances = None);
    Ok((records, next))
}

/// Returns the record of one artifact.
pub(crate) async fn to_record<D: Read + Copy>(
    db: D,
    caller: &Caller,
    row: ArtifactRow,
) -> Result<ArtifactRecord> {
    let mut records = records(db, caller, vec![row]).await?;
    records.pop().ok_or_else(|| Error::not_found("artifact"))
}

/// Returns the records of rows, with a constant number of queries. Callers see only the instances that they may read.
async fn records<D: Read + Copy>(
    db: D,
    caller: &Caller,
    rows: Vec<ArtifactRow>,
) -> Result<Vec<ArtifactRecord>> {
    let ids: Vec<ArtifactId> = rows.iter().map(|row| row.id).collect();
    let seen_by = (!caller.is_system()).then_some(caller.namespace.as_str());
    let mut details = artifacts::details(db, &ids, seen_by).await?;
    let version = |blob: &BlobRow| version_of(blob, details.uses.get(&blob.id.to_string()));
    Ok(rows
        .into_iter()
        .map(|row| {
            let id = row.id.to_string();
            let ObjectAttributes { metadata, references } =
                details.attributes.remove(&id).unwrap_or_default();
            let versions = version::versions(&references.from);
            // A deleted artifact no longer references the blobs of its versions.
            let blobs = row.deleted_versions.unwrap_or_else(|| {
                let known = versions.iter();
                known.filter_map(|(index, blob)| Some((*index, version(details.blobs.get(blob)?)))).collect()
            });
            let newest = blobs.last_key_value();
            ArtifactRecord {
                uuid: row.id,
                index: newest.map_or(0, |(index, _)| *index),
                blob_uuid: newest.map(|(_, version)| version.uuid),
                blobs,
                name: row.name,
                namespace: row.namespace,
                artifact_type: row.artifact_type,
                state: row.state,
                error_message: row.error_message,
                source_url: row.source_url,
                shared: row.shared,
                max_versions: row.max_versions,
                metadata,
                version: VERSION,
                last_cluster_operation: row.last_operation.map(handle),
                references_to: references.to,
                references_from: references.from,
            }
        })
        .collect())
}

/// Returns a version with the users of its blob that the caller may see.
fn version_of(blob: &BlobRow, uses: Option<&References>) -> ArtifactVersion {
    ArtifactVersion {
        uuid: blob.id,
        size: blob.size,
        reference_count: uses.map_or(0, blob::use_count),
        depends_on: blob.depends_on,
        instances: Some(uses.map(blob::instances).unwrap_or_default()),
    }
}

fn handle(operation: OperationId) -> OperationHandle {
    OperationHandle { op_type: OperationType::ArtifactFetch, op_uuid: operation }
}

/// Deletes an artifact. Returns `None` if it was already deleted.
pub async fn delete(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
) -> Result<Option<ArtifactRecord>> {
    let row = find_own(app, caller, reference, namespace).await?;
    if !transaction!(app.store, |tx| { Ok(delete_in(tx, row.id).await?) })? {
        return Ok(None);
    }
    record_deleted(app, caller, row.id, "deletion request from REST API");
    get(app, caller, &row.id.to_string(), None).await.map(Some)
}

/// Records the events of a deletion.
pub(crate) fn record_deleted(app: &App, caller: &Caller, id: ArtifactId, message: &str) {
    app.record(caller, Event::audit(object(id), message));
    app.record(caller, Event::new(EventType::Mutate, object(id), "state is now deleted"));
}

/// Deletes every artifact of a namespace.
pub async fn delete_all(app: &App, caller: &Caller, namespace: Option<&str>) -> Result<Vec<ArtifactId>> {
    let namespace = namespace_for_delete_all(&*app.store, caller, namespace).await?;
    let mut deleted = Vec::new();
    for row in artifacts::of_namespace(&*app.store, namespace).await? {
        if transaction!(app.store, |tx| { Ok(delete_in(tx, row.id).await?) })? {
            record_deleted(app, caller, row.id, "deletion request from REST API");
            deleted.push(row.id);
        }
    }
    Ok(deleted)
}

/// Shares an artifact of `system` with all namespaces, or stops sharing it.
pub async fn set_shared(
    app: &App,
    caller: &Caller,
    reference: &str,
    namespace: Option<&str>,
    shared: bool,
) -> Result<ArtifactRecord> {
    let row = find_own(app, caller, reference, namespace).await?;
    if shared && row.namespace != SYSTEM_NAMESPACE {
        return Err(not_shareable());
    }
    if !shared && !row.shared {
        return Err(Error::Forbidden("artifact not shared".into()));
    }
    transaction!(app.store, |tx| {
        if !artifacts::lock(tx, row.id).await? {
            return Err(Error::not_found("artifact").into());
        }
        Ok(artifacts::set_shared(tx, row.id, shared).await?)
    })?;
    let message = if shared { "share request from REST API" } else { "unshare request from REST API" };
    app.record(caller, Event::audit(object(row.id), message));
    get(app, caller, &row.id.to_string(), None).await
}
