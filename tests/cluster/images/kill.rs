//! `kill -9` while images are sent, fetched, converted and deleted: what was acknowledged is there, whole, and nothing
//! else is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_testing::{Daemon, Setup};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Caller, Content, Dice, MIB, gzip, qcow2, sha512, text};
use crate::setup;
use crate::web::{Asked, Reply, Web};

const KEY: &str = "the first key";
const KILLS: usize = 12;
/// Versions that are kept of an artifact.
const VERSIONS: usize = 3;
const ROUNDS: u64 = 12;
const LONGEST: Duration = Duration::from_secs(40);

/// What callers were told.
#[derive(Debug, Default)]
struct Told {
    /// The checksums of the versions of each artifact, oldest first, and whether it is an image.
    made: BTreeMap<String, (Vec<String>, bool)>,
    deleted: BTreeSet<String>,
    /// Uploads that go on all the time, and how much of them was acknowledged.
    open: BTreeMap<String, (u64, Content)>,
}

struct Storm {
    caller: Caller,
    web: Web,
    /// Disk images, and the same packed.
    images: Vec<(Vec<u8>, Vec<u8>)>,
    told: Mutex<Told>,
    dice: Dice,
    over: AtomicBool,
}

impl Storm {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    /// Asks until there is an answer that is not "please retry".
    async fn persist(&self, method: Method, path: &str, body: Option<Value>) -> (u16, Value) {
        let started = Instant::now();
        loop {
            match self.caller.try_call(method.clone(), path, body.clone()).await {
                Some((status, answer)) if status != 503 => return (status, answer),
                said => assert!(started.elapsed() < LONGEST, "{path}: {said:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The checksum of the newest version of an artifact, if there is one.
    async fn newest(&self, name: &str) -> Option<(String, String)> {
        let (status, record) = self.persist(Method::GET, &format!("/artifacts/{name}"), None).await;
        assert!(status == 200 || status == 404, "{status} {record}");
        let blob = record["blob_uuid"].as_str()?;
        let (status, blob) = self.persist(Method::GET, &format!("/blobs/{blob}"), None).await;
        assert_eq!(status, 200, "an artifact's blob is not there: {blob}");
        Some((text(&record, "uuid"), text(&blob, "sha512")))
    }

    /// Sends some of a content, starting with what is not there yet; how much was acknowledged.
    async fn send(&self, upload: &str, content: &Content, from: u64, to: u64) -> u64 {
        let mut have = from;
        while have < to {
            let end = (have + 1 + self.dice.below(400_000)).min(to);
            match self.caller.try_send(upload, have, content.part(have, end)).await {
                Some((200, size)) => {
                    assert_eq!(size, json!(end));
                    have = end;
                }
                Some((409 | 503, _)) | None => {
                    let (status, record) =
                        self.persist(Method::GET, &format!("/upload/{upload}"), None).await;
                    assert_eq!(status, 200, "an upload is gone: {record}");
                    let size = record["size"].as_u64().unwrap();
                    assert!((have..=end).contains(&size), "{have} bytes were acknowledged, {size} are there");
                    have = size;
                }
                Some((status, body)) => panic!("{status} {body}"),
            }
        }
        have
    }

    async fn begin(&self) -> String {
        let (status, record) = self.persist(Method::POST, "/upload", Some(json!({}))).await;
        assert_eq!(status, 200, "{record}");
        text(&record, "uuid")
    }

    /// Makes an upload a version, and writes down that it is one.
    async fn make(&self, name: &str, upload: &str, sum: &str, is_image: bool) -> String {
        let kind = if is_image { "image" } else { "other" };
        let body = json!({"upload_uuid": upload, "artifact_type": kind});
        let path = format!("/artifacts/upload/{name}");
        let id = loop {
            match self.caller.try_call(Method::POST, &path, Some(body.clone())).await {
                Some((200, record)) => break text(&record, "uuid"),
                Some((503, _)) => {}
                None | Some((404, _)) => {
                    // Without an answer it may or may not have been done: then the upload is used up.
                    let (status, body) = self.persist(Method::GET, &format!("/upload/{upload}"), None).await;
                    if status == 404 {
                        let made = self.newest(name).await.filter(|(_, newest)| newest == sum);
                        break made.expect("an upload is used up, so something was made of it").0;
                    }
                    assert_eq!(status, 200, "{body}");
                }
                Some((status, body)) => panic!("{status} {body}"),
            }
        };
        let mut told = self.told();
        let (versions, _) = told.made.entry(id.clone()).or_insert_with(|| (vec![], is_image));
        if versions.last().is_none_or(|last| last != sum) {
            versions.push(sum.to_owned());
        }
        if versions.len() > VERSIONS {
            versions.remove(0);
        }
        id
    }

    async fn delete(&self, id: &str) {
        let (status, body) = self.persist(Method::DELETE, &format!("/artifacts/{id}"), None).await;
        assert!(status == 200 || status == 404, "{status} {body}");
        let mut told = self.told();
        told.made.remove(id);
        told.deleted.insert(id.to_owned());
    }

    /// Sends contents and images under few names, and deletes some of them.
    async fn send_and_delete(&self, worker: u64) {
        let slow = Content::new(1000 + worker, 50 * MIB);
        let (open, mut sent) = (self.begin().await, 0);
        let mut number = 0;
        while !self.is_over() {
            number += 1;
            let is_image = self.dice.below(3) > 0;
            let content = Content::new(worker * 100_000 + number, 50_000 + self.dice.below(2 * MIB));
            let bytes = if is_image && self.dice.below(2) == 0 {
                self.images[self.dice.below(self.images.len() as u64) as usize].0.clone()
            } else {
                content.bytes()
            };
            let upload = self.begin().await;
            let sum = sha512(&bytes);
            let content = Content::of(bytes);
            self.send(&upload, &content, 0, content.size).await;
            let name = format!("sent-{worker}-{}-{is_image}", number / 6);
            let id = self.make(&name, &upload, &sum, is_image).await;
            if self.dice.below(3) == 0 {
                self.delete(&id).await;
            }
            sent = self.send(&open, &slow, sent, sent + 30_000).await;
            self.told().open.insert(open.clone(), (sent, slow.clone()));
        }
    }

    /// Fetches images from a slow server, and deletes some of them, even while they come.
    async fn fetch_and_delete(&self, worker: u64) {
        let mut number = 0;
        while !self.is_over() {
            number += 1;
            let packed = self.dice.below(2) == 0;
            let (path, sum) = if packed {
                let image = self.dice.below(self.images.len() as u64);
                (format!("/packed/{image}/{worker}-{number}"), sha512(&self.images[image as usize].0))
            } else {
                let seed = 500_000 + worker * 10_000 + number;
                (format!("/plain/{seed}"), Content::new(seed, MIB + seed).sum())
            };
            let body = json!({"url": self.web.url(&path)});
            let (status, record) = self.persist(Method::POST, "/artifacts", Some(body)).await;
            assert_eq!(status, 200, "{record}");
            let id = text(&record, "uuid");
            if self.dice.below(5) == 0 {
                self.delete(&id).await;
                continue;
            }
            let started = Instant::now();
            loop {
                let (status, record) = self.persist(Method::GET, &format!("/artifacts/{id}"), None).await;
                assert!(status == 200 && record["state"] != "error", "{record}");
                if record["state"] == "created" {
                    break;
                }
                assert!(started.elapsed() < LONGEST, "a fetch does not end: {record}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            self.told().made.insert(id.clone(), (vec![sum], true));
            if self.dice.below(3) == 0 {
                self.delete(&id).await;
            }
        }
    }

    /// Compares what there is with what was told. What is not yet as it should be is an error.
    async fn settled(&self, storage: &Path) -> Result<(), String> {
        let mut versions: HashMap<String, Vec<(u64, String)>> = HashMap::new();
        for record in self.caller.get("/artifacts").await.as_array().unwrap() {
            let mut blobs: Vec<(u64, String)> = (record["blobs"].as_object().unwrap().iter())
                .map(|(index, blob)| (index.parse().unwrap(), text(blob, "uuid")))
                .collect();
            blobs.sort_unstable();
            assert_eq!(record["state"], "created", "{record}");
            versions.insert(text(record, "uuid"), blobs);
        }
        let mut sums: HashMap<String, String> = HashMap::new();
        for record in self.caller.get("/blobs").await.as_array().unwrap() {
            if record["state"] != "created" {
                return Err(format!("a blob is not whole: {record}"));
            }
            if record["reference_count"] == 0 {
                return Err(format!("a blob is of no use: {record}"));
            }
            sums.insert(text(record, "uuid"), text(record, "sha512"));
        }
        let told = self.told();
        let known: BTreeSet<&String> = versions.keys().collect();
        let made: BTreeSet<&String> = told.made.keys().collect();
        assert_eq!(known, made, "artifacts that are there, and that should be");
        let mut images = BTreeSet::new();
        for (id, (expected, is_image)) in &told.made {
            let found: Vec<&String> = versions[id].iter().map(|(_, blob)| &sums[blob]).collect();
            assert_eq!(found, expected.iter().collect::<Vec<_>>(), "the versions of {id}");
            if *is_image {
                images.extend(versions[id].iter().map(|(_, blob)| format!("{blob}.qcow2")));
            }
        }

        let blobs = sums.keys().flat_map(|blob| [blob.clone(), format!("{blob}.sums")]).collect();
        let drafts = told.open.keys().map(|upload| format!("upload-{upload}")).collect();
        for (folder, expected) in [("blobs", blobs), ("drafts", drafts), ("work", BTreeSet::new())] {
            same(folder, &files(&storage.join(folder)), &expected)?;
        }
        let conversions = files(&storage.join("conversions"));
        if let Some(missing) = images.difference(&conversions).next() {
            return Err(format!("an image is not converted: {missing}"));
        }
        let all = sums.keys().map(|blob| format!("{blob}.qcow2")).collect();
        same("conversions", &conversions.union(&all).cloned().collect(), &all)
    }

    /// Reads everything, from the first to the last byte.
    async fn read_all(&self) {
        for record in self.caller.get("/blobs").await.as_array().unwrap() {
            let bytes = self.caller.data(&text(record, "uuid")).await;
            assert_eq!(sha512(&bytes), text(record, "sha512"));
        }
        let deleted = self.told().deleted.clone();
        for id in deleted {
            // Its record is there until the cleaner comes by.
            let (status, record) = self.caller.call(Method::GET, &format!("/artifacts/{id}"), None).await;
            assert!(status == 404 || record["state"] == "deleted", "{id} is deleted: {status} {record}");
        }
    }

    async fn settle(&self, daemon: &Daemon) {
        let started = Instant::now();
        while let Err(why) = self.settled(&daemon.data).await {
            assert!(started.elapsed() < LONGEST, "it does not settle: {why}\n{}", daemon.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn same(folder: &str, found: &BTreeSet<String>, expected: &BTreeSet<String>) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let more: Vec<_> = found.difference(expected).collect();
    let less: Vec<_> = expected.difference(found).collect();
    Err(format!("in {folder}, these should not be: {more:?}, and these should: {less:?}"))
}

/// The names of all files in a folder, and in those in it.
fn files(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            names.extend(files(&entry.path()));
        } else {
            names.insert(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names
}

async fn survives(setup: Setup, folder: &Path) {
    let Some(images) = (1..=4)
        .map(|number| {
            let image = qcow2(folder, &Content::new(number, 6 * MIB))?;
            let packed = gzip(folder, &image);
            Some((image, packed))
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
    let packed: Vec<Vec<u8>> = images.iter().map(|(_, packed)| packed.clone()).collect();
    let web = Web::new(move |asked: &Asked, _| {
        let mut words = asked.path.split('/').skip(1);
        let (kind, number) = (words.next().unwrap(), words.next().unwrap().parse::<u64>().unwrap());
        let content = match kind {
            "packed" => packed[number as usize].clone(),
            _ => Content::new(number, MIB + number).bytes(),
        };
        let reply = match asked.start() {
            Some(start) if start < content.len() => Reply::part(&content, start),
            Some(_) => Reply::status(416),
            None => Reply::ok(&content),
        };
        reply.with("ETag", "\"one\"").slow(Duration::from_millis(500))
    })
    .await;

    let mut daemon = setup.start();
    let caller = Caller::new(&daemon, KEY).await;
    let storm = Arc::new(Storm {
        caller,
        web,
        images,
        told: Mutex::default(),
        dice: Dice::new(),
        over: AtomicBool::new(false),
    });
    let mut workers = Vec::new();
    for worker in 1..=5 {
        let storm = Arc::clone(&storm);
        workers.push(tokio::spawn(async move {
            if worker <= 3 {
                storm.send_and_delete(worker).await;
            } else {
                storm.fetch_and_delete(worker).await;
            }
        }));
    }
    let enough = || {
        let told = storm.told();
        told.made.len() >= 5 && told.deleted.len() >= 3 && told.open.len() == 3
    };
    let mut kills = 0;
    while kills < KILLS || !enough() {
        assert!(kills < 5 * KILLS, "little is done: {:?}", storm.told());
        kills += 1;
        // Any moment will do.
        tokio::time::sleep(Duration::from_millis(100 + storm.dice.below(900))).await;
        daemon.kill();
        daemon = setup.start();
        assert!(!workers.iter().any(tokio::task::JoinHandle::is_finished), "a worker has given up");
    }
    storm.over.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    {
        let told = storm.told();
        println!("{kills} kills, {} artifacts made, {} deleted", told.made.len(), told.deleted.len());
    }
    storm.settle(&daemon).await;
    storm.read_all().await;

    // What was begun in the storm ends in the calm.
    let open = std::mem::take(&mut storm.told().open);
    for (upload, (sent, content)) in open {
        let file = daemon.data.join(format!("drafts/upload-{upload}"));
        assert_eq!(std::fs::metadata(file).unwrap().len(), sent);
        let end = sent + 1000;
        assert_eq!(storm.send(&upload, &content, sent, end).await, end);
        storm.make(&format!("calm-{upload}"), &upload, &sha512(&content.part(0, end)), false).await;
    }
    storm.settle(&daemon).await;
    storm.read_all().await;
    let log = daemon.log();
    assert!(!log.contains("panicked") && !log.contains("without a record"), "{log}");
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn images_survive_kills_whole_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    survives(setup(folder.path()), folder.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_survive_kills_whole_on_mariadb() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    survives(setup(folder.path()).set("DATABASE_URL", &url), folder.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_one_content_sent_many_times_at_once_one_is_left_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let setup = setup(folder.path()).arguments(&["--simulate", "1"]).set("SYSTEM_KEY", KEY);
    let mut daemon = setup.start();
    let (caller, dice) = (Caller::new(&daemon, KEY).await, Dice::new());
    for round in 0..ROUNDS {
        let content = Content::new(round, 100_000).bytes();
        let mut uploads = Vec::new();
        for _ in 0..10 {
            let upload = text(&caller.post("/upload", json!({})).await, "uuid");
            assert_eq!(caller.send(&upload, 0, content.clone()).await.0, 200);
            uploads.push(upload);
        }
        let mut making = tokio::task::JoinSet::new();
        for (number, upload) in uploads.into_iter().enumerate() {
            let caller = caller.clone();
            making.spawn(async move {
                let body = json!({"upload_uuid": upload, "artifact_type": "other"});
                let path = format!("/artifacts/upload/same-{round}-{number}");
                caller.try_call(Method::POST, &path, Some(body)).await
            });
        }
        // One is done, or about to be, and the others are about to find that out.
        tokio::time::sleep(Duration::from_millis(dice.below(80))).await;
        daemon.kill();
        making.join_all().await;
        daemon = setup.start();
    }
    let storage = daemon.data.join("simulated/1");
    let started = Instant::now();
    loop {
        let blobs = caller.get("/blobs").await;
        let blobs = blobs.as_array().unwrap().iter().map(|blob| text(blob, "uuid"));
        let expected: BTreeSet<String> = blobs.flat_map(|blob| [format!("{blob}.sums"), blob]).collect();
        let found = same("blobs", &files(&storage.join("blobs")), &expected);
        if found.is_ok() {
            assert!(expected.len() as u64 <= 2 * ROUNDS, "a content is there twice: {expected:?}");
            break;
        }
        assert!(started.elapsed() < LONGEST, "{found:?}\n{}", daemon.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!daemon.log().contains("without a record"), "{}", daemon.log());
}
