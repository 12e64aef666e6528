//! The commands of `muster artifact` that move content.

use std::cell::Cell;
use std::io;
use std::path::Path;

use anyhow::{anyhow, bail};
use muster_types::artifact::{ArtifactRecord, ArtifactState};
use muster_types::blob::HashAlgorithm;
use muster_types::object::check_name;
use muster_types::operation::{OperationHandle, OperationRecord, OperationState};

use super::artifact::{Upload, facts};
use super::{Session, blob, operation};
use crate::api::{Answer, ArtifactRef, Client, Error, NewVersion, VersionSource};
use crate::output::{self, bytes, visible};
use crate::progress::Meter;
use crate::transfer::{
    LocalFile, Policy, Remembered, Tries, Uploaded, pause, send_file, send_stdin, unless_interrupted,
};

/// Waits for a fetch, and tells how it ended.
pub(super) async fn fetch(
    session: &Session,
    answer: Answer<ArtifactRecord>,
    no_wait: bool,
) -> anyhow::Result<()> {
    let begun = answer.clone().value()?;
    let handle = match &begun.last_cluster_operation {
        Some(handle) if !no_wait => handle,
        _ => return session.show(answer, facts),
    };
    let goes_on = || format!("the cluster goes on: `muster artifact show {}` tells how far", begun.uuid);
    unless_interrupted(fetched(session, &begun, handle), goes_on).await
}

/// Waits for the end of a fetch, and tells how it was.
async fn fetched(session: &Session, begun: &ArtifactRecord, handle: &OperationHandle) -> anyhow::Result<()> {
    let operation = wait(&session.client, handle, &begun.name).await?;
    let id = begun.uuid.to_string();
    let answer = session.client.artifact(id.as_str().into()).await?;
    let artifact = answer.clone().value()?;
    session.show(answer, facts)?;
    if let Some(why) = failure(&artifact, &operation) {
        let (source, why) = (visible(&artifact.source_url), visible(&why));
        if artifact.index > 0 && artifact.state == ArtifactState::Created {
            bail!(
                "{source} was not fetched: {why}; version {}, which was there before, is kept",
                artifact.index
            );
        }
        bail!("{source} was not fetched: {why}");
    }
    eprintln!("{}", visible(&outcome(begun, &artifact)));
    Ok(())
}

/// The operation at its end.
async fn wait(client: &Client, handle: &OperationHandle, name: &str) -> anyhow::Result<OperationRecord> {
    let (op_type, op_uuid) = (handle.op_type.as_str(), handle.op_uuid.to_string());
    let meter = Meter::new(&format!("fetching {name}"), 0, None);
    let mut tries = Tries::new(Policy::default());
    loop {
        let operation = match client.operation(op_type, &op_uuid).await.and_then(Answer::value) {
            Ok(operation) => operation,
            Err(error) => {
                tries.again(error, Some(&meter)).await?;
                continue;
            }
        };
        tries.succeeded();
        if operation.state.is_final() {
            return Ok(operation);
        }
        if let Some(progress) = &operation.progress {
            let number = |number: i64| u64::try_from(number).unwrap_or(0);
            if let Some(total) = progress.total {
                meter.set_total(number(total));
            }
            meter.at(number(progress.done));
        }
        pause().await;
    }
}

/// Why nothing was fetched, if nothing was.
fn failure(artifact: &ArtifactRecord, operation: &OperationRecord) -> Option<String> {
    let failed = operation.state != OperationState::Complete || artifact.state == ArtifactState::Error;
    let known = artifact.error_message.clone();
    known.or_else(|| failed.then(|| operation::error(operation)))
}

fn outcome(before: &ArtifactRecord, after: &ArtifactRecord) -> String {
    let size =
        after.blobs.get(&after.index).map_or_else(|| "-".to_owned(), |version| output::size(version.size));
    if before.index == after.index {
        format!("version {} of {} is still the newest", after.index, after.name)
    } else {
        format!("version {} of {} fetched, {size}", after.index, after.name)
    }
}

