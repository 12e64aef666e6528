//! `muster apply` against a daemon with simulated nodes.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};

use muster_testing::Daemon;
use muster_testing::web_server::{Reply, WebServer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::setup;

/// A directory with files, and the command line with the credentials of a namespace.
struct Workspace<'a> {
    directory: &'a Path,
    url: &'a str,
    namespace: &'static str,
    key: String,
}

impl<'a> Workspace<'a> {
    fn system(directory: &'a Path, daemon: &'a Daemon) -> Self {
        Self { directory, url: &daemon.url, namespace: "system", key: daemon.system_key() }
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(line.split(' ')).current_dir(self.directory).env_clear().stdin(Stdio::null());
        command.env("HOME", self.directory).env("MUSTER_API_URL", self.url);
        command.env("MUSTER_NAMESPACE", self.namespace).env("MUSTER_KEY", &self.key);
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("-o json {line}"))).unwrap()
    }

    fn network(&self, name: &str) -> Value {
        self.json(&format!("network show {name}"))["network"].take()
    }

    /// Returns the exit code and the standard error of a command that fails.
    fn fail(&self, line: &str) -> (i32, String) {
        let output = self.run(line);
        assert!(!output.status.success(), "{line}: {output:?}");
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.directory.join(file), text).unwrap();
    }

    /// Returns the actions of a plan as `action kind name`.
    fn plan(&self, options: &str) -> Vec<String> {
        let output = self.run(&format!("apply -o json --dry-run {options}"));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        let steps = plan["steps"].as_array().unwrap();
        let has_changes = steps
            .iter()
            .any(|step| !matches!(step["action"].as_str(), Some("unchanged" | "wait" | "blocked")));
        if plan["problems"].as_array().unwrap().is_empty() {
            let expected = if has_changes { 8 } else { 0 };
            assert_eq!(output.status.code(), Some(expected), "{output:?}");
        }
        let word = |step: &Value, field: &str| step[field].as_str().unwrap().to_owned();
        steps
            .iter()
            .map(|step| format!("{} {} {}", word(step, "action"), word(step, "kind"), word(step, "name")))
            .collect()
    }
}

/// Starts a daemon whose simulated nodes have space for instances.
fn start(directory: &Path) -> Daemon {
    let setup = setup(directory).set("NODE_DISK_RESERVATION_GB", "0");
    setup.set("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8").start()
}

