//! Resolves the base of a disk and brings its content to a node.
//!
//! | form | meaning |
//! |---|---|
//! | `label:NAME` | a label of the caller's namespace, otherwise one that `system` shares |
//! | `sf://label/NAMESPACE/NAME` | a label |
//! | `sf://upload/NAMESPACE/NAME` | an uploaded image |
//! | `sf://snapshot/UUID`, `sf://artifact/UUID` | the newest version of an artifact |
//! | `sf://blob/UUID` | a blob |
//! | anything else | a URL or a short name of one: the content fetched from there |
//!
//! A URL means what the namespace itself or `system` fetched from there, never an upload and never an artifact of a
//! namespace that trusts the caller: anyone can register any URL, and add a trust without asking.

use std::sync::Arc;

use muster_types::artifact::{ArtifactState, ArtifactType};
use muster_types::blob::{BlobState, ImageFacts};
use muster_types::ids::{ArtifactId, BlobId};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::node::NodeApi;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::artifact::{self, ArtifactRequest};
use crate::objects::blob_copy;
use crate::objects::label;
use crate::objects::version;
use crate::queue::{FetchArtifact, Operation as _};
use muster_store::artifacts::ArtifactRow;
use muster_store::instances::InstanceSpec;
use muster_store::{artifacts, blobs, operations, transaction};

const GIB: u64 = 1 << 30;

/// Where the content of a base comes from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ImageSource {
    /// A blob that exists.
    Blob(BlobId),
    /// A URL to fetch, or to check for a newer version.
    Url(String),
}

/// Returns whether a base refers to an object of this cluster.
pub(crate) fn is_cluster_reference(base: &str) -> bool {
    base.starts_with("label:") || base.starts_with("sf://")
}

/// Resolves a base that the caller may use. Changes nothing. Errors name `field`.
pub(crate) async fn resolve(
    app: &App,
    caller: &Caller,
    namespace: &str,
    field: &str,
    base: &str,
) -> Result<ImageSource> {
    if let Some(name) = base.strip_prefix("label:") {
        let row = label::by_name(app, caller, name).await?.ok_or_else(|| Error::not_found("artifact"))?;
        return newest(app, caller, &row, base).await;
    }
    let Some(path) = base.strip_prefix("sf://") else {
        crate::fetch::check(&app.settings, field, base)?;
        return by_url(app, namespace, base).await;
    };
    let (kind, rest) = path.split_once('/').unwrap_or((path, ""));
    match (kind, rest.split_once('/')) {
        ("label", Some((owner, _))) => by_source(app, caller, ArtifactType::Label, owner, base, base).await,
        ("upload", Some((owner, _))) => by_source(app, caller, ArtifactType::Image, owner, base, base).await,
        ("snapshot" | "artifact", None) => {
            let absent = || Error::not_found("artifact");
            let id: ArtifactId = rest.parse().map_err(|_| absent())?;
            let row = artifacts::get(&*app.store, id).await?.ok_or_else(absent)?;
            newest(app, caller, &row, kind).await
        }
        ("blob", None) => {
            let absent = || Error::not_found("blob");
            let id: BlobId = rest.parse().map_err(|_| absent())?;
            let row = blobs::get(&*app.store, id).await?;
            let row = row.filter(|row| row.state == BlobState::Created).ok_or_else(absent)?;
            Ok(ImageSource::Blob(row.id))
        }
        _ => Err(Error::not_found("artifact")),
    }
}

async fn by_source(
    app: &App,
    caller: &Caller,
    kind: ArtifactType,
    owner: &str,
    url: &str,
    reference: &str,
) -> Result<ImageSource> {
    let row = artifacts::by_source(&*app.store, owner, kind, url).await?;
    let row = row.ok_or_else(|| Error::not_found("artifact"))?;
    newest(app, caller, &row, reference).await
}

/// Returns the newest version of an artifact that the caller may read.
async fn newest(app: &App, caller: &Caller, row: &ArtifactRow, reference: &str) -> Result<ImageSource> {
    if row.state == ArtifactState::Deleted
        || !(row.shared || caller.may_see(&*app.store, &row.namespace).await?)
    {
        return Err(Error::not_found("artifact"));
    }
    if row.state != ArtifactState::Created {
        return Err(Error::NotFound(format!("artifact not ready (state={})", row.state)));
    }
    let newest = version::newest(&*app.store, row.id).await?;
    let text = || {
        let what = match row.artifact_type {
            ArtifactType::Label => format!("label {reference}"),
            ArtifactType::Snapshot => "snapshot".to_owned(),
            _ => "artifact".to_owned(),
        };
        Error::NotFound(format!("Could not resolve {what} to a blob"))
    };
    newest.map(ImageSource::Blob).ok_or_else(text)
}

