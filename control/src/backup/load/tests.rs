use std::io::Write;

use muster_store::blobs::NewBlob;
use muster_store::{Store, Value};
use muster_types::backup::BackupRecipient;
use muster_types::blob::{Checksums, ContentDigest};

use super::*;
use crate::backup::archive::ArchiveWriter;
use crate::backup::encryption::{EncryptedWriter, Protection, generate_key};
use crate::backup::{BlobSource, CopyFuture, NewBackup, create};

type Archive = ArchiveWriter<EncryptedWriter<Vec<u8>>>;

fn manifest() -> Manifest {
    Manifest {
        format: FORMAT,
        created: 1e9,
        release: "x".into(),
        schema_version: 20,
        blobs: BlobMode::Include,
    }
}

/// Writes a backup that everyone who knows the recipient can create.
fn forge(recipient: BackupRecipient, manifest: &Manifest, add: impl FnOnce(&mut Archive)) -> Vec<u8> {
    let encrypted = EncryptedWriter::new(Vec::new(), &Protection::Recipients(vec![recipient])).unwrap();
    let mut archive = ArchiveWriter::new(encrypted);
    archive.begin(&PartHeader::Manifest).unwrap();
    archive.add(&serde_json::to_vec(manifest).unwrap()).unwrap();
    archive.begin(&PartHeader::Seed).unwrap();
    archive.add(b"a seed of some length").unwrap();
    add(&mut archive);
    archive.finish().unwrap().finish().unwrap()
}

