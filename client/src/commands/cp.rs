//! `muster cp`: files into guests and out of them. On the way a file is a blob.

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
use muster_types::agent_operation::{AgentOperationRecord, AgentOperationState, Mode};
use muster_types::artifact::ArtifactType;
use muster_types::blob::{BlobRecord, HashAlgorithm};
use muster_types::ids::ArtifactId;
use serde_json::Value;

use super::Session;
use super::agent_wait::{
    Asked, INTERRUPTED, Readiness, ask, ended, ready, seconds, succeeded, unless_interrupted,
};
use super::artifact_transfer::add_version;
use super::wait::Patience;
use crate::api::{Answer, Budgets, Client, NewVersion, io_text};
use crate::output::{self, visible};
use crate::progress::{Meter, pace};
use crate::transfer::{
    LocalFile, Policy, PrivatePart, Remembered, Target, Uploaded, download, send_file, send_once, send_stdin,
};

/// The largest file of which nothing is remembered: sending it again takes little.
const SMALL: u64 = 64 << 20;

/// Arguments of `muster cp`.
#[derive(Debug, Args)]
#[command(
    after_help = "One of the two is INSTANCE:/PATH, the other a file here, a folder here to copy into, or - for \
                  standard input or output. A file here with a colon in its name is written ./a:b. Folders are not \
                  copied: pack them with tar."
)]
pub struct Arguments {
    /// What to copy
    #[arg(value_parser = OsStringValueParser::new().try_map(place))]
    source: Place,
    /// Where to; a path in a guest that ends with / is a folder there
    #[arg(value_parser = OsStringValueParser::new().try_map(place))]
    destination: Place,
    /// Permissions of the copy as for chmod, such as 644 or u+x; those of the file if not given
    #[arg(long, value_parser = mode)]
    mode: Option<Mode>,
    /// How long the guest may take, with the time that it waits for its turn; 0 is no end
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    deadline: Option<f64>,
    /// How long nothing may move to or from the guest; 0 is no end
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    progress_timeout: Option<f64>,
    #[command(flatten)]
    readiness: Readiness,
}

impl Arguments {
    fn budgets(&self) -> Budgets {
        Budgets { deadline: self.deadline, progress_timeout: self.progress_timeout }
    }
}

/// Where a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Guest {
        instance: String,
        path: String,
    },
    File(PathBuf),
    /// Standard input or output.
    Stream,
}

/// `-`, `INSTANCE:/PATH`, or a file here.
fn place(text: OsString) -> Result<Place, String> {
    if text == "-" {
        return Ok(Place::Stream);
    }
    let guest = text.to_str().and_then(|text| text.split_once(':'));
    match guest.filter(|(instance, _)| !instance.is_empty() && !instance.contains('/')) {
        Some((instance, path)) if path.starts_with('/') && path != "/" => {
            Ok(Place::Guest { instance: instance.to_owned(), path: path.to_owned() })
        }
        Some((_, "/")) => Err("names no file".to_owned()),
        Some((instance, path)) => Err(format!(
            "a path in a guest begins with /: {instance}:/{path}; for a file here, write ./ before it"
        )),
        None => Ok(Place::File(PathBuf::from(text))),
    }
}

/// Parses a mode as people write it: numbers are octal.
fn mode(text: &str) -> Result<Mode, String> {
    match FileMode::parse(text, Radix::Octal) {
        Some(FileMode::Number(number)) if number <= PERMISSION_BITS => Ok(Mode::Number(number)),
        Some(FileMode::Symbolic(_)) => Ok(Mode::Words(text.to_owned())),
        _ if text.starts_with(|first: char| first.is_ascii_digit()) => {
            Err("must be octal digits, at most 7777".to_owned())
        }
        _ => Err("must be octal digits or words such as u+x".to_owned()),
    }
}

pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<ExitCode> {
    let client = &session.client;
    let (asked, carrier) = (Asked::default(), Cell::new(None));
    let work = async {
        match (&arguments.source, &arguments.destination) {
            (Place::Guest { .. }, Place::Guest { .. }) => {
                bail!("both are in guests: copy to a file here first, then from that")
            }
            (Place::Guest { instance, path }, here) => {
                get(session, &arguments, &asked, Guest { instance, path }, here).await
            }
            (here, Place::Guest { instance, path }) => {
                let sending = Sending { session, arguments: &arguments, asked: &asked, carrier: &carrier };
                sending.put(here, Guest { instance, path }).await
            }
            (Place::File(_) | Place::Stream, Place::File(_) | Place::Stream) => {
                bail!("neither is in a guest: name a file of an instance as INSTANCE:/PATH")
            }
        }
    };
    let done = unless_interrupted(client, &asked, work).await;
    // Made only to carry the bytes, and still there if something went wrong.
    discard(client, &carrier).await;
    Ok(done?.map_or(ExitCode::from(INTERRUPTED), |()| ExitCode::SUCCESS))
}

/// A file in a guest.
#[derive(Debug, Clone, Copy)]
struct Guest<'a> {
    instance: &'a str,
    path: &'a str,
}

impl Guest<'_> {
    fn shown(self) -> String {
        visible(&format!("{}:{}", self.instance, self.path))
    }
}

/// Waits for the end of an operation, and shows that it goes on.
async fn wait(
    client: &Client,
    answer: Answer<AgentOperationRecord>,
    title: &str,
) -> anyhow::Result<(Answer<AgentOperationRecord>, AgentOperationRecord)> {
    let meter = Meter::waiting(title);
    let answer = ended(client, answer.value()?.uuid, |record| {
        meter.wait_for(match record.state {
            AgentOperationState::Preflight => "on its way to the node",
            AgentOperationState::Queued => "waiting for its turn",
            _ => "",
        });
    });
    let answer = answer.await?;
    drop(meter);
    let record = answer.clone().value()?;
    succeeded(&record)?;
    Ok((answer, record))
}

/// Deletes what was made only to carry the bytes.
async fn discard(client: &Client, carrier: &Cell<Option<ArtifactId>>) {
    let Some(id) = carrier.take() else { return };
    match client.delete_artifact(id.to_string().as_str().into()).await {
        Ok(_) => {}
        Err(error) if error.status() == Some(404) => {}
        Err(error) => eprintln!("artifact {id}, which is of no use any more, was not deleted: {error}"),
    }
}

/// A file on its way into a guest.
struct Sending<'a> {
    session: &'a Session,
    arguments: &'a Arguments,
    asked: &'a Asked,
    carrier: &'a Cell<Option<ArtifactId>>,
}

