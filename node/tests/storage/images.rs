//! Good images: looked at, unpacked, converted.

use std::fs;
use std::path::Path;
use std::process::Command;

use muster_types::Error;
use muster_types::blob::{Compression, ImageFacts, ImageFormat};
use muster_types::ids::BlobId;
use muster_types::storage::StoredFileKind;

use crate::world::{Disk, MIB, bytes, checksums, pipe, sh};

/// A disk with something here and there.
pub(crate) fn guest_disk() -> Vec<u8> {
    let mut disk = vec![0; 6 * MIB];
    for (at, seed) in [(0, 40), (3 * MIB + 512, 41), (5 * MIB, 42)] {
        disk[at..at + MIB].copy_from_slice(&bytes(MIB, seed));
    }
    disk
}

/// The bytes of an optical disc, as far as anybody looks.
fn disc() -> Vec<u8> {
    let mut disc = bytes(2 * MIB, 43);
    disc[..0x8000].fill(0);
    disc[0x8000..0x8006].copy_from_slice(b"\x01CD001");
    disc
}

pub(crate) fn packed(program: &str, data: &[u8]) -> Vec<u8> {
    let mut command = Command::new(program);
    command.args(["-c", "-1"]);
    pipe(command, data)
}

/// The image that `qemu-img convert` makes with these options.
fn qcow2(folder: &Path, options: &str) -> Vec<u8> {
    let folder = folder.display();
    sh(&format!("cd {folder}; qemu-img convert -f raw -O qcow2 {options} disk made"));
    fs::read(format!("{folder}/made")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn good_images_are_taken_in_and_converted_to_the_same_disk() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let folder = tempfile::tempdir().unwrap();
    let guest = guest_disk();
    fs::write(folder.path().join("disk"), &guest).unwrap();
    let qcow2_facts = |cluster_size: u32, compat: &str, compression: &str, extended_l2: bool| {
        serde_json::json!({
            "cluster_size": cluster_size,
            "compat": compat,
            "compression type": compression,
            "extended l2": extended_l2,
        })
    };
    let mut images = Vec::new();
    for (options, further) in [
        ("", qcow2_facts(65536, "1.1", "zlib", false)),
        ("-o compat=0.10", qcow2_facts(65536, "0.10", "zlib", false)),
        ("-c -o cluster_size=4k", qcow2_facts(4096, "1.1", "zlib", false)),
        ("-c -o compression_type=zstd", qcow2_facts(65536, "1.1", "zstd", false)),
        ("-o extended_l2=on,cluster_size=128k", qcow2_facts(131_072, "1.1", "zlib", true)),
        ("-o lazy_refcounts=on,preallocation=metadata", qcow2_facts(65536, "1.1", "zlib", false)),
    ] {
        images.push((options, qcow2(folder.path(), options), (ImageFormat::Qcow2, None), further));
    }
    let (image, further) = (images[0].1.clone(), images[0].3.clone());
    let nothing = serde_json::json!({});
    let (gzip, xz) = (Some(Compression::Gzip), Some(Compression::Xz));
    images.push(("qcow2.gz", packed("gzip", &image), (ImageFormat::Qcow2, gzip), further));
    images.push(("raw", guest.clone(), (ImageFormat::Raw, None), nothing.clone()));
    images.push(("raw.gz", packed("gzip", &guest), (ImageFormat::Raw, gzip), nothing.clone()));
    images.push(("raw.xz", packed("xz", &guest), (ImageFormat::Raw, xz), nothing));
    for (name, image, (format, packing), further) in images {
        let (draft, blob) = (disk.draft(&image).await, BlobId::new());
        disk.storage().keep(draft, blob).await.unwrap();
        let facts = disk.storage().inspect(blob).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((facts.format, facts.packing, facts.virtual_size), (format, packing, 6 << 20), "{name}");
        assert_eq!(serde_json::Value::Object(facts.further.clone()), further, "{name}");
        disk.storage().convert(blob, &facts).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let conversion = disk.conversion_path(blob, "qcow2");
        let (conversion, source) = (conversion.display(), folder.path().join("disk"));
        sh(&format!("qemu-img compare -f qcow2 -F raw {conversion} {}", source.display()));
        assert!(sh(&format!("qemu-img info {conversion}")).contains("cluster_size: 2097152"), "{name}");
        sh(&format!("test $(stat -c %a:%u {conversion}) = 444:$(id -u)"));
        // It is left alone from now on, but for its time.
        let number = sh(&format!("stat -c %i {conversion}; touch -d @1000 {conversion}"));
        disk.storage().convert(blob, &facts).await.unwrap();
        assert_eq!(sh(&format!("stat -c %i {conversion}")), number, "{name}");
        let found = disk.storage().find().await.unwrap();
        let found = found.iter().find(|found| found.what == StoredFileKind::Conversion(blob)).unwrap();
        assert!(found.touched > 1e9, "{name}");
        // Made again after it was removed.
        disk.storage().remove_conversion(blob).await.unwrap();
        disk.storage().remove_conversion(blob).await.unwrap();
        disk.storage().convert(blob, &facts).await.unwrap();
        disk.storage().remove(blob).await.unwrap();
        disk.storage().remove_draft(draft).await.unwrap();
        assert_eq!(disk.files(), [] as [std::path::PathBuf; 0], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_optical_disc_stays_as_it_is() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let data = disc();
    for (image, packing) in [(data.clone(), None), (packed("xz", &data), Some(Compression::Xz))] {
        let blob = disk.blob(&image).await;
        let facts = disk.storage().inspect(blob).await.unwrap();
        assert_eq!((facts.format, facts.packing), (ImageFormat::Iso, packing));
        assert_eq!(facts.virtual_size, data.len() as u64);
        disk.storage().convert(blob, &facts).await.unwrap();
        disk.storage().convert(blob, &facts).await.unwrap();
        assert!(fs::read(disk.conversion_path(blob, "iso")).unwrap() == data);
        let found = disk.storage().find().await.unwrap();
        assert!(found.iter().any(|found| found.what == StoredFileKind::Conversion(blob)));
        disk.storage().remove(blob).await.unwrap();
        assert!(!disk.conversion_path(blob, "iso").exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packed_draft_is_unpacked_in_its_place() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let data = bytes(MIB + 7, 44);
    for (program, packing) in [("gzip", Compression::Gzip), ("xz", Compression::Xz)] {
        let draft = disk.draft(&packed(program, &data)).await;
        // One that is a blob already stays one.
        let blob = BlobId::new();
        disk.storage().keep(draft, blob).await.unwrap();
        assert_eq!(disk.storage().unpack(draft).await.unwrap(), Some(packing));
        assert_eq!(disk.storage().content(draft).await.unwrap().checksums, checksums(&data));
        assert_eq!(disk.storage().unpack(draft).await.unwrap(), None);
        assert!(disk.bytes(blob).await.unwrap() == packed(program, &data));
        disk.storage()
            .append(draft, Some(data.len() as u64), u64::MAX, crate::world::parts(b"x", 1))
            .await
            .unwrap();
    }
    let damaged = disk.draft(&packed("gzip", &data)[..MIB / 2]).await;
    let refused = disk.storage().unpack(damaged).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    assert_eq!(disk.storage().draft_size(damaged).await.unwrap(), Some(MIB as u64 / 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_simulated_node_looks_at_headers_and_converts_by_a_link() {
    let disk = Disk::new();
    let guest = guest_disk();
    let blob = disk.blob(&guest).await;
    let facts = disk.storage().inspect(blob).await.unwrap();
    assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Raw, 6 << 20));
    disk.storage().convert(blob, &facts).await.unwrap();
    assert!(fs::read(disk.conversion_path(blob, "qcow2")).unwrap() == guest);
    let bad = disk.blob(b"QFI\xfb\0\0\0\x03").await;
    assert!(matches!(disk.storage().inspect(bad).await, Err(Error::Invalid(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_is_not_what_was_looked_at_is_not_converted() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let blob = disk.blob(&guest_disk()).await;
    let facts = |format, virtual_size| ImageFacts {
        format,
        packing: None,
        virtual_size,
        further: serde_json::Map::new(),
    };
    for facts in [facts(ImageFormat::Qcow2, 6 << 20), facts(ImageFormat::Raw, 1 << 20)] {
        let refused = disk.storage().convert(blob, &facts).await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    let absent = disk.storage().convert(BlobId::new(), &facts(ImageFormat::Raw, 1)).await;
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn conversions_at_once_make_one_file() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let disk = std::sync::Arc::new(disk);
    let blob = disk.blob(&guest_disk()).await;
    let facts = disk.storage().inspect(blob).await.unwrap();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (disk, facts) = (disk.clone(), facts.clone());
            tokio::spawn(async move { disk.storage().convert(blob, &facts).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    // One that nobody waits for any more leaves nothing half made.
    let other = disk.blob(&guest_disk()).await;
    let task = {
        let (disk, facts) = (disk.clone(), facts.clone());
        tokio::spawn(async move { disk.storage().convert(other, &facts).await })
    };
    tokio::task::yield_now().await;
    task.abort();
    let _ = task.await;
    disk.storage().convert(other, &facts).await.unwrap();
    assert_eq!(fs::read_dir(disk.folder.join("conversions")).unwrap().count(), 2);
    assert_eq!(fs::read_dir(disk.folder.join("work")).unwrap().count(), 0);
}
