//! `muster cp`: copies files into and out of guests, through a blob.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use muster_agent::mode::{FileMode, PERMISSION_BITS, Radix};
use muster_types::agent_operation::{AgentOperationRecord, AgentOperationState, ChmodMode};
use muster_types::artifact::ArtifactType;
use muster_types::blob::{BlobRecord, HashAlgorithm};
use muster_types::ids::ArtifactId;
use serde_json::Value;

use super::agent_wait::{
    EXIT_INTERRUPTED, PendingOperation, ReadinessArguments, check_success, delete_if_interrupted,
    parse_seconds, submit, wait_until_final, wait_until_ready,
};
use super::artifact_transfer::{add_version, is_deleted};
use super::lookup::{NamedType, resolve};
use super::session::Session;
use super::wait::PollTimer;
use crate::api::{AgentTimeouts, ApiResponse, Client, Error, ListQuery, NewVersion};
use crate::error_text::io_error_text;
use crate::output::{self, escape_control};
use crate::progress::{ProgressMeter, format_throughput};
use crate::transfer::{
    DownloadTarget, LocalFile, PrivatePartFile, RetryPolicy, UploadState, Uploaded, download, send_file,
    send_file_untracked, send_stdin,
};

/// The maximum size of a file that is uploaded without saving state, because sending it again is cheap.
const MAX_UNTRACKED_SIZE: u64 = 64 << 20;

/// Arguments of `muster cp`.
#[derive(Debug, Args)]
#[command(
    after_help = "One of the two is INSTANCE:/PATH, the other a local file, a local directory to copy into, or - for \
                  standard input or output. Write a local file with a colon in its name as ./a:b. Directories are not \
                  copied: pack them with tar."
)]
pub struct Arguments {
    /// File to copy
    #[arg(value_parser = OsStringValueParser::new().try_map(parse_location))]
    source: Location,
    /// Destination; a path in a guest that ends with / is a directory
    #[arg(value_parser = OsStringValueParser::new().try_map(parse_location))]
    destination: Location,
    /// Permissions of the copy as for chmod, such as 644 or u+x; those of the source if not given
    #[arg(long, value_parser = parse_mode)]
    mode: Option<ChmodMode>,
    /// Timeout of the operation in the guest, including its time in the queue; 0 is unlimited
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    deadline: Option<f64>,
    /// Timeout without progress of the transfer to or from the guest; 0 is unlimited
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    progress_timeout: Option<f64>,
    #[command(flatten)]
    readiness: ReadinessArguments,
}

impl Arguments {
    fn timeouts(&self) -> AgentTimeouts {
        AgentTimeouts { deadline: self.deadline, progress_timeout: self.progress_timeout }
    }
}

/// The location of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Location {
    Guest {
        instance: String,
        path: String,
    },
    File(PathBuf),
    /// Standard input or output.
    Stream,
}

/// Parses `-`, `INSTANCE:/PATH`, or a local file.
fn parse_location(text: OsString) -> Result<Location, String> {
    if text == "-" {
        return Ok(Location::Stream);
    }
    let guest = text.to_str().and_then(|text| text.split_once(':'));
    match guest.filter(|(instance, _)| !instance.is_empty() && !instance.contains('/')) {
        Some((instance, path)) if path.starts_with('/') && path != "/" => {
            Ok(Location::Guest { instance: instance.to_owned(), path: path.to_owned() })
        }
        Some((_, "/")) => Err("must name a file".to_owned()),
        Some((instance, path)) => Err(format!(
            "a path in a guest must start with /, as in {instance}:/{path}; prefix a local file with ./"
        )),
        None => Ok(Location::File(PathBuf::from(text))),
    }
}

/// Parses permissions as for chmod: numbers are octal.
fn parse_mode(text: &str) -> Result<ChmodMode, String> {
    match FileMode::parse(text, Radix::Octal) {
        Some(FileMode::Number(number)) if number <= PERMISSION_BITS => Ok(ChmodMode::Number(number)),
        Some(FileMode::Symbolic(_)) => Ok(ChmodMode::Symbolic(text.to_owned())),
        _ if text.starts_with(|first: char| first.is_ascii_digit()) => {
            Err("must be octal digits, at most 7777".to_owned())
        }
        _ => Err("must be octal digits or a symbolic mode such as u+x".to_owned()),
    }
}