impl Sending<'_> {
    async fn put(&self, here: &Place, guest: Guest<'_>) -> anyhow::Result<()> {
        let client = &self.session.client;
        let local = match here {
            Place::File(file) => Some(open(file)?),
            Place::Guest { .. } | Place::Stream => None,
        };
        let name = local.as_ref().map(LocalFile::name);
        let path = path_in_guest(guest.path, name.as_deref())?;
        let guest = Guest { path: &path, ..guest };
        let mode = self.arguments.mode.clone().or(match here {
            Place::File(file) => {
                Some(Mode::Number(fs::metadata(file)?.permissions().mode() & PERMISSION_BITS))
            }
            Place::Guest { .. } | Place::Stream => None,
        });
        // Nobody wants to learn that after a long upload.
        ready(client, guest.instance, &mut Patience::of(self.arguments.readiness.wait)).await?;
        let begun = Instant::now();
        let (answer, blob) = match &local {
            Some(local) => self.send(local, guest, mode.as_ref()).await?,
            None => {
                let uploaded = send_stdin(client, io::stdin(), Policy::default()).await?;
                let blob = self.carry(&uploaded).await?;
                (self.order(&blob, guest, mode.as_ref()).await?, blob)
            }
        };
        // The operation holds the content now.
        discard(client, self.carrier).await;
        let (answer, _) = wait(client, answer, &format!("to {}", guest.shown())).await?;
        let from = name.map_or_else(|| "standard input".to_owned(), |name| visible(&name));
        let pace = pace(size(&blob), begun.elapsed());
        self.session.done(&answer, &format!("{} is {from}: {pace}", guest.shown()))
    }

    /// Sends a file, unless the cluster has its content.
    async fn send(
        &self,
        local: &LocalFile,
        guest: Guest<'_>,
        mode: Option<&Mode>,
    ) -> anyhow::Result<(Answer<AgentOperationRecord>, BlobRecord)> {
        let client = &self.session.client;
        let mut known = if local.size > SMALL { Some(Remembered::of(client, local)?) } else { None };
        let sha512 = match &mut known {
            Some(known) => known.sha512(local).await?,
            None => local.sha512().await?,
        };
        let forget = |known: Option<Remembered>| known.map_or((), Remembered::forget);
        if let Some(blob) = client.find_blob(HashAlgorithm::Sha512.as_str(), &sha512).await?.value()? {
            match self.order(&blob, guest, mode).await {
                // It was deleted meanwhile.
                Err(error) if error.to_string() == "blob not found" => {}
                answer => {
                    forget(known);
                    return Ok((answer?, blob));
                }
            }
        }
        let uploaded = match &mut known {
            Some(known) => send_file(client, local, known, Policy::default()).await?,
            None => send_once(client, local, Policy::default()).await?,
        };
        let blob = self.carry(&uploaded).await?;
        // The upload is used up.
        forget(known);
        Ok((self.order(&blob, guest, mode).await?, blob))
    }

    /// Makes a blob of an upload, which takes an artifact.
    async fn carry(&self, uploaded: &Uploaded) -> anyhow::Result<BlobRecord> {
        let client = &self.session.client;
        let version = NewVersion {
            name: format!("cp-{}", uploaded.upload),
            artifact_type: ArtifactType::Other,
            source_url: None,
            shared: false,
            namespace: None,
        };
        let artifact = add_version(client, &version, uploaded).await?.value()?;
        self.carrier.set(Some(artifact.uuid));
        let versions = client.versions(artifact.uuid.to_string().as_str().into()).await?.value()?;
        let blob = versions.into_iter().last().context("the server has made nothing of what was sent")?.blob;
        match &blob.sha512 {
            Some(sum) if !sum.eq_ignore_ascii_case(&uploaded.sha512) => {
                bail!("what arrived is not what was sent: its sha512 is {sum} instead of {}", uploaded.sha512)
            }
            Some(_) | None => Ok(blob),
        }
    }

    async fn order(
        &self,
        blob: &BlobRecord,
        guest: Guest<'_>,
        mode: Option<&Mode>,
    ) -> anyhow::Result<Answer<AgentOperationRecord>> {
        let client = &self.session.client;
        let budgets = self.arguments.budgets();
        let question = async || client.put(guest.instance, blob.uuid, guest.path, mode, budgets).await;
        ask(client, guest.instance, self.arguments.readiness, self.asked, question).await
    }
}

fn size(blob: &BlobRecord) -> u64 {
    u64::try_from(blob.size).unwrap_or(0)
}

fn open(file: &Path) -> anyhow::Result<LocalFile> {
    if file.is_dir() {
        bail!("{} is a folder: pack it with tar, and copy that", file.display());
    }
    LocalFile::open(file)
}

/// Where something goes in a guest: into a folder under its own name, or where the path says.
fn path_in_guest(path: &str, name: Option<&str>) -> anyhow::Result<String> {
    match (path.ends_with('/'), name) {
        (false, _) => Ok(path.to_owned()),
        (true, Some(name)) => Ok(format!("{path}{name}")),
        (true, None) => bail!("standard input has no name: name a file in {path}"),
    }
}

/// Where something from a guest goes here.
fn target(guest: Guest<'_>, here: &Place) -> anyhow::Result<Target> {
    let Place::File(file) = here else { return Ok(Target::Stdout) };
    let name = guest.path.rsplit('/').next().filter(|name| !matches!(*name, "" | "." | ".."));
    let name = name.with_context(|| format!("{} is not a file", guest.shown()))?;
    if file.is_dir() {
        return Target::new(&file.join(name), true);
    }
    if file.as_os_str().as_encoded_bytes().ends_with(b"/") {
        bail!("there is no folder {}", file.display());
    }
    Target::new(file, true)
}