/// Returns the blocks of a language in a Markdown document.
fn blocks(document: &str, language: &str) -> Vec<String> {
    let start = format!("```{language}\n");
    let blocks = document.split(&start).skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn example_of_the_documentation_is_applied_once() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let workspace = Workspace::system(directory.path(), &daemon);
    let page = include_str!("../../docs/apply.md");
    workspace.write("cluster.yaml", &blocks(page, "yaml")[0]);
    workspace.write("tiny.qcow2", &"image".repeat(20_000));
    let plan = workspace.run("apply -f cluster.yaml --dry-run");
    assert_eq!(String::from_utf8_lossy(&plan.stdout), blocks(page, "text")[0]);

    let program = Path::new(env!("CARGO_BIN_EXE_muster")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("bash");
    shell.args(["-c", &format!("set -eux\n{}", blocks(page, "sh")[0])]).current_dir(directory.path());
    shell.env_clear().env("PATH", path).env("HOME", directory.path()).stdin(Stdio::null());
    shell
        .env("MUSTER_API_URL", &daemon.url)
        .env("MUSTER_NAMESPACE", "system")
        .env("MUSTER_KEY", &workspace.key);
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{output:?}");

    assert_eq!(workspace.json("trust list shop"), serde_json::json!(["system", "ops"]));
    let quotas = workspace.json("quota show shop");
    let limit = |name: &str| {
        let quota = quotas.as_array().unwrap().iter().find(|quota| quota["name"] == name).unwrap();
        (quota["limit"].clone(), quota["is_default"].clone())
    };
    assert_eq!(limit("instances"), (10.into(), false.into()));
    assert_eq!(limit("keys").1, true);
    let instances = workspace.json("instance list --filter namespace:shop --sort name");
    assert_eq!((&instances[0]["name"], &instances[1]["name"]), (&"db".into(), &"web".into()));
    assert!(
        instances.as_array().unwrap().iter().all(|instance| instance["state"] == "created"),
        "{instances}"
    );
    assert_eq!(instances[0]["interfaces"][0]["ipv4"], "10.20.0.10");
    assert!(instances[1]["interfaces"][0]["floating"].is_string(), "{instances}");
    assert_eq!(instances[1]["metadata"]["tags"][0], "frontend");
    let artifact = workspace.json("artifact list --filter namespace:shop");
    let base = format!("sf://artifact/{}", artifact[0]["uuid"].as_str().unwrap());
    assert_eq!(
        (&instances[1]["disk_spec"][0]["base"], &artifact[0]["max_versions"]),
        (&base.into(), &2.into())
    );
    let network =
        workspace.json("network list --filter namespace:shop")[0]["uuid"].as_str().unwrap().to_owned();
    let addresses = workspace.json(&format!("network addresses {network} --filter address:10.20.0.250"));
    assert_eq!((&addresses[0]["type"], &addresses[0]["comment"]), (&"manual".into(), &"printer".into()));

    workspace.write("tiny.qcow2", &"other".repeat(20_000));
    let changed = workspace.plan("-f cluster.yaml").into_iter().filter(|step| !step.starts_with("unchanged"));
    assert_eq!(changed.collect::<Vec<_>>(), ["update artifact tiny"]);
    workspace.ok("apply -f cluster.yaml --yes");
    assert!(workspace.plan("-f cluster.yaml").iter().all(|step| step.starts_with("unchanged")));
    assert_eq!(workspace.json("artifact list --filter namespace:shop")[0]["index"], 2);
}

const LAN: &str =
    "{kind: network, name: lan, netblock: 10.0.0.0/24, provide_dns: true, metadata: {owner: ops}}";
const WEB: &str =
    "{kind: instance, name: web, cpus: 1, memory: 128, disk: [{size: 1}], network: [{network_uuid: lan}]}";

#[test]
fn differences_are_changed_in_place_or_need_a_replacement() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let workspace = Workspace::system(directory.path(), &daemon);
    workspace.write("a.yaml", &format!("- {LAN}\n- {WEB}\n"));
    let (code, error) = workspace.fail("apply -f a.yaml");
    assert!(code == 1 && error.contains("give --yes to confirm"), "{code}: {error}");
    workspace.ok("apply -f a.yaml --yes");
    assert_eq!(workspace.plan("-f a.yaml"), ["unchanged network lan", "unchanged instance web"]);
    let (lan, web) =
        (workspace.network("lan")["uuid"].clone(), workspace.json("instance show web")["uuid"].clone());

    // In place, and without touching what others have set.
    workspace.ok("network set-metadata lan colour red");
    let lan2 = "{kind: network, name: lan, netblock: 10.0.0.0/24, metadata: {team: web}, dns: {db: 10.0.0.9}, \
                reserved: {10.0.0.200: spare}, routed_addresses: 1}";
    let web2 = WEB
        .replace("network_uuid: lan", "network_uuid: lan, float: true")
        .replace("}]}", "}], metadata: {a: 1}}");
    workspace.write("a.yaml", &format!("- {lan2}\n- {web2}\n"));
    assert_eq!(workspace.plan("-f a.yaml"), ["update network lan", "update instance web"]);
    workspace.ok("apply -f a.yaml --yes");
    assert_eq!(workspace.plan("-f a.yaml"), ["unchanged network lan", "unchanged instance web"]);
    let network = workspace.network("lan");
    let metadata = &network["metadata"];
    assert_eq!((&metadata["colour"], &metadata["team"]), (&"red".into(), &"web".into()));
    assert!(metadata.get("owner").is_none() && network["uuid"] == lan, "{network}");
    let instance = workspace.json("instance show web");
    assert!(instance["uuid"] == web && instance["interfaces"][0]["floating"].is_string(), "{instance}");
    workspace.write("a.yaml", &format!("- {LAN}\n- {WEB}\n"));
    workspace.ok("apply -f a.yaml --yes");
    let reserved = workspace.json("network addresses lan --filter type:manual");
    assert_eq!(reserved.as_array().unwrap().len(), 0, "{reserved}");

    // Not in place: nothing changes without --replace, and the instances of a network are replaced with it.
    workspace.write(
        "a.yaml",
        &format!("- {}\n- {WEB}\n", LAN.replace("10.0.0.0", "10.9.0.0").replace("ops", "web")),
    );
    assert_eq!(workspace.plan("-f a.yaml"), ["blocked network lan", "unchanged instance web"]);
    let (code, error) = workspace.fail("apply -f a.yaml --yes");
    assert!(
        code == 5
            && error.contains(
                "a.yaml:1: network lan: it cannot be changed in place: netblock: 10.0.0.0/24 -> 10.9.0.0/24"
            ),
        "{error}"
    );
    assert!(error.contains("--replace"), "{error}");
    assert_eq!(workspace.network("lan")["metadata"]["owner"], "ops");
    assert_eq!(workspace.plan("-f a.yaml --replace"), ["replace network lan", "replace instance web"]);
    workspace.ok("apply -f a.yaml --yes --replace");
    let instance = workspace.json("instance show web");
    assert!(
        instance["uuid"] != web && instance["interfaces"][0]["ipv4"].as_str().unwrap().starts_with("10.9."),
        "{instance}"
    );
    assert_eq!(workspace.plan("-f a.yaml --replace"), ["unchanged network lan", "unchanged instance web"]);
}