/// Resolves a URL. The namespace's own artifact is checked for a newer version; one that `system` shares is used as it
/// is.
async fn by_url(app: &App, namespace: &str, url: &str) -> Result<ImageSource> {
    let of = async |owner: &str| artifacts::by_source(&*app.store, owner, ArtifactType::Image, url).await;
    // Without a version, it is being fetched or will be fetched again.
    let own = of(namespace).await?.filter(|row| row.fetched || row.state != ArtifactState::Created);
    if own.is_none()
        && let Some(shared) = of(SYSTEM_NAMESPACE).await?.filter(|row| row.shared && row.fetched)
        && let Some(blob) = version::newest(&*app.store, shared.id).await?
    {
        return Ok(ImageSource::Blob(blob));
    }
    Ok(ImageSource::Url(url.to_owned()))
}

/// Starts fetching a URL, or checking it for a newer version, for an instance of a namespace.
pub(crate) async fn fetch(app: &App, caller: &Caller, namespace: &str, url: &str) -> Result<ArtifactId> {
    if let Some(own) = artifacts::by_source(&*app.store, namespace, ArtifactType::Image, url).await?
        && !caller.may_change(namespace)
    {
        // A trusted namespace uses the existing artifact and fetches nothing into it.
        return Ok(own.id);
    }
    let request = ArtifactRequest {
        name: None,
        namespace: Some(namespace.to_owned()),
        artifact_type: ArtifactType::Image,
        source_url: url.to_owned(),
        shared: false,
        max_versions: 0,
    };
    Ok(artifact::fetch(app, caller, &request).await?.uuid)
}

/// Returns the content of an artifact that was fetched. Fails with [`Error::NotReady`] while it is being fetched.
pub(crate) async fn fetched_blob(app: &App, id: ArtifactId) -> Result<BlobId> {
    let deleted = || Error::Conflict("the image was deleted before it could be used".into());
    let row = artifacts::get(&*app.store, id).await?.ok_or_else(deleted)?;
    if operations::is_pending(&*app.store, &artifact::object(id), FetchArtifact::KIND.name).await? {
        return Err(Error::NotReady(format!("image {} is being fetched", row.source_url)));
    }
    match (row.state, version::newest(&*app.store, id).await?) {
        (ArtifactState::Created, Some(blob)) if row.fetched => Ok(blob),
        (ArtifactState::Created, Some(_)) | (ArtifactState::Error, _) => {
            let reason = row.error_message.unwrap_or_else(|| {
                format!("its newest version was uploaded; to use it, set the base to sf://artifact/{id}")
            });
            Err(Error::Conflict(format!("image {} could not be fetched: {reason}", row.source_url)))
        }
        (ArtifactState::Initial, _) => {
            Err(Error::NotReady(format!("image {} has no version yet", row.source_url)))
        }
        (ArtifactState::Created | ArtifactState::Deleted, _) => Err(deleted()),
    }
}

/// Copies and converts a blob for use as a disk on a node, on behalf of a namespace. Returns the facts of the image.
pub(crate) async fn ensure_on(
    app: &App,
    namespace: &str,
    node: &Arc<dyn NodeApi>,
    id: BlobId,
) -> Result<ImageFacts> {
    let deleted = || Error::Conflict(format!("blob {id} was deleted before it could be used"));
    let row = blobs::get(&*app.store, id).await?;
    let row = row.filter(|row| row.state == BlobState::Created).ok_or_else(deleted)?;
    blob_copy::ensure_local(app, node, id).await?;
    let storage = node.storage();
    let facts = match row.image {
        Some(facts) => facts,
        None => {
            let facts = storage.inspect(namespace, id).await.map_err(unusable)?;
            transaction!(app.store, |tx| { Ok(blobs::set_image(tx, id, &facts).await?) })?;
            facts
        }
    };
    match row.depends_on {
        None => storage.convert(namespace, id, &facts).await.map_err(unusable)?,
        Some(base) => {
            Box::pin(ensure_on(app, namespace, node, base)).await?;
            storage.convert_thin(namespace, id, base).await.map_err(unusable)?;
        }
    }
    Ok(facts)
}

/// An unusable image stays unusable; a lack of space may be temporary.
fn unusable(error: Error) -> Error {
    match error {
        Error::Invalid(reason) => Error::Conflict(format!("the image cannot be used: {reason}")),
        Error::InsufficientCapacity(reason) => Error::Unavailable(reason),
        other => other,
    }
}

/// Returns the total size of the disks, as far as it is known.
pub(crate) async fn disk_gb(app: &App, spec: &InstanceSpec) -> Result<i64> {
    let mut sum = 0u64;
    for disk in &spec.disks {
        let size = match (disk.spec.size, disk.blob_uuid) {
            (Some(size), _) => size,
            (None, Some(blob)) => {
                let facts = blobs::get(&*app.store, blob).await?.and_then(|row| row.image);
                facts.map_or(0, |facts| facts.virtual_size.div_ceil(GIB))
            }
            (None, None) => 0,
        };
        sum = sum.saturating_add(size);
    }
    Ok(i64::try_from(sum).expect("MAX_DISKS disks of at most u64::MAX bytes"))
}
