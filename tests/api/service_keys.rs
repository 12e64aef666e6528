//! Service keys: forwarded requests, and the callers that they act for.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Method, Request};
use axum::response::Response;
use muster_control::auth::Caller;
use muster_control::auth::tokens::TokenSubject;
use muster_control::objects::key::unix_seconds;
use muster_control::objects::service_key::ServiceKey;
use muster_store::{nodes, transaction, uploads};
use muster_test_cluster::{Cluster, caller, wait_for};
use muster_types::ids::{InstanceId, NodeId, UploadId};
use muster_types::node::{HostFeature, NodeApi as _, NodeIdentity, NodeReport};
use muster_types::object::ObjectRef;
use muster_types::time::now;
use serde_json::json;

use crate::networks::{cluster, get};
use crate::remote::remote_daemon;

/// Adds a node of another daemon at `address`, with an upload of the namespace `ci`. Returns the path of the upload.
async fn remote_upload(cluster: &Cluster, id: NodeId, address: SocketAddr) -> String {
    let local = cluster.node.identity();
    let identity = NodeIdentity { id, name: "remote".into(), ..local.clone() };
    let report = NodeReport { node_address: Some(address), ..NodeReport::default() };
    let upload = transaction!(cluster.app.store, |tx| {
        nodes::insert(tx, &identity).await?;
        nodes::set_report(tx, identity.id, &report).await?;
        Ok(uploads::insert(tx, "ci", identity.id).await?)
    });
    format!("/upload/{}", upload.unwrap().id)
}

fn caller_of(namespace: &str, scopes: Option<&[&str]>) -> Caller {
    let scopes = scopes.map(|scopes| scopes.iter().map(|scope| (*scope).to_owned()).collect());
    Caller { namespace: namespace.into(), key_name: "original".into(), scopes, ..caller() }
}

