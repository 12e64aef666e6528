//! The commands of docs/migration-from-shaken-fist.md, from top to bottom. A daemon of Muster stands in for the old cluster,
//! because both have the same API.

use std::path::{Path, PathBuf};
use std::process::Command;

use muster_testing::{Daemon, shell_commands};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{setup, wait_for};

/// The URL and the key of the guide.
const OLD_URL: &str = "http://old.example:13000";
const OLD_KEY: &str = "secret-of-system";

/// A cluster with what a tenant has: a key, networks, an image, other content, and an instance.
struct OldCluster {
    daemon: Daemon,
    token: String,
}

impl OldCluster {
    async fn start(directory: &Path) -> Self {
        let daemon = setup(&directory.join("old")).set("NODE_DISK_RESERVATION_GB", "0").start();
        let token = daemon.log_in("system", &daemon.system_key()).await;
        let this = Self { daemon, token };
        this.post("/auth/namespaces", json!({ "namespace": "ci" })).await;
        this.post("/auth/namespaces/ci/keys", json!({ "key_name": "pipeline", "key": "old-secret" })).await;
        let lan = json!({ "name": "lan", "netblock": "10.0.0.0/24", "namespace": "ci" });
        let lan = this.post("/networks", lan).await;
        let dmz =
            json!({ "name": "dmz", "netblock": "10.0.1.0/24", "provide_nat": false, "namespace": "ci" });
        this.post("/networks", dmz).await;
        wait_for("the networks", async || {
            let (_, networks) = this.daemon.call(&this.token, Method::GET, "/networks", None).await;
            networks.as_array().unwrap().iter().all(|network| network["state"] == "created").then_some(())
        })
        .await;
        let disk = directory.join("disk.raw");
        std::fs::write(&disk, [b"old content".as_slice(), &[0; 1 << 20]].concat()).unwrap();
        std::fs::write(directory.join("notes.txt"), "other content").unwrap();
        let image =
            this.muster(&format!("-o json artifact upload base {} --in-namespace ci", disk.display()));
        let image: Value = serde_json::from_str(&image).unwrap();
        this.muster(&format!(
            "artifact upload notes {} --type other --in-namespace ci",
            directory.join("notes.txt").display()
        ));
        this.muster(&format!(
            "artifact upload manual {} --type other --shared",
            directory.join("notes.txt").display()
        ));
        let instance = json!({
            "name": "web", "cpus": 1, "memory": 128, "namespace": "ci", "ssh_key": "ssh-ed25519 AAAA someone",
            "user_data": "I2Nsb3VkLWNvbmZpZwo=", "metadata": { "owner": "ops" },
            "disk": [{ "size": 1, "base": format!("sf://artifact/{}", image["uuid"].as_str().unwrap()) },
                     { "size": 2, "bus": "scsi" }],
            "network": [{ "network_uuid": lan["uuid"], "address": "10.0.0.9", "float": true }],
        });
        let uuid = this.post("/instances", instance).await["uuid"].as_str().unwrap().to_owned();
        wait_for("the instance", async || {
            let path = format!("/instances/{uuid}");
            let (_, instance) = this.daemon.call(&this.token, Method::GET, &path, None).await;
            (instance["state"] == "created").then_some(())
        })
        .await;
        this
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let (status, response) = self.daemon.call(&self.token, Method::POST, path, Some(body)).await;
        assert_eq!(status, 200, "{path}: {response}");
        response
    }

