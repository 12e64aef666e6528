//! `muster artifact`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use muster_types::artifact::{ArtifactRecord, ArtifactType, VersionRecord};
use muster_types::ids::ArtifactId;

use super::artifact_transfer::{download, fetch, upload};
use super::{Session, blob, events, metadata, operation, path_parser};
use crate::api::{ArtifactRef, NewVersion, Object};
use crate::output::{Table, compact, or_dash, size};
use crate::time::iso;

/// The commands about images and other named content. An artifact goes by its name or its id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the artifacts that you can see
    List,
    /// Show one artifact
    Show {
        #[command(flatten)]
        which: Which,
    },
    /// Have the cluster fetch an image, or look for a newer one where it came from
    Fetch {
        /// Where the image is, or its name, such as debian:12
        url: String,
        /// Everybody may read it
        #[arg(long)]
        shared: bool,
        /// Namespace that it is for, if not the one that you act as
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Do not wait for the end of it
        #[arg(long)]
        no_wait: bool,
    },
    /// Make a file the newest version of an artifact; run again, it goes on where it stopped
    Upload(Upload),
    /// Store a version of an artifact in a file; run again, it goes on where it stopped
    Download {
        #[command(flatten)]
        which: Which,
        /// Where to store it; - is standard output
        #[arg(value_parser = path_parser())]
        file: PathBuf,
        /// Number of the version, if not the newest
        #[arg(long, value_name = "N")]
        version: Option<i64>,
        /// Replace the file if it is there
        #[arg(long)]
        force: bool,
    },
    /// List the versions of an artifact, oldest first
    Versions {
        #[command(flatten)]
        which: Which,
    },
    /// Delete an artifact with all its versions
    Delete {
        #[command(flatten)]
        which: Which,
    },
    /// Delete one version of an artifact; with the last one the artifact goes
    DeleteVersion {
        #[command(flatten)]
        which: Which,
        #[arg(value_name = "N")]
        index: i64,
    },
    /// Delete every artifact of a namespace
    DeleteAll {
        /// Namespace that loses its artifacts, if not the one that you act as
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Say that you mean it
        #[arg(long, required = true)]
        yes: bool,
    },
    /// Set how many versions are kept; 0 is the cluster's default
    MaxVersions {
        #[command(flatten)]
        which: Which,
        #[arg(value_name = "N")]
        most: u32,
    },
    /// Let everybody read an artifact
    Share {
        #[command(flatten)]
        which: Which,
    },
    /// End that everybody may read an artifact
    Unshare {
        #[command(flatten)]
        which: Which,
    },
    /// Show the events of an artifact, newest first
    Events {
        artifact: String,
        #[command(flatten)]
        which: events::Which,
    },
    /// List the operations on an artifact that have not ended, newest first
    Operations {
        artifact: String,
        /// With those that have ended
        #[arg(long)]
        all: bool,
    },
    /// Show the metadata of an artifact
    Metadata { artifact: String },
    /// Set an item of an artifact's metadata
    SetMetadata {
        artifact: String,
        #[command(flatten)]
        item: metadata::Item,
    },
    /// Delete an item of an artifact's metadata
    DeleteMetadata {
        artifact: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

/// Which artifact.
#[derive(Debug, Clone, Args)]
pub struct Which {
    artifact: String,
    /// Only if it is in this namespace
    #[arg(long, value_name = "NAMESPACE")]
    in_namespace: Option<String>,
}

impl Which {
    pub(super) fn reference(&self) -> ArtifactRef<'_> {
        ArtifactRef { artifact: &self.artifact, namespace: self.in_namespace.as_deref() }
    }
}

/// What to upload.
#[derive(Debug, Args)]
pub struct Upload {
    name: String,
    /// What to send; - is standard input
    #[arg(value_parser = path_parser())]
    pub(super) file: PathBuf,
    /// An image is looked at before it is taken
    #[arg(long = "type", value_name = "TYPE", value_parser = types(), default_value = "image")]
    artifact_type: String,
    /// Where it is said to come from
    #[arg(long, value_name = "URL")]
    source_url: Option<String>,
    /// Everybody may read it
    #[arg(long)]
    shared: bool,
    /// Namespace that it is for, if not the one that you act as
    #[arg(long, value_name = "NAMESPACE")]
    in_namespace: Option<String>,
    /// Send it even if the cluster may have the same content
    #[arg(long)]
    pub(super) no_search: bool,
}

