//! Access control of every route for every kind of caller. Routes and table rows must match one to one.

mod table;

use std::collections::BTreeSet;

use axum::http::Method;
use muster_control::auth::scopes::TRUST_SCOPES;
use muster_control::objects;
use muster_control::queue::{DeleteNamespace, NewOperation};
use muster_test_cluster::{Cluster, caller};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

use table::TABLE;

fn body(method: &str, path: &str, fixture: &Fixture) -> Option<Value> {
    Some(match (method, path) {
        ("POST", "/auth") => json!({"namespace": "alpha", "key": "wrong"}),
        ("POST", "/auth/session") => json!({"namespace": "alpha", "key": "wrong"}),
        ("POST", "/auth/federated") => json!({"token": "a.b.c", "namespace": "alpha", "rule": "deploy"}),
        ("POST", "/auth/namespaces") => json!({"namespace": "fresh"}),
        ("POST", "/auth/namespaces/{namespace}/keys") => json!({"key_name": "k"}),
        ("PUT", "/auth/namespaces/{namespace}/keys") => json!({"key_name": "k", "key": "secret"}),
        ("PUT", "/auth/namespaces/{namespace}/keys/{key_name}") => json!({"key": "secret"}),
        ("POST", "/auth/namespaces/{namespace}/claims") => claim_request(),
        ("PUT", "/auth/namespaces/{namespace}/claims/{claim_ref}") => json!({"limit_cpus": 2}),
        ("POST", "/auth/namespaces/{namespace}/trust") => json!({"external_namespace": "delta"}),
        ("POST", "/auth/namespaces/{namespace}/rules") => crate::federation::rule_request("another", "fresh"),
        ("PUT", "/auth/namespaces/{namespace}/rules/{rule}") => {
            let mut rule = crate::federation::rule_request("deploy", "fresh");
            rule.as_object_mut().unwrap().remove("name");
            rule
        }
        ("POST", "/auth/namespaces/{namespace}/webhooks") => {
            json!({"name": "another", "url": "https://hooks.invalid"})
        }
        ("PUT", "/auth/namespaces/{namespace}/webhooks/{webhook}") => json!({"url": "https://hooks.invalid"}),
        ("POST", "/auth/namespaces/{namespace}/webhooks/{webhook}/rotate-secret") => json!({"overlap": 60}),
        ("POST", "/auth/issuers") => crate::federation::issuer_request("another"),
        ("PUT", "/auth/issuers/{name}") => crate::federation::issuer_request("fresh"),
        ("POST", "/instances/{instance_ref}/migrate") => json!({"auto_converge": true}),
        ("POST", "/instances/{instance_ref}/migration") => json!({"channel": "disk", "generation": 2}),
        ("PUT", "/instances/{instance_ref}/fencing") => json!({"fencing": "self"}),
        ("POST", path) if path.ends_with("/metadata") => json!({"key": "m", "value": 1}),
        ("PUT", path) if path.contains("/metadata/") => json!({"value": 1}),
        ("POST", "/networks") => json!({"name": "another", "netblock": "10.9.0.0/24"}),
        ("DELETE", "/networks") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/networks/{network_ref}/dns") => json!({"name": "web", "value": "10.0.0.9"}),
        ("DELETE", "/networks/{network_ref}/dns") => json!({"name": "web"}),
        ("POST", "/instances") => {
            crate::instances::instance_request("another", &json!({"namespace": "alpha"}))
        }
        ("DELETE", "/instances") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/instances/{instance_ref}/console-tickets") => json!({"kind": "serial"}),
        ("POST", "/instances/{instance_ref}/interfaces") => json!({"network_uuid": fixture.network}),
        ("POST", "/instances/{instance_ref}/agent/execute" | "/instances/{instance_ref}/agent/terminal") => {
            json!({"command_line": "true"})
        }
        ("POST", "/instances/{instance_ref}/agent/put") => {
            json!({"blob_uuid": fixture.blob, "path": "/tmp/x", "mode": 420})
        }
        ("POST", "/instances/{instance_ref}/agent/get") => json!({"path": "/etc/hostname"}),
        ("POST", "/artifacts") => json!({"url": "https://images.invalid/x.qcow2", "namespace": "alpha"}),
        ("DELETE", "/artifacts") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/artifacts/upload/{name}") => json!({"blob_uuid": fixture.blob, "namespace": "alpha"}),
        ("POST", "/artifacts/{artifact_ref}/versions") => json!({"max_versions": 2}),
        ("POST", "/label/{*path}") => json!({"blob_uuid": fixture.blob}),
        ("PUT", "/auth/namespaces/{namespace}/quotas/{quota}") => json!({"limit": 9}),
        ("POST", "/admin/invitations") => json!({"expires_in": 60}),
        ("POST", "/admin/invitations/redeem") => json!({"invitation": "x", "proof": "y"}),
        ("POST", "/admin/rebalance") => json!({"dry_run": true}),
        ("DELETE", "/nodes/{node}") => json!({"force": true}),
        ("POST", "/nodes/{node}/drain") => json!({"dry_run": true}),
        ("POST", "/nodes/{node}/evacuate") => json!({"dead": true}),
        ("GET", "/clusteroperations") => json!({"target_object_type": "namespace", "target_uuid": "alpha"}),
        _ => return None,
    })
}