#[test]
fn prune_deletes_only_what_apply_created() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let workspace = Workspace::system(directory.path(), &daemon);
    workspace.ok("network create old 10.1.0.0/24");
    workspace.ok("network create other 10.2.0.0/24");
    let issuer = "{kind: issuer, name: forge, issuer_url: 'https://f.example', jwks_uri: 'https://f.example/k', audience: x}";
    let rule = "{kind: rule, name: deploy, namespace: shop, issuer: forge, bound_claims: {sub: a}, scopes: [node.read], \
                key_ttl: 60, key_name_prefix: robot}";
    let old = "{kind: network, name: old, netblock: 10.1.0.0/24, metadata: {a: 1}}";
    let all = format!("- {LAN}\n- {WEB}\n- {issuer}\n- {rule}\n- {{kind: namespace, name: shop}}\n- {old}\n");
    workspace.write("a.yaml", &all);
    let plan = workspace.plan("-f a.yaml --prune");
    let expected = [
        "create namespace shop",
        "create issuer forge",
        "create rule deploy",
        "create network lan",
        "adopt network old",
        "create instance web",
    ];
    assert_eq!(plan, expected);
    workspace.ok("apply -f a.yaml --yes --prune");
    assert!(workspace.plan("-f a.yaml --prune").iter().all(|step| step.starts_with("unchanged")));
    assert_eq!(workspace.network("old")["metadata"]["a"], 1);
    // An adopted object is never replaced either.
    workspace.write("b.yaml", &all.replace("10.1.0.0", "10.3.0.0"));
    let (code, error) = workspace.fail("apply -f b.yaml --set a --yes --replace");
    assert!(code == 5 && error.contains("apply did not create it"), "{error}");

    // Another set neither changes nor deletes the objects.
    let (code, error) = workspace.fail("apply -f b.yaml --yes --prune");
    assert!(
        code == 5 && error.contains("network lan: it belongs to set a of namespace system; give --set a"),
        "{error}"
    );
    workspace.write("b.yaml", "[]\n");
    assert_eq!(workspace.plan("-f b.yaml --prune"), [""; 0]);
    // Without --prune they are kept, too.
    workspace.write("a.yaml", &format!("- {LAN}\n- {WEB}\n"));
    assert_eq!(workspace.plan("-f a.yaml"), ["unchanged network lan", "unchanged instance web"]);
    // A namespace with something that apply did not create stays.
    workspace.write("note", "text");
    workspace.ok("artifact upload note note --type other --in-namespace shop");
    let (code, error) = workspace.fail("apply -f a.yaml --prune --yes");
    assert!(
        code == 5
            && error.contains("namespace shop cannot be deleted: it has objects that stay: artifact note"),
        "{error}"
    );
    workspace.ok("artifact delete note --in-namespace shop");
    // So does a network with an instance that apply did not create.
    workspace.ok("instance create mine --disk 1 --network lan");
    workspace.write("a.yaml", "# nothing\n");
    let (code, error) = workspace.fail("apply -f a.yaml --prune --yes");
    assert!(
        code == 5
            && error.contains("network lan cannot be deleted: it has interfaces of instances that stay"),
        "{error}"
    );
    workspace.ok("instance delete mine");
    let expected = [
        "delete namespace shop",
        "delete issuer forge",
        "delete rule deploy",
        "delete network lan",
        "release network old",
        "delete instance web",
    ];
    assert_eq!(workspace.plan("-f a.yaml --prune"), expected);
    workspace.ok("apply -f a.yaml --prune --yes");
    let names = |line: &str| workspace.ok(&format!("{line} list -o name"));
    assert_eq!((names("instance"), names("issuer")), (String::new(), String::new()));
    assert_eq!(workspace.ok("network list -o name --filter namespace:system"), "old\nother\n");
    assert!(!names("namespace").contains("shop"));
    assert!(workspace.network("old")["metadata"].get("muster-apply").is_none());
    assert_eq!(workspace.plan("-f a.yaml --prune"), [""; 0]);
}

