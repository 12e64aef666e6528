use super::*;
use crate::fake_server::FakeServer;

fn spec(size: Option<u64>, base: Option<&str>, bus: DiskBus, disk_type: DiskType) -> DiskSpec {
    DiskSpec { size, base: base.map(str::to_owned), bus, disk_type }
}

#[test]
fn disk_has_a_size_or_an_image_or_both() {
    use DiskBus::{Nvme, Sata, Virtio};
    use DiskType::{Cdrom, Disk};
    for (text, expected) in [
        ("20", spec(Some(20), None, Virtio, Disk)),
        ("2T", spec(Some(2048), None, Virtio, Disk)),
        ("20GB", spec(Some(20), None, Virtio, Disk)),
        ("8@tiny", spec(Some(8), Some("tiny"), Virtio, Disk)),
        ("@debian:12", spec(None, Some("debian:12"), Virtio, Disk)),
        ("8@tiny,bus=nvme", spec(Some(8), Some("tiny"), Nvme, Disk)),
        ("@cd,type=cdrom,bus=sata", spec(None, Some("cd"), Sata, Cdrom)),
        ("@cd,cdrom", spec(None, Some("cd"), Virtio, Cdrom)),
        ("@https://h/a,b.img", spec(None, Some("https://h/a,b.img"), Virtio, Disk)),
        ("@https://h/a?x,y=1,bus=sata", spec(None, Some("https://h/a?x,y=1"), Sata, Disk)),
        ("9@https://me@h/a.img", spec(Some(9), Some("https://me@h/a.img"), Virtio, Disk)),
    ] {
        assert_eq!(parse_disk(text), Ok(expected), "{text}");
    }
}

#[test]
fn rejects_invalid_disks() {
    for text in
        ["", "@", "8@", "x", "-8", "8M", "8,", "8,bus=ide", "8,bus", "8,size=9", "8@tiny,type=floppy", "8,9"]
    {
        assert!(parse_disk(text).is_err(), "{text}");
    }
    assert_eq!(parse_disk("8,bus=ide").unwrap_err(), "\"ide\" must be one of sata, scsi, usb, virtio, nvme");
}

#[test]
fn interface_starts_with_its_network() {
    let plain = parse_network("lan").unwrap();
    assert_eq!(json!(plain), json!({ "network_uuid": "lan", "float": false }));
    let full = parse_network("lan@10.0.0.7,float,model=e1000,mac=02:00:00:00:00:07").unwrap();
    let expected = json!({
        "network_uuid": "lan", "address": "10.0.0.7", "float": true, "model": "e1000",
        "macaddress": "02:00:00:00:00:07"
    });
    assert_eq!(json!(full), expected);
    assert_eq!(parse_network("lan@none").unwrap().address.as_deref(), Some("none"));
    for text in ["", "@10.0.0.7", "lan@", "lan,", "lan,floating", "lan,model=", "lan,mac", "lan,x=y"] {
        assert!(parse_network(text).is_err(), "{text}");
    }
}

#[test]
fn video_options_have_defaults() {
    assert_eq!(parse_video("vdi=vnc").unwrap(), VideoSpec { vdi: Vdi::Vnc, ..VideoSpec::default() });
    let full = VideoSpec { model: "qxl".into(), memory: 65536, vdi: Vdi::SpiceConcurrent };
    assert_eq!(parse_video("model=qxl,memory=65536,vdi=spiceconcurrent").unwrap(), full);
    for text in ["", "qxl", "model=", "memory=1.5", "vdi=rdp", "colour=red"] {
        assert!(parse_video(text).is_err(), "{text}");
    }
}

#[test]
fn memory_is_in_megabytes_without_a_unit() {
    for (text, megabytes) in [("512", 512), ("512M", 512), ("2G", 2048), ("2gib", 2048), ("1t", 1 << 20)] {
        assert_eq!(parse_memory(text), Ok(megabytes), "{text}");
    }
    for text in ["", "G", "1.5G", "-1", "2X", "2 G", "99999999999999999999", "18446744073709551615T"] {
        assert!(parse_memory(text).is_err(), "{text}");
    }
}

