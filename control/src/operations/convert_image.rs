//! Makes the copy of an image that machines use, on the node where the image came in.

use muster_types::blob::BlobState;
use muster_types::ids::BlobId;
use muster_types::operation::OperationType;
use muster_types::{Error, Result};

use super::{Kind, Step, Undo};
use crate::app::App;
use crate::store::operations::OperationRow;
use crate::store::{blobs, transaction};

pub const KIND: Kind = Kind {
    operation_type: OperationType::ImageCache,
    name: "convert_image",
    removes_target: false,
    steps: &[Step {
        name: "image_convert",
        run: |app, row| Box::pin(convert(app, row)),
        undo: Undo::NotNeeded("a conversion can be made again and dropped at any time"),
    }],
};

async fn convert(app: &App, row: &OperationRow) -> Result<()> {
    let id: BlobId = row.target.id.parse().map_err(|_| Error::Internal("a blob's id is not one".into()))?;
    let wanted = row.arguments["node"].as_str().unwrap_or_default();
    let node = app.nodes.iter().find(|node| node.identity().id.to_string() == wanted);
    let node = node.ok_or_else(|| Error::Internal(format!("node {wanted} is not one of ours")))?;
    let Some(blob) = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created) else {
        // Deleted before anybody used it.
        return Ok(());
    };
    let facts = match blob.image {
        Some(facts) => facts,
        None => {
            let facts = node.storage().inspect(id).await?;
            transaction!(app.store, |tx| { Ok(blobs::set_image(tx, id, &facts).await?) })?;
            facts
        }
    };
    node.storage().convert(id, &facts).await
}