#[test]
fn invalid_files_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let workspace = Workspace::system(directory.path(), &daemon);
    workspace.write("a.yaml", &format!("- {LAN}\n- kind: network\n  name: b\n  netblok: 10.0.1.0/24\n"));
    let (code, error) = workspace.fail("apply -f a.yaml --yes");
    assert_eq!(code, 2);
    assert!(error.contains("a.yaml:4: field netblok is unknown; did you mean netblock?"), "{error}");
    assert!(error.contains("a.yaml:2: netblock is missing"), "{error}");
    // The server validates values.
    workspace.write("b.yaml", "{kind: network, name: b, netblock: 10.0.1.0/31}\n");
    let (code, error) = workspace.fail("apply -f b.yaml --yes");
    assert!(code == 3 && error.contains("b.yaml:1: network b: "), "{code}: {error}");
    let (code, error) = workspace.fail("apply -f missing.yaml");
    assert!(code == 1 && error.contains("cannot read missing.yaml: no such file"), "{error}");
    let (code, _) = workspace.fail("apply -f - --prune --yes");
    assert_eq!(code, 2);
    assert_eq!(workspace.ok("network list -o name --filter namespace:system"), "");

    let mut command = workspace.command("apply -f - --yes");
    let mut child =
        command.stdin(Stdio::piped()).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), LAN.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(workspace.ok("network list -o name --filter namespace:system"), "lan\n");
}