pub(super) async fn run(mut arguments: Arguments, session: &Session) -> anyhow::Result<ExitCode> {
    let client = &session.client;
    let (pending, temporary) = (PendingOperation::default(), Cell::new(None));
    match (&mut arguments.source, &mut arguments.destination) {
        (Location::Guest { .. }, Location::Guest { .. }) => {}
        (Location::Guest { instance, .. }, _) | (_, Location::Guest { instance, .. }) => {
            resolve(client, NamedType::Instance, instance, None).await?;
        }
        _ => {}
    }
    let work = async {
        match (&arguments.source, &arguments.destination) {
            (Location::Guest { .. }, Location::Guest { .. }) => {
                bail!("both files are in guests: copy to a local file first")
            }
            (Location::Guest { instance, path }, local) => {
                get(session, &arguments, &pending, GuestFile { instance, path }, local).await
            }
            (local, Location::Guest { instance, path }) => {
                let copy =
                    CopyToGuest { session, arguments: &arguments, pending: &pending, temporary: &temporary };
                copy.run(local, GuestFile { instance, path }).await
            }
            (Location::File(_) | Location::Stream, Location::File(_) | Location::Stream) => {
                bail!("neither file is in a guest: give one of them as INSTANCE:/PATH")
            }
        }
    };
    let done = delete_if_interrupted(client, &pending, work).await;
    // Still exists if the copy failed.
    delete_temporary(client, &temporary).await;
    Ok(done?.map_or(ExitCode::from(EXIT_INTERRUPTED), |()| ExitCode::SUCCESS))
}

/// A file in a guest.
#[derive(Debug, Clone, Copy)]
struct GuestFile<'a> {
    instance: &'a str,
    path: &'a str,
}

impl GuestFile<'_> {
    fn display(self) -> String {
        escape_control(&format!("{}:{}", self.instance, self.path))
    }
}

/// Waits until an operation has succeeded, and shows its state.
pub(super) async fn wait_for_success(
    client: &Client,
    response: ApiResponse<AgentOperationRecord>,
    title: &str,
) -> anyhow::Result<(ApiResponse<AgentOperationRecord>, AgentOperationRecord)> {
    let meter = ProgressMeter::spinner(title);
    let response = wait_until_final(client, response.value()?.uuid, |record| {
        meter.set_status(match record.state {
            AgentOperationState::Preflight => "being sent to the node",
            AgentOperationState::Queued => "queued",
            _ => "",
        });
    });
    let response = response.await?;
    drop(meter);
    let record = response.clone().value()?;
    check_success(&record)?;
    Ok((response, record))
}

/// Creates a blob from an upload, which requires a temporary artifact.
pub(super) async fn create_blob(
    client: &Client,
    uploaded: &Uploaded,
    temporary: &Cell<Option<ArtifactId>>,
) -> anyhow::Result<BlobRecord> {
    let version = NewVersion {
        name: format!("cp-{}", uploaded.upload),
        artifact_type: ArtifactType::Other,
        source_url: None,
        shared: false,
        namespace: None,
    };
    let artifact = add_version(client, &version, uploaded).await?.value()?;
    temporary.set(Some(artifact.uuid));
    let versions =
        client.versions(artifact.uuid.to_string().as_str().into(), &ListQuery::default()).await?.value()?;
    let blob = versions.into_iter().last().context("the server created no version from the upload")?.blob;
    match &blob.sha512 {
        Some(checksum) if !checksum.eq_ignore_ascii_case(&uploaded.sha512) => {
            bail!("the upload is corrupt: its sha512 is {checksum} instead of {}", uploaded.sha512)
        }
        Some(_) | None => Ok(blob),
    }
}

