//! SIGKILL while images are uploaded, fetched, converted and deleted: acknowledged images are complete, and no other
//! files remain.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_testing::web_server::{ReceivedRequest, Reply, WebServer};
use muster_testing::{Daemon, DaemonSetup};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Client, Content, MIB, Random, gzip, qcow2, sha512, text};
use crate::setup;

const KEY: &str = "the first key";
const KILLS: usize = 12;
/// The maximum number of versions of an artifact.
const MAX_VERSIONS: usize = 3;
const ROUNDS: u64 = 12;
const TIMEOUT: Duration = Duration::from_secs(120);

/// The changes that the daemon acknowledged.
#[derive(Debug, Default)]
struct Acknowledged {
    /// The checksums of the versions of each artifact, oldest first, and whether it is an image.
    created: BTreeMap<String, (Vec<String>, bool)>,
    deleted: BTreeSet<String>,
    /// Uploads in progress, and how many of their bytes were acknowledged.
    open: BTreeMap<String, (u64, Content)>,
}

/// The state that all workers share.
struct Workload {
    client: Client,
    web: WebServer,
    /// Disk images, uncompressed and compressed.
    images: Vec<(Vec<u8>, Vec<u8>)>,
    acknowledged: Mutex<Acknowledged>,
    random: Random,
    stopped: AtomicBool,
}

