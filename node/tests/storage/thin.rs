//! Thin images: they hold only what differs from another, and are joined with it.

use std::fs;
use std::path::Path;

use muster_types::Error;
use muster_types::blob::ImageFormat;
use muster_types::ids::BlobId;
use muster_types::storage::{Draft, StoredFileKind};

use crate::images::guest_disk;
use crate::world::{ANY, Disk, MIB, parts, sh};

/// A disk on top of `base`, in the folder: `whole` is all of it, `thin` what differs, without a name of the base.
fn change(folder: &Path, base: &Path) {
    let (folder, base) = (folder.display(), base.display());
    sh(&format!(
        "cd {folder}
        qemu-img create -q -f qcow2 -F qcow2 -b {base} top 8M
        qemu-io -f qcow2 -c 'write -P 7 1M 200k' -c 'write -z 3M 1M' -c 'write -P 9 7M 64k' top
        qemu-img convert -f qcow2 -O qcow2 top whole
        qemu-img convert -f qcow2 -O qcow2 -B {base} -F qcow2 top thin
        qemu-img rebase -u -f qcow2 -b '' thin"
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thin_image_is_joined_with_its_base_and_then_needs_it_no_more() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let folder = tempfile::tempdir().unwrap();
    let base = disk.blob(&guest_disk()).await;
    let facts = disk.storage().inspect(base).await.unwrap();
    disk.storage().convert(base, &facts).await.unwrap();
    change(folder.path(), &disk.conversion_path(base, "qcow2"));

    let thin = disk.blob(&fs::read(folder.path().join("thin")).unwrap()).await;
    let facts = disk.storage().inspect(thin).await.unwrap();
    assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Qcow2, 8 << 20));
    let elsewhere = disk.storage().convert_thin(thin, BlobId::new()).await;
    assert!(matches!(elsewhere, Err(Error::Unavailable(_))), "{elsewhere:?}");
    disk.storage().convert_thin(thin, base).await.unwrap();
    let conversion = disk.conversion_path(thin, "qcow2");
    sh(&format!("test $(stat -c %a:%u {0}) = 444:$(id -u)", conversion.display()));
    disk.storage().remove(base).await.unwrap();
    let whole = folder.path().join("whole");
    sh(&format!("qemu-img compare -f qcow2 -F qcow2 {} {}", conversion.display(), whole.display()));
    assert!(!sh(&format!("qemu-img info {}", conversion.display())).contains("backing"));
    // One that is there is left alone, without the base, too.
    disk.storage().convert_thin(thin, base).await.unwrap();
    assert_eq!(fs::read_dir(disk.folder.join("work")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_image_that_can_lie_on_another_is_joined() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let base = disk.blob(&guest_disk()).await;
    let facts = disk.storage().inspect(base).await.unwrap();
    disk.storage().convert(base, &facts).await.unwrap();
    let raw = disk.blob(&vec![1; MIB]).await;
    let refused = disk.storage().convert_thin(raw, base).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    let folder = tempfile::tempdir().unwrap();
    change(folder.path(), &disk.conversion_path(base, "qcow2"));
    // It names its base itself, which could be any file of the host.
    let naming = disk.blob(&fs::read(folder.path().join("top")).unwrap()).await;
    let refused = disk.storage().convert_thin(naming, base).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    let absent = disk.storage().convert_thin(BlobId::new(), base).await;
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
    assert_eq!(fs::read_dir(disk.folder.join("conversions")).unwrap().count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_machine_writes_is_a_draft_like_any_other() {
    let disk = Disk::new();
    let draft = Draft::Vm(BlobId::new());
    disk.storage().append(draft, Some(0), ANY, parts(b"a picture", 4)).await.unwrap();
    let found = disk.storage().find().await.unwrap();
    let found: Vec<(StoredFileKind, u64)> = found.iter().map(|found| (found.what, found.size)).collect();
    assert_eq!(found, [(StoredFileKind::Draft(draft), 9)]);
    disk.storage().keep(draft, BlobId::new()).await.unwrap();
    disk.storage().remove_draft(draft).await.unwrap();
    assert_eq!(disk.storage().draft_size(draft).await.unwrap(), None);
}