    fn muster(&self, arguments: &str) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command
            .args(arguments.split(' '))
            .env("MUSTER_CREDENTIALS", self.daemon.data.join("credentials.json"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Returns the objects of a collection in a namespace.
async fn objects(daemon: &Daemon, collection: &str, namespace: &str) -> Vec<Value> {
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let (_, objects) = daemon.call(&token, Method::GET, collection, None).await;
    let objects = objects.as_array().unwrap().iter();
    objects.filter(|object| object["namespace"] == namespace).cloned().collect()
}

/// Returns the part of an instance that the guide promises to keep.
fn kept(instance: &Value) -> Value {
    let interface = &instance["interfaces"][0];
    let disks = instance["disk_spec"].as_array().unwrap().iter();
    let disks: Vec<Value> = disks.map(|disk| json!([disk["size"], disk["bus"]])).collect();
    json!([
        instance["name"],
        instance["cpus"],
        instance["memory"],
        instance["ssh_key"],
        instance["user_data"],
        instance["metadata"],
        interface["ipv4"],
        interface["macaddr"],
        interface["model"],
        disks
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_the_guide_move_everything_of_a_tenant() {
    for program in ["bash", "curl", "jq"] {
        if Command::new(program).arg("--version").output().is_err() {
            return muster_testing::skipped(program);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    for name in ["old", "new"] {
        std::fs::create_dir(directory.path().join(name)).unwrap();
    }
    let old = OldCluster::start(directory.path()).await;
    let new = setup(&directory.path().join("new")).set("NODE_DISK_RESERVATION_GB", "0").start();

    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/migration-from-shaken-fist.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    assert!(guide.contains(OLD_URL) && guide.contains(OLD_KEY));
    let script = shell_commands(&guide).join("\n");
    let script = script.replace(OLD_URL, &old.daemon.url).replace(OLD_KEY, &old.daemon.system_key());
    let programs: PathBuf = Path::new(env!("CARGO_BIN_EXE_muster")).parent().unwrap().into();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("bash");
    shell.args(["-c", &format!("set -eu -o pipefail\n{script}")]).current_dir(directory.path());
    shell.env("PATH", path).env("HOME", directory.path());
    shell.env("MUSTER_CREDENTIALS", new.data.join("credentials.json"));
    let output = shell.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("ci: 1 instances of the old cluster, 1 of the new one"), "{stdout}");

    // The new key of the tenant.
    let keys = std::fs::read_to_string(directory.path().join("new-keys.txt")).unwrap();
    let key = keys.strip_prefix("ci pipeline ").unwrap().trim();
    new.log_in("ci", key).await;

    let networks = objects(&new, "/networks", "ci").await;
    let facts: Vec<_> = networks
        .iter()
        .map(|network| (&network["name"], &network["netblock"], &network["provide_nat"]))
        .collect();
    assert_eq!(facts.len(), 2, "{networks:?}");
    assert!(facts.contains(&(&json!("lan"), &json!("10.0.0.0/24"), &json!(true))), "{facts:?}");
    assert!(facts.contains(&(&json!("dmz"), &json!("10.0.1.0/24"), &json!(false))), "{facts:?}");

    let artifacts = objects(&new, "/artifacts", "ci").await;
    let find = |name: &str| artifacts.iter().find(|artifact| artifact["name"] == name).unwrap();
    assert_eq!((&find("base")["artifact_type"], &find("base")["shared"]), (&json!("image"), &json!(false)));
    assert_eq!((&find("notes")["artifact_type"], &find("notes")["shared"]), (&json!("other"), &json!(false)));
    let shared = objects(&new, "/artifacts", "system").await;
    assert_eq!((shared.len(), &shared[0]["name"], &shared[0]["shared"]), (1, &json!("manual"), &json!(true)));

    wait_for("the new instance", async || {
        let instances = objects(&new, "/instances", "ci").await;
        assert!(
            instances.iter().all(|instance| instance["state"] != "error"),
            "{instances:?}\n{}",
            new.log()
        );
        instances.iter().all(|instance| instance["state"] == "created").then_some(())
    })
    .await;
    let (before, after) =
        (objects(&old.daemon, "/instances", "ci").await, objects(&new, "/instances", "ci").await);
    assert_eq!((before.len(), after.len()), (1, 1));
    let (before, after) = (&before[0], &after[0]);
    assert_eq!(kept(after), kept(before));
    assert_eq!((&before["power_state"], &after["state"]), (&json!("off"), &json!("created")));
    assert!(after["interfaces"][0]["floating"].is_string(), "{after}");
    let copies = after["disk_spec"].as_array().unwrap();
    for (disk, name) in copies.iter().zip(["web-vda", "web-sdc"]) {
        assert_eq!(disk["blob_uuid"], find(name)["blob_uuid"], "{name} is the content of the disk");
    }
}