impl Upload {
    /// The version that is to be made of it.
    pub(super) fn version(&self) -> NewVersion {
        let image = self.artifact_type == ArtifactType::Image.as_str();
        NewVersion {
            name: self.name.clone(),
            artifact_type: if image { ArtifactType::Image } else { ArtifactType::Other },
            source_url: self.source_url.clone(),
            shared: self.shared,
            namespace: self.in_namespace.clone(),
        }
    }
}

fn types() -> PossibleValuesParser {
    PossibleValuesParser::new([ArtifactType::Image, ArtifactType::Other].map(ArtifactType::as_str))
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List => session.show(client.artifacts().await?, table),
        Command::Show { which } => session.show(client.artifact(which.reference()).await?, facts),
        Command::Fetch { url, shared, in_namespace, no_wait } => {
            let answer = client.fetch_artifact(&url, shared, in_namespace.as_deref()).await?;
            fetch(session, answer, no_wait).await
        }
        Command::Upload(what) => upload(session, &what).await,
        Command::Download { which, file, version, force } => {
            download(session, which.reference(), &file, version, force).await
        }
        Command::Versions { which } => session.show(client.versions(which.reference()).await?, versions),
        Command::Delete { which } => {
            let answer = client.delete_artifact(which.reference()).await?;
            session.done(&answer, &format!("artifact {} deleted", which.artifact))
        }
        Command::DeleteVersion { which, index } => {
            let answer = client.delete_version(which.reference(), index).await?;
            session.done(&answer, &format!("version {index} of artifact {} deleted", which.artifact))
        }
        Command::DeleteAll { in_namespace, yes: _ } => {
            session.show(client.delete_artifacts(in_namespace.as_deref()).await?, deletions)
        }
        Command::MaxVersions { which, most } => {
            let answer = client.set_max_versions(which.reference(), most).await?;
            let most = if most == 0 { "the default number of".to_owned() } else { format!("at most {most}") };
            session.done(&answer, &format!("{most} versions of artifact {} are kept", which.artifact))
        }
        Command::Share { which } => {
            let answer = client.share_artifact(which.reference()).await?;
            session.done(&answer, &format!("everybody may read artifact {}", which.artifact))
        }
        Command::Unshare { which } => {
            let answer = client.unshare_artifact(which.reference()).await?;
            session.done(&answer, &format!("artifact {} is no longer shared", which.artifact))
        }
        Command::Events { artifact, which } => {
            events::show(session, Object::Artifact(&artifact), &which).await
        }
        Command::Operations { artifact, all } => {
            session.show(client.artifact_operations(&artifact, all).await?, operation::table)
        }
        Command::Metadata { artifact } => metadata::show(session, Object::Artifact(&artifact)).await,
        Command::SetMetadata { artifact, item } => {
            metadata::set(session, Object::Artifact(&artifact), &item).await
        }
        Command::DeleteMetadata { artifact, item } => {
            metadata::delete(session, Object::Artifact(&artifact), &item).await
        }
    }
}

/// Size of the newest version.
fn newest_size(artifact: &ArtifactRecord) -> String {
    artifact.blobs.get(&artifact.index).map_or_else(|| "-".to_owned(), |version| size(version.size))
}

/// Number of the newest version.
fn newest(artifact: &ArtifactRecord) -> String {
    if artifact.index == 0 { "-".to_owned() } else { artifact.index.to_string() }
}

fn yes(flag: bool) -> String {
    if flag { "yes" } else { "no" }.to_owned()
}

