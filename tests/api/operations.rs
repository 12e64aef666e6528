//! Reading cluster operations.

use axum::http::Method;
use muster_control::objects;
use muster_control::queue::{DeleteNamespace, NewOperation};
use muster_test_cluster::{Cluster, caller};
use muster_types::object::ObjectRef;
use muster_types::operation::OperationHandle;
use serde_json::{Value, json};

async fn enqueue(cluster: &Cluster, namespace: &str, depends_on: Vec<OperationHandle>) -> OperationHandle {
    let mut tx = cluster.app.store.begin().await.unwrap();
    let target = ObjectRef::namespace(namespace);
    let mut new = NewOperation::new(target, Some(namespace.into()), DeleteNamespace {});
    new.depends_on = depends_on;
    let handle = new.enqueue(&mut tx).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();
    handle
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_operation_is_readable_until_complete() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("system").await;
    objects::namespace::delete(&cluster.app, &caller(), "ci").await.unwrap();
    let query = "/clusteroperations?target_object_type=namespace&target_uuid=ci";
    let list = cluster.call(&token, Method::GET, query, None).await.body;
    let operation = &list[0];
    for field in [
        "depends_on",
        "error_report",
        "namespace",
        "object_type",
        "operation_type",
        "state",
        "tasks",
        "uuid",
        "version",
    ] {
        assert!(operation.get(field).is_some(), "{field}: {operation}");
    }
    assert_eq!(
        (&operation["state"], &operation["object_type"]),
        (&json!("queued"), &json!("clusteroperation"))
    );
    assert_eq!(operation["tasks_completed"], 0);
    cluster.settle().await;
    let path = format!("/clusteroperations/namespace_op/{}", operation["uuid"].as_str().unwrap());
    let complete = cluster.call(&token, Method::GET, &path, None).await.body;
    assert_eq!(complete["state"], "complete");
    assert_eq!(complete["tasks_completed"], complete["tasks"].as_array().unwrap().len());
}

#[tokio::test(flavor = "multi_thread")]
async fn chain_contains_all_ancestors_and_rejects_foreign_ones() {
    let cluster = Cluster::new().await;
    cluster.allow_unfinished_operations("a chain of 256 operations takes long, and none of it has to run");
    for name in ["mine", "other"] {
        cluster.create_namespace(name).await;
    }
    let (mine, system) = (cluster.token("mine").await, cluster.token("system").await);
    let first = enqueue(&cluster, "mine", vec![]).await;
    let second = enqueue(&cluster, "mine", vec![first.clone()]).await;
    let third = enqueue(&cluster, "mine", vec![second.clone(), first.clone()]).await;
    let foreign = enqueue(&cluster, "other", vec![third.clone()]).await;
    let crossing = enqueue(&cluster, "mine", vec![foreign]).await;
    let chain = async |token: &str, handle: &OperationHandle| {
        cluster.call(token, Method::GET, &format!("/clusteroperations/{}/chain", handle.op_uuid), None).await
    };
    let uuids = |body: &Value| {
        body.as_array().unwrap().iter().map(|o| o["uuid"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let expected = [&third, &second, &first].map(|handle| handle.op_uuid.to_string());
    assert_eq!(uuids(&chain(&mine, &third).await.body), expected);
    assert_eq!(uuids(&chain(&system, &crossing).await.body).len(), 5);
    let refused = chain(&mine, &crossing).await;
    assert_eq!(refused.status, 403);
    assert_eq!(refused.body["error"], "cluster operation chain crosses into a namespace you cannot see");

    let mut last = first;
    for _ in 0..256 {
        last = enqueue(&cluster, "mine", vec![last]).await;
    }
    let long = chain(&mine, &last).await;
    assert_eq!(
        (long.status.as_u16(), &long.body["error"]),
        (400, &json!("cluster operation chain exceeds maximum size of 256 nodes"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_invalid_queries_with_reason() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("mine").await;
    let mine = cluster.token("mine").await;
    for (path, status, text) in [
        ("/clusteroperations", 400, "target_object_type parameter is required"),
        ("/clusteroperations?target_object_type=namespace", 400, "target_uuid parameter is required"),
        ("/clusteroperations?target_object_type=x&target_uuid=y", 400, "invalid target_object_type: 'x'"),
        (
            "/clusteroperations?target_object_type=api-requests&target_uuid=y",
            400,
            "unsupported target_object_type: 'api-requests'",
        ),
        (
            "/clusteroperations?target_object_type=namespace&target_uuid=absent",
            404,
            "target object not found",
        ),
        (
            "/clusteroperations?target_object_type=namespace&target_uuid=system",
            403,
            "target object is in a namespace you cannot see",
        ),
        ("/clusteroperations/nonsense/7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11", 404, "operation type not found"),
        ("/clusteroperations/namespace_op/7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11", 404, "operation not found"),
        ("/clusteroperations/namespace_op/not-a-uuid", 404, "operation not found"),
        ("/clusteroperations/not-a-uuid/chain", 404, "operation not found"),
    ] {
        let response = cluster.call(&mine, Method::GET, path, None).await;
        assert_eq!((response.status.as_u16(), &response.body["error"]), (status, &json!(text)), "{path}");
    }
}
