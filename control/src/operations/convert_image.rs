//! Makes the copy of an image that machines use, on the node where the image came in.

use muster_types::blob::BlobState;
use muster_types::event::{Event, EventType};
use muster_types::ids::BlobId;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::artifact;
use crate::objects::version::VERSION_OF;
use crate::queue::{ConvertImage, Operation as _};
use muster_store::operations::OperationRow;
use muster_store::{artifacts, blobs, references, transaction};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    ConvertImage::KIND,
    &[Step {
        name: "image_convert",
        run: |app, row| Box::pin(convert(app, row)),
        undo: Undo::Run(|app, row| Box::pin(tell(app, row))),
    }],
);

/// What cannot be converted cannot be used: the artifacts say so.
async fn tell(app: &App, row: &OperationRow) -> Result<()> {
    let reason =
        row.error_report.as_ref().map_or_else(|| "unknown".to_owned(), |report| report.message.clone());
    let reason = format!("the image cannot be used: {reason}");
    let uses = references::of_object(&*app.store, &row.target).await?.to;
    for user in uses.get(VERSION_OF).into_iter().flatten() {
        let Ok(id) = user.source_uuid.parse() else { continue };
        transaction!(app.store, |tx| { Ok(artifacts::set_error(tx, id, Some(&reason)).await?) })?;
        let event = Event::new(EventType::Status, artifact::object(id), "the image cannot be converted");
        app.events.record(event.with("blob_uuid", row.target.id.clone()).with("reason", reason.clone()));
    }
    Ok(())
}

async fn convert(app: &App, row: &OperationRow) -> Result<()> {
    let id: BlobId = row.target.id.parse().map_err(|_| Error::Internal("a blob's id is not one".into()))?;
    let ConvertImage { node: wanted } = ConvertImage::parameters(row)?;
    let node = app.nodes.iter().find(|node| node.identity().id == wanted);
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
    node.storage().convert(id, &facts).await.map_err(|error| match error {
        // There may be room later.
        Error::Insufficient(why) => Error::Unavailable(why),
        other => other,
    })
}
