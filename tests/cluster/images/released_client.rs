//! Images with the unmodified released Python client.

use muster_testing::web_server::{Reply, WebServer};

use std::process::Command;

use super::{Content, MIB, sha512};
use crate::released_client::{installed, run};
use crate::{setup, wait_for};

/// Tests the functions of the client's library that its command does not use. Its argument is a file.
const LIBRARY_SCRIPT: &str = r#"
import os, sys
from shakenfist_client import apiclient

c = apiclient.Client(base_url=os.environ['SHAKENFIST_API_URL'], namespace='system',
                     key=os.environ['SHAKENFIST_KEY'], suppress_configuration_lookup=True)
for word in ('blob-search-by-hash', 'blob-metadata', 'artifact-metadata', 'blob-events', 'blob-data-limit',
             'blob-single-checksum', 'artifact-upload-types'):
    assert c.check_capability(word), word

a = c.get_artifact('pictures')
blob = a['blob_uuid']
assert list(a['blobs']) == [1, 2], a
c.set_artifact_metadata_item(a['uuid'], 'colour', 'navy')
assert c.get_artifact_metadata('pictures') == {'colour': 'navy'}
c.delete_artifact_metadata_item('pictures', 'colour')
assert c.get_artifact_metadata('pictures') == {}
c.set_blob_metadata_item(blob, 'season', 'autumn')
assert c.get_blob_metadata(blob) == {'season': 'autumn'}
c.delete_blob_metadata_item(blob, 'season')
assert c.get_blob_metadata(blob) == {}
assert [e['message'] for e in c.get_artifact_events('pictures')]
assert c.get_blob_hash(blob, 'sha512') == c.get_blob(blob)['sha512']
assert c.get_blob_by_sha512('0' * 128) is None
with open(sys.argv[1], 'rb') as f:
    content = f.read()
assert b''.join(c.get_blob_data(blob)) == content
assert b''.join(c.get_blob_data(blob, offset=1000)) == content[1000:]
assert b''.join(c.get_blob_data(blob, offset=len(content) - 3)) == content[-3:]

l = c.update_label('best', blob)
assert (l['artifact_type'], l['blobs'][1]['uuid']) == ('label', blob), l
l = c.update_label('best', a['blobs'][1]['uuid'])
assert sorted(l['blobs']) == [1, 2], l
try:
    c.update_label('best', '00000000-0000-4000-8000-000000000000')
    assert False, 'a label of nothing'
except apiclient.ResourceNotFoundException:
    pass

u = c.create_upload()
with open(sys.argv[1], 'rb') as f:
    c.send_upload_file(u['uuid'], f)
c.truncate_upload(u['uuid'], 1000)
assert c.send_upload(u['uuid'], content[1000:]) == len(content)
o = c.upload_artifact('papers', u['uuid'])
assert o['blobs']['1']['uuid'] == blob, 'the same content is stored once'

assert len(c.get_artifacts()) == 4, c.get_artifacts()
c.delete_artifact_version('best', 1)
assert list(c.get_artifact('best')['blobs']) == [2]
c.delete_artifact('papers')
gone = c.delete_all_artifacts('system')
assert len(gone) == 3, gone
assert c.get_artifacts() == []
print('done')
"#;