#[tokio::test(flavor = "multi_thread")]
async fn forwards_with_service_key_instead_of_token_of_caller() {
    let (cluster, token) = cluster(&[]).await;
    let record = json!({
        "uuid": UploadId::new(), "state": "created", "metadata": {}, "version": 3, "node": "remote",
        "created_at": 1.0, "size": 0,
    });
    let remote = NodeId::new();
    let (address, received) = remote_daemon(&cluster, remote, move |_| {
        let response = Response::builder().header("Content-Type", "application/json");
        response.body(Body::from(record.to_string())).unwrap()
    })
    .await;
    let path = remote_upload(&cluster, remote, address).await;
    let system = cluster.token("system").await;
    for (token, namespace) in [(&token, "ci"), (&system, "system")] {
        assert_eq!(get(&cluster, token, &path).await.status, 200);
        let request = received.lock().pop().unwrap();
        let header = |name: &str| request.headers[name].to_str().unwrap().to_owned();
        let deadline: f64 = header("x-muster-deadline").parse().unwrap();
        assert!((now()..now() + 10.0).contains(&deadline), "{deadline}");
        assert!(!header("x-request-id").is_empty());
        let sent = header("authorization").strip_prefix("Bearer ").unwrap().to_owned();
        assert_ne!(&sent, token);
        let claims = cluster.app.tokens.verify(unix_seconds(), &sent).unwrap();
        assert_eq!(claims.sub.0, "ci", "the namespace of the upload");
        assert!(claims.sub.1.starts_with("_service_key"), "{:?}", claims.sub);
        assert!(claims.exp <= unix_seconds() + 300);
        let own = cluster.app.tokens.verify(unix_seconds(), token).unwrap();
        let original = claims.caller.unwrap();
        assert_eq!((original.namespace.as_str(), &original.key_name), (namespace, &own.sub.1));
        assert_eq!(get(&cluster, &sent, "/auth/namespaces").await.status, 401, "the key is removed");
    }
    assert_eq!(cluster.count_rows("namespace_keys", "name LIKE '%service_key%'").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn peer_may_work_on_a_forwarded_request_while_its_caller_waits() {
    let (cluster, token) = cluster(&[("NODE_RESPONSE_TIMEOUT", "2")]).await;
    let record = json!({
        "uuid": UploadId::new(), "state": "created", "metadata": {}, "version": 3, "node": "remote",
        "created_at": 1.0, "size": 0,
    });
    let remote = NodeId::new();
    let is_probed = AtomicBool::new(false);
    let (address, received) = remote_daemon(&cluster, remote, move |request| {
        if request.uri.path() == "/livez" {
            is_probed.store(true, Ordering::Relaxed);
        } else {
            // Longer than the response timeout.
            muster_testing::wait_for("a probe", Duration::from_secs(30), || {
                is_probed.load(Ordering::Relaxed).then_some(())
            });
        }
        let response = Response::builder().header("Content-Type", "application/json");
        response.body(Body::from(record.to_string())).unwrap()
    })
    .await;
    let path = remote_upload(&cluster, remote, address).await;
    let response = get(&cluster, &token, &path).await;
    assert_eq!(response.status, 200, "{}", response.text);
    let received = received.lock();
    let header = |request: &Parts, name: &str| request.headers[name].to_str().unwrap().to_owned();
    let (forwarded, probes) = received.split_last().unwrap();
    assert!(!probes.is_empty(), "no probe");
    let deadline = |request: &Parts| header(request, "x-muster-deadline").parse::<f64>().unwrap();
    for probe in probes {
        assert_eq!(header(probe, "x-muster-forward-id"), header(forwarded, "x-muster-forward-id"));
        assert!(deadline(probe) > deadline(forwarded), "the probe extends the deadline");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarded_request_is_executed_while_its_deadline_is_extended() {
    let (cluster, token) = cluster(&[]).await;
    let instance = crate::instances::create(&cluster, &token, "web", &json!({})).await;
    let id: InstanceId = instance["uuid"].as_str().unwrap().parse().unwrap();
    for (is_extended, status) in [(false, 503), (true, 200)] {
        let lock = cluster.app.instance_locks.lock(id).await;
        let expires = now() + 3.0;
        let with_headers = |request: axum::http::request::Builder, expires: f64| {
            let request = request.header("x-muster-deadline", expires.to_string());
            request.header("x-muster-forward-id", format!("request-{is_extended}"))
        };
        let request =
            Request::post(format!("/instances/{id}/poweroff")).header("content-type", "application/json");
        let request = with_headers(request, expires).header("authorization", format!("Bearer {token}"));
        let sent = cluster.request(request.body(Body::from("{}")).unwrap());
        let sender = async {
            wait_for("the request to wait for the instance", async || {
                cluster.app.instance_locks.is_awaited(&id).then_some(())
            })
            .await;
            if is_extended {
                let probe = with_headers(Request::get("/livez"), now() + 60.0).body(Body::empty()).unwrap();
                assert_eq!(cluster.request(probe).await.status, 200);
            }
            wait_for("the first deadline", async || (now() > expires).then_some(())).await;
            drop(lock);
        };
        let (response, ()) = tokio::join!(sent, sender);
        assert_eq!(response.status, status, "{}", response.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn error_names_the_reason_of_a_node_without_api() {
    let (cluster, token) = cluster(&[]).await;
    let remote = NodeId::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let path = remote_upload(&cluster, remote, closed).await;
    let refused = get(&cluster, &token, &path).await;
    assert!(refused.status == 503 && refused.text.contains("please retry"), "{}", refused.text);
    let reason = "it is reachable only from this host";
    let report = NodeReport {
        node_address: Some(closed),
        limits: [(HostFeature::Api, reason.to_owned())].into(),
        ..NodeReport::default()
    };
    transaction!(cluster.app.store, |tx| { Ok(nodes::set_report(tx, remote, &report).await?) }).unwrap();
    let refused = get(&cluster, &token, &path).await;
    assert!(refused.status == 503 && refused.text.contains("node remote"), "{}", refused.text);
    assert!(refused.text.contains(reason), "{}", refused.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn service_key_acts_for_caller_with_its_limits() {
    let (cluster, _) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    cluster.key(&caller(), "ci", "original").await;
    let app = &cluster.app;
    let read_only = caller_of("ci", Some(&["network.read"]));
    let key = ServiceKey::for_caller(app, &read_only, "ci").await.unwrap();
    assert_eq!(get(&cluster, key.token(), "/networks").await.status, 200);
    let request = json!({"name": "n", "netblock": "10.0.0.0/24"});
    let refused = cluster.call(key.token(), Method::POST, "/networks", Some(request.clone())).await;
    assert_eq!(refused.status, 403, "{}", refused.text);
    assert_eq!(get(&cluster, key.token(), "/nodes").await.status, 403, "not scoped");

    let key = ServiceKey::for_caller(app, &caller_of("ci", None), "other").await.unwrap();
    let created = cluster.call(key.token(), Method::POST, "/networks", Some(request)).await;
    assert_eq!((created.status.as_u16(), &created.body["namespace"]), (200, &json!("ci")));
    assert_eq!(get(&cluster, key.token(), "/nodes").await.status, 401, "not system");
    let events = cluster.events(&ObjectRef::namespace("ci")).await;
    let used: Vec<_> = events
        .iter()
        .filter(|event| event.message == "token used to authenticate request")
        .map(|event| event.extra["keyname"].as_str().unwrap())
        .collect();
    assert_eq!(used, ["original"], "events name the caller");
    cluster.settle_networks().await;
    let nonces = app.store.query("SELECT nonce FROM namespace_keys WHERE name = 'original'", &[]).await;
    let original = Caller { nonce: nonces.unwrap()[0].scalar().ok(), ..caller_of("ci", None) };
    assert!(original.nonce.is_some());
    let bound = ServiceKey::for_caller(app, &original, "ci").await.unwrap();
    assert_eq!(get(&cluster, bound.token(), "/networks").await.status, 200);
    let replaced = json!({"key_name": "original", "key": "another secret"});
    let keys = "/auth/namespaces/ci/keys";
    let replaced = cluster.call(&cluster.token("system").await, Method::PUT, keys, Some(replaced)).await;
    assert_eq!(replaced.status, 200, "{}", replaced.text);
    assert_eq!(get(&cluster, bound.token(), "/networks").await.status, 401, "the caller's key is replaced");
    let path = "/auth/namespaces/ci/keys/original";
    assert_eq!(cluster.call(&cluster.token("ci").await, Method::DELETE, path, None).await.status, 200);
    assert_eq!(get(&cluster, key.token(), "/networks").await.status, 401, "the caller's key is deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_service_keys_of_same_namespace_act_for_callers() {
    let (cluster, _) = cluster(&[]).await;
    cluster.create_namespace("other").await;
    let app = &cluster.app;
    cluster.key(&caller(), "ci", "mine").await;
    for namespace in ["system", "ci", "other"] {
        cluster.key(&caller(), namespace, "original").await;
    }
    let service = ServiceKey::for_caller(app, &caller_of("ci", None), "ci").await.unwrap();
    let service = app.tokens.verify(unix_seconds(), service.token()).unwrap();
    let nonces = app.store.query("SELECT nonce FROM namespace_keys WHERE name = 'mine'", &[]).await.unwrap();
    let nonce: String = nonces[0].scalar().unwrap();
    let service_nonce = service.nonce.unwrap();
    // Not even a token that is signed by the cluster.
    for (key, nonce, original) in [
        ("mine", &nonce, caller_of("system", None)),
        ("mine", &nonce, caller_of("ci", None)),
        (&*service.sub.1, &service_nonce, caller_of("other", None)),
    ] {
        let subject = TokenSubject { namespace: "ci", key, nonce, scopes: None };
        let token = app.tokens.create_service(unix_seconds(), 300, subject, Some(original.original()));
        assert_eq!(get(&cluster, &token, "/networks").await.status, 401, "{key}");
    }
    let token = cluster.token("ci").await;
    let named = json!({"key_name": "_service_keyabc", "key": "secret"});
    let refused = cluster.call(&token, Method::POST, "/auth/namespaces/ci/keys", Some(named)).await;
    assert_eq!(refused.status, 403, "{}", refused.text);
}
