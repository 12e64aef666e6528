//! Uploads in chunks, whose data is read back.

use std::time::Duration;

use muster_testing::wait;
use reqwest::Method;
use serde_json::json;

use super::Caller;
use crate::client::{Client, Told};

const CHUNK: u64 = 64 << 10;
/// The chunks of one upload.
const MAX_CHUNKS: u64 = 20;
const INTERVAL: Duration = Duration::from_millis(100);

/// An upload, as far as the responses to its caller describe it.
#[derive(Debug)]
pub(crate) struct ExpectedUpload {
    name: String,
    id: String,
    /// The bytes that were acknowledged.
    acknowledged: u64,
    /// The bytes that were sent.
    sent: u64,
}

pub(crate) type ExpectedUploads = Vec<ExpectedUpload>;

/// Returns a byte of the content of every upload.
fn byte_at(offset: u64) -> u8 {
    u8::try_from((offset ^ (offset >> 8) ^ (offset >> 16)) & 0xff).unwrap()
}

/// Creates uploads and appends to them.
pub(super) fn run(mut caller: Caller) -> ExpectedUploads {
    let mut uploads: ExpectedUploads = Vec::new();
    while caller.next() {
        wait(INTERVAL);
        let is_full = |upload: &ExpectedUpload| upload.acknowledged >= CHUNK * MAX_CHUNKS;
        let Some(upload) = uploads.last_mut().filter(|upload| !is_full(upload)) else {
            let name = caller.name("upload");
            if let Told::Done(record) = caller.call(Method::POST, "/upload", None)
                && let Some(id) = record["uuid"].as_str()
            {
                uploads.push(ExpectedUpload { name, id: id.to_owned(), acknowledged: 0, sent: 0 });
            }
            continue;
        };
        let path = format!("/upload/{}", upload.id);
        // A chunk without acknowledgement may have arrived in part.
        let mut offset = upload.acknowledged;
        if upload.sent > offset {
            let Told::Done(record) = caller.call(Method::GET, &path, None) else { continue };
            offset = record["size"].as_u64().unwrap_or(offset).max(offset);
        }
        let chunk: Vec<u8> = (offset..offset + CHUNK).map(byte_at).collect();
        upload.sent = upload.sent.max(offset + CHUNK);
        if let Told::Done(size) = caller.send(&format!("{path}?offset={offset}"), chunk) {
            upload.acknowledged = size.as_u64().unwrap_or(offset);
        }
    }
    uploads
}

/// Turns the uploads of a round into artifacts, compares their data with what was acknowledged, and deletes them.
pub(crate) fn check(client: &Client, hosts: usize, uploads: &ExpectedUploads) -> Vec<String> {
    let mut violations = Vec::new();
    for upload in uploads {
        for host in 0..hosts {
            let record = client.get(host, &format!("/upload/{}", upload.id));
            let size = record.as_ref().ok().and_then(|record| record["size"].as_u64());
            if size.is_none_or(|size| size < upload.acknowledged || size > upload.sent) {
                violations.push(format!("{upload:?} is {record:?} through host {host}"));
            }
        }
        violations.extend(check_data(client, upload).err().map(|error| format!("{upload:?}: {error}")));
    }
    violations
}

fn check_data(client: &Client, upload: &ExpectedUpload) -> Result<(), String> {
    if upload.acknowledged == 0 {
        return Ok(());
    }
    let body = json!({ "upload_uuid": upload.id, "artifact_type": "other" });
    let artifact = client.post(&format!("/artifacts/upload/{}", upload.name), &body)?;
    let id = artifact["uuid"].as_str().unwrap_or_default().to_owned();
    let record = client.get(1, &format!("/artifacts/{id}"))?;
    let blob = record["blob_uuid"].as_str().ok_or_else(|| format!("no blob: {record}"))?;
    let data = client.data(2, &format!("/blobs/{blob}/data"))?;
    let is_right = data.len() as u64 >= upload.acknowledged
        && data.iter().enumerate().all(|(offset, byte)| *byte == byte_at(offset as u64));
    client.delete(&format!("/artifacts/{id}"))?;
    if is_right { Ok(()) } else { Err(format!("its data of {} bytes differs", data.len())) }
}