#[test]
fn tags_and_affinity_become_metadata() {
    let items = vec![parse_metadata("size=7").unwrap(), parse_metadata("who=me=you").unwrap()];
    let rules = ["require-with=web", "prefer-without=db", "require-with=big"]
        .map(|rule| parse_affinity(rule).unwrap());
    let all = build_metadata(items, &["web".into()], rules.into()).unwrap();
    let expected = json!({
        "size": 7, "who": "me=you", "tags": ["web"],
        "affinity": { "require_with_tag": ["web", "big"], "prefer_without_tag": ["db"] }
    });
    assert_eq!(Value::from(all), expected);
    let twice = vec![parse_metadata("tags=[\"a\"]").unwrap()];
    assert!(build_metadata(twice, &["b".into()], vec![]).is_err());
    assert!(parse_metadata("size").is_err() && parse_metadata("=7").is_err());
    assert!(
        parse_affinity("near=web").is_err()
            && parse_affinity("require-with=").is_err()
            && parse_affinity("web").is_err()
    );
}

#[test]
fn side_channels_are_default_none_or_given() {
    assert_eq!(check_side_channels(vec![]).unwrap(), None);
    assert_eq!(check_side_channels(vec!["none".into()]).unwrap(), Some(vec![]));
    assert_eq!(check_side_channels(vec!["sf-agent".into()]).unwrap(), Some(vec!["sf-agent".into()]));
    let error = check_side_channels(vec!["agent".into()]).unwrap_err().to_string();
    assert_eq!(error, "--side-channel: \"agent\" must be one of sf-agent, sf-agent2, none");
}

#[test]
fn accepts_public_keys_and_their_files_but_no_private_keys() {
    assert_eq!(read_ssh_key("ssh-ed25519 AAAA me\n").unwrap(), "ssh-ed25519 AAAA me");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("id");
    let name = file.to_str().unwrap();
    assert!(read_ssh_key(name).unwrap_err().to_string().ends_with("no such file or directory"));
    fs::write(&file, "ecdsa-sha2-nistp256 AAAA me\n").unwrap();
    assert_eq!(read_ssh_key(name).unwrap(), "ecdsa-sha2-nistp256 AAAA me");
    fs::write(&file, "-----BEGIN OPENSSH PRIVATE KEY-----").unwrap();
    assert!(read_ssh_key(name).unwrap_err().to_string().ends_with("id.pub?"));
    fs::write(&file, "\n").unwrap();
    assert!(read_ssh_key(name).is_err());
}

#[test]
fn user_data_is_sent_as_base64() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("data");
    fs::write(&file, [0, 255]).unwrap();
    assert_eq!(read_user_data(&file).unwrap(), "AP8=");
    assert!(read_user_data(&directory.path().join("none")).is_err());
}

#[tokio::test]
async fn plain_word_is_a_label_or_an_artifact_or_passed_on() {
    const ID: &str = "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
    const BLOB: &str = "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
    let artifact = json!({
        "uuid": ID, "name": "tiny", "namespace": "ci", "artifact_type": "image", "state": "created",
        "error_message": null, "source_url": "x", "shared": false, "max_versions": 3, "index": 1, "blobs": {},
        "metadata": {}, "version": 9, "last_cluster_operation": null, "references_to": {}, "references_from": {}
    });
    let (client, fake) = FakeServer::start(vec![
        ("GET /label/stable", vec![(200, artifact.clone())]),
        ("GET /artifacts/tiny", vec![(200, artifact.clone())]),
        ("GET /artifacts/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, artifact)]),
        ("GET /artifacts/twice", vec![(400, json!({ "error": "multiple artifacts" }))]),
    ])
    .await;
    for unchanged in ["debian:12", "label:x", "sf://blob/x", "https://h/a", "a/b", "none"] {
        assert_eq!(resolve_image(&client, unchanged).await.unwrap(), unchanged);
    }
    assert!(fake.requests().is_empty(), "{:?}", fake.requests());
    let artifact = format!("sf://artifact/{ID}");
    assert_eq!(resolve_image(&client, "stable").await.unwrap(), "label:stable");
    assert_eq!(resolve_image(&client, "tiny").await.unwrap(), artifact);
    assert_eq!(resolve_image(&client, ID).await.unwrap(), artifact);
    assert_eq!(resolve_image(&client, BLOB).await.unwrap(), format!("sf://blob/{BLOB}"));
    assert_eq!(resolve_image(&client, "cirros").await.unwrap(), "cirros");
    assert_eq!(resolve_image(&client, "twice").await.unwrap_err().to_string(), "multiple artifacts");
}
