//! Converts an image into the format that VMs use, on the node that received the image.
//! See docs/decisions/0016.

use muster_types::blob::BlobState;
use muster_types::event::{Event, EventType};
use muster_types::ids::BlobId;
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo, failure_message, parse_target_id};
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
        undo: Undo::Run(|app, row| Box::pin(fail(app, row))),
    }],
);

/// Records the reason in the artifacts that have the image as a version.
async fn fail(app: &App, row: &OperationRow) -> Result<()> {
    let reason = format!("the image cannot be used: {}", failure_message(row));
    let references = references::of_object(&*app.store, &row.target).await?.to;
    for version in references.get(VERSION_OF).into_iter().flatten() {
        let artifact = &version.source_uuid;
        let id = artifact
            .parse()
            .map_err(|_| Error::Internal(format!("{artifact:?} is not the id of an artifact")))?;
        transaction!(app.store, |tx| { Ok(artifacts::set_error(tx, id, Some(&reason)).await?) })?;
        let event = Event::new(EventType::Status, artifact::object(id), "failed to convert the image");
        app.events.record(event.with("blob_uuid", row.target.id.clone()).with("reason", reason.clone()));
    }
    Ok(())
}

async fn convert(app: &App, row: &OperationRow) -> Result<()> {
    let id: BlobId = parse_target_id(row)?;
    let ConvertImage { node: node_id } = ConvertImage::parameters(row)?;
    let node = app.nodes.iter().find(|node| node.identity().id == node_id);
    let node = node.ok_or_else(|| Error::Internal(format!("node {node_id} is not a node of this daemon")))?;
    let Some(blob) = blobs::get(&*app.store, id).await?.filter(|row| row.state == BlobState::Created) else {
        // Deleted before it was used.
        return Ok(());
    };
    let namespace = row.namespace.as_deref().unwrap_or(SYSTEM_NAMESPACE);
    let facts = match blob.image {
        Some(facts) => facts,
        None => {
            let facts = node.storage().inspect(namespace, id).await?;
            transaction!(app.store, |tx| { Ok(blobs::set_image(tx, id, &facts).await?) })?;
            facts
        }
    };
    node.storage().convert(namespace, id, &facts).await.map_err(|error| match error {
        // Space may become available later.
        Error::InsufficientCapacity(why) => Error::Unavailable(why),
        other => other,
    })
}
