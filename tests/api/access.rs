//! Every route, called by everyone. A route without a row fails, and so does a row without a route.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_control::objects;
use muster_control::queue::{DeleteNamespace, NewOperation};
use muster_test_cluster::{Cluster, caller};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

/// The scope that a token needs, and the status by caller: nobody, a bad token, an expired key, a foreign namespace, one that `alpha` trusts, `alpha`
/// itself, `system`. The calls are about namespace `alpha`, and run in this order.
const TABLE: &[(&str, &str, &str, [u16; 7])] = &[
    ("GET", "/", "", [200, 200, 200, 200, 200, 200, 200]),
    ("GET", "/livez", "", [200, 200, 200, 200, 200, 200, 200]),
    // The cluster in this process has no task that looks at the database.
    ("GET", "/readyz", "", [503, 503, 503, 503, 503, 503, 503]),
    ("GET", "/healthz", "", [503, 503, 503, 503, 503, 503, 503]),
    ("GET", "/openapi.json", "", [200, 200, 200, 200, 200, 200, 200]),
    ("GET", "/apidocs", "", [200, 200, 200, 200, 200, 200, 200]),
    ("GET", "/apidocs/{file}", "", [200, 200, 200, 200, 200, 200, 200]),
    // The calls of this test name no host.
    ("GET", "/agent/install.sh", "", [400, 400, 400, 400, 400, 400, 400]),
    ("GET", "/agent/muster-agent", "", [200, 200, 200, 200, 200, 200, 200]),
    ("POST", "/auth", "", [401, 401, 401, 401, 401, 401, 401]),
    ("POST", "/auth/federated", "", [401, 401, 401, 401, 401, 401, 401]),
    ("GET", "/auth/namespaces", "auth.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/auth/namespaces", "auth.write", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/auth/namespaces/{namespace}", "auth.read", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/auth/namespaces/{namespace}", "auth.delete", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/auth/namespaces/{namespace}/events", "auth.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/auth/namespaces/{namespace}/keys", "auth.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/auth/namespaces/{namespace}/keys", "auth.write", [401, 401, 401, 404, 200, 200, 200]),
    ("PUT", "/auth/namespaces/{namespace}/keys", "auth.write", [401, 401, 401, 401, 401, 401, 200]),
    (
        "PUT",
        "/auth/namespaces/{namespace}/keys/{key_name}",
        "auth.write",
        [401, 401, 401, 401, 401, 401, 200],
    ),
    // The first who may deletes it; those after find it gone.
    (
        "DELETE",
        "/auth/namespaces/{namespace}/keys/{key_name}",
        "auth.delete",
        [401, 401, 401, 404, 200, 404, 404],
    ),
    ("POST", "/auth/namespaces/{namespace}/trust", "auth.write", [401, 401, 401, 404, 200, 200, 200]),
    (
        "DELETE",
        "/auth/namespaces/{namespace}/trust/{external_namespace}",
        "auth.delete",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    ("GET", "/auth/namespaces/{namespace}/claims", "auth.read", [401, 401, 401, 401, 401, 401, 200]),
    // It holds one.
    ("POST", "/auth/namespaces/{namespace}/claims", "auth.write", [401, 401, 401, 401, 401, 401, 409]),
    (
        "GET",
        "/auth/namespaces/{namespace}/claims/{claim_ref}",
        "auth.read",
        [401, 401, 401, 401, 401, 401, 200],
    ),
    (
        "PUT",
        "/auth/namespaces/{namespace}/claims/{claim_ref}",
        "auth.write",
        [401, 401, 401, 401, 401, 401, 200],
    ),
    (
        "DELETE",
        "/auth/namespaces/{namespace}/claims/{claim_ref}",
        "auth.delete",
        [401, 401, 401, 401, 401, 401, 200],
    ),
    (
        "GET",
        "/auth/namespaces/{namespace}/claims/{claim_ref}/events",
        "auth.read",
        [401, 401, 401, 401, 401, 401, 200],
    ),
    ("GET", "/auth/namespaces/{namespace}/metadata", "auth.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/auth/namespaces/{namespace}/metadata", "auth.write", [401, 401, 401, 404, 200, 200, 200]),
    ("PUT", "/auth/namespaces/{namespace}/metadata/{key}", "auth.write", [401, 401, 401, 404, 200, 200, 200]),
    (
        "DELETE",
        "/auth/namespaces/{namespace}/metadata/{key}",
        "auth.delete",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    ("GET", "/auth/namespaces/{namespace}/rules", "rule.read", [401, 401, 401, 404, 200, 200, 200]),
    // The second who may finds it made.
    ("POST", "/auth/namespaces/{namespace}/rules", "rule.write", [401, 401, 401, 404, 200, 409, 409]),
    ("GET", "/auth/namespaces/{namespace}/rules/{rule}", "rule.read", [401, 401, 401, 404, 200, 200, 200]),
    (
        "GET",
        "/auth/namespaces/{namespace}/rules/{rule}/events",
        "rule.read",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    ("PUT", "/auth/namespaces/{namespace}/rules/{rule}", "rule.write", [401, 401, 401, 404, 200, 200, 200]),
    (
        "DELETE",
        "/auth/namespaces/{namespace}/rules/{rule}",
        "rule.delete",
        [401, 401, 401, 404, 200, 404, 404],
    ),
    ("GET", "/auth/issuers", "issuer.read", [401, 401, 401, 401, 401, 401, 200]),
    ("POST", "/auth/issuers", "issuer.write", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/auth/issuers/{name}", "issuer.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/auth/issuers/{name}/events", "issuer.read", [401, 401, 401, 401, 401, 401, 200]),
    ("PUT", "/auth/issuers/{name}", "issuer.write", [401, 401, 401, 401, 401, 401, 200]),
    ("DELETE", "/auth/issuers/{name}", "issuer.delete", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/nodes", "node.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/nodes/{node}", "node.read", [401, 401, 401, 401, 401, 401, 200]),
    ("DELETE", "/nodes/{node}", "node.delete", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/nodes/{node}/processmetrics", "node.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/nodes/{node}/events", "node.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/nodes/{node}/metadata", "node.read", [401, 401, 401, 401, 401, 401, 200]),
    ("POST", "/nodes/{node}/metadata", "node.write", [401, 401, 401, 401, 401, 401, 200]),
    ("PUT", "/nodes/{node}/metadata/{key}", "node.write", [401, 401, 401, 401, 401, 401, 200]),
    ("DELETE", "/nodes/{node}/metadata/{key}", "node.delete", [401, 401, 401, 401, 401, 401, 200]),
    // Networks of namespace `alpha`: trust reads, only the owner and `system` change.
    ("GET", "/networks", "network.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/networks", "network.write", [401, 401, 401, 200, 200, 200, 200]),
    ("DELETE", "/networks", "network.delete", [401, 401, 401, 401, 401, 403, 403]),
    ("GET", "/networks/{network_ref}", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/networks/{network_ref}", "network.delete", [401, 401, 401, 404, 404, 202, 202]),
    ("DELETE", "/networks/networks/{network_ref}", "network.delete", [401, 401, 401, 404, 404, 202, 202]),
    ("GET", "/networks/{network_ref}/events", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("GET", "/networks/{network_ref}/interfaces", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("GET", "/networks/{network_ref}/addresses", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    // The second who may finds it reserved, and the second who may release finds it free.
    (
        "POST",
        "/networks/{network_ref}/addresses/{address}",
        "network.write",
        [401, 401, 401, 404, 404, 200, 409],
    ),
    (
        "DELETE",
        "/networks/{network_ref}/addresses/{address}",
        "network.delete",
        [401, 401, 401, 404, 404, 404, 404],
    ),
    ("GET", "/networks/{network_ref}/ping/{address}", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/networks/{network_ref}/route", "network.write", [401, 401, 401, 404, 404, 200, 200]),
    (
        "DELETE",
        "/networks/{network_ref}/route/{address}",
        "network.delete",
        [401, 401, 401, 404, 404, 404, 404],
    ),
    ("POST", "/networks/{network_ref}/dns", "network.write", [401, 401, 401, 404, 404, 200, 200]),
    ("DELETE", "/networks/{network_ref}/dns", "network.delete", [401, 401, 401, 404, 404, 200, 200]),
    // Trust does not reach operations.
    ("GET", "/networks/{network_ref}/clusteroperations", "network.read", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/networks/{network_ref}/metadata", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/networks/{network_ref}/metadata", "network.write", [401, 401, 401, 404, 404, 200, 200]),
    ("PUT", "/networks/{network_ref}/metadata/{key}", "network.write", [401, 401, 401, 404, 404, 200, 200]),
    (
        "DELETE",
        "/networks/{network_ref}/metadata/{key}",
        "network.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    // An instance of namespace `alpha`, which runs: trust reads, and creates.
    ("GET", "/instances", "instance.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/instances", "instance.write", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/instances", "instance.delete", [401, 401, 401, 401, 401, 200, 200]),
    ("GET", "/instances/{instance_ref}", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/instances/{instance_ref}", "instance.delete", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/instances/{instance_ref}/interfaces", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/instances/{instance_ref}/interfaces", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/instances/{instance_ref}/snapshot", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/instances/{instance_ref}/snapshot", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/instances/{instance_ref}/events", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    (
        "GET",
        "/instances/{instance_ref}/clusteroperations",
        "instance.read",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    ("GET", "/instances/{instance_ref}/metadata", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/instances/{instance_ref}/metadata", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    (
        "PUT",
        "/instances/{instance_ref}/metadata/{key}",
        "instance.write",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    (
        "DELETE",
        "/instances/{instance_ref}/metadata/{key}",
        "instance.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    ("POST", "/instances/{instance_ref}/rebootsoft", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/instances/{instance_ref}/reboothard", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/instances/{instance_ref}/poweron", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/instances/{instance_ref}/poweroff", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    // The second who may finds it paused; nobody finds it paused who did not pause it.
    ("POST", "/instances/{instance_ref}/pause", "instance.write", [401, 401, 401, 404, 404, 200, 409]),
    ("POST", "/instances/{instance_ref}/unpause", "instance.write", [401, 401, 401, 404, 404, 409, 409]),
    ("GET", "/instances/{instance_ref}/consoledata", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    (
        "DELETE",
        "/instances/{instance_ref}/consoledata",
        "instance.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    // Whoever sees the screen can use the keyboard; a picture of it is made, not read.
    ("GET", "/instances/{instance_ref}/screenshot", "instance.read", [401, 401, 401, 404, 404, 200, 200]),
    (
        "GET",
        "/instances/{instance_ref}/vdiconsolehelper",
        "instance.console",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    (
        "GET",
        "/instances/{instance_ref}/vdiconsoleproxy",
        "instance.console",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    // What is done in a guest is done by the owner; what came of it is read.
    (
        "POST",
        "/instances/{instance_ref}/agent/execute",
        "instance.execute",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    ("POST", "/instances/{instance_ref}/agent/put", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/instances/{instance_ref}/agent/get", "instance.write", [401, 401, 401, 404, 404, 200, 200]),
    (
        "GET",
        "/instances/{instance_ref}/agentoperations",
        "instance.read",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    ("GET", "/instances/{instance_ref}/agent/facts", "instance.read", [401, 401, 401, 404, 404, 200, 200]),
    (
        "GET",
        "/agentoperations/{agentoperation_uuid}",
        "agentoperation.read",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    (
        "DELETE",
        "/agentoperations/{agentoperation_uuid}",
        "agentoperation.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    (
        "GET",
        "/agentoperations/{agentoperation_uuid}/events",
        "agentoperation.read",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    ("GET", "/interfaces/{interface_uuid}", "interface.read", [401, 401, 401, 404, 200, 200, 200]),
    // The second who may finds it floating.
    ("POST", "/interfaces/{interface_uuid}/float", "interface.write", [401, 401, 401, 404, 404, 200, 409]),
    ("POST", "/interfaces/{interface_uuid}/defloat", "interface.write", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/interfaces/{interface_uuid}/metadata", "interface.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/interfaces/{interface_uuid}/metadata", "interface.write", [401, 401, 401, 404, 404, 200, 200]),
    (
        "PUT",
        "/interfaces/{interface_uuid}/metadata/{key}",
        "interface.write",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    (
        "DELETE",
        "/interfaces/{interface_uuid}/metadata/{key}",
        "interface.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    // An artifact of namespace `alpha`: trust reads, and makes the first of a source, never the second.
    ("GET", "/artifacts", "artifact.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/artifacts", "artifact.write", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/artifacts", "artifact.delete", [401, 401, 401, 401, 401, 200, 200]),
    ("POST", "/artifacts/upload/{name}", "artifact.write", [401, 401, 401, 404, 200, 200, 200]),
    ("GET", "/artifacts/{artifact_ref}", "artifact.read", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/artifacts/{artifact_ref}", "artifact.delete", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/artifacts/{artifact_ref}/versions", "artifact.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/artifacts/{artifact_ref}/versions", "artifact.write", [401, 401, 401, 404, 404, 200, 200]),
    // The second who may finds the version gone.
    (
        "DELETE",
        "/artifacts/{artifact_ref}/versions/{index}",
        "artifact.delete",
        [401, 401, 401, 404, 404, 200, 404],
    ),
    // Only artifacts of `system` can be shared.
    ("POST", "/artifacts/{artifact_ref}/share", "artifact.write", [401, 401, 401, 404, 404, 403, 403]),
    ("POST", "/artifacts/{artifact_ref}/unshare", "artifact.write", [401, 401, 401, 404, 404, 403, 403]),
    ("GET", "/artifacts/{artifact_ref}/events", "artifact.read", [401, 401, 401, 404, 200, 200, 200]),
    (
        "GET",
        "/artifacts/{artifact_ref}/clusteroperations",
        "artifact.read",
        [401, 401, 401, 404, 200, 200, 200],
    ),
    ("GET", "/artifacts/{artifact_ref}/metadata", "artifact.read", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/artifacts/{artifact_ref}/metadata", "artifact.write", [401, 401, 401, 404, 404, 200, 200]),
    (
        "PUT",
        "/artifacts/{artifact_ref}/metadata/{key}",
        "artifact.write",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    (
        "DELETE",
        "/artifacts/{artifact_ref}/metadata/{key}",
        "artifact.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    ("GET", "/label/{*path}", "label.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/label/{*path}", "label.write", [401, 401, 401, 404, 404, 200, 200]),
    ("DELETE", "/label/{*path}", "label.delete", [401, 401, 401, 404, 404, 200, 404]),
    ("POST", "/upload", "upload.write", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/upload/{upload_uuid}", "upload.read", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/upload/{upload_uuid}", "upload.write", [401, 401, 401, 404, 404, 200, 200]),
    ("POST", "/upload/{upload_uuid}/truncate/{offset}", "upload.write", [401, 401, 401, 404, 404, 200, 200]),
    // Who knows a blob may read it, and write on it.
    ("GET", "/blobs", "blob.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/blobs/{blob_uuid}", "blob.read", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/blobs/{blob_uuid}/data", "blob.read", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/blobs/{blob_uuid}/events", "blob.read", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/blobs/{blob_uuid}/checksum/{algorithm}", "blob.read", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/blob_checksums/{algorithm}", "blob.read", [401, 401, 401, 400, 400, 400, 400]),
    ("GET", "/blob_checksums/{algorithm}/{hash}", "blob.read", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/blobs/{blob_uuid}/metadata", "blob.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/blobs/{blob_uuid}/metadata", "blob.write", [401, 401, 401, 200, 200, 200, 200]),
    ("PUT", "/blobs/{blob_uuid}/metadata/{key}", "blob.write", [401, 401, 401, 200, 200, 200, 200]),
    ("DELETE", "/blobs/{blob_uuid}/metadata/{key}", "blob.delete", [401, 401, 401, 200, 200, 200, 200]),
    // Trust does not reach operations.
    ("GET", "/clusteroperations", "clusteroperation.read", [401, 401, 401, 403, 403, 200, 200]),
    (
        "GET",
        "/clusteroperations/{operation_type}/{operation_uuid}",
        "clusteroperation.read",
        [401, 401, 401, 403, 403, 200, 200],
    ),
    (
        "GET",
        "/clusteroperations/{operation_uuid}/chain",
        "clusteroperation.read",
        [401, 401, 401, 403, 403, 200, 200],
    ),
    ("GET", "/admin/locks", "admin.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/admin/resources", "admin.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/admin/vditokenpubkey", "admin.read", [401, 401, 401, 401, 401, 401, 200]),
];

fn body(method: &str, path: &str, stage: &Stage) -> Option<Value> {
    Some(match (method, path) {
        ("POST", "/auth") => json!({"namespace": "alpha", "key": "wrong"}),
        ("POST", "/auth/federated") => json!({"token": "a.b.c", "namespace": "alpha", "rule": "deploy"}),
        ("POST", "/auth/namespaces") => json!({"namespace": "fresh"}),
        ("POST", "/auth/namespaces/{namespace}/keys") => json!({"key_name": "k"}),
        ("PUT", "/auth/namespaces/{namespace}/keys") => json!({"key_name": "k", "key": "secret"}),
        ("PUT", "/auth/namespaces/{namespace}/keys/{key_name}") => json!({"key": "secret"}),
        ("POST", "/auth/namespaces/{namespace}/claims") => claim(),
        ("PUT", "/auth/namespaces/{namespace}/claims/{claim_ref}") => json!({"limit_cpus": 2}),
        ("POST", "/auth/namespaces/{namespace}/trust") => json!({"external_namespace": "delta"}),
        ("POST", "/auth/namespaces/{namespace}/rules") => crate::federation::rule("another", "fresh"),
        ("PUT", "/auth/namespaces/{namespace}/rules/{rule}") => {
            let mut rule = crate::federation::rule("deploy", "fresh");
            rule.as_object_mut().unwrap().remove("name");
            rule
        }
        ("POST", "/auth/issuers") => crate::federation::issuer("another"),
        ("PUT", "/auth/issuers/{name}") => crate::federation::issuer("fresh"),
        ("POST", path) if path.ends_with("/metadata") => json!({"key": "m", "value": 1}),
        ("PUT", path) if path.contains("/metadata/") => json!({"value": 1}),
        ("POST", "/networks") => json!({"name": "another", "netblock": "10.9.0.0/24"}),
        ("DELETE", "/networks") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/networks/{network_ref}/dns") => json!({"name": "web", "value": "10.0.0.9"}),
        ("DELETE", "/networks/{network_ref}/dns") => json!({"name": "web"}),
        ("POST", "/instances") => crate::instances::small("another", &json!({"namespace": "alpha"})),
        ("DELETE", "/instances") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/instances/{instance_ref}/interfaces") => json!({"network_uuid": stage.network}),
        ("POST", "/instances/{instance_ref}/agent/execute") => json!({"command_line": "true"}),
        ("POST", "/instances/{instance_ref}/agent/put") => {
            json!({"blob_uuid": stage.blob, "path": "/tmp/x", "mode": 420})
        }
        ("POST", "/instances/{instance_ref}/agent/get") => json!({"path": "/etc/hostname"}),
        ("POST", "/artifacts") => json!({"url": "https://images.invalid/x.qcow2", "namespace": "alpha"}),
        ("DELETE", "/artifacts") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/artifacts/upload/{name}") => json!({"blob_uuid": stage.blob, "namespace": "alpha"}),
        ("POST", "/artifacts/{artifact_ref}/versions") => json!({"max_versions": 2}),
        ("POST", "/label/{*path}") => json!({"blob_uuid": stage.blob}),
        ("GET", "/clusteroperations") => json!({"target_object_type": "namespace", "target_uuid": "alpha"}),
        _ => return None,
    })
}

/// The body that promises a little.
fn claim() -> Value {
    json!({"limit_cpus": 1, "limit_memory_mb": 1, "limit_disk_gb": 1, "expires_in_seconds": 3600})
}

struct Stage {
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
}

/// A cluster for one route, so that no call disturbs another's.
async fn stage(path: &str) -> Stage {
    // Any file will do for an agent.
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let settings = [("KERBSIDE_URL", "https://consoles.example"), ("AGENT_PROGRAM", program)];
    let cluster = Cluster::with(&settings, None).await;
    for name in ["alpha", "beta", "gamma"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "alpha", "gamma").await.unwrap();
    cluster.key(&caller(), "alpha", "k").await;
    cluster.expiring_key("system", "late", 1.0).await;
    let late =
        cluster.app.store.query("SELECT nonce FROM namespace_keys WHERE name = 'late'", &[]).await.unwrap();
    let nonce: String = late[0].scalar().unwrap();
    let mut tx = cluster.app.store.begin().await.unwrap();
    let target = ObjectRef::namespace("alpha");
    let handle =
        NewOperation::new(target, Some("alpha".into()), DeleteNamespace {}).enqueue(&mut tx).await.unwrap();
    tx.finish(Ok(()), &mut muster_store::Retry::default()).await.unwrap().unwrap();

    let now = muster_types::time::now();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "Unix time")]
    let late = cluster.app.tokens.create(now as u64, "system", "late", &nonce, None);
    let tokens = [
        String::new(),
        "not.a.token".into(),
        late,
        cluster.token("beta").await,
        cluster.token("gamma").await,
        cluster.token("alpha").await,
        cluster.token("system").await,
    ];
    if path.starts_with("/auth/issuers") || path.contains("/rules") {
        let made = [
            ("/auth/issuers", crate::federation::issuer("fresh")),
            ("/auth/namespaces/alpha/rules", crate::federation::rule("deploy", "fresh")),
        ];
        for (path, new) in made {
            assert_eq!(cluster.call(&tokens[6], Method::POST, path, Some(new)).await.status, 200);
        }
    }
    let mut claimed = String::new();
    if path.contains("/claims") {
        let path = "/auth/namespaces/alpha/claims";
        let record = cluster.call(&tokens[6], Method::POST, path, Some(claim())).await.body;
        record["uuid"].as_str().unwrap().clone_into(&mut claimed);
    }
    let (mut network, mut interface) = (String::new(), String::new());
    if path.starts_with("/networks") || path.contains("/interfaces") {
        let new = json!({"name": "net", "netblock": "10.0.0.0/24", "provide_dns": true});
        let answer = cluster.call(&tokens[5], Method::POST, "/networks", Some(new)).await;
        answer.body["uuid"].as_str().unwrap().clone_into(&mut network);
        cluster.settle_networks().await;
        interface = cluster.create_interface(&network, "alpha", "host", 1).await.id.to_string();
    }
    let (mut instance, mut agent_operation) = (String::new(), String::new());
    if path.starts_with("/instances") || path.starts_with("/agentoperations") {
        let record = crate::instances::create(&cluster, &tokens[5], "host", &json!({})).await;
        record["uuid"].as_str().unwrap().clone_into(&mut instance);
    }
    if path.starts_with("/agentoperations") {
        let (path, body) = (format!("/instances/{instance}/agent/execute"), json!({"command_line": "true"}));
        let begun = cluster.call(&tokens[5], Method::POST, &path, Some(body)).await;
        begun.body["uuid"].as_str().unwrap().clone_into(&mut agent_operation);
    }
    let (mut artifact, mut blob, mut upload) = (String::new(), String::new(), String::new());
    let families = ["/artifacts", "/label", "/upload", "/blob"];
    if families.iter().any(|family| path.starts_with(family)) || path.ends_with("/agent/put") {
        let record = crate::artifacts::upload(&cluster, &tokens[5], "img", b"content").await;
        record["uuid"].as_str().unwrap().clone_into(&mut artifact);
        record["blob_uuid"].as_str().unwrap().clone_into(&mut blob);
        let label = json!({"blob_uuid": blob});
        assert_eq!(cluster.call(&tokens[5], Method::POST, "/label/lab", Some(label)).await.status, 200);
        let begun = cluster.call(&tokens[5], Method::POST, "/upload", None).await;
        begun.body["uuid"].as_str().unwrap().clone_into(&mut upload);
    }
    let operation = handle.op_uuid.to_string();
    Stage {
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
        claim: claimed,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_answers_every_kind_of_caller_as_the_table_says() {
    let mut wrong = Vec::new();
    for (method, path, _, expected) in TABLE {
        let stage = stage(path).await;
        let concrete = path
            .replace("{namespace}", "alpha")
            .replace("{key_name}", "k")
            .replace("{external_namespace}", "delta")
            .replace("{key}", "m")
            .replace("{rule}", "deploy")
            .replace("{node}", "sim-1")
            .replace("{operation_type}", "namespace_op")
            .replace("{operation_uuid}", &stage.operation)
            .replace("{network_ref}", &stage.network)
            .replace("{interface_uuid}", &stage.interface)
            .replace("{instance_ref}", &stage.instance)
            .replace("{agentoperation_uuid}", &stage.agent_operation)
            .replace("{claim_ref}", &stage.claim)
            .replace("{address}", "10.0.0.9")
            .replace("{artifact_ref}", &stage.artifact)
            .replace("{blob_uuid}", &stage.blob)
            .replace("{upload_uuid}", &stage.upload)
            .replace("{name}", "fresh")
            .replace("{index}", "1")
            .replace("{offset}", "0")
            .replace("{algorithm}", "sha512")
            .replace("{hash}", "00")
            .replace("{*path}", "alpha/lab")
            .replace("{file}", "swagger-ui.css");
        let mut found = [0; 7];
        for (at, token) in stage.tokens.iter().enumerate() {
            let method: Method = method.parse().unwrap();
            let answer = stage
                .cluster
                .call(token, method.clone(), &concrete, body(method.as_str(), path, &stage))
                .await;
            found[at] = answer.status.as_u16();
            assert!(answer.headers.contains_key("x-request-id"));
            if found[at] >= 400 && !path.ends_with('z') {
                assert_eq!(answer.body["status"], found[at], "{method} {path}: {}", answer.text);
                // In one place clients expect an object there.
                let object = *path == "/networks" && answer.body["error"]["unable"].is_array();
                assert!(object || answer.body["error"].is_string(), "{method} {path}: {}", answer.text);
            }
        }
        if found != *expected {
            wrong.push(format!("{method} {path}: expected {expected:?}, found {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_has_a_row_and_every_row_a_route() {
    let cluster = Cluster::new().await;
    let routes: BTreeSet<(&str, &str, &str)> =
        cluster.routes.iter().map(|route| (&*route.method, &*route.path, &*route.scope)).collect();
    let rows: BTreeSet<(&str, &str, &str)> =
        TABLE.iter().map(|(method, path, scope, _)| (*method, *path, *scope)).collect();
    assert_eq!(routes, rows);
}