fn table(archive: &mut Archive, name: &str, rows: &[Vec<Value>]) {
    archive.begin(&PartHeader::Table { name: name.into() }).unwrap();
    for row in rows {
        archive.add(&backup::encode(&Row(row.clone()))).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_backups_are_rejected_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (recipient, private) = generate_key().unwrap();
    let key = DecryptionKey::PrivateKey(private);
    let blob = PartHeader::Blob { uuid: BlobId::new(), size: 1 << 62 };
    let text = |text: &str| Value::Text(text.to_owned());
    let newer = Manifest { schema_version: 999, ..manifest() };
    let unknown = Manifest { format: 2, ..manifest() };
    let forged: Vec<(&str, Vec<u8>)> = vec![
        ("unknown table", forge(recipient, &manifest(), |a| table(a, "nodes; DROP TABLE nodes", &[]))),
        (
            "not in the order",
            forge(recipient, &manifest(), |a| {
                table(a, "nodes", &[]);
                table(a, "namespaces", &[]);
            }),
        ),
        (
            "failed to restore table trusts",
            forge(recipient, &manifest(), |a| {
                table(a, "trusts", &[vec![text("a"); 9]]);
            }),
        ),
        (
            "not readable",
            forge(recipient, &manifest(), |a| {
                a.begin(&PartHeader::Table { name: "nodes".into() }).unwrap();
                a.add(&[3, 255, 255, 255, 255]).unwrap();
            }),
        ),
        (
            "is not that of its database",
            forge(recipient, &manifest(), |a| {
                a.begin(&blob).unwrap();
                a.add(b"x").unwrap();
            }),
        ),
        ("there twice", forge(recipient, &manifest(), |a| a.begin(&PartHeader::Seed).unwrap())),
        (
            "not consistent",
            forge(recipient, &manifest(), |a| {
                let link = ["namespace", "x"].map(text);
                table(a, "blob_contents", &[vec![link[0].clone(), link[1].clone()]]);
            }),
        ),
        ("use the release that created the backup", forge(recipient, &newer, |_| {})),
        ("does not know", forge(recipient, &unknown, |_| {})),
    ];
    let file = folder.path().join("forged.backup");
    for (reason, bytes) in forged {
        fs::write(&file, bytes).unwrap();
        let error = verify(&file, &key, folder.path(), &[], ProgressReceiver::default())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(reason), "{error} instead of {reason}");
    }
    // A name that is not an id of a blob, and a part without an end.
    let raw = |frames: &[(u8, &str)]| {
        let mut writer = EncryptedWriter::new(Vec::new(), &Protection::Recipients(vec![recipient])).unwrap();
        for (kind, text) in frames {
            writer.write_all(&[*kind]).unwrap();
            writer.write_all(&u32::try_from(text.len()).unwrap().to_be_bytes()).unwrap();
            writer.write_all(text.as_bytes()).unwrap();
        }
        writer.finish().unwrap()
    };
    for frames in [
        &[(b'P', r#"{"part":"blob","uuid":"../../etc/passwd","size":1}"#)][..],
        &[(b'P', r#"{"part":"manifest","path":"/etc/passwd"}"#)],
        &[(b'P', r#"{"part":"manifest"}"#), (b'R', "{}")],
        &[(b'Z', r#"{"parts":0}"#)],
        &[],
    ] {
        fs::write(&file, raw(frames)).unwrap();
        let error = verify(&file, &key, folder.path(), &[], ProgressReceiver::default()).await.unwrap_err();
        assert!(matches!(error, BackupError::Damaged(_)), "{error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "only the file remains");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_database_can_be_backed_up() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("sqlite:{}", folder.path().join("muster.db").display())).await.unwrap();
    let (recipient, private) = generate_key().unwrap();
    let (file, seed) = (folder.path().join("x.backup"), Secret::new("a seed of some length"));
    let new = || NewBackup {
        store: &store,
        seed: &seed,
        blobs: BlobMode::Include,
        storages: &[],
        source: None,
        protection: Protection::Recipients(vec![recipient]),
        file: &file,
        progress: ProgressReceiver::default(),
    };
    let summary = create(new()).await.unwrap();
    assert_eq!(summary.bytes, fs::metadata(&file).unwrap().len());
    let exists = create(new()).await.unwrap_err().to_string();
    assert!(exists.contains("exists"), "{exists}");
    let report =
        verify(&file, &DecryptionKey::PrivateKey(private), folder.path(), &[], ProgressReceiver::default())
            .await
            .unwrap();
    assert_eq!((report.rows, report.blobs), (summary.rows, 0));
}

/// A cluster with blobs that this host lacks, and a directory for backups.
struct RemoteCluster {
    folder: tempfile::TempDir,
    store: Store,
    blobs: Vec<BlobId>,
}

/// What another host does when a blob is requested from it.
#[derive(Debug)]
enum OtherHost<'a> {
    Sends(&'a [u8]),
    /// Deletes the blob at that moment.
    Deletes(&'a Store),
    Fails,
    /// Sends nothing, and tells that it was asked.
    Hangs(tokio::sync::Notify),
}

impl BlobSource for OtherHost<'_> {
    fn copy(&self, blob: BlobId, sink: mpsc::Sender<Vec<u8>>) -> CopyFuture<'_> {
        Box::pin(async move {
            match self {
                Self::Sends(content) => {
                    for part in content.chunks(3) {
                        sink.send(part.to_vec()).await.map_err(|error| error.to_string())?;
                    }
                    Ok(())
                }
                Self::Deletes(store) => {
                    let removed: muster_types::Result<()> = muster_store::transaction!(store, |tx| {
                        tx.execute(
                            "UPDATE blobs SET state = 'deleted' WHERE uuid = ?",
                            &[Value::Text(blob.to_string())],
                        )
                        .await?;
                        Ok(())
                    });
                    removed.map_err(|error| error.to_string())?;
                    Err("not found".to_owned())
                }
                Self::Fails => Err("unreachable".to_owned()),
                Self::Hangs(asked) => {
                    asked.notify_one();
                    std::future::pending().await
                }
            }
        })
    }
}

impl RemoteCluster {
    async fn new(contents: &[&[u8]]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("muster.db").display());
        let store = Store::open(&url).await.unwrap();
        let mut blobs = Vec::new();
        for content in contents {
            let id = BlobId::new();
            let sha256 = hex::encode(digest::digest(&digest::SHA256, content));
            let checksums =
                Checksums { sha1: String::new(), sha256, sha512: id.to_string(), xxh128: String::new() };
            let content = ContentDigest { size: content.len() as u64, checksums };
            let new = NewBlob { id, content, modified: None, image: None };
            let added: muster_types::Result<()> = muster_store::transaction!(store, |tx| {
                muster_store::blobs::insert(tx, &new).await?;
                muster_store::blobs::set_created(tx, id).await?;
                Ok(())
            });
            added.unwrap();
            blobs.push(id);
        }
        Self { folder, store, blobs }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("backups/x.backup")
    }

    /// Creates a backup, and returns what verifying it finds.
    async fn back_up(&self, source: &OtherHost<'_>) -> Result<(BackupReport, u64), BackupError> {
        let _ = fs::create_dir(self.folder.path().join("backups"));
        let (recipient, private) = generate_key().unwrap();
        let (file, seed) = (self.file(), Secret::new("a seed of some length"));
        let summary = create(NewBackup {
            store: &self.store,
            seed: &seed,
            blobs: BlobMode::Include,
            storages: &[],
            source: Some(source),
            protection: Protection::Recipients(vec![recipient]),
            file: &file,
            progress: ProgressReceiver::default(),
        })
        .await?;
        let key = DecryptionKey::PrivateKey(private);
        let report = verify(&file, &key, self.folder.path(), &[], ProgressReceiver::default()).await?;
        Ok((report, summary.deleted_blobs))
    }

    fn has_file(&self) -> bool {
        fs::read_dir(self.folder.path().join("backups")).is_ok_and(|entries| entries.count() > 0)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_of_other_hosts_are_included_if_their_checksum_is_right() {
    let cluster = RemoteCluster::new(&[b"content of a blob"]).await;
    for source in [OtherHost::Sends(b"another content"), OtherHost::Sends(b""), OtherHost::Fails] {
        let error = cluster.back_up(&source).await.unwrap_err().to_string();
        assert!(error.contains(&cluster.blobs[0].to_string()), "{error}");
        assert!(!cluster.has_file());
    }
    let (report, deleted) = cluster.back_up(&OtherHost::Sends(b"content of a blob")).await.unwrap();
    assert_eq!((report.blobs, report.missing_blobs.len(), deleted), (1, 0, 0));
    assert_eq!(report.manifest.blobs, BlobMode::Include);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_is_deleted_meanwhile_does_not_fail_the_backup() {
    let cluster = RemoteCluster::new(&[b"one", b"two"]).await;
    let (report, deleted) = cluster.back_up(&OtherHost::Deletes(&cluster.store)).await.unwrap();
    assert_eq!((report.blobs, deleted), (2, 2));
    let (mut found, mut expected) = (report.deleted_blobs, cluster.blobs);
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_backup_leaves_no_file() {
    let cluster = RemoteCluster::new(&[b"content of a blob"]).await;
    let source = OtherHost::Hangs(tokio::sync::Notify::new());
    let OtherHost::Hangs(asked) = &source else { unreachable!() };
    tokio::select! {
        done = cluster.back_up(&source) => panic!("{done:?}"),
        () = asked.notified() => {}
    }
    while cluster.has_file() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(!cluster.file().exists());
}

#[test]
fn missing_space_is_found_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    assert!(require_space(&folder.path().join("a/b"), 1).is_ok());
    let error = require_space(folder.path(), u64::MAX).unwrap_err().to_string();
    assert!(error.contains("not enough space in") && error.contains("MiB are available"), "{error}");
}
