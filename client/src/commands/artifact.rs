//! `muster artifact`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use muster_types::artifact::{ArtifactRecord, VersionRecord};
use muster_types::object::ObjectType;

use super::arguments::path_parser;
use super::artifact_tables::{deletions, details, table, versions};
use super::artifact_transfer::{UploadArguments, download, fetch, upload};
use super::list::{ListOptions, ListView};
use super::lookup::{NamedType, require_unambiguous, resolve};
use super::session::Session;
use super::wait::LongWaitOptions;
use super::{events, metadata, operation};
use crate::api::{ArtifactRef, ObjectPath};

const LIST: ListView<ArtifactRecord> = ListView {
    table,
    wide: &["max_versions", "error_message"],
    order: &["namespace", "name", "uuid"],
    watched: &[ObjectType::Artifact],
};

const VERSIONS: ListView<VersionRecord> = ListView {
    table: versions,
    wide: &["reference_count", "modified", "sha512"],
    order: &[],
    watched: &[ObjectType::Artifact, ObjectType::Blob],
};

/// Commands for artifacts, which are given by name or id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the visible artifacts
    List {
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show an artifact
    Show {
        #[command(flatten)]
        target: ArtifactArguments,
    },
    /// Fetch an image, or update it if its source has a newer version
    Fetch {
        /// URL of the image, or its name such as debian:12
        url: String,
        /// Let all namespaces read it
        #[arg(long)]
        shared: bool,
        /// Namespace to create it in, if not your own
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Check the request without fetching
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        wait: LongWaitOptions,
    },
    /// Upload a file as the newest version of an artifact; run again to resume
    Upload(UploadArguments),
    /// Download a version of an artifact to a file; run again to resume
    Download {
        #[command(flatten)]
        target: ArtifactArguments,
        /// File to write; - is standard output
        #[arg(value_parser = path_parser())]
        file: PathBuf,
        /// Number of the version; the newest if not given
        #[arg(long, value_name = "N")]
        version: Option<i64>,
        /// Replace an existing file
        #[arg(long)]
        force: bool,
    },
    /// List the versions of an artifact, oldest first
    Versions {
        #[command(flatten)]
        target: ArtifactArguments,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Delete an artifact and all its versions
    Delete {
        #[command(flatten)]
        target: ArtifactArguments,
    },
    /// Delete a version of an artifact; deleting the last version deletes the artifact
    DeleteVersion {
        #[command(flatten)]
        target: ArtifactArguments,
        #[arg(value_name = "N")]
        index: i64,
    },
    /// Delete all artifacts of a namespace
    DeleteAll {
        /// Namespace to delete the artifacts of, if not your own
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Confirm the deletion
        #[arg(long, required = true)]
        yes: bool,
    },
    /// Set how many versions are kept; 0 selects the cluster's default
    MaxVersions {
        #[command(flatten)]
        target: ArtifactArguments,
        #[arg(value_name = "N")]
        max_versions: u32,
    },
    /// Let all namespaces read an artifact
    Share {
        #[command(flatten)]
        target: ArtifactArguments,
    },
    /// Make a shared artifact private again
    Unshare {
        #[command(flatten)]
        target: ArtifactArguments,
    },
    /// Show the events of an artifact, newest first
    Events {
        artifact: String,
        #[command(flatten)]
        filter: events::EventFilter,
    },
    /// List the unfinished operations on an artifact, newest first
    Operations {
        artifact: String,
        /// Include finished operations
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show the metadata of an artifact
    Metadata { artifact: String },
    /// Set a metadata key of an artifact
    SetMetadata {
        artifact: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of an artifact
    DeleteMetadata {
        artifact: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

/// Selects an artifact.
#[derive(Debug, Clone, Args)]
pub struct ArtifactArguments {
    artifact: String,
    /// Only in this namespace
    #[arg(long, value_name = "NAMESPACE")]
    in_namespace: Option<String>,
}

impl ArtifactArguments {
    fn reference(&self) -> ArtifactRef<'_> {
        ArtifactRef { artifact: &self.artifact, namespace: self.in_namespace.as_deref() }
    }
}

impl Command {
    /// Returns the artifact that the command is for and its namespace, if given.
    fn artifact_mut(&mut self) -> Option<(&mut String, Option<&str>)> {
        match self {
            Self::List { .. } | Self::Fetch { .. } | Self::Upload(_) | Self::DeleteAll { .. } => None,
            Self::Show { target }
            | Self::Download { target, .. }
            | Self::Versions { target, .. }
            | Self::Delete { target }
            | Self::DeleteVersion { target, .. }
            | Self::MaxVersions { target, .. }
            | Self::Share { target }
            | Self::Unshare { target } => Some((&mut target.artifact, target.in_namespace.as_deref())),
            Self::Events { artifact, .. }
            | Self::Operations { artifact, .. }
            | Self::Metadata { artifact }
            | Self::SetMetadata { artifact, .. }
            | Self::DeleteMetadata { artifact, .. } => Some((artifact, None)),
        }
    }
}

pub(super) async fn run(mut command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    let destroys = matches!(command, Command::Delete { .. } | Command::DeleteVersion { .. });
    match command.artifact_mut() {
        Some((artifact, namespace)) if destroys => {
            require_unambiguous(client, NamedType::Artifact, artifact, namespace).await?;
        }
        Some((artifact, namespace)) => resolve(client, NamedType::Artifact, artifact, namespace).await?,
        None => {}
    }
    match command {
        Command::List { list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.artifacts(&query)).await
        }
        Command::Show { target } => session.show(client.artifact(target.reference()).await?, details),
        Command::Fetch { url, shared, in_namespace, dry_run, wait } => {
            let response = client.fetch_artifact(&url, shared, in_namespace.as_deref(), dry_run).await?;
            if dry_run {
                return session.show_created(response, true, details);
            }
            fetch(session, response, wait.timer()).await
        }
        Command::Upload(arguments) => upload(session, &arguments).await,
        Command::Download { target, file, version, force } => {
            download(session, target.reference(), &file, version, force).await
        }
        Command::Versions { target, list } => {
            let query = list.query();
            session.list(&list, &VERSIONS, || client.versions(target.reference(), &query)).await
        }
        Command::Delete { target } => {
            let response = client.delete_artifact(target.reference()).await?;
            session.confirm(&response, &format!("artifact {} deleted", target.artifact))
        }
        Command::DeleteVersion { target, index } => {
            let response = client.delete_version(target.reference(), index).await?;
            session.confirm(&response, &format!("version {index} of artifact {} deleted", target.artifact))
        }
        Command::DeleteAll { in_namespace, yes: _ } => {
            session.show(client.delete_artifacts(in_namespace.as_deref()).await?, deletions)
        }
        Command::MaxVersions { target, max_versions } => {
            let response = client.set_max_versions(target.reference(), max_versions).await?;
            let limit = if max_versions == 0 {
                "the default number of".to_owned()
            } else {
                format!("at most {max_versions}")
            };
            session.confirm(&response, &format!("{limit} versions of artifact {} are kept", target.artifact))
        }
        Command::Share { target } => {
            let response = client.share_artifact(target.reference()).await?;
            session.confirm(&response, &format!("artifact {} is shared with all namespaces", target.artifact))
        }
        Command::Unshare { target } => {
            let response = client.unshare_artifact(target.reference()).await?;
            session.confirm(&response, &format!("artifact {} is no longer shared", target.artifact))
        }
        Command::Events { artifact, filter } => {
            events::show(session, ObjectPath::Artifact(&artifact), &filter).await
        }
        Command::Operations { artifact, all, list } => {
            let query = list.query();
            session.list(&list, &operation::LIST, || client.artifact_operations(&artifact, all, &query)).await
        }
        Command::Metadata { artifact } => metadata::show(session, ObjectPath::Artifact(&artifact)).await,
        Command::SetMetadata { artifact, item } => {
            metadata::set(session, ObjectPath::Artifact(&artifact), &item).await
        }
        Command::DeleteMetadata { artifact, item } => {
            metadata::delete(session, ObjectPath::Artifact(&artifact), &item).await
        }
    }
}