impl Workload {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn acknowledged(&self) -> std::sync::MutexGuard<'_, Acknowledged> {
        self.acknowledged.lock().unwrap()
    }

    /// Repeats a call until there is a response other than 503.
    async fn call_with_retry(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let started = Instant::now();
        loop {
            match self.client.try_call(method.clone(), path, body.clone()).await {
                Some((status, response)) if status != 503 => return (status, response),
                response => assert!(started.elapsed() < TIMEOUT, "{path}: {response:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns the ID of an artifact and the checksum of its newest version, if there is one.
    async fn newest(&self, name: &str) -> Option<(String, String)> {
        let (status, record) = self.call_with_retry(Method::GET, &format!("/artifacts/{name}"), None).await;
        assert!(status == 200 || status == 404, "{status} {record}");
        let blob = record["blob_uuid"].as_str()?;
        let (status, blob) = self.call_with_retry(Method::GET, &format!("/blobs/{blob}"), None).await;
        assert_eq!(status, 200, "the blob of an artifact is missing: {blob}");
        Some((text(&record, "uuid"), text(&blob, "sha512")))
    }

    /// Uploads a part of a content, resuming after failures. Returns the acknowledged size.
    async fn send(&self, upload: &str, content: &Content, from: u64, to: u64) -> u64 {
        let mut size_sent = from;
        while size_sent < to {
            let end = (size_sent + 1 + self.random.below(400_000)).min(to);
            match self.client.try_send(upload, size_sent, content.part(size_sent, end)).await {
                Some((200, size)) => {
                    assert_eq!(size, json!(end));
                    size_sent = end;
                }
                Some((409 | 503, _)) | None => {
                    let (status, record) =
                        self.call_with_retry(Method::GET, &format!("/upload/{upload}"), None).await;
                    assert_eq!(status, 200, "an upload was lost: {record}");
                    let size = record["size"].as_u64().unwrap();
                    assert!(
                        (size_sent..=end).contains(&size),
                        "{size_sent} bytes were acknowledged, {size} are stored"
                    );
                    size_sent = size;
                }
                Some((status, body)) => panic!("{status} {body}"),
            }
        }
        size_sent
    }

    async fn create_upload(&self) -> String {
        let (status, record) = self.call_with_retry(Method::POST, "/upload", Some(json!({}))).await;
        assert_eq!(status, 200, "{record}");
        text(&record, "uuid")
    }

    /// Creates a version of an artifact from an upload and records it.
    async fn create_version(&self, name: &str, upload: &str, checksum: &str, is_image: bool) -> String {
        let kind = if is_image { "image" } else { "other" };
        let body = json!({"upload_uuid": upload, "artifact_type": kind});
        let path = format!("/artifacts/upload/{name}");
        let id = loop {
            match self.client.try_call(Method::POST, &path, Some(body.clone())).await {
                Some((200, record)) => break text(&record, "uuid"),
                Some((503, _)) => {}
                None | Some((404, _)) => {
                    // Without a response it may have been done, in which case the upload is consumed.
                    let (status, body) =
                        self.call_with_retry(Method::GET, &format!("/upload/{upload}"), None).await;
                    if status == 404 {
                        let created = self.newest(name).await.filter(|(_, newest)| newest == checksum);
                        break created.expect("a consumed upload has become a version").0;
                    }
                    assert_eq!(status, 200, "{body}");
                }
                Some((status, body)) => panic!("{status} {body}"),
            }
        };
        let mut acknowledged = self.acknowledged();
        let (versions, _) = acknowledged.created.entry(id.clone()).or_insert_with(|| (vec![], is_image));
        if versions.last().is_none_or(|last| last != checksum) {
            versions.push(checksum.to_owned());
        }
        if versions.len() > MAX_VERSIONS {
            versions.remove(0);
        }
        id
    }

    async fn delete(&self, id: &str) {
        let (status, body) = self.call_with_retry(Method::DELETE, &format!("/artifacts/{id}"), None).await;
        assert!(status == 200 || status == 404, "{status} {body}");
        let mut acknowledged = self.acknowledged();
        acknowledged.created.remove(id);
        acknowledged.deleted.insert(id.to_owned());
    }

    /// Uploads contents and images under few names, and deletes some of them.
    async fn upload_and_delete(&self, worker: u64) {
        let slow = Content::new(1000 + worker, 50 * MIB);
        let (open, mut sent) = (self.create_upload().await, 0);
        let mut number = 0;
        while !self.is_stopped() {
            number += 1;
            let is_image = self.random.below(3) > 0;
            let content = Content::new(worker * 100_000 + number, 50_000 + self.random.below(2 * MIB));
            let bytes = if is_image && self.random.below(2) == 0 {
                self.images[self.random.below(self.images.len() as u64) as usize].0.clone()
            } else {
                content.bytes()
            };
            let upload = self.create_upload().await;
            let checksum = sha512(&bytes);
            let content = Content::of(bytes);
            self.send(&upload, &content, 0, content.size).await;
            let name = format!("sent-{worker}-{}-{is_image}", number / 6);
            let id = self.create_version(&name, &upload, &checksum, is_image).await;
            if self.random.below(3) == 0 {
                self.delete(&id).await;
            }
            sent = self.send(&open, &slow, sent, sent + 30_000).await;
            self.acknowledged().open.insert(open.clone(), (sent, slow.clone()));
        }
    }

    /// Fetches images from a slow server, and deletes some of them, even while they are fetched.
    async fn fetch_and_delete(&self, worker: u64) {
        let mut number = 0;
        while !self.is_stopped() {
            number += 1;
            let compressed = self.random.below(2) == 0;
            let (path, checksum) = if compressed {
                let image = self.random.below(self.images.len() as u64);
                (format!("/packed/{image}/{worker}-{number}"), sha512(&self.images[image as usize].0))
            } else {
                let seed = 500_000 + worker * 10_000 + number;
                (format!("/plain/{seed}"), Content::new(seed, MIB + seed).checksum())
            };
            let body = json!({"url": self.web.url(&path)});
            let (status, record) = self.call_with_retry(Method::POST, "/artifacts", Some(body)).await;
            assert_eq!(status, 200, "{record}");
            let id = text(&record, "uuid");
            if self.random.below(5) == 0 {
                self.delete(&id).await;
                continue;
            }
            let started = Instant::now();
            loop {
                let (status, record) =
                    self.call_with_retry(Method::GET, &format!("/artifacts/{id}"), None).await;
                assert!(status == 200 && record["state"] != "error", "{record}");
                if record["state"] == "created" {
                    break;
                }
                assert!(started.elapsed() < TIMEOUT, "a fetch timed out: {record}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            self.acknowledged().created.insert(id.clone(), (vec![checksum], true));
            if self.random.below(3) == 0 {
                self.delete(&id).await;
            }
        }
    }

    /// Compares the stored objects with the acknowledged changes. Temporary differences are returned as errors.
    async fn check_settled(&self, storage: &Path) -> Result<(), String> {
        let mut versions: HashMap<String, Vec<(u64, String)>> = HashMap::new();
        for record in self.client.get("/artifacts").await.as_array().unwrap() {
            let mut blobs: Vec<(u64, String)> = (record["blobs"].as_object().unwrap().iter())
                .map(|(index, blob)| (index.parse().unwrap(), text(blob, "uuid")))
                .collect();
            blobs.sort_unstable();
            assert_eq!(record["state"], "created", "{record}");
            versions.insert(text(record, "uuid"), blobs);
        }
        let mut checksums: HashMap<String, String> = HashMap::new();
        for record in self.client.get("/blobs").await.as_array().unwrap() {
            if record["state"] != "created" {
                return Err(format!("a blob is incomplete: {record}"));
            }
            if record["reference_count"] == 0 {
                return Err(format!("a blob is not referenced: {record}"));
            }
            checksums.insert(text(record, "uuid"), text(record, "sha512"));
        }
        let acknowledged = self.acknowledged();
        let found: BTreeSet<&String> = versions.keys().collect();
        let expected: BTreeSet<&String> = acknowledged.created.keys().collect();
        assert_eq!(found, expected, "artifacts differ from the acknowledged ones");
        let mut images = BTreeSet::new();
        for (id, (expected, is_image)) in &acknowledged.created {
            let found: Vec<&String> = versions[id].iter().map(|(_, blob)| &checksums[blob]).collect();
            assert_eq!(found, expected.iter().collect::<Vec<_>>(), "the versions of {id}");
            if *is_image {
                images.extend(versions[id].iter().map(|(_, blob)| format!("{blob}.qcow2")));
            }
        }

        let blobs = checksums.keys().flat_map(|blob| [blob.clone(), format!("{blob}.sums")]).collect();
        let drafts = acknowledged.open.keys().map(|upload| format!("upload-{upload}")).collect();
        for (directory, expected) in [("blobs", blobs), ("drafts", drafts), ("work", BTreeSet::new())] {
            compare(directory, &files(&storage.join(directory)), &expected)?;
        }
        let conversions = files(&storage.join("conversions"));
        if let Some(missing) = images.difference(&conversions).next() {
            return Err(format!("an image is not converted: {missing}"));
        }
        let all = checksums.keys().map(|blob| format!("{blob}.qcow2")).collect();
        compare("conversions", &conversions.union(&all).cloned().collect(), &all)
    }

    /// Reads all blobs completely.
    async fn read_all(&self) {
        for record in self.client.get("/blobs").await.as_array().unwrap() {
            let bytes = self.client.data(&text(record, "uuid")).await;
            assert_eq!(sha512(&bytes), text(record, "sha512"));
        }
        let deleted = self.acknowledged().deleted.clone();
        for id in deleted {
            // The record exists until the cleaner deletes it.
            let (status, record) = self.client.call(Method::GET, &format!("/artifacts/{id}"), None).await;
            assert!(status == 404 || record["state"] == "deleted", "{id} is not deleted: {status} {record}");
        }
    }

    async fn settle(&self, daemon: &Daemon) {
        let started = Instant::now();
        while let Err(why) = self.check_settled(&daemon.data).await {
            assert!(started.elapsed() < TIMEOUT, "the daemon does not settle: {why}\n{}", daemon.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn compare(directory: &str, found: &BTreeSet<String>, expected: &BTreeSet<String>) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let extra: Vec<_> = found.difference(expected).collect();
    let missing: Vec<_> = expected.difference(found).collect();
    Err(format!("{directory}: unexpected {extra:?}, missing {missing:?}"))
}

/// Returns the names of all files below a directory.
fn files(directory: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            names.extend(files(&entry.path()));
        } else {
            names.insert(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names
}

async fn kill_during_workload(setup: DaemonSetup, directory: &Path) {
    let Some(images) = (1..=4)
        .map(|number| {
            let image = qcow2(directory, &Content::new(number, 6 * MIB))?;
            let compressed = gzip(directory, &image);
            Some((image, compressed))
        })
        .collect::<Option<Vec<_>>>()
    else {
        return muster_testing::skipped("qemu-utils");
    };
    let setup = setup
        .arguments(&[])
        .set("NODE_NAME", "here")
        .set("SYSTEM_KEY", KEY)
        .set("CLUSTER_OP_LEASE", "1")
        .set("CLUSTER_OP_MAX_ATTEMPTS", "50")
        .set("CLEANER_DELAY", "1")
        .set("BLOB_DELETION_DELAY", "1")
        .set("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8");
    let compressed: Vec<Vec<u8>> = images.iter().map(|(_, compressed)| compressed.clone()).collect();
    let web = WebServer::new(move |request: &ReceivedRequest, _| {
        let mut words = request.path.split('/').skip(1);
        let (kind, number) = (words.next().unwrap(), words.next().unwrap().parse::<u64>().unwrap());
        let content = match kind {
            "packed" => compressed[number as usize].clone(),
            _ => Content::new(number, MIB + number).bytes(),
        };
        let reply = match request.range_start() {
            Some(start) if start < content.len() => Reply::part(&content, start),
            Some(_) => Reply::status(416),
            None => Reply::ok(&content),
        };
        reply.with("ETag", "\"one\"").slow(Duration::from_millis(500))
    })
    .await;

    let mut daemon = setup.start();
    let client = Client::new(&daemon, KEY).await;
    let workload = Arc::new(Workload {
        client,
        web,
        images,
        acknowledged: Mutex::default(),
        random: Random::new(),
        stopped: AtomicBool::new(false),
    });
    let mut workers = Vec::new();
    for worker in 1..=5 {
        let workload = Arc::clone(&workload);
        workers.push(tokio::spawn(async move {
            if worker <= 3 {
                workload.upload_and_delete(worker).await;
            } else {
                workload.fetch_and_delete(worker).await;
            }
        }));
    }
    let is_enough = || {
        let acknowledged = workload.acknowledged();
        acknowledged.created.len() >= 5 && acknowledged.deleted.len() >= 3 && acknowledged.open.len() == 3
    };
    let mut kills = 0;
    while kills < KILLS || !is_enough() {
        assert!(kills < 5 * KILLS, "too little progress: {:?}", workload.acknowledged());
        kills += 1;
        // A busy host needs more time for the same progress.
        let busy = 1 + (kills / KILLS) as u64;
        tokio::time::sleep(Duration::from_millis(100 + busy * workload.random.below(900))).await;
        daemon.kill();
        daemon = setup.start();
        assert!(!workers.iter().any(tokio::task::JoinHandle::is_finished), "a worker ended early");
    }
    workload.stopped.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    {
        let acknowledged = workload.acknowledged();
        println!(
            "{kills} kills, {} artifacts created, {} deleted",
            acknowledged.created.len(),
            acknowledged.deleted.len()
        );
    }
    workload.settle(&daemon).await;
    workload.read_all().await;

    // Uploads that were in progress can be finished.
    let open = std::mem::take(&mut workload.acknowledged().open);
    for (upload, (sent, content)) in open {
        let file = daemon.data.join(format!("drafts/upload-{upload}"));
        assert_eq!(std::fs::metadata(file).unwrap().len(), sent);
        let end = sent + 1000;
        assert_eq!(workload.send(&upload, &content, sent, end).await, end);
        workload
            .create_version(&format!("calm-{upload}"), &upload, &sha512(&content.part(0, end)), false)
            .await;
    }
    workload.settle(&daemon).await;
    workload.read_all().await;
    let log = daemon.log();
    assert!(!log.contains("panicked") && !log.contains("without a record"), "{log}");
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_images_survive_sigkill_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    kill_during_workload(setup(directory.path()), directory.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_images_survive_sigkill_on_mariadb() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let directory = tempfile::tempdir().unwrap();
    kill_during_workload(setup(directory.path()).set("DATABASE_URL", &url), directory.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_identical_uploads_leave_one_blob_after_kill() {
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path()).arguments(&["--simulate", "1"]).set("SYSTEM_KEY", KEY);
    let mut daemon = setup.start();
    let (client, random) = (Client::new(&daemon, KEY).await, Random::new());
    for round in 0..ROUNDS {
        let content = Content::new(round, 100_000).bytes();
        let mut uploads = Vec::new();
        for _ in 0..10 {
            let upload = text(&client.post("/upload", json!({})).await, "uuid");
            assert_eq!(client.send(&upload, 0, content.clone()).await.0, 200);
            uploads.push(upload);
        }
        let mut requests = tokio::task::JoinSet::new();
        for (number, upload) in uploads.into_iter().enumerate() {
            let client = client.clone();
            requests.spawn(async move {
                let body = json!({"upload_uuid": upload, "artifact_type": "other"});
                let path = format!("/artifacts/upload/same-{round}-{number}");
                client.try_call(Method::POST, &path, Some(body)).await
            });
        }
        // Kills the daemon while the first request creates the blob and the others are about to reuse it.
        tokio::time::sleep(Duration::from_millis(random.below(80))).await;
        daemon.kill();
        requests.join_all().await;
        daemon = setup.start();
    }
    let storage = daemon.data.join("simulated/1");
    let started = Instant::now();
    loop {
        let blobs = client.get("/blobs").await;
        let blobs = blobs.as_array().unwrap().iter().map(|blob| text(blob, "uuid"));
        let expected: BTreeSet<String> = blobs.flat_map(|blob| [format!("{blob}.sums"), blob]).collect();
        let found = compare("blobs", &files(&storage.join("blobs")), &expected);
        if found.is_ok() {
            assert!(expected.len() as u64 <= 2 * ROUNDS, "a content is stored twice: {expected:?}");
            break;
        }
        assert!(started.elapsed() < TIMEOUT, "{found:?}\n{}", daemon.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!daemon.log().contains("without a record"), "{}", daemon.log());
}
