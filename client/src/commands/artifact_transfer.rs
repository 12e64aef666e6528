//! The commands of `muster artifact` that transfer content.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use muster_types::artifact::{ArtifactRecord, ArtifactState, ArtifactType};
use muster_types::blob::{BlobState, HashAlgorithm};
use muster_types::ids::BlobId;
use muster_types::object::check_name;
use muster_types::operation::{OperationHandle, OperationRecord, OperationState};

use super::arguments::path_parser;
use super::artifact_tables::details;
use super::session::Session;
use super::wait::PollTimer;
use super::{blob, operation};
use crate::api::{ApiResponse, ArtifactRef, Client, Error, ListQuery, NewVersion, VersionSource};
use crate::exit_code::timed_out;
use crate::output::{self, escape_control};
use crate::progress::{ProgressMeter, show_progress};
use crate::transfer::{
    LocalFile, Retries, RetryPolicy, UploadState, Uploaded, send_file, send_stdin, unless_interrupted,
};

/// Arguments of `muster artifact upload`.
#[derive(Debug, Args)]
pub struct UploadArguments {
    name: String,
    /// File to upload; - is standard input
    #[arg(value_parser = path_parser())]
    file: PathBuf,
    /// Type of the content; images are inspected
    #[arg(long = "type", value_name = "TYPE", value_parser = upload_types(), default_value = "image")]
    artifact_type: ArtifactType,
    /// URL to record as its origin
    #[arg(long, value_name = "URL")]
    source_url: Option<String>,
    /// Let all namespaces read it
    #[arg(long)]
    shared: bool,
    /// Namespace to create it in, if not your own
    #[arg(long, value_name = "NAMESPACE")]
    in_namespace: Option<String>,
    /// Upload even if the cluster already has the same content
    #[arg(long)]
    no_search: bool,
}

impl UploadArguments {
    /// Returns the version to create.
    fn version(&self) -> NewVersion {
        NewVersion {
            name: self.name.clone(),
            artifact_type: self.artifact_type,
            source_url: self.source_url.clone(),
            shared: self.shared,
            namespace: self.in_namespace.clone(),
        }
    }
}

fn upload_types() -> impl TypedValueParser<Value = ArtifactType> {
    PossibleValuesParser::new([ArtifactType::Image, ArtifactType::Other].map(ArtifactType::as_str))
        .try_map(|word| word.parse::<ArtifactType>())
}

/// Waits for a fetch operation and reports its outcome.
pub(super) async fn fetch(
    session: &Session,
    response: ApiResponse<ArtifactRecord>,
    timer: Option<PollTimer>,
) -> anyhow::Result<()> {
    let before = response.clone().value()?;
    let (Some(handle), Some(timer)) = (&before.last_cluster_operation, timer) else {
        return session.show(response, details);
    };
    let consequence =
        || format!("the fetch continues: see its progress with `muster artifact show {}`", before.uuid);
    unless_interrupted(report_fetch(session, &before, handle, timer), consequence).await
}

/// Waits for the end of a fetch operation and reports its outcome.
async fn report_fetch(
    session: &Session,
    before: &ArtifactRecord,
    handle: &OperationHandle,
    timer: PollTimer,
) -> anyhow::Result<()> {
    let operation = wait_for_operation(&session.client, handle, &before.name, timer).await?;
    let id = before.uuid.to_string();
    let response = session.client.artifact(id.as_str().into()).await?;
    let artifact = response.clone().value()?;
    session.show(response, details)?;
    if let Some(reason) = failure(&artifact, &operation) {
        let (source, reason) = (escape_control(&artifact.source_url), escape_control(&reason));
        if artifact.index > 0 && artifact.state == ArtifactState::Created {
            bail!("failed to fetch {source}: {reason}; the existing version {} is kept", artifact.index);
        }
        bail!("failed to fetch {source}: {reason}");
    }
    output::status(&outcome(before, &artifact));
    Ok(())
}

/// Waits until an operation has ended, and shows its progress.
async fn wait_for_operation(
    client: &Client,
    handle: &OperationHandle,
    name: &str,
    mut timer: PollTimer,
) -> anyhow::Result<OperationRecord> {
    let (op_type, op_uuid) = (handle.op_type.as_str(), handle.op_uuid.to_string());
    let meter = ProgressMeter::new(&format!("fetching {name}"), 0, None);
    meter.announce();
    let mut retries = Retries::new(RetryPolicy::default());
    loop {
        let operation = match client.operation(op_type, &op_uuid).await.and_then(ApiResponse::value) {
            Ok(operation) => operation,
            Err(error) => {
                retries.back_off(error, Some(&meter)).await?;
                continue;
            }
        };
        retries.reset();
        if operation.state.is_final() {
            return Ok(operation);
        }
        if let Some(progress) = &operation.progress {
            show_progress(&meter, progress);
        }
        if !timer.tick().await {
            return Err(timed_out(format!("timed out; the fetch of {} continues", escape_control(name))));
        }
    }
}

