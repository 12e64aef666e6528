//! Thin images, which contain only the differences to a base, and are flattened.

use std::fs;
use std::path::Path;

use muster_types::Error;
use muster_types::blob::ImageFormat;
use muster_types::ids::BlobId;
use muster_types::storage::{Draft, StoredFileKind};

use crate::fixture::{MIB, NO_LIMIT, TestNode, parts, sh};
use crate::images::guest_disk;

/// Creates two images of a changed disk: `whole` is complete, `thin` has only the differences to `base`, without naming it.
fn create_changed_disk(directory: &Path, base: &Path) {
    let (directory, base) = (directory.display(), base.display());
    sh(&format!(
        "cd {directory}
        qemu-img create -q -f qcow2 -F qcow2 -b {base} top 8M
        qemu-io -f qcow2 -c 'write -P 7 1M 200k' -c 'write -z 3M 1M' -c 'write -P 9 7M 64k' top
        qemu-img convert -f qcow2 -O qcow2 top whole
        qemu-img convert -f qcow2 -O qcow2 -B {base} -F qcow2 top thin
        qemu-img rebase -u -f qcow2 -b '' thin"
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn thin_image_is_flattened_and_independent_of_its_base() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let directory = tempfile::tempdir().unwrap();
    let base = node.blob(&guest_disk()).await;
    let facts = node.storage().inspect("ci", base).await.unwrap();
    node.storage().convert("ci", base, &facts).await.unwrap();
    create_changed_disk(directory.path(), &node.conversion_path(base, "qcow2"));

    let thin = node.blob(&fs::read(directory.path().join("thin")).unwrap()).await;
    let facts = node.storage().inspect("ci", thin).await.unwrap();
    assert_eq!((facts.format, facts.virtual_size), (ImageFormat::Qcow2, 8 << 20));
    let elsewhere = node.storage().convert_thin("ci", thin, BlobId::new()).await;
    assert!(matches!(elsewhere, Err(Error::Unavailable(_))), "{elsewhere:?}");
    node.storage().convert_thin("ci", thin, base).await.unwrap();
    let conversion = node.conversion_path(thin, "qcow2");
    sh(&format!("test $(stat -c %a:%u {0}) = 444:$(id -u)", conversion.display()));
    node.storage().remove(base).await.unwrap();
    let whole = directory.path().join("whole");
    sh(&format!("qemu-img compare -f qcow2 -F qcow2 {} {}", conversion.display(), whole.display()));
    assert!(!sh(&format!("qemu-img info {}", conversion.display())).contains("backing"));
    // An existing conversion is not changed, even without the base.
    node.storage().convert_thin("ci", thin, base).await.unwrap();
    assert_eq!(fs::read_dir(node.directory.join("work")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_thin_images_that_cannot_have_a_base() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let base = node.blob(&guest_disk()).await;
    let facts = node.storage().inspect("ci", base).await.unwrap();
    node.storage().convert("ci", base, &facts).await.unwrap();
    let raw = node.blob(&vec![1; MIB]).await;
    let refused = node.storage().convert_thin("ci", raw, base).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    let directory = tempfile::tempdir().unwrap();
    create_changed_disk(directory.path(), &node.conversion_path(base, "qcow2"));
    // The image names its own base, which could be any file of the host.
    let naming = node.blob(&fs::read(directory.path().join("top")).unwrap()).await;
    let refused = node.storage().convert_thin("ci", naming, base).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    let absent = node.storage().convert_thin("ci", BlobId::new(), base).await;
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
    assert_eq!(fs::read_dir(node.directory.join("conversions")).unwrap().count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_of_vms_behave_like_other_drafts() {
    let node = TestNode::new();
    let draft = Draft::Vm(BlobId::new());
    node.storage().append(draft, Some(0), NO_LIMIT, parts(b"a picture", 4)).await.unwrap();
    let found = node.storage().list_files().await.unwrap();
    let found: Vec<(StoredFileKind, u64)> = found.iter().map(|found| (found.kind, found.size)).collect();
    assert_eq!(found, [(StoredFileKind::Draft(draft), 9)]);
    node.storage().commit(draft, BlobId::new()).await.unwrap();
    node.storage().remove_draft(draft).await.unwrap();
    assert_eq!(node.storage().draft_size(draft).await.unwrap(), None);
}
