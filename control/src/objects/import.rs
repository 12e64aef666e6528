//! Imports images that the operator passes to a daemon at startup: shared artifacts of `system`, with a label.

use std::io;
use std::path::Path;

use futures_util::future::BoxFuture;
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
const CHUNK_BYTES: usize = 1 << 20;

/// Makes a file the newest version of the artifact `sf://upload/system/<name>`, and points the label `<name>` at it. An
/// identical version is not added again. Boxed, so that it is compiled with this crate and not again with its caller.
pub fn run<'a>(app: &'a App, name: &'a str, file: &'a Path) -> BoxFuture<'a, Result<ArtifactRecord>> {
    Box::pin(import(app, name, file))
}

async fn import(app: &App, name: &str, file: &Path) -> Result<ArtifactRecord> {
    check_name("name", name)?;
    let caller = Caller::daemon("start");
    let unreadable = |error: io::Error| Error::Invalid(format!("{}: {error}", file.display()));
    let data = read_chunks(File::open(file).await.map_err(unreadable)?);
    let node = storage_node(app)?;
    let upload_record = upload::create(app, &caller).await?;
    let upload_row = upload::find(app, &caller, &upload_record.uuid.to_string()).await?;
    upload::append(app, &caller, node, &upload_row, Some(0), None, data).await?;
    let request = ArtifactRequest {
        name: Some(name.to_owned()),
        namespace: None,
        artifact_type: ArtifactType::Image,
        source_url: format!("sf://upload/{SYSTEM_NAMESPACE}/{name}"),
        shared: true,
        max_versions: 0,
    };
    let record = artifact::from_upload(app, &caller, &request, node, &upload_row).await?;
    let blob = record.blob_uuid.map(|id| id.to_string());
    label::update(app, &caller, name, blob.as_deref(), 0, true).await?;
    Ok(record)
}

fn read_chunks(file: File) -> ByteStream {
    Box::pin(stream::try_unfold(file, |mut file| async move {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        let read = (&mut file).take(CHUNK_BYTES as u64).read_to_end(&mut chunk).await;
        match read.map_err(|error| Error::Internal(error.to_string()))? {
            0 => Ok(None),
            _ => Ok(Some((chunk.into(), file))),
        }
    }))
}