/// Returns why a fetch failed, if it did.
fn failure(artifact: &ArtifactRecord, operation: &OperationRecord) -> Option<String> {
    let failed = operation.state != OperationState::Complete || artifact.state == ArtifactState::Error;
    let reported = artifact.error_message.clone();
    reported.or_else(|| failed.then(|| operation::error(operation)))
}

fn outcome(before: &ArtifactRecord, after: &ArtifactRecord) -> String {
    let size = after
        .blobs
        .get(&after.index)
        .map_or_else(|| "-".to_owned(), |version| output::format_size(version.size));
    if before.index == after.index {
        format!("version {} of {} is still the newest", after.index, after.name)
    } else {
        format!("version {} of {} fetched, {size}", after.index, after.name)
    }
}

/// The consequences of interrupting an upload, in the order of its phases.
pub(super) const NOTHING_SENT: &str = "nothing was sent";
const NOT_RESUMABLE: &str = "an upload from standard input cannot be resumed";
const RESUMABLE: &str = "the server keeps the received part: run the same command again to resume";
const UNKNOWN: &str = "it is unknown whether a version was created: check with `muster artifact list`";

/// Uploads a file or standard input as the newest version of an artifact.
pub(super) async fn upload(session: &Session, arguments: &UploadArguments) -> anyhow::Result<()> {
    let version = arguments.version();
    // The server checks the name only after the upload, which may take hours.
    check_name("name", &version.name)?;
    let consequence = Cell::new(NOTHING_SENT);
    let work = async {
        if arguments.file == Path::new("-") {
            consequence.set(NOT_RESUMABLE);
            let uploaded = send_stdin(&session.client, io::stdin(), RetryPolicy::default()).await?;
            consequence.set(UNKNOWN);
            finish(&session.client, &version, &uploaded, None).await
        } else {
            let search = !arguments.no_search;
            store_file(&session.client, &arguments.file, &version, search, &consequence).await
        }
    };
    let (response, summary) = unless_interrupted(work, || consequence.get().to_owned()).await?;
    session.show(response, details)?;
    output::status(&summary);
    Ok(())
}

/// Adds a file as the newest version of an artifact, and returns the artifact and what was sent. With `search`, content that
/// the cluster already has is not sent.
pub(super) async fn store_file(
    client: &Client,
    file: &Path,
    version: &NewVersion,
    search: bool,
    consequence: &Cell<&'static str>,
) -> anyhow::Result<(ApiResponse<ArtifactRecord>, String)> {
    let local = LocalFile::open(file)?;
    let mut state = UploadState::load(client, &local)?;
    if search && let Some(blob) = find_blob(client, &local, &mut state).await? {
        consequence.set(UNKNOWN);
        match client.add_version(version, VersionSource::Blob(blob)).await {
            Ok(response) => {
                state.discard();
                return Ok((response, "the cluster already has this content: nothing was sent".to_owned()));
            }
            Err(error) if error.is_not_found() && is_deleted(client, blob).await? => {}
            Err(error) => return Err(error.into()),
        }
    }
    consequence.set(RESUMABLE);
    let uploaded = send_file(client, &local, &mut state, RetryPolicy::default()).await?;
    consequence.set(UNKNOWN);
    finish(client, version, &uploaded, Some(state)).await
}

/// Returns a blob with the content of a file, if the caller can read one.
async fn find_blob(
    client: &Client,
    local: &LocalFile,
    state: &mut UploadState,
) -> anyhow::Result<Option<BlobId>> {
    let sha512 = state.sha512(local).await?;
    let found = client.find_blob(HashAlgorithm::Sha512.as_str(), &sha512).await?.value()?;
    Ok(found.map(|blob| blob.uuid))
}

/// Returns whether a blob that was found earlier no longer exists.
pub(super) async fn is_deleted(client: &Client, blob: BlobId) -> Result<bool, Error> {
    match client.blob(&blob.to_string()).await {
        Ok(response) => Ok(response.value()?.state == BlobState::Deleted),
        Err(error) if error.is_not_found() => Ok(true),
        Err(error) => Err(error),
    }
}