/// Deletes the artifact that was created only to transfer the content.
pub(super) async fn delete_temporary(client: &Client, temporary: &Cell<Option<ArtifactId>>) {
    let Some(id) = temporary.take() else { return };
    match client.delete_artifact(id.to_string().as_str().into()).await {
        Ok(_) => {}
        Err(error) if error.is_not_found() => {}
        Err(error) => crate::message!("failed to delete the temporary artifact {id}: {error}"),
    }
}

/// A copy of a file into a guest.
struct CopyToGuest<'a> {
    session: &'a Session,
    arguments: &'a Arguments,
    pending: &'a PendingOperation,
    temporary: &'a Cell<Option<ArtifactId>>,
}

impl CopyToGuest<'_> {
    async fn run(&self, location: &Location, guest: GuestFile<'_>) -> anyhow::Result<()> {
        let client = &self.session.client;
        let local = match location {
            Location::File(file) => Some(open_local(file)?),
            Location::Guest { .. } | Location::Stream => None,
        };
        let name = local.as_ref().map(LocalFile::name);
        let path = guest_path(guest.path, name.as_deref())?;
        let guest = GuestFile { path: &path, ..guest };
        let mode = self.arguments.mode.clone().or(match location {
            Location::File(file) => {
                Some(ChmodMode::Number(fs::metadata(file)?.permissions().mode() & PERMISSION_BITS))
            }
            Location::Guest { .. } | Location::Stream => None,
        });
        // Checked before a long upload.
        wait_until_ready(client, guest.instance, &mut PollTimer::new(self.arguments.readiness.wait)).await?;
        let started = Instant::now();
        let (response, blob) = match &local {
            Some(local) => self.send(local, guest, mode.as_ref()).await?,
            None => {
                let uploaded = send_stdin(client, io::stdin(), RetryPolicy::default()).await?;
                let blob = create_blob(client, &uploaded, self.temporary).await?;
                (self.submit_put(&blob, guest, mode.as_ref()).await?, blob)
            }
        };
        // The operation references the content now.
        delete_temporary(client, self.temporary).await;
        let (response, _) =
            wait_for_success(client, response, &format!("copying to {}", guest.display())).await?;
        let from = name.map_or_else(|| "standard input".to_owned(), |name| escape_control(&name));
        let throughput = format_throughput(size(&blob)?, started.elapsed());
        self.session.confirm(&response, &format!("copied {from} to {}: {throughput}", guest.display()))
    }

    /// Uploads a file, unless the cluster already has its content, and submits the operation.
    async fn send(
        &self,
        local: &LocalFile,
        guest: GuestFile<'_>,
        mode: Option<&ChmodMode>,
    ) -> anyhow::Result<(ApiResponse<AgentOperationRecord>, BlobRecord)> {
        let client = &self.session.client;
        let mut state =
            if local.size > MAX_UNTRACKED_SIZE { Some(UploadState::load(client, local)?) } else { None };
        let sha512 = match &mut state {
            Some(state) => state.sha512(local).await?,
            None => local.sha512().await?,
        };
        let discard = |state: Option<UploadState>| state.map_or((), UploadState::discard);
        if let Some(blob) = client.find_blob(HashAlgorithm::Sha512.as_str(), &sha512).await?.value()? {
            match self.submit_put(&blob, guest, mode).await {
                Ok(response) => {
                    discard(state);
                    return Ok((response, blob));
                }
                Err(error) if is_not_found(&error) && is_deleted(client, blob.uuid).await? => {}
                Err(error) => {
                    discard(state);
                    return Err(error);
                }
            }
        }
        let uploaded = match &mut state {
            Some(state) => send_file(client, local, state, RetryPolicy::default()).await?,
            None => send_file_untracked(client, local, RetryPolicy::default()).await?,
        };
        let blob = create_blob(client, &uploaded, self.temporary).await?;
        // The upload is consumed.
        discard(state);
        Ok((self.submit_put(&blob, guest, mode).await?, blob))
    }

    /// Submits the operation that writes a blob to a file in the guest.
    async fn submit_put(
        &self,
        blob: &BlobRecord,
        guest: GuestFile<'_>,
        mode: Option<&ChmodMode>,
    ) -> anyhow::Result<ApiResponse<AgentOperationRecord>> {
        let client = &self.session.client;
        let timeouts = self.arguments.timeouts();
        let request = async || client.put(guest.instance, blob.uuid, guest.path, mode, timeouts).await;
        submit(client, guest.instance, self.arguments.readiness, self.pending, request).await
    }
}

