//! Imports images that the operator passes to a daemon at startup: shared artifacts of `system`, with a label.

use std::io;
use std::path::Path;

use futures_util::stream;
use muster_types::artifact::{ArtifactRecord, ArtifactType};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::check_name;
use muster_types::storage::ByteStream;
use muster_types::{Error, Result};
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;

use crate::app::App;
use crate::auth::Caller;
use crate::objects::artifact::{self, ArtifactRequest};
use crate::objects::node_location::storage_node;
use crate::objects::{label, upload};

/// The number of bytes read at a time.
const PIECE: usize = 1 << 20;

/// Makes a file the newest version of the artifact `sf://upload/system/<name>`, and points the label `<name>` at it. An
/// identical version is not added again.
pub async fn run(app: &App, name: &str, file: &Path) -> Result<ArtifactRecord> {
    check_name("name", name)?;
    let caller = Caller {
        namespace: SYSTEM_NAMESPACE.into(),
        key_name: "start".into(),
        scopes: None,
        minted: None,
        request_id: uuid::Uuid::now_v7().to_string(),
        method: "START".into(),
        path: "/".into(),
        remote: String::new(),
    };
    let unreadable = |error: io::Error| Error::Invalid(format!("{}: {error}", file.display()));
    let data = bytes_of(File::open(file).await.map_err(unreadable)?);
    let node = storage_node(app)?;
    let begun = upload::create(app, &caller).await?;
    let from = upload::find(app, &caller, &begun.uuid.to_string()).await?;
    upload::append(app, node, &from, Some(0), data).await?;
    let request = ArtifactRequest {
        name: Some(name.to_owned()),
        namespace: None,
        artifact_type: ArtifactType::Image,
        source_url: format!("sf://upload/{SYSTEM_NAMESPACE}/{name}"),
        shared: true,
        max_versions: 0,
    };
    let record = artifact::from_upload(app, &caller, &request, node, &from).await?;
    let blob = record.blob_uuid.map(|id| id.to_string());
    label::update(app, &caller, name, blob.as_deref(), 0, true).await?;
    Ok(record)
}

fn bytes_of(file: File) -> ByteStream {
    Box::pin(stream::try_unfold(file, |mut file| async move {
        let mut piece = Vec::with_capacity(PIECE);
        let read = (&mut file).take(PIECE as u64).read_to_end(&mut piece).await;
        match read.map_err(|error| Error::Internal(error.to_string()))? {
            0 => Ok(None),
            _ => Ok(Some((piece.into(), file))),
        }
    }))
}
