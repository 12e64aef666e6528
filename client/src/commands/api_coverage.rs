//! The command of every operation of the API. The tests compare the table with docs/openapi.json and with the commands.

use std::collections::BTreeSet;

use clap::CommandFactory as _;
use serde_json::Value;

use super::tests::Cli;

/// Who uses an operation.
enum User {
    /// People, with this command. `{METADATA}` operations of a noun have the commands `metadata`, `set-metadata` and
    /// `delete-metadata`.
    Command(&'static str),
    /// Programs only, for this reason.
    Program(&'static str),
}

use User::{Command, Program};

const BROWSER: &str = "a page for browsers";
const PROBE: &str = "a probe of load balancers and supervisors";
const GUEST: &str = "downloaded by guests that install the agent";
const UPLOAD: &str = "a part of an upload, which `artifact upload` sends and resumes";
const OLD_CLIENT: &str = "another form of an operation, for released clients";

/// Every operation except those of metadata.
const OPERATIONS: &[(&str, User)] = &[
    ("GET /", Program("a page that released clients search for capabilities")),
    ("GET /admin/cacert", Command("cluster cacert")),
    ("POST /admin/invitations", Command("node invite")),
    ("POST /admin/invitations/redeem", Command("node join")),
    ("GET /admin/locks", Command("cluster locks")),
    ("POST /admin/rebalance", Command("cluster rebalance")),
    ("GET /admin/resources", Command("cluster resources")),
    ("GET /admin/upgrade", Command("cluster upgrade status")),
    ("GET /admin/vditokenpubkey", Program("the key with which a console proxy verifies tokens")),
    ("GET /agent/install.sh", Program(GUEST)),
    ("GET /agent/muster-agent", Program(GUEST)),
    ("GET /agentoperations/{agentoperation_uuid}", Command("agent show")),
    ("DELETE /agentoperations/{agentoperation_uuid}", Command("agent delete")),
    ("GET /agentoperations/{agentoperation_uuid}/events", Command("agent events")),
    ("GET /apidocs", Program(BROWSER)),
    ("GET /apidocs/{file}", Program(BROWSER)),
    ("GET /artifacts", Command("artifact list")),
    ("POST /artifacts", Command("artifact fetch")),
    ("DELETE /artifacts", Command("artifact delete-all")),
    ("POST /artifacts/upload/{name}", Command("artifact upload")),
    ("GET /artifacts/{artifact_ref}", Command("artifact show")),
    ("DELETE /artifacts/{artifact_ref}", Command("artifact delete")),
    ("GET /artifacts/{artifact_ref}/clusteroperations", Command("artifact operations")),
    ("GET /artifacts/{artifact_ref}/events", Command("artifact events")),
    ("POST /artifacts/{artifact_ref}/share", Command("artifact share")),
    ("POST /artifacts/{artifact_ref}/unshare", Command("artifact unshare")),
    ("GET /artifacts/{artifact_ref}/versions", Command("artifact versions")),
    ("POST /artifacts/{artifact_ref}/versions", Command("artifact max-versions")),
    ("DELETE /artifacts/{artifact_ref}/versions/{index}", Command("artifact delete-version")),
    ("POST /auth", Command("login")),
    ("POST /auth/federated", Command("login")),
    ("GET /auth/issuers", Command("issuer list")),
    ("POST /auth/issuers", Command("issuer create")),
    ("GET /auth/issuers/{name}", Command("issuer show")),
    ("PUT /auth/issuers/{name}", Command("issuer update")),
    ("DELETE /auth/issuers/{name}", Command("issuer delete")),
    ("GET /auth/issuers/{name}/events", Command("issuer events")),
    ("POST /auth/login-tickets", Command("ui")),
    ("GET /auth/namespaces", Command("namespace list")),
    ("POST /auth/namespaces", Command("namespace create")),
    ("GET /auth/namespaces/{namespace}", Command("namespace show")),
    ("DELETE /auth/namespaces/{namespace}", Command("namespace delete")),
    ("GET /auth/namespaces/{namespace}/claims", Command("claim list")),
    ("POST /auth/namespaces/{namespace}/claims", Command("claim create")),
    ("GET /auth/namespaces/{namespace}/claims/{claim_ref}", Command("claim show")),
    ("PUT /auth/namespaces/{namespace}/claims/{claim_ref}", Command("claim update")),
    ("DELETE /auth/namespaces/{namespace}/claims/{claim_ref}", Command("claim delete")),
    ("GET /auth/namespaces/{namespace}/claims/{claim_ref}/events", Command("claim events")),
    ("GET /auth/namespaces/{namespace}/events", Command("events namespace")),
    ("GET /auth/namespaces/{namespace}/keys", Command("key list")),
    ("PUT /auth/namespaces/{namespace}/keys", Program(OLD_CLIENT)),
    ("POST /auth/namespaces/{namespace}/keys", Command("key add")),
    ("GET /auth/namespaces/{namespace}/keys/{key_name}", Command("key show")),
    ("PUT /auth/namespaces/{namespace}/keys/{key_name}", Command("key update")),
    ("DELETE /auth/namespaces/{namespace}/keys/{key_name}", Command("key delete")),
    ("GET /auth/namespaces/{namespace}/quotas", Command("quota show")),
    ("PUT /auth/namespaces/{namespace}/quotas/{quota}", Command("quota set")),
    ("DELETE /auth/namespaces/{namespace}/quotas/{quota}", Command("quota reset")),
    ("GET /auth/namespaces/{namespace}/rules", Command("rule list")),
    ("POST /auth/namespaces/{namespace}/rules", Command("rule create")),
    ("GET /auth/namespaces/{namespace}/rules/{rule}", Command("rule show")),
    ("PUT /auth/namespaces/{namespace}/rules/{rule}", Command("rule update")),
    ("DELETE /auth/namespaces/{namespace}/rules/{rule}", Command("rule delete")),
    ("GET /auth/namespaces/{namespace}/rules/{rule}/events", Command("rule events")),
    ("POST /auth/namespaces/{namespace}/trust", Command("trust add")),
    ("DELETE /auth/namespaces/{namespace}/trust/{external_namespace}", Command("trust remove")),
    ("GET /auth/namespaces/{namespace}/webhooks", Command("webhook list")),
    ("POST /auth/namespaces/{namespace}/webhooks", Command("webhook create")),
    ("GET /auth/namespaces/{namespace}/webhooks/{webhook}", Command("webhook show")),
    ("PUT /auth/namespaces/{namespace}/webhooks/{webhook}", Command("webhook update")),
    ("DELETE /auth/namespaces/{namespace}/webhooks/{webhook}", Command("webhook delete")),
    ("GET /auth/namespaces/{namespace}/webhooks/{webhook}/deliveries", Command("webhook deliveries")),
    (
        "POST /auth/namespaces/{namespace}/webhooks/{webhook}/deliveries/{delivery}/redeliver",
        Command("webhook redeliver"),
    ),
    ("POST /auth/namespaces/{namespace}/webhooks/{webhook}/rotate-secret", Command("webhook rotate-secret")),
    ("POST /auth/namespaces/{namespace}/webhooks/{webhook}/test", Command("webhook test")),
    ("GET /auth/session", Command("whoami")),
    ("POST /auth/session", Program("opens the session of a browser with the ticket that `ui` prints")),
    ("DELETE /auth/session", Program("clears the cookie of a browser")),
    ("GET /blob_checksums/{algorithm}", Program("rejects a search without a checksum")),
    ("GET /blob_checksums/{algorithm}/{hash}", Command("blob search")),
    ("GET /blobs", Command("blob list")),
    ("GET /blobs/{blob_uuid}", Command("blob show")),
    ("DELETE /blobs/{blob_uuid}", Command("blob delete")),
    ("GET /blobs/{blob_uuid}/checksum/{algorithm}", Command("blob checksum")),
    ("GET /blobs/{blob_uuid}/data", Command("blob download")),
    ("GET /blobs/{blob_uuid}/events", Command("blob events")),
    ("GET /clusteroperations", Command("operation list")),
    ("GET /clusteroperations/{operation_type}/{operation_uuid}", Command("operation show")),
    ("GET /clusteroperations/{operation_type}/{operation_uuid}/explain", Command("operation why")),
    ("GET /clusteroperations/{operation_uuid}/chain", Command("operation chain")),
    ("GET /events/stream", Command("events")),
    ("GET /docs", Program(BROWSER)),
    ("GET /docs/{file}", Program(BROWSER)),
    ("GET /healthz", Program(PROBE)),
    ("GET /instances", Command("instance list")),
    ("POST /instances", Command("instance create")),
    ("DELETE /instances", Command("instance delete-all")),
    ("GET /instances/{instance_ref}", Command("instance show")),
    ("DELETE /instances/{instance_ref}", Command("instance delete")),
    ("POST /instances/{instance_ref}/agent/execute", Command("exec")),
    ("GET /instances/{instance_ref}/agent/facts", Command("instance facts")),
    ("POST /instances/{instance_ref}/agent/get", Command("cp")),
    ("POST /instances/{instance_ref}/agent/put", Command("cp")),
    ("POST /instances/{instance_ref}/agent/terminal", Command("exec")),
    ("GET /instances/{instance_ref}/agentoperations", Command("agent list")),
    ("GET /instances/{instance_ref}/clusteroperations", Command("instance operations")),
    (
        "GET /instances/{instance_ref}/console",
        Program("a console without WebSocket, for programs and other daemons"),
    ),
    ("GET /instances/{instance_ref}/console-socket", Command("console")),
    ("POST /instances/{instance_ref}/console-tickets", Command("console")),
    ("GET /instances/{instance_ref}/consoledata", Command("instance log")),
    ("DELETE /instances/{instance_ref}/consoledata", Command("instance log")),
    ("GET /instances/{instance_ref}/events", Command("instance events")),
    ("GET /instances/{instance_ref}/explain", Command("instance why")),
    ("PUT /instances/{instance_ref}/fencing", Command("instance set-fencing")),
    ("GET /instances/{instance_ref}/interfaces", Command("instance interfaces")),
    ("POST /instances/{instance_ref}/interfaces", Command("instance plug")),
    ("POST /instances/{instance_ref}/migrate", Command("instance migrate")),
    ("POST /instances/{instance_ref}/migrate/cancel", Command("instance cancel-migration")),
    ("POST /instances/{instance_ref}/migration", Program("a connection between daemons")),
    ("POST /instances/{instance_ref}/pause", Command("instance pause")),
    ("POST /instances/{instance_ref}/poweroff", Command("instance poweroff")),
    ("POST /instances/{instance_ref}/poweron", Command("instance poweron")),
    ("POST /instances/{instance_ref}/reboothard", Command("instance reboot")),
    ("POST /instances/{instance_ref}/rebootsoft", Command("instance reboot")),
    ("GET /instances/{instance_ref}/screenshot", Command("instance screenshot")),
    ("GET /instances/{instance_ref}/snapshot", Command("instance snapshots")),
    ("POST /instances/{instance_ref}/snapshot", Command("instance snapshot")),
    ("POST /instances/{instance_ref}/unpause", Command("instance unpause")),
    ("GET /instances/{instance_ref}/vdiconsolehelper", Command("instance vdi")),
    ("GET /instances/{instance_ref}/vdiconsoleproxy", Command("instance vdi")),
    ("GET /interfaces/{interface_uuid}", Command("interface show")),
    ("POST /interfaces/{interface_uuid}/defloat", Command("interface defloat")),
    ("POST /interfaces/{interface_uuid}/float", Command("interface float")),
    ("GET /label/{path}", Command("label show")),
    ("POST /label/{path}", Command("label set")),
    ("DELETE /label/{path}", Command("label delete")),
    ("GET /livez", Program(PROBE)),
    ("GET /networks", Command("network list")),
    ("POST /networks", Command("network create")),
    ("DELETE /networks", Command("network delete-all")),
    ("DELETE /networks/networks/{network_ref}", Program(OLD_CLIENT)),
    ("GET /networks/{network_ref}", Command("network show")),
    ("DELETE /networks/{network_ref}", Command("network delete")),
    ("GET /networks/{network_ref}/addresses", Command("network addresses")),
    ("POST /networks/{network_ref}/addresses/{address}", Command("network reserve")),
    ("DELETE /networks/{network_ref}/addresses/{address}", Command("network release")),
    ("GET /networks/{network_ref}/clusteroperations", Command("network operations")),
    ("POST /networks/{network_ref}/dns", Command("network set-name")),
    ("DELETE /networks/{network_ref}/dns", Command("network delete-name")),
    ("GET /networks/{network_ref}/events", Command("events network")),
    ("GET /networks/{network_ref}/explain", Command("network why")),
    ("GET /networks/{network_ref}/interfaces", Command("network interfaces")),
    ("GET /networks/{network_ref}/ping/{address}", Command("network ping")),
    ("POST /networks/{network_ref}/route", Command("network route")),
    ("DELETE /networks/{network_ref}/route/{address}", Command("network unroute")),
    ("GET /nodes", Command("node list")),
    ("GET /nodes/{node}", Command("node show")),
    ("DELETE /nodes/{node}", Command("node delete")),
    ("POST /nodes/{node}/drain", Command("node drain")),
    ("POST /nodes/{node}/evacuate", Command("node evacuate")),
    ("GET /nodes/{node}/events", Command("events node")),
    ("POST /nodes/{node}/maintenance", Command("node maintenance")),
    ("GET /nodes/{node}/processmetrics", Command("node metrics")),
    ("POST /nodes/{node}/undrain", Command("node undrain")),
    ("GET /openapi.json", Program("the description of the API")),
    ("GET /readyz", Program(PROBE)),
    ("GET /ui", Program(BROWSER)),
    ("GET /ui/{file}", Program(BROWSER)),
    ("POST /upload", Program(UPLOAD)),
    ("GET /upload/{upload_uuid}", Program(UPLOAD)),
    ("POST /upload/{upload_uuid}", Program(UPLOAD)),
    ("POST /upload/{upload_uuid}/truncate/{offset}", Program(UPLOAD)),
];

/// The objects with metadata and the noun of their commands.
const METADATA: &[(&str, User)] = &[
    ("/agentoperations/{agentoperation_uuid}", Command("agent")),
    ("/artifacts/{artifact_ref}", Command("artifact")),
    ("/auth/issuers/{name}", Command("issuer")),
    ("/auth/namespaces/{namespace}", Command("namespace")),
    ("/auth/namespaces/{namespace}/claims/{claim_ref}", Command("claim")),
    ("/auth/namespaces/{namespace}/keys/{key_name}", Command("key")),
    ("/auth/namespaces/{namespace}/rules/{rule}", Command("rule")),
    ("/blobs/{blob_uuid}", Command("blob")),
    ("/clusteroperations/{operation_type}/{operation_uuid}", Command("operation")),
    ("/instances/{instance_ref}", Command("instance")),
    ("/interfaces/{interface_uuid}", Command("interface")),
    ("/networks/{network_ref}", Command("network")),
    ("/nodes/{node}", Command("node")),
    ("/upload/{upload_uuid}", Program(UPLOAD)),
];

/// Returns the operations of the table, and the commands that it names.
fn table() -> (BTreeSet<String>, Vec<String>) {
    let mut operations = BTreeSet::new();
    let mut commands = vec![];
    for (operation, user) in OPERATIONS {
        assert!(operations.insert((*operation).to_owned()), "{operation} is listed twice");
        match user {
            Command(command) => commands.push((*command).to_owned()),
            Program(reason) => assert!(!reason.is_empty(), "{operation} has no reason"),
        }
    }
    for (object, user) in METADATA {
        let verbs = [
            (format!("GET {object}/metadata"), "metadata"),
            (format!("POST {object}/metadata"), "set-metadata"),
            (format!("PUT {object}/metadata/{{key}}"), "set-metadata"),
            (format!("DELETE {object}/metadata/{{key}}"), "delete-metadata"),
        ];
        for (operation, verb) in verbs {
            operations.insert(operation);
            if let Command(noun) = user {
                commands.push(format!("{noun} {verb}"));
            }
        }
    }
    (operations, commands)
}

#[test]
fn every_operation_of_the_api_has_a_command() {
    let document: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    let paths = document["paths"].as_object().unwrap().iter();
    let documented: BTreeSet<String> = paths
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().keys();
            let methods =
                methods.filter(|method| ["get", "post", "put", "patch", "delete"].contains(&method.as_str()));
            methods.map(move |method| format!("{} {path}", method.to_uppercase()))
        })
        .collect();
    let (listed, _) = table();
    let missing: Vec<_> = documented.difference(&listed).collect();
    assert!(missing.is_empty(), "add a command for these operations, and a line to the table: {missing:#?}");
    let obsolete: Vec<_> = listed.difference(&documented).collect();
    assert!(obsolete.is_empty(), "the API does not have these operations: {obsolete:#?}");
}

#[test]
fn every_command_of_the_table_exists() {
    for line in table().1 {
        let root = Cli::command();
        let mut command = &root;
        for word in line.split(' ') {
            command =
                command.find_subcommand(word).unwrap_or_else(|| panic!("`muster {line}` does not exist"));
        }
    }
}
