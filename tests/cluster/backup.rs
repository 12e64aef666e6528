//! Backups of running clusters: created, verified, attacked and restored, on both engines.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use muster_testing::Daemon;
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// Runs `muster` with words and settings, and returns whether it succeeded and what it printed.
fn muster(words: &[&str], settings: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
    command.args(words).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.envs(settings.iter().map(|(name, value)| (format!("MUSTER_{name}"), value)));
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// A cluster with simulated nodes and one object of each kind, and the key of its backups.
struct Source {
    directory: tempfile::TempDir,
    daemon: Daemon,
    token: String,
    database: Option<String>,
    recipient: String,
}

impl Source {
    async fn start(database: Option<String>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut setup = setup(directory.path());
        if let Some(url) = &database {
            setup = setup.set("DATABASE_URL", url);
        }
        let daemon = setup.start();
        let token = daemon.log_in("system", &daemon.system_key()).await;
        let key = directory.path().join("backup.key");
        let (success, output) = muster(&["backup", "create-key", key.to_str().unwrap()], &[]);
        assert!(success, "{output}");
        assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
        let recipient = output.lines().find(|line| line.starts_with("backup-recipient-")).unwrap().to_owned();
        let source = Self { directory, daemon, token, database, recipient };
        source.fill().await;
        source
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn word(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn settings(&self) -> Vec<(&str, &str)> {
        self.database.iter().map(|url| ("DATABASE_URL", url.as_str())).collect()
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let (status, body) = self.daemon.call(&self.token, Method::POST, path, Some(body)).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    async fn fill(&self) {
        self.post("/auth/namespaces", json!({"namespace": "ci"})).await;
        self.post("/auth/namespaces/ci/keys", json!({"key_name": "robot", "key": "a secret of ci"})).await;
        let network =
            json!({"name": "lan", "netblock": "10.0.0.0/24", "provide_dhcp": true, "provide_nat": true});
        let network = self.post("/networks", network).await;
        let upload = self.post("/upload", json!({})).await["uuid"].as_str().unwrap().to_owned();
        let sent = reqwest::Client::new()
            .post(format!("{}/upload/{upload}", self.daemon.url))
            .bearer_auth(&self.token)
            .body(vec![7u8; 3 << 20])
            .send()
            .await
            .unwrap();
        assert_eq!(sent.status(), 200);
        self.post("/artifacts/upload/notes", json!({"upload_uuid": upload, "artifact_type": "other"})).await;
        let instance = json!({
            "name": "web", "cpus": 1, "memory": 512, "disk": [{"size": 8, "type": "disk"}],
            "network": [{"network_uuid": network["uuid"]}],
        });
        let instance = self.post("/instances", instance).await["uuid"].as_str().unwrap().to_owned();
        wait_for("the instance", async || {
            let (_, found) =
                self.daemon.call(&self.token, Method::GET, &format!("/instances/{instance}"), None).await;
            (found["state"] == "created").then_some(())
        })
        .await;
    }

    /// Creates a backup, which must succeed.
    fn back_up(&self, name: &str, options: &[&str]) -> PathBuf {
        let (success, output) = self.try_back_up(name, options);
        assert!(success, "{output}");
        self.path(name)
    }

    fn try_back_up(&self, name: &str, options: &[&str]) -> (bool, String) {
        let (file, data) = (self.word(name), self.daemon.data.to_str().unwrap().to_owned());
        let mut words = vec!["backup", "create", &file, "--data-dir", &data];
        words.extend_from_slice(options);
        if !options.contains(&"--passphrase-file") {
            words.extend(["--recipient", &self.recipient]);
        }
        muster(&words, &self.settings())
    }

    fn verify(&self, file: &Path) -> (bool, String) {
        let key = self.word("backup.key");
        let data = self.daemon.data.to_str().unwrap();
        let file = file.to_str().unwrap();
        muster(&["backup", "verify", file, "--key-file", &key, "--data-dir", data], &[])
    }

    fn restore(&self, file: &Path, data: &Path, database: Option<&str>) -> (bool, String) {
        let key = self.word("backup.key");
        let storage = data.join("simulated/1");
        let mut settings = vec![("STORAGE_PATH", storage.to_str().unwrap())];
        settings.extend(database.map(|url| ("DATABASE_URL", url)));
        let words =
            ["restore", file.to_str().unwrap(), "--key-file", &key, "--data-dir", data.to_str().unwrap()];
        muster(&words, &settings)
    }
}

/// The lists whose records a restored cluster has, with the fields that a restoration changes.
const LISTS: &[(&str, &[&str])] = &[
    ("/auth/namespaces", &[]),
    ("/auth/namespaces/ci/keys", &[]),
    ("/networks", &["version", "nodes"]),
    ("/artifacts", &[]),
    ("/blobs", &["locations", "version"]),
    ("/instances/web/interfaces", &["version"]),
    (
        "/instances",
        &[
            "node",
            "version",
            "generation",
            "power_state",
            "power_state_since",
            "agent_state",
            "console_port",
            "vdi_port",
            "vdi_tls_port",
            "warnings",
        ],
    ),
];

async fn lists(daemon: &Daemon, token: &str) -> Vec<(&'static str, Value)> {
    let mut found = Vec::new();
    for (path, changed) in LISTS {
        let (status, mut list) = daemon.call(token, Method::GET, path, None).await;
        assert_eq!(status, 200, "{path}: {list}");
        for record in list.as_array_mut().into_iter().flatten() {
            if let Some(record) = record.as_object_mut() {
                record.retain(|name, _| !changed.contains(&name.as_str()));
            }
        }
        found.push((*path, list));
    }
    found
}

/// Backs up a cluster under load and at rest, and restores the latter into a new cluster that answers the same.
async fn check_round_trip(from: Option<String>, to: Option<String>) {
    let source = Source::start(from).await;
    // Under concurrent writes, every snapshot is consistent: the verification checks relations between tables.
    let writer = async {
        for number in 0.. {
            let name = format!("load-{number}");
            source.post("/auth/namespaces", json!({"namespace": name})).await;
            let body =
                json!({"name": name, "netblock": "10.9.0.0/16", "provide_dhcp": true, "provide_nat": false});
            let network = source.post("/networks", body).await["uuid"].as_str().unwrap().to_owned();
            let path = format!("/networks/{network}");
            assert_eq!(source.daemon.call(&source.token, Method::DELETE, &path, None).await.0, 200);
        }
    };
    let backups = async {
        for number in 0..3 {
            let name = format!("load-{number}.backup");
            let file = tokio::task::block_in_place(|| source.back_up(&name, &[]));
            let (success, output) = tokio::task::block_in_place(|| source.verify(&file));
            assert!(success && output.contains("consistent"), "{output}");
        }
    };
    tokio::select! {
        () = writer => {}
        () = backups => {}
    }
    wait_for("all operations to end", async || {
        let (_, list) =
            source.daemon.call(&source.token, Method::GET, "/networks?filter=name:load*", None).await;
        let states: Vec<&Value> = list.as_array()?.iter().map(|network| &network["state"]).collect();
        states.iter().all(|state| **state == "deleted" || **state == "created").then_some(())
    })
    .await;

    let before = lists(&source.daemon, &source.token).await;
    let file = source.back_up("all.backup", &["--blobs", "include"]);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(source.verify(&file).0);
    let (success, output) = source.try_back_up("all.backup", &[]);
    assert!(!success && output.contains("exists"), "{output}");

    let data = source.path("restored/data");
    let (success, output) = source.restore(&file, &data, to.as_deref());
    assert!(success && output.contains("sim-1-lost"), "{output}");
    let mut target = crate::setup(&source.path("restored")).arguments(&["--simulate", "1"]);
    if let Some(url) = &to {
        target = target.set("DATABASE_URL", url);
    }
    let restored = target.start();
    let (status, _) = restored.call(&source.token, Method::GET, "/instances", None).await;
    assert_eq!(status, 401, "tokens of the former cluster are invalid");
    let token = restored.log_in("system", &source.daemon.system_key()).await;
    restored.log_in("ci", "a secret of ci").await;
    wait_for("the copies of blobs to be found", async || {
        let (_, blobs) = restored.call(&token, Method::GET, "/blobs", None).await;
        let mut blobs = blobs.as_array()?.iter();
        blobs.all(|blob| blob["locations"].as_array().is_some_and(|list| !list.is_empty())).then_some(())
    })
    .await;
    let after = lists(&restored, &token).await;
    for ((path, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(before, after, "{path}");
    }

    // The VM does not run before an operator declares its former host dead, and then under a later generation.
    let (_, list) = restored.call(&token, Method::GET, "/instances", None).await;
    assert_eq!((&list[0]["power_state"], list.as_array().unwrap().len()), (&json!("unknown"), 1), "{list}");
    let node = list[0]["node"].as_str().unwrap();
    assert!(node.ends_with("-lost"), "{list}");
    let (status, _) =
        restored.call(&token, Method::POST, &format!("/nodes/{node}/evacuate"), Some(json!({}))).await;
    assert_eq!(status, 409);
    let (status, records) = restored
        .call(&token, Method::POST, &format!("/nodes/{node}/evacuate"), Some(json!({"dead": true})))
        .await;
    assert_eq!((status.as_u16(), &records[0]["outcome"]), (200, &json!("error")), "no snapshot: {records}");

    // A cluster that exists is never replaced.
    let (success, output) = source.restore(&file, &restored.data, to.as_deref());
    assert!(!success && output.contains("in use by another muster process"), "{output}");
    let database = to.unwrap_or_else(|| format!("sqlite:{}", restored.data.join("muster.db").display()));
    let (success, output) = source.restore(&file, &source.path("other"), Some(&database));
    assert!(!success && output.contains("is not empty"), "{output}");
    let used = restored.data.clone();
    assert!(restored.stop().success());
    let (success, output) = source.restore(&file, &used, Some(&database));
    assert!(!success && output.contains("is that of a node"), "{output}");

    // A host of the former cluster that finds the restored database is refused, because its VMs are stale.
    if database.starts_with("mysql:") {
        let Source { directory, daemon, .. } = source;
        assert!(daemon.stop().success());
        let returning = setup(directory.path()).set("DATABASE_URL", &database).wrapped(&["timeout", "60"]);
        let refused = returning.command().output().unwrap();
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(1) && text.contains("muster node adopt"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restores_a_cluster_from_sqlite_to_sqlite() {
    check_round_trip(None, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restores_a_cluster_from_mariadb_to_mariadb() {
    let (Some(from), Some(to)) = (muster_testing::database_url(), muster_testing::database_url()) else {
        return muster_testing::skipped("mariadb-server");
    };
    check_round_trip(Some(from), Some(to)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restores_a_cluster_from_sqlite_to_mariadb() {
    let Some(to) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    check_round_trip(None, Some(to)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_backups_are_rejected_and_leave_nothing() {
    let source = Source::start(None).await;
    let file = source.back_up("all.backup", &["--blobs", "include"]);
    let bytes = std::fs::read(&file).unwrap();
    let damaged = source.path("damaged.backup");
    let mut random = fastrand::Rng::with_seed(19);
    for round in 0..12 {
        let mut changed = bytes.clone();
        let at = random.usize(..changed.len());
        changed[at] ^= 1 << random.u8(..8);
        if round % 3 == 0 {
            changed = bytes[..random.usize(..bytes.len())].to_vec();
        }
        std::fs::write(&damaged, changed).unwrap();
        let (success, output) = source.verify(&damaged);
        assert!(!success && output.contains("damaged"), "byte {at}: {output}");
    }
    // A restoration of a damaged backup can be repeated with an intact one.
    let mut changed = bytes.clone();
    let last = changed.len() - 1000;
    changed[last] ^= 1;
    std::fs::write(&damaged, changed).unwrap();
    let data = source.path("restored/data");
    let (success, output) = source.restore(&damaged, &data, None);
    assert!(!success && output.contains("damaged"), "{output}");
    let refused = setup(&source.path("restored")).command().output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("run `muster restore` again"), "{text}");
    let (success, output) = source.restore(&file, &data, None);
    assert!(success, "{output}");

    let passphrase = source.path("passphrase");
    std::fs::write(&passphrase, "correct horse\n").unwrap();
    let locked = source.back_up("locked.backup", &["--passphrase-file", passphrase.to_str().unwrap()]);
    let (success, output) = source.verify(&locked);
    assert!(!success && output.contains("wrong key") && output.contains("--passphrase-file"), "{output}");
    let unlock = |text: &str| {
        std::fs::write(&passphrase, text).unwrap();
        let data = source.daemon.data.to_str().unwrap();
        let words =
            ["backup", "verify", locked.to_str().unwrap(), "--passphrase-file", passphrase.to_str().unwrap()];
        muster(&[&words[..], &["--data-dir", data]].concat(), &[])
    };
    assert!(unlock("correct horse").0);
    let (success, output) = unlock("correct hors");
    assert!(!success && output.contains("wrong key: the passphrase is wrong"), "{output}");

    // Blobs by reference must be on this host.
    let reference = source.back_up("reference.backup", &[]);
    assert!(source.verify(&reference).0);
    let key = source.word("backup.key");
    let other = source.word("elsewhere");
    let words = ["backup", "verify", reference.to_str().unwrap(), "--key-file", &key, "--data-dir", &other];
    let (success, output) = muster(&words, &[]);
    assert!(!success && output.contains("neither in the backup nor on this host"), "{output}");
    // A host without them fetches them from the others, if it may.
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(source.daemon.data.join("auth_secret_seed"), source.path("elsewhere/auth_secret_seed"))
        .unwrap();
    let database = format!("sqlite:{}", source.daemon.data.join("muster.db").display());
    let file = source.word("fetched.backup");
    let create = ["backup", "create", &file, "--blobs", "include", "--data-dir", &other, "--recipient"];
    let create = || muster(&[&create[..], &[&source.recipient]].concat(), &[("DATABASE_URL", &database)]);
    let (success, output) = create();
    assert!(!success && output.contains("no other host can be asked"), "{output}");
    let credentials = "elsewhere/credentials.json";
    std::fs::copy(source.daemon.data.join("credentials.json"), source.path(credentials)).unwrap();
    let (success, output) = create();
    assert!(success, "{output}");
    let words = ["-o", "yaml", "backup", "verify", &file, "--key-file", &key, "--data-dir", &other];
    let (success, output) = muster(&words, &[]);
    assert!(success && output.contains("missing_blobs: []"), "{output}");
    let left: Vec<_> = std::fs::read_dir(source.directory.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| name.contains("partial"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_leaves_no_file() {
    let source = Source::start(None).await;
    let small = source.path("small");
    std::fs::create_dir(&small).unwrap();
    let data = source.daemon.data.display();
    let script = format!(
        "mount -t tmpfs -o size=4k none {0} && for blobs in include reference; do ! {1} backup create {0}/x.backup --blobs $blobs \
         --data-dir {data} --recipient {2} 2>>{0}.log || exit 1; done && cat {0}.log && ls -A {0} | wc -l",
        small.display(),
        env!("CARGO_BIN_EXE_muster"),
        source.recipient
    );
    let output =
        Command::new("unshare").args(["--mount", "--map-root-user", "sh", "-c", &script]).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if text.contains("unshare failed") || text.contains("mount:") {
        return muster_testing::skipped("mount namespaces");
    }
    assert!(output.status.success(), "{text}");
    // With blobs, it is known before anything is written.
    assert!(text.contains("the blobs need 3 MiB"), "{text}");
    assert!(text.contains("No space left on device") && text.trim_end().ends_with("\n0"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn periodic_backups_are_written_verified_and_trimmed() {
    let directory = tempfile::tempdir().unwrap();
    let (backups, key) = (directory.path().join("backups"), directory.path().join("backup.key"));
    let (_, output) = muster(&["backup", "create-key", key.to_str().unwrap()], &[]);
    let recipient = output.lines().find(|line| line.starts_with("backup-recipient-")).unwrap().to_owned();
    let daemon = setup(directory.path())
        .set("BACKUP_BLOBS", "include")
        .set("BACKUP_INTERVAL", "1")
        .set("BACKUP_DIRECTORY", backups.to_str().unwrap())
        .set("BACKUP_RECIPIENT", &recipient)
        .set("BACKUP_KEEP", "2")
        .start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let events = async |message: &str| {
        let (_, events) =
            daemon.call(&token, Method::GET, "/auth/namespaces/system/events?limit=1000", None).await;
        let found = events.as_array().into_iter().flatten().filter(|event| event["message"] == message);
        found.count()
    };
    let (_, upload) = daemon.call(&token, Method::POST, "/upload", Some(json!({}))).await;
    let upload = upload["uuid"].as_str().unwrap();
    let content = reqwest::Client::new().post(format!("{}/upload/{upload}", daemon.url)).bearer_auth(&token);
    assert_eq!(content.body("notes").send().await.unwrap().status(), 200);
    let artifact = json!({"upload_uuid": upload, "artifact_type": "other"});
    assert_eq!(daemon.call(&token, Method::POST, "/artifacts/upload/notes", Some(artifact)).await.0, 200);
    // The directory does not exist yet.
    wait_for("a failure", async || (events("failed to create a backup").await > 0).then_some(())).await;
    std::fs::create_dir(&backups).unwrap();
    wait_for("three backups", async || (events("backup created and verified").await >= 3).then_some(()))
        .await;
    assert!(daemon.stop().success());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&backups).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| !file.to_str().unwrap().ends_with(".partial"));
    assert_eq!(files.len(), 2, "{files:?}");
    for file in files {
        // The blobs are in the backup.
        let other = directory.path().join("elsewhere");
        let words =
            ["backup", "verify", file.to_str().unwrap(), "--key-file", key.to_str().unwrap(), "--data-dir"];
        let (success, output) = muster(&[&words[..], &[other.to_str().unwrap()]].concat(), &[]);
        assert!(success && output.contains("blobs: 1 "), "{output}");
    }
}
