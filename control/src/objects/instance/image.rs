//! What the base of a disk stands for, and how its content comes to the node.
//!
//! | form | meaning |
//! |---|---|
//! | `label:NAME` | the label of that name of the caller's namespace |
//! | `sf://label/NAMESPACE/NAME` | a label |
//! | `sf://upload/NAMESPACE/NAME` | an image that was uploaded |
//! | `sf://snapshot/UUID`, `sf://artifact/UUID` | the newest version of an artifact |
//! | `sf://blob/UUID` | a content |
//! | anything else | a URL, or a name that stands for one: the artifact that was or will be fetched from there |

use std::sync::Arc;

use muster_types::artifact::{ArtifactState, ArtifactType};
use muster_types::blob::{BlobState, ImageFacts};
use muster_types::ids::{ArtifactId, BlobId};
use muster_types::node::NodeApi;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::artifact::{self, ArtifactRequest};
use crate::objects::blob_copy;
use crate::objects::version;
use crate::queue::{FetchArtifact, Operation as _};
use muster_store::artifacts::ArtifactRow;
use muster_store::{artifacts, blobs, operations, transaction};

/// What a base stands for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// A content that is there.
    Blob(BlobId),
    /// It is to be fetched, or asked for news, from here.
    Url(String),
}

/// Whether a base names something of this cluster.
pub(crate) fn is_ours(base: &str) -> bool {
    base.starts_with("label:") || base.starts_with("sf://")
}

/// What a base stands for, if the caller may use it. Nothing is changed by asking.
pub(crate) async fn resolve(app: &App, caller: &Caller, namespace: &str, base: &str) -> Result<Source> {
    if let Some(name) = base.strip_prefix("label:") {
        let url = format!("sf://label/{}/{name}", caller.namespace);
        return by_source(app, caller, ArtifactType::Label, &caller.namespace, &url, base).await;
    }
    let Some(path) = base.strip_prefix("sf://") else {
        crate::fetch::check(&app.settings, base)?;
        return by_url(app, caller, namespace, base).await;
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
            Ok(Source::Blob(row.id))
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
    asked: &str,
) -> Result<Source> {
    let row = artifacts::by_source(&*app.store, owner, kind, url).await?;
    let row = row.ok_or_else(|| Error::not_found("artifact"))?;
    newest(app, caller, &row, asked).await
}

/// The newest version of an artifact that the caller may read.
async fn newest(app: &App, caller: &Caller, row: &ArtifactRow, asked: &str) -> Result<Source> {
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
            ArtifactType::Label => format!("label {asked}"),
            ArtifactType::Snapshot => "snapshot".to_owned(),
            _ => "artifact".to_owned(),
        };
        Error::NotFound(format!("Could not resolve {what} to a blob"))
    };
    newest.map(Source::Blob).ok_or_else(text)
}

/// An own artifact is asked for news; one of somebody else that may be read is used as it is.
async fn by_url(app: &App, caller: &Caller, namespace: &str, url: &str) -> Result<Source> {
    let own = artifacts::by_source(&*app.store, namespace, ArtifactType::Image, url).await?;
    if own.is_none() {
        for row in artifacts::by_url_visible(&*app.store, url, &caller.namespace).await? {
            if let Some(blob) = version::newest(&*app.store, row.id).await? {
                return Ok(Source::Blob(blob));
            }
        }
    }
    Ok(Source::Url(url.to_owned()))
}

/// Has a URL fetched, or asked for news, for an instance of a namespace.
pub(crate) async fn fetch(app: &App, caller: &Caller, namespace: &str, url: &str) -> Result<ArtifactId> {
    if let Some(own) = artifacts::by_source(&*app.store, namespace, ArtifactType::Image, url).await?
        && !caller.may_change(namespace)
    {
        // A trusted namespace uses what is there, and fetches nothing into it anew.
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

/// The content of an artifact that was awaited. [`Error::NotReady`] while it is being fetched.
pub(crate) async fn awaited(app: &App, id: ArtifactId) -> Result<BlobId> {
    let gone = || Error::Conflict("the image was deleted before it could be used".into());
    let row = artifacts::get(&*app.store, id).await?.ok_or_else(gone)?;
    if operations::is_pending(&*app.store, &artifact::object(id), FetchArtifact::KIND.name).await? {
        return Err(Error::NotReady(format!("image {} is being fetched", row.source_url)));
    }
    match (row.state, version::newest(&*app.store, id).await?) {
        (ArtifactState::Created, Some(blob)) => Ok(blob),
        (ArtifactState::Error, _) => {
            let why = row.error_message.unwrap_or_else(|| "unknown".into());
            Err(Error::Conflict(format!("image {} could not be fetched: {why}", row.source_url)))
        }
        (ArtifactState::Initial, _) => {
            Err(Error::NotReady(format!("image {} is not there yet", row.source_url)))
        }
        (ArtifactState::Created | ArtifactState::Deleted, _) => Err(gone()),
    }
}

/// Makes the content that a disk begins as usable on a node, and says what it is.
pub(crate) async fn ensure_on(app: &App, node: &Arc<dyn NodeApi>, id: BlobId) -> Result<ImageFacts> {
    let gone = || Error::Conflict(format!("blob {id} was deleted before it could be used"));
    let row = blobs::get(&*app.store, id).await?;
    let row = row.filter(|row| row.state == BlobState::Created).ok_or_else(gone)?;
    blob_copy::ensure_here(app, node, id).await?;
    let storage = node.storage();
    let facts = match row.image {
        Some(facts) => facts,
        None => {
            let facts = storage.inspect(id).await.map_err(unusable)?;
            transaction!(app.store, |tx| { Ok(blobs::set_image(tx, id, &facts).await?) })?;
            facts
        }
    };
    match row.depends_on {
        None => storage.convert(id, &facts).await.map_err(unusable)?,
        Some(base) => {
            Box::pin(ensure_on(app, node, base)).await?;
            storage.convert_thin(id, base).await.map_err(unusable)?;
        }
    }
    Ok(facts)
}

/// What nobody should use cannot be used later either; room may come back.
fn unusable(error: Error) -> Error {
    match error {
        Error::Invalid(why) => Error::Conflict(format!("the image cannot be used: {why}")),
        Error::Insufficient(why) => Error::Unavailable(why),
        other => other,
    }
}
