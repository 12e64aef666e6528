//! Access control of every route for every kind of caller. Routes and table rows must match one to one.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_control::auth::scopes::TRUST_SCOPES;
use muster_control::objects;
use muster_control::queue::{DeleteNamespace, NewOperation};
use muster_test_cluster::{Cluster, caller};
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

/// The required scope and the expected status per caller: no token, invalid token, expired key, unrelated namespace,
/// namespace trusted by `alpha`, `alpha` itself, `system`. Calls target the namespace `alpha` and run in this order.
const TABLE: &[(&str, &str, &str, [u16; 7])] = &[
    ("GET", "/", "", [200, 200, 200, 200, 200, 200, 200]),
    ("GET", "/livez", "", [200, 200, 200, 200, 200, 200, 200]),
    // The in-process cluster does not run the database health check.
    ("GET", "/readyz", "", [503, 503, 503, 503, 503, 503, 503]),
    ("GET", "/healthz", "", [503, 503, 503, 503, 503, 503, 503]),
    ("GET", "/openapi.json", "", [200, 200, 200, 200, 200, 200, 200]),
    ("GET", "/apidocs", "", [200, 200, 200, 200, 200, 200, 200]),
    ("GET", "/apidocs/{file}", "", [200, 200, 200, 200, 200, 200, 200]),
    // These requests have no Host header.
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
    ("GET", "/auth/namespaces/{namespace}/keys/{key_name}", "auth.read", [401, 401, 401, 404, 200, 200, 200]),
    (
        "PUT",
        "/auth/namespaces/{namespace}/keys/{key_name}",
        "auth.write",
        [401, 401, 401, 401, 401, 401, 200],
    ),
    // The first authorized caller deletes the key; later callers get 404.
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
    // The namespace already has an active claim.
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
    // The second authorized caller finds that the rule exists.
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
    // Networks of namespace `alpha`: trusted namespaces read; only the owner and `system` modify.
    ("GET", "/networks", "network.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/networks", "network.write", [401, 401, 401, 200, 200, 200, 200]),
    ("DELETE", "/networks", "network.delete", [401, 401, 401, 401, 401, 403, 403]),
    ("GET", "/networks/{network_ref}", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/networks/{network_ref}", "network.delete", [401, 401, 401, 404, 404, 202, 202]),
    ("DELETE", "/networks/networks/{network_ref}", "network.delete", [401, 401, 401, 404, 404, 202, 202]),
    ("GET", "/networks/{network_ref}/events", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("GET", "/networks/{network_ref}/interfaces", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    ("GET", "/networks/{network_ref}/addresses", "network.read", [401, 401, 401, 404, 200, 200, 200]),
    // The second authorized caller finds the address reserved, or already released.
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
    // Trust does not extend to operations.
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
    // A running instance of namespace `alpha`: trusted namespaces read and create.
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
    // The second authorized caller finds the instance paused; nothing is paused in the cluster of the unpause row.
    ("POST", "/instances/{instance_ref}/pause", "instance.write", [401, 401, 401, 404, 404, 200, 409]),
    ("POST", "/instances/{instance_ref}/unpause", "instance.write", [401, 401, 401, 404, 404, 409, 409]),
    ("GET", "/instances/{instance_ref}/consoledata", "instance.read", [401, 401, 401, 404, 200, 200, 200]),
    (
        "DELETE",
        "/instances/{instance_ref}/consoledata",
        "instance.delete",
        [401, 401, 401, 404, 404, 200, 200],
    ),
    // Console access includes keyboard input; a screenshot creates a blob, so trusted namespaces get neither.
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
    // Only the owner runs agent operations; trusted namespaces read their results.
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
    // The second authorized caller finds the interface floating.
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
    // An artifact of namespace `alpha`: trusted namespaces read, and add the first version of a source but no later one.
    ("GET", "/artifacts", "artifact.read", [401, 401, 401, 200, 200, 200, 200]),
    ("POST", "/artifacts", "artifact.write", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/artifacts", "artifact.delete", [401, 401, 401, 401, 401, 200, 200]),
    ("POST", "/artifacts/upload/{name}", "artifact.write", [401, 401, 401, 404, 200, 200, 200]),
    ("GET", "/artifacts/{artifact_ref}", "artifact.read", [401, 401, 401, 404, 200, 200, 200]),
    ("DELETE", "/artifacts/{artifact_ref}", "artifact.delete", [401, 401, 401, 404, 404, 200, 200]),
    ("GET", "/artifacts/{artifact_ref}/versions", "artifact.read", [401, 401, 401, 404, 200, 200, 200]),
    ("POST", "/artifacts/{artifact_ref}/versions", "artifact.write", [401, 401, 401, 404, 404, 200, 200]),
    // The second authorized caller finds the version deleted.
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
    // Anyone who knows a blob's id may read it and change its metadata.
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
    // Trust does not extend to operations.
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
    ("GET", "/admin/cacert", "admin.read", [401, 401, 401, 200, 200, 200, 200]),
    ("GET", "/admin/locks", "admin.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/admin/resources", "admin.read", [401, 401, 401, 401, 401, 401, 200]),
    ("GET", "/admin/vditokenpubkey", "admin.read", [401, 401, 401, 401, 401, 401, 200]),
];

fn body(method: &str, path: &str, fixture: &Fixture) -> Option<Value> {
    Some(match (method, path) {
        ("POST", "/auth") => json!({"namespace": "alpha", "key": "wrong"}),
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
        ("POST", "/auth/issuers") => crate::federation::issuer_request("another"),
        ("PUT", "/auth/issuers/{name}") => crate::federation::issuer_request("fresh"),
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
        ("POST", "/instances/{instance_ref}/interfaces") => json!({"network_uuid": fixture.network}),
        ("POST", "/instances/{instance_ref}/agent/execute") => json!({"command_line": "true"}),
        ("POST", "/instances/{instance_ref}/agent/put") => {
            json!({"blob_uuid": fixture.blob, "path": "/tmp/x", "mode": 420})
        }
        ("POST", "/instances/{instance_ref}/agent/get") => json!({"path": "/etc/hostname"}),
        ("POST", "/artifacts") => json!({"url": "https://images.invalid/x.qcow2", "namespace": "alpha"}),
        ("DELETE", "/artifacts") => json!({"confirm": true, "namespace": "alpha"}),
        ("POST", "/artifacts/upload/{name}") => json!({"blob_uuid": fixture.blob, "namespace": "alpha"}),
        ("POST", "/artifacts/{artifact_ref}/versions") => json!({"max_versions": 2}),
        ("POST", "/label/{*path}") => json!({"blob_uuid": fixture.blob}),
        ("DELETE", "/nodes/{node}") => json!({"force": true}),
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
}

/// Creates a separate cluster for one route, so that rows do not affect each other.
async fn fixture(path: &str) -> Fixture {
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
    if path.starts_with("/auth/issuers") || path.contains("/rules") {
        let prerequisites = [
            ("/auth/issuers", crate::federation::issuer_request("fresh")),
            ("/auth/namespaces/alpha/rules", crate::federation::rule_request("deploy", "fresh")),
        ];
        for (path, request) in prerequisites {
            assert_eq!(cluster.call(&tokens[6], Method::POST, path, Some(request)).await.status, 200);
        }
    }
    let mut claim_id = String::new();
    if path.contains("/claims") {
        let path = "/auth/namespaces/alpha/claims";
        let record = cluster.call(&tokens[6], Method::POST, path, Some(claim_request())).await.body;
        record["uuid"].as_str().unwrap().clone_into(&mut claim_id);
    }
    let (mut network, mut interface) = (String::new(), String::new());
    if path.starts_with("/networks") || path.contains("/interfaces") {
        let request = json!({"name": "net", "netblock": "10.0.0.0/24", "provide_dns": true});
        let response = cluster.call(&tokens[5], Method::POST, "/networks", Some(request)).await;
        response.body["uuid"].as_str().unwrap().clone_into(&mut network);
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
        let started = cluster.call(&tokens[5], Method::POST, &path, Some(body)).await;
        started.body["uuid"].as_str().unwrap().clone_into(&mut agent_operation);
    }
    let (mut artifact, mut blob, mut upload) = (String::new(), String::new(), String::new());
    let storage_paths = ["/artifacts", "/label", "/upload", "/blob"];
    if storage_paths.iter().any(|prefix| path.starts_with(prefix)) || path.ends_with("/agent/put") {
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
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_returns_expected_status_per_caller() {
    let mut mismatches = Vec::new();
    for (method, path, _, expected) in TABLE {
        let fixture = fixture(path).await;
        fixture.cluster.allow_unfinished_operations("a network with an interface is never deleted");
        let concrete = path
            .replace("{namespace}", "alpha")
            .replace("{key_name}", "k")
            .replace("{external_namespace}", "delta")
            .replace("{key}", "m")
            .replace("{rule}", "deploy")
            .replace("{node}", "sim-1")
            .replace("{operation_type}", "namespace_op")
            .replace("{operation_uuid}", &fixture.operation)
            .replace("{network_ref}", &fixture.network)
            .replace("{interface_uuid}", &fixture.interface)
            .replace("{instance_ref}", &fixture.instance)
            .replace("{agentoperation_uuid}", &fixture.agent_operation)
            .replace("{claim_ref}", &fixture.claim)
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
            .replace("{file}", "swagger-ui.css");
        let mut actual = [0; 7];
        for (index, token) in fixture.tokens.iter().enumerate() {
            let method: Method = method.parse().unwrap();
            let response = fixture
                .cluster
                .call(token, method.clone(), &concrete, body(method.as_str(), path, &fixture))
                .await;
            actual[index] = response.status.as_u16();
            assert!(response.headers.contains_key("x-request-id"));
            if actual[index] >= 400 && !path.ends_with('z') {
                assert_eq!(response.body["status"], actual[index], "{method} {path}: {}", response.text);
                // Deleting all networks reports the error as an object, as released clients expect.
                let object = *path == "/networks" && response.body["error"]["unable"].is_array();
                assert!(object || response.body["error"].is_string(), "{method} {path}: {}", response.text);
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
fn trust_scopes_include_every_call_that_a_trust_opens() {
    for (method, path, scope, [.., stranger, trusted, _, _]) in TABLE {
        if *stranger == 404 && *trusted == 200 {
            assert!(TRUST_SCOPES.contains(scope), "{method} {path}: {scope}");
        }
    }
}