async fn get(
    session: &Session,
    arguments: &Arguments,
    asked: &Asked,
    guest: Guest<'_>,
    here: &Place,
) -> anyhow::Result<()> {
    let client = &session.client;
    let target = target(guest, here)?;
    let mode = match &arguments.mode {
        Some(Mode::Words(words)) => bail!("--mode {words}: for a file here, give octal digits"),
        Some(Mode::Number(mode)) => Some(*mode),
        None => None,
    };
    let begun = Instant::now();
    let question = async || client.get_file(guest.instance, guest.path, arguments.budgets()).await;
    let answer = ask(client, guest.instance, arguments.readiness, asked, question).await?;
    let (answer, record) = wait(client, answer, &format!("from {}", guest.shown())).await?;
    let result = record.results.get("0").context("the server does not say what it got")?;
    let blob = result.get("content_blob").and_then(Value::as_str);
    let blob = client.blob(blob.context("the server does not say what it got")?).await?.value()?;
    let part = match &target {
        Target::File(file) => Some(PrivatePart::new(&blob, file)?),
        Target::Stdout => None,
    };
    download(client, &blob, &target, Policy::default()).await?;
    drop(part);
    let Target::File(file) = &target else { return Ok(()) };
    // What would let others act as its owner stays in the guest, unless it is asked for.
    let given = result.get("stat_result").and_then(|facts| facts.get("mode")).and_then(Value::as_u64);
    let given = given.and_then(|mode| u32::try_from(mode).ok()).map(|mode| mode & 0o777);
    if let Some(mode) = mode.or(given) {
        let set = fs::set_permissions(file, Permissions::from_mode(mode));
        set.map_err(|error| anyhow!("cannot set the mode of {}: {}", file.display(), io_text(&error)))?;
    }
    if session.json {
        return output::print_json(answer.json());
    }
    let pace = pace(size(&blob), begun.elapsed());
    let text = format!("{} is {}: {pace}", file.display(), guest.shown());
    eprintln!("{}", visible(&text));
    Ok(())
}

#[cfg(test)]
mod tests {
    use muster_types::ids::UploadId;
    use serde_json::json;

    use super::super::agent::tests::example;
    use super::super::instance_tables::tests::example as instance;
    use super::*;
    use crate::fake::Fake;

    const LOOK: &str = "GET /agentoperations/7d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
    const ARTIFACT: &str = "3d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

    fn given(source: &str, destination: &str) -> Arguments {
        Arguments {
            source: place(source.into()).unwrap(),
            destination: place(destination.into()).unwrap(),
            mode: None,
            deadline: None,
            progress_timeout: Some(9.0),
            readiness: Readiness { wait: 0 },
        }
    }

    fn blob() -> Value {
        json!({
            "uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "state": "created", "metadata": {}, "version": 6, "size": 9,
            "modified": null, "fetched_at": 0.0, "depends_on": null, "transcodes": {}, "locations": [],
            "reference_count": 1, "sha512": null, "checksums": {}, "last_used": null, "references_to": {},
            "references_from": {}
        })
    }

    #[test]
    fn places_are_told_apart_by_their_colon() {
        let guest =
            |instance: &str, path: &str| Place::Guest { instance: instance.into(), path: path.into() };
        for (text, expected) in [
            ("web:/etc/hosts", guest("web", "/etc/hosts")),
            ("web:/a:b", guest("web", "/a:b")),
            ("-", Place::Stream),
            ("./web:/etc", Place::File("./web:/etc".into())),
            ("/tmp/a:b", Place::File("/tmp/a:b".into())),
            (":x", Place::File(":x".into())),
            ("file", Place::File("file".into())),
        ] {
            assert_eq!(place(text.into()), Ok(expected), "{text}");
        }
        for text in ["web:hosts", "web:", "web:/", "web:~/x"] {
            assert!(place(text.into()).is_err(), "{text}");
        }
    }

