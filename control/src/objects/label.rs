//! Labels: names for blobs, stored as artifacts of their own type.

use muster_types::artifact::{ArtifactRecord, ArtifactState, ArtifactType};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::check_name;
use muster_types::{Error, Result};

use crate::app::App;
use crate::auth::Caller;
use crate::objects::artifact::{self, ArtifactRequest};
use muster_store::artifacts::{self, ArtifactRow};

/// Returns the namespace and the name of a path: `<label>` or `<namespace>/<label>`.
fn parse(caller: &Caller, path: &str) -> Result<(String, String)> {
    let (namespace, label) = path.split_once('/').unwrap_or((&caller.namespace, path));
    check_name("label", label)?;
    check_name("namespace", namespace)?;
    Ok((namespace.to_owned(), label.to_owned()))
}

fn source_url(namespace: &str, label: &str) -> String {
    format!("sf://label/{namespace}/{label}")
}

/// Points a label at a blob: creates the label, or adds a version.
pub async fn update(
    app: &App,
    caller: &Caller,
    path: &str,
    blob: Option<&str>,
    max_versions: i64,
    shared: bool,
) -> Result<ArtifactRecord> {
    let (namespace, label) = parse(caller, path)?;
    let blob = blob.ok_or_else(|| Error::Invalid("blob_uuid: Missing data for required field.".into()))?;
    let request = ArtifactRequest {
        source_url: source_url(&namespace, &label),
        name: Some(label),
        namespace: Some(namespace),
        artifact_type: ArtifactType::Label,
        shared,
        max_versions,
    };
    artifact::from_blob(app, caller, &request, blob).await
}

/// Returns the label that a name without a namespace refers to: the caller's own, otherwise one that `system` shares.
pub(crate) async fn by_name(app: &App, caller: &Caller, label: &str) -> Result<Option<ArtifactRow>> {
    for namespace in [caller.namespace.as_str(), SYSTEM_NAMESPACE] {
        let url = source_url(namespace, label);
        let row = artifacts::by_source(&*app.store, namespace, ArtifactType::Label, &url).await?;
        let is_visible = |row: &ArtifactRow| row.shared || namespace == caller.namespace;
        if let Some(row) = row.filter(|row| row.state != ArtifactState::Deleted && is_visible(row)) {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

async fn find(app: &App, caller: &Caller, path: &str) -> Result<(ArtifactRow, Error)> {
    let (namespace, label) = parse(caller, path)?;
    let absent = || Error::NotFound(format!("label {path} not found"));
    let url = source_url(&namespace, &label);
    let row = artifacts::by_source(&*app.store, &namespace, ArtifactType::Label, &url).await?;
    Ok((row.ok_or_else(absent)?, absent()))
}

/// Returns a label that the caller may read.
pub async fn get(app: &App, caller: &Caller, path: &str) -> Result<ArtifactRecord> {
    if !path.contains('/')
        && let Some(row) = by_name(app, caller, path).await?
    {
        return artifact::to_record(&*app.store, caller, row).await;
    }
    let (row, absent) = find(app, caller, path).await?;
    if row.shared || caller.may_see(&*app.store, &row.namespace).await? {
        artifact::to_record(&*app.store, caller, row).await
    } else {
        Err(absent)
    }
}

/// Deletes a label.
pub async fn delete(app: &App, caller: &Caller, path: &str) -> Result<ArtifactRecord> {
    let (row, absent) = find(app, caller, path).await?;
    if !caller.may_change(&row.namespace) {
        return Err(absent);
    }
    artifact::delete(app, caller, &row.id.to_string(), None).await?.ok_or(absent)
}