fn is_not_found(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(Error::is_not_found)
}

fn size(blob: &BlobRecord) -> anyhow::Result<u64> {
    u64::try_from(blob.size).with_context(|| format!("the server sent an invalid size of blob {}", blob.uuid))
}

fn open_local(file: &Path) -> anyhow::Result<LocalFile> {
    if file.is_dir() {
        bail!("{} is a directory: pack it with tar and copy the archive", file.display());
    }
    LocalFile::open(file)
}

/// Returns the path in a guest: a directory is extended with the file name.
fn guest_path(path: &str, name: Option<&str>) -> anyhow::Result<String> {
    match (path.ends_with('/'), name) {
        (false, _) => Ok(path.to_owned()),
        (true, Some(name)) => Ok(format!("{path}{name}")),
        (true, None) => bail!("standard input has no name: give a file in {path}"),
    }
}

/// Returns where to write a file from a guest.
fn local_target(guest: GuestFile<'_>, location: &Location) -> anyhow::Result<DownloadTarget> {
    let Location::File(file) = location else { return Ok(DownloadTarget::Stdout) };
    let name = guest.path.rsplit('/').next().filter(|name| !matches!(*name, "" | "." | ".."));
    let name = name.with_context(|| format!("{} is not a file", guest.display()))?;
    if file.is_dir() {
        return DownloadTarget::new(&file.join(name), true);
    }
    if file.as_os_str().as_encoded_bytes().ends_with(b"/") {
        bail!("the directory {} does not exist", file.display());
    }
    DownloadTarget::new(file, true)
}

async fn get(
    session: &Session,
    arguments: &Arguments,
    pending: &PendingOperation,
    guest: GuestFile<'_>,
    location: &Location,
) -> anyhow::Result<()> {
    let client = &session.client;
    let target = local_target(guest, location)?;
    let mode = match &arguments.mode {
        Some(ChmodMode::Symbolic(words)) => bail!("--mode {words}: a local file needs octal digits"),
        Some(ChmodMode::Number(mode)) => Some(*mode),
        None => None,
    };
    let started = Instant::now();
    let request = async || client.get_file(guest.instance, guest.path, arguments.timeouts()).await;
    let response = submit(client, guest.instance, arguments.readiness, pending, request).await?;
    let (response, record) =
        wait_for_success(client, response, &format!("copying from {}", guest.display())).await?;
    let result = record.results.get("0").context("the server does not return the content")?;
    let blob = result.get("content_blob").and_then(Value::as_str);
    let blob = client.blob(blob.context("the server does not return the content")?).await?.value()?;
    let part = match &target {
        DownloadTarget::File(file) => Some(PrivatePartFile::new(&blob, file)?),
        DownloadTarget::Stdout => None,
    };
    download(client, &blob, &target, RetryPolicy::default()).await?;
    drop(part);
    let DownloadTarget::File(file) = &target else { return Ok(()) };
    // Set-user-ID and similar bits are copied only with --mode.
    let source_mode =
        result.get("stat_result").and_then(|details| details.get("mode")).and_then(Value::as_u64);
    let source_mode = source_mode.and_then(|mode| u32::try_from(mode).ok()).map(|mode| mode & 0o777);
    if let Some(mode) = mode.or(source_mode) {
        let set = fs::set_permissions(file, Permissions::from_mode(mode));
        set.map_err(|error| anyhow!("cannot set the mode of {}: {}", file.display(), io_error_text(&error)))?;
    }
    if session.is_structured() {
        return session.print_value(response.json());
    }
    let throughput = format_throughput(size(&blob)?, started.elapsed());
    let text = format!("copied {} to {}: {throughput}", guest.display(), file.display());
    output::status(&text);
    Ok(())
}

#[cfg(test)]
mod tests;
