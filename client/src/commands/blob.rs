//! `muster blob`.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Subcommand;
use clap::builder::PossibleValuesParser;
use muster_types::blob::{BlobRecord, HashAlgorithm};
use muster_types::object::ObjectType;
use serde_json::Value;

use super::arguments::path_parser;
use super::list::{ListOptions, ListView};
use super::session::Session;
use super::{events, metadata};
use crate::api::ObjectPath;
use crate::output::{self, Table, compact, format_size, or_dash};
use crate::time::format_utc;
use crate::transfer::{DownloadTarget, RetryPolicy, download as download_blob, unless_interrupted};

const LIST: ListView<BlobRecord> = ListView {
    table,
    wide: &["last_used", "modified", "depends_on", "sha512"],
    order: &[],
    watched: &[ObjectType::Blob],
};

/// Commands for blobs, which are given by id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List all blobs
    List {
        /// Only blobs with a replica on this node
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a blob
    Show { uuid: String },
    /// Find a readable blob by checksum
    Search {
        #[arg(value_parser = algorithms())]
        algorithm: String,
        hash: String,
    },
    /// Print a checksum of a blob
    Checksum {
        uuid: String,
        #[arg(value_parser = algorithms(), default_value = "sha512")]
        algorithm: String,
    },
    /// Download a blob to a file; run again to resume
    Download {
        uuid: String,
        /// File to write; - is standard output
        #[arg(value_parser = path_parser())]
        file: PathBuf,
        /// Replace an existing file
        #[arg(long)]
        force: bool,
    },
    /// Delete a blob that your namespace has sent, unless it is in use
    Delete { uuid: String },
    /// Show the events of a blob, newest first
    Events {
        uuid: String,
        #[command(flatten)]
        filter: events::EventFilter,
    },
    /// Show the metadata of a blob
    Metadata { uuid: String },
    /// Set a metadata key of a blob
    SetMetadata {
        uuid: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a blob
    DeleteMetadata {
        uuid: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

fn algorithms() -> PossibleValuesParser {
    PossibleValuesParser::new(HashAlgorithm::ALL.iter().map(|algorithm| algorithm.as_str()))
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { node, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.blobs(node.as_deref(), &query)).await
        }
        Command::Show { uuid } => session.show(client.blob(&uuid).await?, details),
        Command::Search { algorithm, hash } => {
            let response = client.find_blob(&algorithm, &hash).await?;
            if session.is_structured() {
                return session.print_value(response.json());
            }
            match response.value()? {
                Some(blob) => output::print_table(&details(blob)),
                None => bail!("no readable blob has this {algorithm}"),
            }
        }
        Command::Checksum { uuid, algorithm } => {
            let response = client.checksum(&uuid, &algorithm).await?;
            if session.is_structured() {
                return session.print_value(response.json());
            }
            match response.value()? {
                Some(checksum) => output::print(&format!("{}\n", output::escape_control(&checksum))),
                None => bail!("the {algorithm} of blob {uuid} has not been computed yet; try again later"),
            }
        }
        Command::Download { uuid, file, force } => {
            download(session, &uuid, &file, force, &format!("blob {uuid}")).await
        }
        Command::Delete { uuid } => {
            let response = client.delete_blob(&uuid).await?;
            session.confirm(&response, &format!("blob {uuid} deleted, unless it is in use"))
        }
        Command::Events { uuid, filter } => events::show(session, ObjectPath::Blob(&uuid), &filter).await,
        Command::Metadata { uuid } => metadata::show(session, ObjectPath::Blob(&uuid)).await,
        Command::SetMetadata { uuid, item } => metadata::set(session, ObjectPath::Blob(&uuid), &item).await,
        Command::DeleteMetadata { uuid, item } => {
            metadata::delete(session, ObjectPath::Blob(&uuid), &item).await
        }
    }
}

/// Downloads a blob to a file and confirms it as `content`. Prints no JSON, because standard output may be the target.
pub(super) async fn download(
    session: &Session,
    uuid: &str,
    file: &Path,
    force: bool,
    content: &str,
) -> anyhow::Result<()> {
    let target = DownloadTarget::new(file, force)?;
    if target == DownloadTarget::Stdout && io::stdout().is_terminal() {
        bail!("binary content is not written to a terminal; redirect standard output or give a file");
    }
    let blob = session.client.blob(uuid).await?.value()?;
    let download = download_blob(&session.client, &blob, &target, RetryPolicy::default());
    let summary = unless_interrupted(download, || target.interrupt_consequence()).await?;
    if let (DownloadTarget::File(file), Some(summary)) = (&target, summary) {
        let text = format!("downloaded {content} to {}: {summary}", file.display());
        output::status(&text);
    }
    Ok(())
}

/// Returns the format of an image, or a dash for other content.
pub(super) fn image_format(blob: &BlobRecord) -> String {
    or_dash(blob.image.get("file format").map(compact).unwrap_or_default())
}

fn table(blobs: Vec<BlobRecord>) -> Table {
    let table = Table::new(&["UUID", "STATE", "SIZE", "FORMAT", "USES", "SINCE"], &["NODES"]);
    table.rows(blobs.into_iter().map(|blob| {
        let format = image_format(&blob);
        [
            blob.uuid.to_string(),
            blob.state.to_string(),
            format_size(blob.size),
            format,
            blob.reference_count.to_string(),
            format_utc(blob.fetched_at),
            or_dash(blob.locations.join(", ")),
        ]
    }))
}

/// Formats a size with a binary unit and in bytes.
fn exact_size(count: i64) -> String {
    if (0..1024).contains(&count) {
        format_size(count)
    } else {
        format!("{} ({count} B)", format_size(count))
    }
}

fn format_image_field(name: &str, value: &Value) -> String {
    match value.as_i64() {
        Some(count) if name.ends_with(" size") => exact_size(count),
        _ => compact(value),
    }
}

fn details(blob: BlobRecord) -> Table {
    let metadata = blob.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let metadata: Vec<_> = metadata.collect();
    let checksums =
        blob.checksums.iter().map(|(algorithm, checksum)| (algorithm.to_string(), checksum.clone()));
    let checksums: Vec<_> = checksums.collect();
    // The server chooses the field names, which depend on the image.
    let image = blob.image.iter().filter(|(_, value)| !value.is_null());
    let image: Vec<_> = image.map(|(name, value)| (name.clone(), format_image_field(name, value))).collect();
    let transcodes = blob.transcodes.iter().map(|(how, id)| (format!("copy {how}"), id.to_string()));
    let transcodes: Vec<_> = transcodes.collect();
    let details = [
        ("uuid", blob.uuid.to_string()),
        ("state", blob.state.to_string()),
        ("size", exact_size(blob.size)),
        ("uses", blob.reference_count.to_string()),
        ("nodes", or_dash(blob.locations.join(", "))),
        ("since", format_utc(blob.fetched_at)),
        ("modified", or_dash(blob.modified.unwrap_or_default())),
        ("last used", or_dash(blob.last_used.map(format_utc).unwrap_or_default())),
        ("depends on", or_dash(blob.depends_on.map(|id| id.to_string()).unwrap_or_default())),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value));
    Table::key_values(details.into_iter().chain(image).chain(transcodes).chain(checksums).chain(metadata))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn example() -> BlobRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "state": "created", "metadata": { "owner": "me" },
            "version": 6, "size": 1_610_612_736_i64, "modified": null, "fetched_at": 1_767_225_600.0,
            "depends_on": null, "transcodes": {}, "locations": ["sim-1", "sim-2"], "reference_count": 2,
            "sha512": "ab", "checksums": { "sha512": "ab" }, "last_used": null, "references_to": {},
            "references_from": {}, "file format": "qcow2", "virtual size": 2048
        }))
        .unwrap()
    }

    #[test]
    fn list_rounds_sizes_and_details_are_exact() {
        let expected = "\
UUID                                  STATE    SIZE     FORMAT  USES  SINCE                     NODES
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  created  1.5 GiB  qcow2   2     2026-01-01T00:00:00.000Z  sim-1, sim-2
";
        assert_eq!(table(vec![example()]).render(None), expected);
        let text = details(example()).render(None);
        assert!(text.contains("\nsize            1.5 GiB (1610612736 B)\n"), "{text}");
        assert!(
            text.contains("\nfile format     qcow2\n") && text.contains("\nsha512          ab\n"),
            "{text}"
        );
    }
}