#[tokio::test(flavor = "multi_thread")]
async fn released_client_manages_images() {
    let Some(client) = installed() else { return muster_testing::skipped("the released client from PyPI") };
    let directory = tempfile::tempdir().unwrap();
    let daemon =
        setup(directory.path()).arguments(&[]).set("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8").start();
    let key = daemon.system_key();
    let ok = |arguments: &str| {
        let (success, output) = run(&client, &daemon, "system", &key, arguments);
        assert!(success, "{arguments}: {output}");
        output
    };
    let json = |arguments: &str| -> serde_json::Value {
        serde_json::from_str(&ok(&format!("--json {arguments}"))).unwrap()
    };
    let file = |name: &str, number| {
        let path = directory.path().join(name);
        std::fs::write(&path, Content::new(number, 3 * MIB + number).bytes()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (first, second, third) = (file("first", 1), file("second", 2), file("third", 3));

    let output = ok(&format!("artifact upload pictures {first}"));
    assert!(output.contains("Uploading new blob") && output.contains("Created artifact"), "{output}");
    ok(&format!("artifact upload pictures {second}"));
    let output = ok(&format!("artifact upload again {second}"));
    assert!(output.contains("Recycling existing blob"), "{output}");
    ok(&format!("artifact upload again {third} --no-checksum --shared"));
    ok(&format!("artifact upload again {second}"));

    let list = ok("artifact list");
    assert!(list.contains("sf://upload/system/pictures") && list.contains("2 of 2"), "{list}");
    assert!(ok("--simple artifact list").contains("3 of 3,created,True"));
    let pictures = json("artifact show pictures");
    assert_eq!((&pictures["index"], &pictures["max_versions"]), (&2.into(), &3.into()));
    assert!(ok("artifact show pictures").contains("number of versions       : 2"));
    assert!(ok("--simple artifact show again").contains("3:3.0MB"));
    let versions = json("artifact versions again");
    let checksums: Vec<&str> =
        versions.as_array().unwrap().iter().map(|version| version["sha512"].as_str().unwrap()).collect();
    let checksum = |path: &str| sha512(&std::fs::read(path).unwrap());
    assert_eq!(checksums, [checksum(&second), checksum(&third), checksum(&second)]);
    ok("artifact max-versions again 1");
    assert_eq!(json("artifact versions again").as_array().unwrap().len(), 1);

    ok("artifact unshare again");
    assert_eq!(json("artifact show again")["shared"], false);
    ok("artifact share again");
    assert_eq!(json("artifact show again")["shared"], true);
    ok("namespace create ci");
    ok("namespace add-key ci robot the-secret-of-ci");
    let list = run(&client, &daemon, "ci", "the-secret-of-ci", "--simple artifact list").1;
    assert!(list.contains("sf://upload/system/again") && !list.contains("pictures"), "{list}");

    let copy = directory.path().join("copy");
    let output = ok(&format!("artifact download pictures {}", copy.display()));
    assert!(output.contains("Download complete"), "{output}");
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(&second).unwrap());

    let blob = pictures["blob_uuid"].as_str().unwrap();
    let shown = ok(&format!("blob show {blob}"));
    assert!(shown.contains(&checksum(&second)), "{shown}");
    assert_eq!(json(&format!("blob sha512 {}", checksum(&second)))["uuid"], blob);
    assert!(ok("blob list").contains(blob));
    assert_eq!(json("blob list").as_array().unwrap().len(), 3);
    wait_for("the blob's events", async || {
        ok(&format!("blob events {blob}")).contains("db record created").then_some(())
    })
    .await;
    assert!(ok("artifact events pictures").contains("version added"));
    ok(&format!("label update newest {blob}"));
    assert_eq!(json("artifact show newest")["artifact_type"], "label");
    ok("artifact delete newest");

    let content = Content::new(4, MIB).bytes();
    let web = WebServer::new(move |_, _| Reply::ok(&content)).await;
    ok(&format!("artifact cache {} --shared", web.url("/fetched.img")));
    wait_for("the fetch", async || (json("artifact show fetched.img")["state"] == "created").then_some(()))
        .await;
    ok("artifact delete-version again 3");
    let (success, output) = run(&client, &daemon, "system", &key, "artifact show again");
    assert!(!success || output.contains("deleted"), "{output}");
    assert_eq!(json("artifact delete fetched.img")["state"], "deleted");
    ok(&format!("artifact upload again {third}"));

    let python = client.with_file_name("python");
    let output = Command::new(python)
        .args(["-c", LIBRARY_SCRIPT, &second])
        .env("SHAKENFIST_API_URL", &daemon.url)
        .env("SHAKENFIST_KEY", &key)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("done"), "{text}");
}