/// Creates a version from an upload and verifies its checksum. Returns the artifact and what was sent.
async fn finish(
    client: &Client,
    version: &NewVersion,
    uploaded: &Uploaded,
    state: Option<UploadState>,
) -> anyhow::Result<(ApiResponse<ArtifactRecord>, String)> {
    let response = add_version(client, version, uploaded).await?;
    // The upload is consumed.
    if let Some(state) = state {
        state.discard();
    }
    let artifact = response.clone().value()?;
    let index = verify_version(client, &artifact, &uploaded.sha512).await?;
    Ok((response, format!("uploaded version {index} of {}: {}", artifact.name, uploaded.summary)))
}

/// Creates a version from an upload. If the response is lost, checks whether the version was created.
pub(super) async fn add_version(
    client: &Client,
    version: &NewVersion,
    uploaded: &Uploaded,
) -> anyhow::Result<ApiResponse<ArtifactRecord>> {
    let mut retries = Retries::new(RetryPolicy::default());
    let mut response_lost = false;
    loop {
        let error = match client.add_version(version, VersionSource::Upload(uploaded.upload)).await {
            Ok(response) => return Ok(response),
            Err(error) => error,
        };
        // An earlier attempt consumed the upload, but its response was lost.
        if response_lost && error.is_not_found() {
            let namespace = version.namespace.as_deref().or(Some(client.own_namespace()));
            let artifact = ArtifactRef { artifact: &version.name, namespace };
            return client.artifact(artifact).await.map_err(|error| {
                anyhow!(
                    "it is unknown whether a version was created: {error}; check with `muster artifact list`"
                )
            });
        }
        response_lost |= matches!(error, Error::Unreachable { .. });
        retries.back_off(error, None).await?;
    }
}

/// Returns the number of the version with the sent content. Usually the newest, unless there are concurrent uploads.
async fn verify_version(client: &Client, artifact: &ArtifactRecord, sha512: &str) -> anyhow::Result<i64> {
    let id = artifact.uuid.to_string();
    let versions = client.versions(id.as_str().into(), &ListQuery::default()).await?.value()?;
    let same = |sum: &Option<String>| sum.as_ref().is_some_and(|sum| sum.eq_ignore_ascii_case(sha512));
    if let Some(version) = versions.iter().rev().find(|version| same(&version.blob.sha512)) {
        return Ok(version.index);
    }
    let newest = versions.last();
    let actual = newest.and_then(|version| version.blob.sha512.as_deref()).unwrap_or("unknown");
    bail!(
        "version {} of artifact {id} is corrupt: its sha512 is {actual} instead of {sha512}; delete it with \
         `muster artifact delete-version {id} {}` and upload again",
        artifact.index,
        artifact.index
    )
}

/// Downloads a version of an artifact to a file.
pub(super) async fn download(
    session: &Session,
    artifact: ArtifactRef<'_>,
    file: &Path,
    version: Option<i64>,
    force: bool,
) -> anyhow::Result<()> {
    let record = session.client.artifact(artifact).await?.value()?;
    let index = version.unwrap_or(record.index);
    let name = escape_control(&record.name);
    let Some(version) = record.blobs.get(&index) else {
        let existing: Vec<String> = record.blobs.keys().map(ToString::to_string).collect();
        match (record.blobs.is_empty(), record.error_message) {
            (true, Some(reason)) => bail!("artifact {name} has no version: {}", escape_control(&reason)),
            (true, None) => bail!("artifact {name} has no version yet"),
            (false, _) => bail!("artifact {name} has no version {index}, only {}", existing.join(", ")),
        }
    };
    let content = format!("version {index} of {name}, {}", output::format_size(version.size));
    blob::download(session, &version.uuid.to_string(), file, force, &content).await
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
    fn fetch_failed_if_the_artifact_or_the_operation_failed() {
        let complete = operation(&json!(null));
        let failed = operation(&json!({ "code": "c", "message": "it broke", "details": {} }));
        assert_eq!(failure(&artifact("created", 1, None), &complete), None);
        assert_eq!(failure(&artifact("created", 1, Some("gone")), &complete).as_deref(), Some("gone"));
        assert_eq!(failure(&artifact("error", 0, None), &failed).as_deref(), Some("it broke (c)"));
    }

    #[test]
    fn fetch_reports_whether_there_is_a_new_version() {
        let (old, new) = (artifact("created", 1, None), artifact("created", 2, None));
        assert_eq!(outcome(&old, &new), "version 2 of debian fetched, -");
        assert_eq!(outcome(&new, &new), "version 2 of debian is still the newest");
    }
}
