//! `muster blob`.

use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Subcommand;
use clap::builder::PossibleValuesParser;
use muster_types::blob::{BlobRecord, HashAlgorithm};
use serde_json::Value;

use super::{Session, events, metadata, path_parser};
use crate::api::Object;
use crate::output::{self, Table, compact, or_dash, size};
use crate::time::iso;
use crate::transfer::{Policy, Target, download as receive, unless_interrupted};

/// The commands about content, each stored once. A blob goes by its id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List all blobs
    List {
        /// Only those of which this node has a copy
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
    },
    /// Show one blob
    Show { uuid: String },
    /// Find the blob of a checksum, among those that you can read
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
    /// Store a blob in a file; run again, it goes on where it stopped
    Download {
        uuid: String,
        /// Where to store it; - is standard output
        #[arg(value_parser = path_parser())]
        file: PathBuf,
        /// Replace the file if it is there
        #[arg(long)]
        force: bool,
    },
    /// Show the events of a blob, newest first
    Events {
        uuid: String,
        #[command(flatten)]
        which: events::Which,
    },
    /// Show the metadata of a blob
    Metadata { uuid: String },
    /// Set an item of a blob's metadata
    SetMetadata {
        uuid: String,
        #[command(flatten)]
        item: metadata::Item,
    },
    /// Delete an item of a blob's metadata
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
        Command::List { node } => session.show(client.blobs(node.as_deref()).await?, table),
        Command::Show { uuid } => session.show(client.blob(&uuid).await?, facts),
        Command::Search { algorithm, hash } => {
            let answer = client.find_blob(&algorithm, &hash).await?;
            if session.json {
                return output::print_json(answer.json());
            }
            match answer.value()? {
                Some(blob) => output::print_table(&facts(blob)),
                None => bail!("no blob that you can read has this {algorithm}"),
            }
        }
        Command::Checksum { uuid, algorithm } => {
            let answer = client.checksum(&uuid, &algorithm).await?;
            if session.json {
                return output::print_json(answer.json());
            }
            match answer.value()? {
                Some(sum) => output::print(&format!("{}\n", output::visible(&sum))),
                None => bail!("the {algorithm} of blob {uuid} is not known yet; ask again later"),
            }
        }
        Command::Download { uuid, file, force } => {
            download(session, &uuid, &file, force, &format!("blob {uuid}")).await
        }
        Command::Events { uuid, which } => events::show(session, Object::Blob(&uuid), &which).await,
        Command::Metadata { uuid } => metadata::show(session, Object::Blob(&uuid)).await,
        Command::SetMetadata { uuid, item } => metadata::set(session, Object::Blob(&uuid), &item).await,
        Command::DeleteMetadata { uuid, item } => metadata::delete(session, Object::Blob(&uuid), &item).await,
    }
}

/// Stores a blob in a file, and says that it is `what`. Standard output may be the target, so with JSON nothing more
/// is printed either.
pub(super) async fn download(
    session: &Session,
    uuid: &str,
    file: &Path,
    force: bool,
    what: &str,
) -> anyhow::Result<()> {
    let target = Target::new(file, force)?;
    if target == Target::Stdout && io::stdout().is_terminal() {
        bail!("the content is not for a terminal; redirect standard output or name a file");
    }
    let blob = session.client.blob(uuid).await?.value()?;
    let receiving = receive(&session.client, &blob, &target, Policy::default());
    let summary = unless_interrupted(receiving, || target.when_interrupted()).await?;
    if let (Target::File(file), Some(summary)) = (&target, summary) {
        let text = format!("{} is {what}, checked: {summary}", file.display());
        eprintln!("{}", output::visible(&text));
    }
    Ok(())
}

/// The format of an image, and how it is packed; a dash for what is none.
pub(super) fn format(blob: &BlobRecord) -> String {
    or_dash(blob.image.get("file format").map(compact).unwrap_or_default())
}

fn table(blobs: Vec<BlobRecord>) -> Table {
    let table = Table::new(&["UUID", "STATE", "SIZE", "FORMAT", "USES", "SINCE"], &["NODES"]);
    table.rows(blobs.into_iter().map(|blob| {
        let format = format(&blob);
        [
            blob.uuid.to_string(),
            blob.state.to_string(),
            size(blob.size),
            format,
            blob.reference_count.to_string(),
            iso(blob.fetched_at),
            or_dash(blob.locations.join(", ")),
        ]
    }))
}

/// A size for people, and exactly.
fn exact(count: i64) -> String {
    if (0..1024).contains(&count) { size(count) } else { format!("{} ({count} B)", size(count)) }
}

fn image_fact(name: &str, value: &Value) -> String {
    match value.as_i64() {
        Some(count) if name.ends_with(" size") => exact(count),
        _ => compact(value),
    }
}

fn facts(blob: BlobRecord) -> Table {
    let metadata = blob.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let metadata: Vec<_> = metadata.collect();
    let sums = blob.checksums.iter().map(|(algorithm, sum)| (algorithm.to_string(), sum.clone()));
    let sums: Vec<_> = sums.collect();
    // The server's own words: which facts there are depends on the image.
    let image = blob.image.iter().filter(|(_, value)| !value.is_null());
    let image: Vec<_> = image.map(|(name, value)| (name.clone(), image_fact(name, value))).collect();
    let transcodes = blob.transcodes.iter().map(|(how, id)| (format!("copy {how}"), id.to_string()));
    let transcodes: Vec<_> = transcodes.collect();
    let facts = [
        ("uuid", blob.uuid.to_string()),
        ("state", blob.state.to_string()),
        ("size", exact(blob.size)),
        ("uses", blob.reference_count.to_string()),
        ("nodes", or_dash(blob.locations.join(", "))),
        ("since", iso(blob.fetched_at)),
        ("modified", or_dash(blob.modified.unwrap_or_default())),
        ("last used", or_dash(blob.last_used.map(iso).unwrap_or_default())),
        ("depends on", or_dash(blob.depends_on.map(|id| id.to_string()).unwrap_or_default())),
    ];
    let facts = facts.map(|(name, value)| (name.to_owned(), value));
    Table::facts(facts.into_iter().chain(image).chain(transcodes).chain(sums).chain(metadata))
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
    fn sizes_are_for_people_in_the_list_and_exact_in_one() {
        let expected = "\
UUID                                  STATE    SIZE     FORMAT  USES  SINCE                     NODES
5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  created  1.5 GiB  qcow2   2     2026-01-01T00:00:00.000Z  sim-1, sim-2
";
        assert_eq!(table(vec![example()]).render(None), expected);
        let text = facts(example()).render(None);
        assert!(text.contains("\nsize            1.5 GiB (1610612736 B)\n"), "{text}");
        assert!(
            text.contains("\nfile format     qcow2\n") && text.contains("\nsha512          ab\n"),
            "{text}"
        );
    }
}