fn table(mut artifacts: Vec<ArtifactRecord>) -> Table {
    artifacts.sort_by(|a, b| (&a.namespace, &a.name, a.uuid).cmp(&(&b.namespace, &b.name, b.uuid)));
    let whole = ["NAME", "UUID", "TYPE", "STATE", "VERSION", "SIZE", "SHARED", "NAMESPACE"];
    Table::new(&whole, &["SOURCE"]).rows(artifacts.into_iter().map(|artifact| {
        let (newest, size) = (newest(&artifact), newest_size(&artifact));
        [
            artifact.name,
            artifact.uuid.to_string(),
            artifact.artifact_type.to_string(),
            artifact.state.to_string(),
            newest,
            size,
            yes(artifact.shared),
            artifact.namespace,
            artifact.source_url,
        ]
    }))
}

/// One artifact, in full.
pub(super) fn facts(artifact: ArtifactRecord) -> Table {
    let metadata = artifact.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let metadata: Vec<_> = metadata.collect();
    let (newest, newest_size) = (newest(&artifact), newest_size(&artifact));
    let error = artifact.error_message.map(|why| ("error".to_owned(), why));
    let versions = artifact.blobs.iter().rev().map(|(index, version)| {
        (format!("version {index}"), format!("{}, {}", version.uuid, size(version.size)))
    });
    let operation = artifact.last_cluster_operation.map(|last| format!("{} {}", last.op_type, last.op_uuid));
    let facts = [
        ("name", artifact.name),
        ("uuid", artifact.uuid.to_string()),
        ("namespace", artifact.namespace),
        ("type", artifact.artifact_type.to_string()),
        ("state", artifact.state.to_string()),
        ("source", artifact.source_url),
        ("shared", yes(artifact.shared)),
        ("newest version", newest),
        ("size", newest_size),
        ("max versions", artifact.max_versions.to_string()),
        ("last operation", or_dash(operation.unwrap_or_default())),
    ];
    let facts = facts.map(|(name, value)| (name.to_owned(), value));
    Table::facts(facts.into_iter().chain(error).chain(versions).chain(metadata))
}

fn versions(versions: Vec<VersionRecord>) -> Table {
    let table = Table::new(&["VERSION", "BLOB", "STATE", "SIZE", "FORMAT", "SINCE"], &["NODES"]);
    table.rows(versions.into_iter().map(|version| {
        let format = blob::format(&version.blob);
        [
            version.index.to_string(),
            version.blob.uuid.to_string(),
            version.blob.state.to_string(),
            size(version.blob.size),
            format,
            iso(version.blob.fetched_at),
            or_dash(version.blob.locations.join(", ")),
        ]
    }))
}

fn deletions(deleted: Vec<ArtifactId>) -> Table {
    Table::new(&["ARTIFACT"], &[]).rows(deleted.into_iter().map(|id| [id.to_string()]))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn example(name: &str, index: i64) -> ArtifactRecord {
        let blob = json!({ "uuid": "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "size": 1_610_612_736_i64,
                           "reference_count": 1, "depends_on": null });
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": name, "namespace": "ci", "artifact_type": "image",
            "state": if index == 0 { "error" } else { "created" }, "source_url": "debian:12", "shared": false,
            "error_message": if index == 0 { json!("no such host") } else { json!(null) }, "max_versions": 3,
            "index": index, "blobs": if index == 0 { json!({}) } else { json!({ "7": blob }) },
            "metadata": { "owner": "me" }, "version": 9, "last_cluster_operation": null, "references_to": {},
            "references_from": {}
        }))
        .unwrap()
    }

    #[test]
    fn artifacts_are_listed_by_name_with_their_size() {
        let text = table(vec![example("debian", 7), example("broken", 0)]).render(None);
        let expected = "\
NAME    UUID                                  TYPE   STATE    VERSION  SIZE     SHARED  NAMESPACE  SOURCE
broken  5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  image  error    -        -        no      ci         debian:12
debian  5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  image  created  7        1.5 GiB  no      ci         debian:12
";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_artifact_is_shown_with_its_versions_and_its_error() {
        let text = facts(example("debian", 7)).render(None);
        assert!(text.contains("\nversion 7       1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01, 1.5 GiB\n"), "{text}");
        assert!(text.ends_with("metadata owner  me\n") && !text.contains("error"), "{text}");
        let text = facts(example("broken", 0)).render(None);
        assert!(text.contains("\nerror           no such host\n"), "{text}");
    }
}
