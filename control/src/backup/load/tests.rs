use std::io::Write;

use muster_store::{Store, Value};
use muster_types::backup::BackupRecipient;

use super::*;
use crate::backup::archive::ArchiveWriter;
use crate::backup::encryption::{EncryptedWriter, Protection, generate_key};
use crate::backup::{NewBackup, create};

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
        let error = verify(&file, &key, folder.path(), &[]).await.unwrap_err().to_string();
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
        let error = verify(&file, &key, folder.path(), &[]).await.unwrap_err();
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
        protection: Protection::Recipients(vec![recipient]),
        file: &file,
    };
    let summary = create(new()).await.unwrap();
    assert_eq!(summary.bytes, fs::metadata(&file).unwrap().len());
    let exists = create(new()).await.unwrap_err().to_string();
    assert!(exists.contains("exists"), "{exists}");
    let report = verify(&file, &DecryptionKey::PrivateKey(private), folder.path(), &[]).await.unwrap();
    assert_eq!((report.rows, report.blobs), (summary.rows, 0));
}