/// Returns the request body of a small capacity claim.
fn claim_request() -> Value {
    json!({"limit_cpus": 1, "limit_memory_mb": 1, "limit_disk_gb": 1, "expires_in_seconds": 3600})
}

struct Fixture {
    cluster: Cluster,
    tokens: [String; 7],
    operation: String,
    network: String,
    interface: String,
    instance: String,
    artifact: String,
    blob: String,
    upload: String,
    agent_operation: String,
    claim: String,
    delivery: String,
}

/// Stands for the paths of all routes.
const EVERY_PATH: &str = "*";

/// Creates a cluster with the objects that the calls of a route need.
async fn fixture(path: &str) -> Fixture {
    let is_needed = |prefixes: &[&str], parts: &[&str]| {
        path == EVERY_PATH
            || prefixes.iter().any(|prefix| path.starts_with(prefix))
            || parts.iter().any(|part| path.contains(part))
    };
    // The content of the agent file does not matter.
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let settings = [("KERBSIDE_URL", "https://consoles.example"), ("AGENT_PROGRAM", program)];
    let cluster = Cluster::with(&settings, None).await;
    for name in ["alpha", "beta", "gamma"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "alpha", "gamma").await.unwrap();
    cluster.key(&caller(), "alpha", "k").await;
    cluster.expiring_key("system", "late", 1.0).await;
    let expired_key =
        cluster.app.store.query("SELECT nonce FROM namespace_keys WHERE name = 'late'", &[]).await.unwrap();
    let nonce: String = expired_key[0].scalar().unwrap();
    let mut tx = cluster.app.store.begin().await.unwrap();
    let target = ObjectRef::namespace("alpha");
    let handle =
        NewOperation::new(target, Some("alpha".into()), DeleteNamespace {}).enqueue(&mut tx).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();

    let now = muster_types::time::now();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "Unix time")]
    let expired_key = cluster.app.tokens.create(now as u64, "system", "late", &nonce, None);
    let tokens = [
        String::new(),
        "not.a.token".into(),
        expired_key,
        cluster.token("beta").await,
        cluster.token("gamma").await,
        cluster.token("alpha").await,
        cluster.token("system").await,
    ];
    if is_needed(&["/auth/issuers"], &["/rules"]) {
        let prerequisites = [
            ("/auth/issuers", crate::federation::issuer_request("fresh")),
            ("/auth/namespaces/alpha/rules", crate::federation::rule_request("deploy", "fresh")),
        ];
        for (path, request) in prerequisites {
            assert_eq!(cluster.call(&tokens[6], Method::POST, path, Some(request)).await.status, 200);
        }
    }
    let mut delivery = String::new();
    if is_needed(&[], &["/webhooks"]) {
        let (path, request) =
            ("/auth/namespaces/alpha/webhooks", json!({"name": "hook", "url": "https://hooks.invalid"}));
        assert_eq!(cluster.call(&tokens[6], Method::POST, path, Some(request)).await.status, 200);
        let test = cluster.call(&tokens[6], Method::POST, &format!("{path}/hook/test"), None).await.body;
        test["uuid"].as_str().unwrap().clone_into(&mut delivery);
    }
    let mut claim_id = String::new();
    if is_needed(&[], &["/claims"]) {
        let path = "/auth/namespaces/alpha/claims";
        let record = cluster.call(&tokens[6], Method::POST, path, Some(claim_request())).await.body;
        record["uuid"].as_str().unwrap().clone_into(&mut claim_id);
    }
    let (mut network, mut interface) = (String::new(), String::new());
    if is_needed(&["/networks"], &["/interfaces"]) {
        let request = json!({"name": "net", "netblock": "10.0.0.0/24", "provide_dns": true});
        let response = cluster.call(&tokens[5], Method::POST, "/networks", Some(request)).await;
        response.body["uuid"].as_str().unwrap().clone_into(&mut network);
        cluster.settle_networks().await;
        interface = cluster.create_interface(&network, "alpha", "host", 1).await.id.to_string();
    }
    let (mut instance, mut agent_operation) = (String::new(), String::new());
    if is_needed(&["/instances", "/agentoperations"], &[]) {
        let record = crate::instances::create(&cluster, &tokens[5], "host", &json!({})).await;
        record["uuid"].as_str().unwrap().clone_into(&mut instance);
    }
    if is_needed(&["/agentoperations"], &[]) {
        let (path, body) = (format!("/instances/{instance}/agent/execute"), json!({"command_line": "true"}));
        let started = cluster.call(&tokens[5], Method::POST, &path, Some(body)).await;
        started.body["uuid"].as_str().unwrap().clone_into(&mut agent_operation);
    }
    let (mut artifact, mut blob, mut upload) = (String::new(), String::new(), String::new());
    if is_needed(&["/artifacts", "/label", "/upload", "/blob"], &["/agent/put"]) {
        let record = crate::artifacts::upload(&cluster, &tokens[5], "img", b"content").await;
        record["uuid"].as_str().unwrap().clone_into(&mut artifact);
        record["blob_uuid"].as_str().unwrap().clone_into(&mut blob);
        let label = json!({"blob_uuid": blob});
        assert_eq!(cluster.call(&tokens[5], Method::POST, "/label/lab", Some(label)).await.status, 200);
        let started = cluster.call(&tokens[5], Method::POST, "/upload", None).await;
        started.body["uuid"].as_str().unwrap().clone_into(&mut upload);
    }
    let operation = handle.op_uuid.to_string();
    Fixture {
        cluster,
        tokens,
        operation,
        network,
        interface,
        instance,
        artifact,
        blob,
        upload,
        agent_operation,
        claim: claim_id,
        delivery,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_returns_expected_status_per_caller() {
    let mut mismatches = Vec::new();
    let allow_unfinished = |fixture: &Fixture| {
        fixture.cluster.allow_unfinished_operations("a network with an interface is never deleted");
    };
    let unchanged = fixture(EVERY_PATH).await;
    allow_unfinished(&unchanged);
    for (method, path, _, expected) in TABLE {
        // Only calls that change nothing share a cluster.
        let separate = if *method == "GET" { None } else { Some(fixture(path).await) };
        separate.iter().for_each(allow_unfinished);
        let fixture = separate.as_ref().unwrap_or(&unchanged);
        let concrete = path
            .replace("{namespace}", "alpha")
            .replace("{key_name}", "k")
            .replace("{external_namespace}", "delta")
            .replace("{key}", "m")
            .replace("{rule}", "deploy")
            .replace("{webhook}", "hook")
            .replace("{delivery}", &fixture.delivery)
            .replace("{node}", "sim-1")
            .replace("{operation_type}", "namespace_op")
            .replace("{operation_uuid}", &fixture.operation)
            .replace("{network_ref}", &fixture.network)
            .replace("{interface_uuid}", &fixture.interface)
            .replace("{instance_ref}", &fixture.instance)
            .replace("{agentoperation_uuid}", &fixture.agent_operation)
            .replace("{claim_ref}", &fixture.claim)
            .replace("{quota}", "networks")
            .replace("{address}", "10.0.0.9")
            .replace("{artifact_ref}", &fixture.artifact)
            .replace("{blob_uuid}", &fixture.blob)
            .replace("{upload_uuid}", &fixture.upload)
            .replace("{name}", "fresh")
            .replace("{index}", "1")
            .replace("{offset}", "0")
            .replace("{algorithm}", "sha512")
            .replace("{hash}", "00")
            .replace("{*path}", "alpha/lab")
            .replace("/docs/{*file}", "/docs/style.css")
            .replace("{*file}", "main.js")
            .replace("{file}", "swagger-ui.css");
        let mut actual = [0; 7];
        for (index, token) in fixture.tokens.iter().enumerate() {
            let method: Method = method.parse().unwrap();
            let response = fixture
                .cluster
                .call(token, method.clone(), &concrete, body(method.as_str(), path, fixture))
                .await;
            actual[index] = response.status.as_u16();
            assert!(response.headers.contains_key("x-request-id"));
            if actual[index] >= 400 && !path.ends_with('z') {
                assert_eq!(response.body["status"], actual[index], "{method} {path}: {}", response.text);
                assert!(response.body["error"].is_string(), "{method} {path}: {}", response.text);
            }
        }
        if actual != *expected {
            mismatches.push(format!("{method} {path}: expected {expected:?}, actual {actual:?}"));
        }
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_and_table_rows_match() {
    let cluster = Cluster::new().await;
    let routes: BTreeSet<(&str, &str, &str)> =
        cluster.routes.iter().map(|route| (&*route.method, &*route.path, &*route.scope)).collect();
    let rows: BTreeSet<(&str, &str, &str)> =
        TABLE.iter().map(|(method, path, scope, _)| (*method, *path, *scope)).collect();
    assert_eq!(routes, rows);
}

#[test]
fn trust_scopes_are_those_of_the_calls_that_a_trust_opens() {
    // The calls of the table create these in the caller's own namespace; a body can name the trusting one.
    let mut opened = BTreeSet::from(["label.write", "network.write"]);
    for (method, path, scope, [.., stranger, trusted, _, _]) in TABLE {
        // Whatever the response is: a trusted caller gets another one than a stranger.
        if stranger != trusted {
            assert!(TRUST_SCOPES.contains(scope), "{method} {path}: {scope}");
            opened.insert(*scope);
        }
    }
    assert_eq!(opened.into_iter().collect::<Vec<_>>(), TRUST_SCOPES, "a scope that no call needs");
}
