//! Namespaces, keys, trusts and metadata.

use axum::http::Method;
use muster_control::objects;
use muster_test_cluster::{Cluster, caller};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

/// Asserts that each body is rejected with its status and error text.
async fn assert_rejected(
    cluster: &Cluster,
    token: &str,
    method: Method,
    path: &str,
    cases: &[(Value, u16, &str)],
) {
    for (body, status, text) in cases {
        let response = cluster.call(token, method.clone(), path, Some(body.clone())).await;
        assert_eq!(
            (response.status.as_u16(), &response.body["error"]),
            (*status, &json!(text)),
            "{method} {path} {body}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_shows_lists_and_deletes_namespace() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let created =
        cluster.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await;
    let expected = json!({
        "name": "ci", "state": "created", "version": 7, "metadata": {}, "keys": [], "trust": {"full": ["system"]}
    });
    assert_eq!((created.status.as_u16(), &created.body), (200, &expected));
    assert_eq!(cluster.call(&token, Method::GET, "/auth/namespaces/ci", None).await.body, expected);
    let list = cluster.call(&token, Method::GET, "/auth/namespaces", None).await.body;
    assert_eq!(
        list.as_array().unwrap().iter().map(|n| n["name"].clone()).collect::<Vec<_>>(),
        ["ci", "system"]
    );

    let deleted = cluster.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await;
    assert_eq!((deleted.status.as_u16(), deleted.text.as_str()), (200, "null\n"));
    assert_eq!(cluster.call(&token, Method::GET, "/auth/namespaces/ci", None).await.status, 404);
    assert_eq!(cluster.call(&token, Method::DELETE, "/auth/namespaces/ci", None).await.status, 404);
    let again =
        cluster.call(&token, Method::POST, "/auth/namespaces", Some(json!({"namespace": "ci"}))).await;
    assert_eq!((again.status.as_u16(), &again.body["error"]), (403, &json!("namespace exists")));
    let system = cluster.call(&token, Method::DELETE, "/auth/namespaces/system", None).await;
    assert_eq!(system.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_namespace_without_side_effects() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let long = "x".repeat(73);
    assert_rejected(
        &cluster,
        &token,
        Method::POST,
        "/auth/namespaces",
        &[
            (json!({}), 400, "no namespace specified"),
            (json!({"namespace": ""}), 400, "no namespace specified"),
            (json!({"namespace": "a/b"}), 400, "namespace: must not contain slashes or control characters"),
            (json!({"namespace": "x".repeat(256)}), 400, "namespace: must be at most 255 characters"),
            (json!({"namespace": "n", "key_name": "k"}), 400, "no key specified"),
            (json!({"namespace": "n", "key_name": "k", "key": 7}), 400, "key is not a string"),
            (json!({"namespace": "n", "key_name": "_service_keyX", "key": "x"}), 403, "illegal key name"),
            (
                json!({"namespace": "n", "key_name": "k", "key": long}),
                422,
                "keys cannot be longer than 72 characters",
            ),
        ],
    )
    .await;
    let prefixed = json!({"namespace": "n", "key_name": "k", "key": "sfk_mine"});
    assert_eq!(cluster.call(&token, Method::POST, "/auth/namespaces", Some(prefixed)).await.status, 400);
    assert_eq!(cluster.call(&token, Method::GET, "/auth/namespaces/n", None).await.status, 404);
    let with_key = json!({"namespace": "n", "key_name": "k", "key": "secret"});
    let created = cluster.call(&token, Method::POST, "/auth/namespaces", Some(with_key)).await;
    assert_eq!(created.body["keys"], json!(["k"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_many_namespaces_in_one_document() {
    let cluster = Cluster::new().await;
    for n in 0..1203 {
        let mut tx = cluster.app.store.begin().await.unwrap();
        muster_store::namespaces::insert(&mut tx, &format!("ns-{n:05}")).await.unwrap();
        tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    }
    objects::trust::add(&cluster.app, &caller(), "ns-01100", "friend").await.unwrap();
    let token = cluster.token("system").await;
    let list = cluster.call(&token, Method::GET, "/auth/namespaces", None).await.body;
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 1204);
    assert!(list.is_sorted_by_key(|namespace| namespace["name"].as_str().unwrap()));
    assert_eq!(list[1100]["trust"]["full"], json!(["system", "friend"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn adds_replaces_lists_and_deletes_keys() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("system").await;
    let keys = "/auth/namespaces/ci/keys";
    let generated =
        cluster.call(&token, Method::POST, keys, Some(json!({"key_name": "made", "key": ""}))).await.body;
    assert_eq!(generated["key_name"], "made");
    assert_eq!(generated["key"].as_str().unwrap().len(), 42);
    let special_name = json!({"key_name": "odd / name é", "key": "secret", "expiry": null});
    assert_eq!(
        cluster.call(&token, Method::POST, keys, Some(special_name)).await.body,
        json!("odd / name é")
    );
    assert_eq!(cluster.call(&token, Method::GET, keys, None).await.body, json!(["made", "odd / name é"]));

    // The released client sends the name in the body; the path form is accepted as well.
    let body = json!({"key_name": "made", "key": "second"});
    assert_eq!(cluster.call(&token, Method::PUT, keys, Some(body)).await.body, json!("made"));
    let named = format!("{keys}/made");
    let response =
        cluster.call(&token, Method::PUT, &named, Some(json!({"key": "third", "key_name": "made"}))).await;
    assert_eq!(response.body, json!("made"));
    let conflicting =
        cluster.call(&token, Method::PUT, &named, Some(json!({"key": "x", "key_name": "other"}))).await;
    assert_eq!(conflicting.status, 400);
    for (secret, status) in [("second", 401), ("third", 200)] {
        let login = json!({"namespace": "ci", "key": secret});
        assert_eq!(cluster.call("", Method::POST, "/auth", Some(login)).await.status, status, "{secret}");
    }
    let expiring = json!({"key": "fourth", "expiry": 4_000_000_000_u64});
    cluster.call(&token, Method::PUT, &named, Some(expiring)).await;
    let expected = json!({"key_name": "made", "expiry": 4_000_000_000.0, "scopes": null, "metadata": {}});
    assert_eq!(cluster.call(&token, Method::GET, &named, None).await.body, expected);
    let absent = cluster.call(&token, Method::GET, &format!("{keys}/absent"), None).await;
    assert_eq!((absent.status.as_u16(), &absent.body["error"]), (404, &json!("key does not exist")));
    let absent =
        cluster.call(&token, Method::PUT, &format!("{keys}/absent"), Some(json!({"key": "x"}))).await;
    assert_eq!((absent.status.as_u16(), &absent.body["error"]), (404, &json!("key does not exist")));
    assert_eq!(
        cluster.call(&token, Method::PUT, &named, Some(json!({}))).await.body["error"],
        "no key specified"
    );

    let special_name = format!("{keys}/odd%20%2F%20name%20%C3%A9");
    assert_eq!(cluster.call(&token, Method::DELETE, &special_name, None).await.text, "null\n");
    let again = cluster.call(&token, Method::DELETE, &special_name, None).await;
    assert_eq!(
        (again.status.as_u16(), &again.body["error"]),
        (404, &json!("key name not found in namespace"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_key_with_reason() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    assert_rejected(
        &cluster,
        &token,
        Method::POST,
        "/auth/namespaces/system/keys",
        &[
            (json!({}), 400, "no key name specified"),
            (json!({"key_name": ""}), 400, "no key name specified"),
            (json!({"key_name": "service_key"}), 403, "illegal key name"),
            (json!({"key_name": "_service_key"}), 403, "illegal key name"),
            (json!({"key_name": "k", "key": ["x"]}), 400, "key is not a string"),
            (
                json!({"key_name": "k", "key": "x".repeat(73)}),
                422,
                "keys cannot be longer than 72 characters",
            ),
            (json!({"key_name": "k", "expiry": "soon"}), 400, "expiry is not a number"),
            (json!({"key_name": "k", "expiry": true}), 400, "expiry is not a number"),
            (json!({"key_name": "k", "expiry": 12}), 400, "expiry must be in the future"),
            (json!({"key_name": 7}), 400, "key_name: Not a valid string."),
        ],
    )
    .await;
    let prefixed = json!({"key_name": "k", "key": "sfk_mine"});
    let response = cluster.call(&token, Method::POST, "/auth/namespaces/system/keys", Some(prefixed)).await;
    assert_eq!(response.status, 400);
    assert!(response.body["error"].as_str().unwrap().contains("sfk_ prefix is reserved"));
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_makes_namespace_visible_until_revoked() {
    let cluster = Cluster::new().await;
    for name in ["a", "b"] {
        cluster.create_namespace(name).await;
    }
    let (a, b) = (cluster.token("a").await, cluster.token("b").await);
    let trust = json!({"external_namespace": "b"});
    for _ in 0..2 {
        let added = cluster.call(&a, Method::POST, "/auth/namespaces/a/trust", Some(trust.clone())).await;
        assert_eq!(added.body["trust"]["full"], json!(["system", "b"]), "adding twice changes nothing");
    }
    let visible_count = async |token: &str| {
        cluster.call(token, Method::GET, "/auth/namespaces", None).await.body.as_array().unwrap().len()
    };
    assert_eq!((visible_count(&a).await, visible_count(&b).await), (1, 2), "trust is not mutual");
    for (other, remaining) in
        [("system", json!(["system", "b"])), ("absent", json!(["system", "b"])), ("b", json!(["system"]))]
    {
        let path = format!("/auth/namespaces/a/trust/{other}");
        assert_eq!(cluster.call(&a, Method::DELETE, &path, None).await.body["trust"]["full"], remaining);
    }
    assert_eq!(visible_count(&b).await, 1);
    let none = cluster.call(&a, Method::POST, "/auth/namespaces/a/trust", Some(json!({}))).await;
    assert_eq!(none.body["error"], "no external namespace specified");
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_namespace_revokes_trusts_immediately() {
    let cluster = Cluster::new().await;
    for name in ["a", "b", "doomed"] {
        cluster.create_namespace(name).await;
    }
    for name in ["a", "b"] {
        objects::trust::add(&cluster.app, &caller(), name, "doomed").await.unwrap();
    }
    objects::namespace::delete(&cluster.app, &caller(), "doomed").await.unwrap();
    for name in ["a", "b"] {
        let record = objects::namespace::get(&cluster.app, &caller(), name).await.unwrap();
        assert_eq!(record.trust.full, ["system"]);
        let messages = cluster.messages(&ObjectRef::namespace(name)).await;
        assert!(messages.iter().any(|m| m == "trust revoked, trusted namespace is gone"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sets_replaces_and_deletes_metadata() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let path = "/auth/namespaces/system/metadata";
    let post = json!({"key": "a", "value": {"deep": [1, 2]}});
    assert_eq!(cluster.call(&token, Method::POST, path, Some(post)).await.text, "null\n");
    let put = cluster.call(&token, Method::PUT, &format!("{path}/b"), Some(json!({"value": "text"}))).await;
    assert_eq!(put.text, "null\n");
    let all = json!({"a": {"deep": [1, 2]}, "b": "text"});
    assert_eq!(cluster.call(&token, Method::GET, path, None).await.body, all);
    assert_eq!(
        cluster.call(&token, Method::GET, "/auth/namespaces/system", None).await.body["metadata"],
        all
    );
    for _ in 0..2 {
        assert_eq!(cluster.call(&token, Method::DELETE, &format!("{path}/a"), None).await.text, "null\n");
    }
    let large = json!({"value": "x".repeat(200 << 10)});
    assert_eq!(
        cluster.call(&token, Method::PUT, &format!("{path}/l1"), Some(large.clone())).await.status,
        200
    );
    let over_limit = cluster.call(&token, Method::PUT, &format!("{path}/l2"), Some(large)).await;
    assert_eq!(over_limit.status, 400, "{}", over_limit.text);
    assert!(
        !cluster.call(&token, Method::GET, path, None).await.body.as_object().unwrap().contains_key("l2")
    );
    assert_rejected(
        &cluster,
        &token,
        Method::POST,
        path,
        &[
            (json!({"value": 1}), 400, "no key specified"),
            (json!({"key": "k"}), 400, "no value specified"),
            (json!({"key": "x".repeat(256), "value": 1}), 400, "key: must be at most 255 characters"),
        ],
    )
    .await;
}