    #[test]
    fn modes_are_octal_or_words() {
        assert_eq!(mode("0755"), Ok(Mode::Number(0o755)));
        assert_eq!(mode("ugo+r"), Ok(Mode::Words("ugo+r".into())));
        for text in ["", "8", "77777", "0o7", "rw", "u+x;ls"] {
            assert!(mode(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_folder_takes_a_file_under_its_own_name() {
        assert_eq!(path_in_guest("/tmp/", Some("a")).unwrap(), "/tmp/a");
        assert_eq!(path_in_guest("/tmp/b", Some("a")).unwrap(), "/tmp/b");
        assert!(path_in_guest("/tmp/", None).is_err());
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest { instance: "web", path: "/etc/hosts" };
        let here = Place::File(folder.path().to_owned());
        assert_eq!(target(guest, &here).unwrap(), Target::File(folder.path().join("hosts")));
        assert!(target(Guest { path: "/etc/", ..guest }, &here).is_err());
        assert!(target(guest, &Place::File(folder.path().join("absent/"))).is_err());
        assert!(open(folder.path()).unwrap_err().to_string().contains("is a folder"));
    }

    #[tokio::test]
    async fn exactly_one_place_is_in_a_guest() {
        for (source, destination, expected) in
            [("a", "b", "neither is in a guest"), ("web:/a", "db:/a", "both are in guests")]
        {
            let (client, fake) = Fake::serve(vec![]).await;
            let error = run(given(source, destination), &Session { client, json: false }).await.unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}");
            assert_eq!(fake.asked().len(), 0);
        }
    }

    #[tokio::test]
    async fn a_file_from_a_guest_has_its_content_and_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let result = json!({ "0": {
            "path": "/a", "result": true, "content_blob": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
            "stat_result": { "mode": 0o104_640, "size": 9 }
        } });
        let (client, fake) = Fake::serve(vec![
            ("POST /instances/web/agent/get", vec![(200, json!(example(&json!({ "state": "queued" }))))]),
            (LOOK, vec![(200, json!(example(&json!({ "results": result }))))]),
            ("GET /blobs/1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, blob())]),
            ("GET /blobs/1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/checksum/sha512", vec![(200, json!(null))]),
            ("GET /blobs/1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/data", vec![(200, json!("content"))]),
        ])
        .await;
        let file = folder.path().join("a");
        fs::write(&file, "old").unwrap();
        let arguments = given("web:/a", folder.path().to_str().unwrap());
        run(arguments, &Session { client, json: false }).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "\"content\"");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & PERMISSION_BITS, 0o640);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let asked = r#"POST /instances/web/agent/get {"path":"/a","progress_timeout_seconds":9.0}"#;
        assert_eq!(fake.asked()[0], asked);
    }

    #[tokio::test]
    async fn what_a_guest_refuses_leaves_nothing_here() {
        let folder = tempfile::tempdir().unwrap();
        let failed = json!({ "state": "error", "error_message": "no such file", "results": {} });
        let (client, _) = Fake::serve(vec![
            ("POST /instances/web/agent/get", vec![(200, json!(example(&json!({ "state": "queued" }))))]),
            (LOOK, vec![(200, json!(example(&failed)))]),
        ])
        .await;
        let arguments = given("web:/a", folder.path().join("b").to_str().unwrap());
        let error = run(arguments, &Session { client, json: false }).await.unwrap_err();
        assert_eq!(error.to_string(), "no such file");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn what_only_carries_the_bytes_is_deleted() {
        let artifact = json!({
            "uuid": ARTIFACT, "name": "cp-x", "namespace": "ci", "artifact_type": "other", "state": "created",
            "error_message": null, "source_url": "x", "shared": false, "max_versions": 3, "index": 1, "blobs": {},
            "metadata": {}, "version": 9, "last_cluster_operation": null, "references_to": {}, "references_from": {}
        });
        let mut version = blob();
        version["index"] = json!(1);
        let upload: UploadId = serde_json::from_value(json!("0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01")).unwrap();
        let (client, fake) = Fake::serve(vec![
            ("POST /artifacts/upload/cp-0d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, artifact.clone())]),
            ("GET /artifacts/3d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/versions", vec![(200, json!([version]))]),
            ("POST /instances/web/agent/put", vec![(200, json!(example(&json!({ "state": "preflight" }))))]),
            ("DELETE /artifacts/3d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, artifact)]),
            ("GET /instances/web", vec![(200, json!(instance(&json!({ "agent_state": "ready" }))))]),
        ])
        .await;
        let session = Session { client, json: false };
        let (arguments, asked, carrier) = (given("-", "web:/a"), Asked::default(), Cell::new(None));
        let sending = Sending { session: &session, arguments: &arguments, asked: &asked, carrier: &carrier };
        let uploaded = Uploaded { upload, sha512: "ab".into(), summary: String::new() };
        let blob = sending.carry(&uploaded).await.unwrap();
        let guest = Guest { instance: "web", path: "/a" };
        sending.order(&blob, guest, Some(&Mode::Number(0o644))).await.unwrap();
        discard(&session.client, &carrier).await;
        discard(&session.client, &carrier).await;
        let calls = fake.asked();
        let put = r#"{"blob_uuid":"1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01","mode":420,"path":"/a","progress_timeout_seconds":9.0}"#;
        assert_eq!(calls[2], format!("POST /instances/web/agent/put {put}"));
        assert_eq!(calls[3..], [format!("DELETE /artifacts/{ARTIFACT}")]);
    }
}