/// What becomes of an upload that is interrupted, in the order in which that changes.
const NOTHING_SENT: &str = "nothing was sent";
const LOST: &str = "standard input cannot be gone on with";
const KEPT: &str = "what was sent is on the server: run the same command again to go on";
const UNKNOWN: &str = "whether a version was made is not known: `muster artifact list` tells";

/// Makes a file or standard input the newest version of an artifact.
pub(super) async fn upload(session: &Session, what: &Upload) -> anyhow::Result<()> {
    let version = what.version();
    // Refused at the end by the server, too; but that may be hours away.
    check_name("name", &version.name)?;
    let left = Cell::new(NOTHING_SENT);
    let work = async {
        if what.file == Path::new("-") {
            left.set(LOST);
            let uploaded = send_stdin(&session.client, io::stdin(), Policy::default()).await?;
            left.set(UNKNOWN);
            finish(session, &version, &uploaded, None).await
        } else {
            upload_file(session, what, &version, &left).await
        }
    };
    unless_interrupted(work, || left.get().to_owned()).await
}

async fn upload_file(
    session: &Session,
    what: &Upload,
    version: &NewVersion,
    left: &Cell<&'static str>,
) -> anyhow::Result<()> {
    let local = LocalFile::open(&what.file)?;
    let mut known = Remembered::of(&session.client, &local)?;
    if !what.no_search
        && let Some(source) = find(&session.client, &local, &mut known).await?
    {
        left.set(UNKNOWN);
        match session.client.add_version(version, source).await {
            Ok(answer) => {
                known.forget();
                eprintln!("the cluster has this content already: nothing was sent");
                return session.show(answer, facts);
            }
            // It was deleted meanwhile.
            Err(error) if error.status() == Some(404) && error.to_string().contains("blob") => {}
            Err(error) => return Err(error.into()),
        }
    }
    left.set(KEPT);
    let uploaded = send_file(&session.client, &local, &mut known, Policy::default()).await?;
    left.set(UNKNOWN);
    finish(session, version, &uploaded, Some(known)).await
}

/// A blob with the content of a file, if the caller can read one.
async fn find(
    client: &Client,
    local: &LocalFile,
    known: &mut Remembered,
) -> anyhow::Result<Option<VersionSource>> {
    let sha512 = known.sha512(local).await?;
    let found = client.find_blob(HashAlgorithm::Sha512.as_str(), &sha512).await?.value()?;
    Ok(found.map(|blob| VersionSource::Blob(blob.uuid)))
}

/// Makes a version of an upload, and compares what the server has with what was meant.
async fn finish(
    session: &Session,
    version: &NewVersion,
    uploaded: &Uploaded,
    known: Option<Remembered>,
) -> anyhow::Result<()> {
    let answer = add_version(&session.client, version, uploaded).await?;
    // The upload is used up, whatever comes now.
    if let Some(known) = known {
        known.forget();
    }
    let artifact = answer.clone().value()?;
    let index = stored(&session.client, &artifact, &uploaded.sha512).await?;
    session.show(answer, facts)?;
    eprintln!("version {index} of {} holds what was sent: {}", visible(&artifact.name), uploaded.summary);
    Ok(())
}

/// Makes a version of an upload. If the answer is lost, it is found out whether it was done.
pub(super) async fn add_version(
    client: &Client,
    version: &NewVersion,
    uploaded: &Uploaded,
) -> anyhow::Result<Answer<ArtifactRecord>> {
    let mut tries = Tries::new(Policy::default());
    let mut lost = false;
    loop {
        let error = match client.add_version(version, VersionSource::Upload(uploaded.upload)).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        // The upload is gone because an earlier try has used it, without being able to say so.
        if lost && error.status() == Some(404) {
            let namespace = version.namespace.as_deref().or(Some(client.acts_as()));
            let made = ArtifactRef { artifact: &version.name, namespace };
            return client.artifact(made).await.map_err(|error| {
                anyhow!("whether a version was made is not known: {error}; look at `muster artifact list`")
            });
        }
        lost |= matches!(error, Error::Unreachable { .. });
        tries.again(error, None).await?;
    }
}