#[test]
fn namespaces_apply_only_what_they_may() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let system = Workspace::system(directory.path(), &daemon);
    system.ok("namespace create ci");
    system.ok("namespace create other");
    let key = system.ok("key add ci robot").trim().to_owned();
    let tenant = Workspace { directory: directory.path(), url: &daemon.url, namespace: "ci", key };
    system.write("a.yaml", &format!("- {LAN}\n"));
    tenant.ok("apply -f a.yaml --yes");
    // The set of the same name of another namespace is another set.
    system.write("none.yaml", "[]\n");
    assert_eq!(system.plan("-f none.yaml --set a --prune"), [""; 0]);
    assert_eq!(system.plan("-f a.yaml --prune"), ["create network lan"]);
    let mine = format!("- {}\n", LAN.replace("name: lan", "name: lan, namespace: ci"));
    system.write("b.yaml", &mine);
    let (code, error) = system.fail("apply -f b.yaml --set a --yes");
    assert!(code == 5 && error.contains("it belongs to set a of namespace ci"), "{error}");
    // Objects of others: the server refuses them.
    system.write("c.yaml", &format!("- {}\n", LAN.replace("name: lan", "name: x, namespace: other")));
    let (code, error) = tenant.fail("apply -f c.yaml --yes");
    assert!(matches!(code, 3 | 4) && error.contains("c.yaml:1: network x: "), "{code}: {error}");
    system.write("d.yaml", "{kind: namespace, name: new}\n");
    let (code, error) = tenant.fail("apply -f d.yaml --yes");
    assert!(matches!(code, 3 | 4) && error.contains("d.yaml:1: namespace new: "), "{code}: {error}");
    assert_eq!(system.ok("network list -o name --filter namespace:ci"), "lan\n");
    assert_eq!(system.ok("network list -o name --filter namespace:other"), "");
    tenant.ok("apply -f none.yaml --set a --prune --yes");
    assert_eq!(tenant.ok("network list -o name --filter namespace:ci"), "");
}

/// Blocks a server until it is opened.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        let closed = self.0.lock().unwrap();
        // A test that fails before it opens the gate ends, too.
        drop(self.1.wait_timeout_while(closed, crate::TIMEOUT, |is_open| !*is_open).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn interrupted_run_is_continued() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let workspace = Workspace::system(directory.path(), &daemon);
    let gate = Arc::new(Gate::default());
    let server = WebServer::new({
        let gate = Arc::clone(&gate);
        move |_, _| {
            gate.wait();
            Reply::ok(&b"image".repeat(20_000))
        }
    })
    .await;
    let url = server.url("/disk.img");
    let web = WEB.replace("{size: 1}", &format!("{{base: '{url}'}}"));
    workspace.write("a.yaml", &format!("- {LAN}\n- {{kind: artifact, url: '{url}'}}\n- {web}\n"));
    for signal in [Signal::SIGKILL, Signal::SIGINT, Signal::SIGTERM] {
        // The artifact cannot be completed, so the command waits when it is interrupted.
        let mut child = workspace.command("apply -f a.yaml --yes").stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        if signal == Signal::SIGKILL {
            assert!(lines.any(|line| line.unwrap() == "network lan created"));
        } else {
            assert!(lines.any(|line| line.unwrap().starts_with("applying ")));
        }
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        let rest: Vec<String> = lines.map_while(Result::ok).collect();
        let status = child.wait().unwrap();
        if signal != Signal::SIGKILL {
            assert_eq!(status.code(), Some(130), "{rest:?}");
            assert!(
                rest.iter().any(|line| line.contains("run the same command again to continue")),
                "{rest:?}"
            );
        }
        assert_eq!(workspace.ok("instance list -o name"), "");
    }
    let (code, error) = workspace.fail("apply -f a.yaml --yes --timeout 1");
    assert!(code == 7 && error.contains("timed out"), "{code}: {error}");
    gate.open();
    workspace.ok("apply -f a.yaml --yes");
    let names = |line: &str| workspace.ok(&format!("{line} list -o name --filter namespace:system"));
    assert_eq!((names("network"), names("instance")), ("lan\n".into(), "web\n".into()));
    assert!(workspace.plan("-f a.yaml").iter().all(|step| step.starts_with("unchanged")));
    assert_eq!(workspace.network("lan")["metadata"]["muster-apply"]["created"], true);
    workspace.write("a.yaml", "[]\n");
    workspace.ok("apply -f a.yaml --prune --yes --no-wait");
    daemon.allow_unfinished_operations("--no-wait");
}
