//! Everything that belongs to artifacts besides their rows, read in one statement.

use std::collections::HashMap;

use muster_types::ids::{ArtifactId, BlobId};
use muster_types::object::{ObjectType, Reference};

use crate::attributes::{AttributeParts, ObjectAttributes};
use crate::blobs::{self, BlobRow};
use crate::references::References;
use crate::{Read, Select as _, StoreError, Union, Value, placeholders};

/// The details of some artifacts.
#[derive(Debug, Default)]
pub struct ArtifactDetails {
    /// By artifact.
    pub attributes: HashMap<String, ObjectAttributes>,
    /// The blobs of the versions.
    pub blobs: HashMap<BlobId, BlobRow>,
    /// The references to these blobs, without users that the namespace may not read.
    pub uses: HashMap<String, References>,
}

/// Returns the details of some artifacts as a namespace may read them; `None` reads all.
pub async fn details(
    db: impl Read,
    ids: &[ArtifactId],
    seen_by: Option<&str>,
) -> Result<ArtifactDetails, StoreError> {
    if ids.is_empty() {
        return Ok(ArtifactDetails::default());
    }
    let list = placeholders(ids.len());
    let values: Vec<Value> = ids.iter().map(|id| (*id).into()).collect();
    let versions = format!(
        "SELECT target_id FROM object_references WHERE source_type = 'artifact' AND source_id IN ({list}) \
         AND target_type = 'blob'"
    );
    let mut union = Union::default();
    let attributes = AttributeParts::add(&mut union, ObjectType::Artifact, &list, &values);
    let versions_in = format!("FROM blobs WHERE uuid IN ({versions})");
    let blobs_of = union.add(BlobRow::COLUMNS, versions_in, &values);
    let uses = blobs::add_uses(&mut union, &versions, &values, seen_by);
    let mut rows = union.fetch(db).await?;
    let mut details = ArtifactDetails {
        attributes: attributes.take(&mut rows)?,
        blobs: rows.take(blobs_of)?.into_iter().map(|row: BlobRow| (row.id, row)).collect(),
        uses: HashMap::new(),
    };
    for row in rows.take::<Reference>(uses)? {
        let references = details.uses.entry(row.target_uuid.clone()).or_default();
        references.entry(row.relationship.clone()).or_default().push(row);
    }
    Ok(details)
}