/// Number of the version that holds what was sent. Normally the newest; somebody else may have been faster.
async fn stored(client: &Client, artifact: &ArtifactRecord, sha512: &str) -> anyhow::Result<i64> {
    let id = artifact.uuid.to_string();
    let versions = client.versions(id.as_str().into()).await?.value()?;
    let same = |sum: &Option<String>| sum.as_ref().is_some_and(|sum| sum.eq_ignore_ascii_case(sha512));
    if let Some(version) = versions.iter().rev().find(|version| same(&version.blob.sha512)) {
        return Ok(version.index);
    }
    let newest = versions.last();
    let there = newest.and_then(|version| version.blob.sha512.as_deref()).unwrap_or("not known");
    bail!(
        "version {} of artifact {id} is NOT what was sent: its sha512 is {there} instead of {sha512}; delete it with \
         `muster artifact delete-version {id} {}` and upload again",
        artifact.index,
        artifact.index
    )
}

/// Stores a version of an artifact in a file.
pub(super) async fn download(
    session: &Session,
    artifact: ArtifactRef<'_>,
    file: &Path,
    version: Option<i64>,
    force: bool,
) -> anyhow::Result<()> {
    let record = session.client.artifact(artifact).await?.value()?;
    let index = version.unwrap_or(record.index);
    let name = visible(&record.name);
    let Some(version) = record.blobs.get(&index) else {
        let known: Vec<String> = record.blobs.keys().map(ToString::to_string).collect();
        match (record.blobs.is_empty(), record.error_message) {
            (true, Some(why)) => bail!("artifact {name} has no version: {}", visible(&why)),
            (true, None) => bail!("artifact {name} has no version yet"),
            (false, _) => bail!("artifact {name} has no version {index}, only {}", known.join(", ")),
        }
    };
    let size = bytes(u64::try_from(version.size).unwrap_or(0));
    let done = format!("version {index} of {name}, {size}");
    blob::download(session, &version.uuid.to_string(), file, force, &done).await
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn artifact(state: &str, index: i64, error: Option<&str>) -> ArtifactRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": "debian", "namespace": "ci", "artifact_type": "image",
            "state": state, "error_message": error, "source_url": "debian:12", "shared": false, "max_versions": 3,
            "index": index, "blobs": {}, "metadata": {}, "version": 9, "last_cluster_operation": null,
            "references_to": {}, "references_from": {}
        }))
        .unwrap()
    }

    fn operation(error: &Value) -> OperationRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "object_type": "clusteroperation",
            "operation_type": "artifact_fetch_op", "state": if error.is_null() { "complete" } else { "error" },
            "tasks": [], "depends_on": [], "error_report": error, "namespace": "ci", "target_object_type": "artifact",
            "target_uuid": "x", "attempts": 1, "progress": null, "created": 0.0, "updated": 0.0, "version": 1
        }))
        .unwrap()
    }

    #[test]
    fn a_fetch_failed_if_the_artifact_or_the_operation_says_so() {
        let well = operation(&json!(null));
        let report = operation(&json!({ "code": "c", "message": "it broke", "details": {} }));
        assert_eq!(failure(&artifact("created", 1, None), &well), None);
        assert_eq!(failure(&artifact("created", 1, Some("gone")), &well).as_deref(), Some("gone"));
        assert_eq!(failure(&artifact("error", 0, None), &report).as_deref(), Some("it broke (c)"));
    }

    #[test]
    fn a_fetch_tells_whether_there_was_something_new() {
        let (old, new) = (artifact("created", 1, None), artifact("created", 2, None));
        assert_eq!(outcome(&old, &new), "version 2 of debian fetched, -");
        assert_eq!(outcome(&new, &new), "version 2 of debian is still the newest");
    }
}
