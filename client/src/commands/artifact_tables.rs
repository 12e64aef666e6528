//! Tables of artifacts.

use muster_types::artifact::{ArtifactRecord, VersionRecord};
use muster_types::ids::ArtifactId;

use super::blob;
use crate::output::{Table, compact, format_size, or_dash};
use crate::time::format_utc;

/// Formats the size of the newest version.
fn newest_size(artifact: &ArtifactRecord) -> String {
    artifact.blobs.get(&artifact.index).map_or_else(|| "-".to_owned(), |version| format_size(version.size))
}

/// Formats the number of the newest version.
fn newest_version(artifact: &ArtifactRecord) -> String {
    if artifact.index == 0 { "-".to_owned() } else { artifact.index.to_string() }
}

fn yes_or_no(flag: bool) -> String {
    if flag { "yes" } else { "no" }.to_owned()
}

/// Lists artifacts.
pub(super) fn table(artifacts: Vec<ArtifactRecord>) -> Table {
    let fixed = ["NAME", "UUID", "TYPE", "STATE", "VERSION", "SIZE", "SHARED", "NAMESPACE"];
    Table::new(&fixed, &["SOURCE"]).rows(artifacts.into_iter().map(|artifact| {
        let (newest, size) = (newest_version(&artifact), newest_size(&artifact));
        [
            artifact.name,
            artifact.uuid.to_string(),
            artifact.artifact_type.to_string(),
            artifact.state.to_string(),
            newest,
            size,
            yes_or_no(artifact.shared),
            artifact.namespace,
            artifact.source_url,
        ]
    }))
}

/// Shows all fields of an artifact.
pub(super) fn details(artifact: ArtifactRecord) -> Table {
    let metadata = artifact.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let metadata: Vec<_> = metadata.collect();
    let (newest, newest_size) = (newest_version(&artifact), newest_size(&artifact));
    let error = artifact.error_message.map(|reason| ("error".to_owned(), reason));
    let versions = artifact.blobs.iter().rev().map(|(index, version)| {
        (format!("version {index}"), format!("{}, {}", version.uuid, format_size(version.size)))
    });
    let operation = artifact.last_cluster_operation.map(|last| format!("{} {}", last.op_type, last.op_uuid));
    let details = [
        ("name", artifact.name),
        ("uuid", artifact.uuid.to_string()),
        ("namespace", artifact.namespace),
        ("type", artifact.artifact_type.to_string()),
        ("state", artifact.state.to_string()),
        ("source", artifact.source_url),
        ("shared", yes_or_no(artifact.shared)),
        ("newest version", newest),
        ("size", newest_size),
        ("max versions", artifact.max_versions.to_string()),
        ("last operation", or_dash(operation.unwrap_or_default())),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value));
    Table::key_values(details.into_iter().chain(error).chain(versions).chain(metadata))
}

/// Lists versions of an artifact.
pub(super) fn versions(versions: Vec<VersionRecord>) -> Table {
    let table = Table::new(&["VERSION", "BLOB", "STATE", "SIZE", "FORMAT", "SINCE"], &["NODES"]);
    table.rows(versions.into_iter().map(|version| {
        let format = blob::image_format(&version.blob);
        [
            version.index.to_string(),
            version.blob.uuid.to_string(),
            version.blob.state.to_string(),
            format_size(version.blob.size),
            format,
            format_utc(version.blob.fetched_at),
            or_dash(version.blob.locations.join(", ")),
        ]
    }))
}

/// Lists deleted artifacts.
pub(super) fn deletions(deleted: Vec<ArtifactId>) -> Table {
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
    fn lists_artifacts_with_their_size() {
        let text = table(vec![example("broken", 0), example("debian", 7)]).render(None);
        let expected = "\
NAME    UUID                                  TYPE   STATE    VERSION  SIZE     SHARED  NAMESPACE  SOURCE
broken  5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  image  error    -        -        no      ci         debian:12
debian  5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  image  created  7        1.5 GiB  no      ci         debian:12
";
        assert_eq!(text, expected);
    }

    #[test]
    fn shows_versions_and_error_of_an_artifact() {
        let text = details(example("debian", 7)).render(None);
        assert!(text.contains("\nversion 7       1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01, 1.5 GiB\n"), "{text}");
        assert!(text.ends_with("metadata owner  me\n") && !text.contains("error"), "{text}");
        let text = details(example("broken", 0)).render(None);
        assert!(text.contains("\nerror           no such host\n"), "{text}");
    }
}
