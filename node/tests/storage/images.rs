//! Valid images: inspected, decompressed, converted.

use std::fs;
use std::path::Path;
use std::process::Command;

use muster_types::Error;
use muster_types::blob::{Compression, ImageFacts, ImageFormat};
use muster_types::ids::BlobId;
use muster_types::storage::StoredFileKind;

use crate::fixture::{MIB, TestNode, bytes, checksums, pipe, sh};

/// Returns a disk with some data.
pub(crate) fn guest_disk() -> Vec<u8> {
    let mut disk = vec![0; 6 * MIB];
    for (at, seed) in [(0, 40), (3 * MIB + 512, 41), (5 * MIB, 42)] {
        disk[at..at + MIB].copy_from_slice(&bytes(MIB, seed));
    }
    disk
}

/// Returns a file that begins like an ISO image.
fn disc() -> Vec<u8> {
    let mut disc = bytes(2 * MIB, 43);
    disc[..0x8000].fill(0);
    disc[0x8000..0x8006].copy_from_slice(b"\x01CD001");
    disc
}

pub(crate) fn compressed(program: &str, data: &[u8]) -> Vec<u8> {
    let mut command = Command::new(program);
    command.args(["-c", "-1"]);
    pipe(command, data)
}

/// Returns the image that `qemu-img convert` creates with these options.
fn qcow2(directory: &Path, options: &str) -> Vec<u8> {
    let directory = directory.display();
    sh(&format!("cd {directory}; qemu-img convert -f raw -O qcow2 {options} disk made"));
    fs::read(format!("{directory}/made")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn converts_valid_images_to_identical_disks() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let directory = tempfile::tempdir().unwrap();
    let guest = guest_disk();
    fs::write(directory.path().join("disk"), &guest).unwrap();
    let qcow2_facts = |cluster_size: u32, compat: &str, compression: &str, extended_l2: bool| {
        serde_json::json!({
            "cluster_size": cluster_size,
            "compat": compat,
            "compression type": compression,
            "extended l2": extended_l2,
        })
    };
    let mut images = Vec::new();
    for (options, format_details) in [
        ("", qcow2_facts(65536, "1.1", "zlib", false)),
        ("-o compat=0.10", qcow2_facts(65536, "0.10", "zlib", false)),
        ("-c -o cluster_size=4k", qcow2_facts(4096, "1.1", "zlib", false)),
        ("-c -o compression_type=zstd", qcow2_facts(65536, "1.1", "zstd", false)),
        ("-o extended_l2=on,cluster_size=128k", qcow2_facts(131_072, "1.1", "zlib", true)),
        ("-o lazy_refcounts=on,preallocation=metadata", qcow2_facts(65536, "1.1", "zlib", false)),
    ] {
        images.push((options, qcow2(directory.path(), options), (ImageFormat::Qcow2, None), format_details));
    }
    let (image, format_details) = (images[0].1.clone(), images[0].3.clone());
    let nothing = serde_json::json!({});
    let (gzip, xz) = (Some(Compression::Gzip), Some(Compression::Xz));
    images.push(("qcow2.gz", compressed("gzip", &image), (ImageFormat::Qcow2, gzip), format_details));
    images.push(("raw", guest.clone(), (ImageFormat::Raw, None), nothing.clone()));
    images.push(("raw.gz", compressed("gzip", &guest), (ImageFormat::Raw, gzip), nothing.clone()));
    images.push(("raw.xz", compressed("xz", &guest), (ImageFormat::Raw, xz), nothing));
    for (name, image, (format, compression), format_details) in images {
        let (draft, blob) = (node.draft(&image).await, BlobId::new());
        node.storage().commit(draft, blob).await.unwrap();
        let facts =
            node.storage().inspect("ci", blob).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            (facts.format, facts.compression, facts.virtual_size),
            (format, compression, 6 << 20),
            "{name}"
        );
        assert_eq!(serde_json::Value::Object(facts.format_details.clone()), format_details, "{name}");
        node.storage().convert("ci", blob, &facts).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let conversion = node.conversion_path(blob, "qcow2");
        let (conversion, source) = (conversion.display(), directory.path().join("disk"));
        sh(&format!("qemu-img compare -f qcow2 -F raw {conversion} {}", source.display()));
        assert!(sh(&format!("qemu-img info {conversion}")).contains("cluster_size: 2097152"), "{name}");
        sh(&format!("test $(stat -c %a:%u {conversion}) = 444:$(id -u)"));
        // An existing conversion is not changed, except for its modification time.
        let number = sh(&format!("stat -c %i {conversion}; touch -d @1000 {conversion}"));
        node.storage().convert("ci", blob, &facts).await.unwrap();
        assert_eq!(sh(&format!("stat -c %i {conversion}")), number, "{name}");
        let found = node.storage().list_files().await.unwrap();
        let found = found.iter().find(|found| found.kind == StoredFileKind::Conversion(blob)).unwrap();
        assert!(found.modified_at > 1e9, "{name}");
        // It is created again after it was removed.
        node.storage().remove_conversion(blob).await.unwrap();
        node.storage().remove_conversion(blob).await.unwrap();
        node.storage().convert("ci", blob, &facts).await.unwrap();
        node.storage().remove(blob).await.unwrap();
        node.storage().remove_draft(draft).await.unwrap();
        assert_eq!(node.files(), [] as [std::path::PathBuf; 0], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn iso_images_are_not_converted() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let data = disc();
    for (image, compression) in [(data.clone(), None), (compressed("xz", &data), Some(Compression::Xz))] {
        let blob = node.blob(&image).await;
        let facts = node.storage().inspect("ci", blob).await.unwrap();
        assert_eq!((facts.format, facts.compression), (ImageFormat::Iso, compression));
        assert_eq!(facts.virtual_size, data.len() as u64);
        node.storage().convert("ci", blob, &facts).await.unwrap();
        node.storage().convert("ci", blob, &facts).await.unwrap();
        assert!(fs::read(node.conversion_path(blob, "iso")).unwrap() == data);
        let found = node.storage().list_files().await.unwrap();
        assert!(found.iter().any(|found| found.kind == StoredFileKind::Conversion(blob)));
        node.storage().remove(blob).await.unwrap();
        assert!(!node.conversion_path(blob, "iso").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_draft_is_decompressed_in_place() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let data = bytes(MIB + 7, 44);
    for (program, compression) in [("gzip", Compression::Gzip), ("xz", Compression::Xz)] {
        let draft = node.draft(&compressed(program, &data)).await;
        // The blob of the draft does not change.
        let blob = BlobId::new();
        node.storage().commit(draft, blob).await.unwrap();
        assert_eq!(node.storage().decompress("ci", draft).await.unwrap(), Some(compression));
        assert_eq!(node.storage().digest(draft).await.unwrap().checksums, checksums(&data));
        assert_eq!(node.storage().decompress("ci", draft).await.unwrap(), None);
        assert!(node.bytes(blob).await.unwrap() == compressed(program, &data));
        node.storage()
            .append(draft, Some(data.len() as u64), u64::MAX, crate::fixture::parts(b"x", 1))
            .await
            .unwrap();
    }
    let damaged = node.draft(&compressed("gzip", &data)[..MIB / 2]).await;
    let refused = node.storage().decompress("ci", damaged).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    assert_eq!(node.storage().draft_size(damaged).await.unwrap(), Some(MIB as u64 / 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn simulated_node_inspects_headers_and_converts_by_linking() {
    let node = TestNode::new();
    let guest = guest_disk();
    let blob = node.blob(&guest).await;
    let facts = node.storage().inspect("ci", blob).await.unwrap();
    assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Raw, 6 << 20));
    node.storage().convert("ci", blob, &facts).await.unwrap();
    assert!(fs::read(node.conversion_path(blob, "qcow2")).unwrap() == guest);
    let bad = node.blob(b"QFI\xfb\0\0\0\x03").await;
    assert!(matches!(node.storage().inspect("ci", bad).await, Err(Error::Invalid(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_to_convert_a_blob_that_differs_from_its_facts() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let blob = node.blob(&guest_disk()).await;
    let facts = |format, virtual_size| ImageFacts {
        format,
        compression: None,
        virtual_size,
        format_details: serde_json::Map::new(),
    };
    for facts in [facts(ImageFormat::Qcow2, 6 << 20), facts(ImageFormat::Raw, 1 << 20)] {
        let refused = node.storage().convert("ci", blob, &facts).await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    let absent = node.storage().convert("ci", BlobId::new(), &facts(ImageFormat::Raw, 1)).await;
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_conversions_create_one_file() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let node = std::sync::Arc::new(node);
    let blob = node.blob(&guest_disk()).await;
    let facts = node.storage().inspect("ci", blob).await.unwrap();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (node, facts) = (node.clone(), facts.clone());
            tokio::spawn(async move { node.storage().convert("ci", blob, &facts).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    // A cancelled conversion leaves nothing behind.
    let other = node.blob(&guest_disk()).await;
    let task = {
        let (node, facts) = (node.clone(), facts.clone());
        tokio::spawn(async move { node.storage().convert("ci", other, &facts).await })
    };
    tokio::task::yield_now().await;
    task.abort();
    let _ = task.await;
    node.storage().convert("ci", other, &facts).await.unwrap();
    assert_eq!(fs::read_dir(node.directory.join("conversions")).unwrap().count(), 2);
    assert_eq!(fs::read_dir(node.directory.join("work")).unwrap().count(), 0);
}
