//! How each operation of the OpenAPI document is called: objects for its parameters, a body, and what must follow.
//!
//! An operation without special needs is called with the example of the document. One whose parameter is unknown here, or
//! whose body has no example, fails.

use std::time::Duration;

use bytes::BytesMut;
use muster_testing::Issuer;
use muster_testing::web_server::WebServer;
use muster_types::invitation::InvitationToken;
use muster_types::terminal::{TERMINAL_PROTOCOL, TerminalFrame, take_frame};
use muster_types::vm::CONSOLE_PROTOCOL;
use reqwest::{Method, Upgraded};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::objects::{ISSUER, Objects, claim_request, instance_request, text};
use super::session::{Answer, Call, POLL_INTERVAL, Problem, RequestBody};

const UPGRADE_TIMEOUT: Duration = Duration::from_secs(60);

/// An operation of the OpenAPI document.
#[derive(Debug, Clone)]
pub(super) struct ApiOperation {
    pub(super) method: Method,
    pub(super) path: String,
    document: Value,
    /// The example of its body.
    example: Option<Value>,
}

impl std::fmt::Display for ApiOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:<6} {}", self.method.as_str(), self.path)
    }
}

impl ApiOperation {
    /// Returns the operations of a document. Nodes are deleted last.
    pub(super) fn list(openapi: &Value) -> Vec<Self> {
        let mut operations = Vec::new();
        for (path, item) in openapi["paths"].as_object().unwrap() {
            for (method, document) in item.as_object().unwrap() {
                let Ok(method) = method.to_uppercase().parse::<Method>() else { continue };
                let schema = &document["requestBody"]["content"]["application/json"]["schema"];
                let reference = schema["$ref"].as_str().map(|reference| reference.trim_start_matches('#'));
                let schema = reference.and_then(|pointer| openapi.pointer(pointer)).unwrap_or(schema);
                let example = schema.get("example").cloned();
                operations.push(Self { method, path: path.clone(), document: document.clone(), example });
            }
        }
        operations.sort_by_key(|operation| operation.is("DELETE", "/nodes/{node}"));
        operations
    }

    fn is(&self, method: &str, path: &str) -> bool {
        self.method == method && self.path == path
    }

    /// Whether a status is a documented success. An operation that has none only rejects requests.
    pub(super) fn accepts(&self, status: u16) -> bool {
        let statuses: Vec<u16> = self.document["responses"]
            .as_object()
            .unwrap()
            .keys()
            .filter_map(|status| status.parse().ok())
            .collect();
        if self.is("POST", "/instances/{instance_ref}/migration") {
            // Only daemons call it.
            return status == 403;
        }
        let successes: Vec<u16> = statuses.into_iter().filter(|status| *status < 400).collect();
        if successes.is_empty() { status == 400 } else { successes.contains(&status) }
    }
}

/// Servers that the hosts call.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) issuer: Issuer,
    pub(super) images: WebServer,
}

impl Objects<'_> {
    /// Creates everything that an operation needs, and returns its request.
    pub(super) async fn prepare(&self, operation: &ApiOperation, servers: &Servers) -> Result<Call, Problem> {
        let mut path = String::new();
        for part in operation.path.split_inclusive('}') {
            let (fixed, parameter) = part.split_once('{').unwrap_or((part, ""));
            path.push_str(fixed);
            if let Some(parameter) = parameter.strip_suffix('}') {
                let collection = path.trim_end_matches('/').to_owned();
                path.push_str(&self.parameter(operation, parameter, &collection).await?);
            }
        }
        let body = self.body(operation, servers, &path).await?;
        match (operation.method.as_str(), operation.path.as_str()) {
            ("DELETE", "/nodes/{node}") => path.push_str("?dead=true"),
            ("DELETE", "/networks/{network_ref}/dns") => {
                self.post(&path, json!({ "name": "gone", "value": "10.0.0.9" })).await?;
                path.push_str("?name=gone");
            }
            ("GET", "/clusteroperations") => {
                path.push_str(&format!("?target_object_type=instance&target_uuid={}", self.guest));
            }
            _ => {}
        }
        let upgrade = match operation.path.rsplit('/').next() {
            Some("console") => Some(CONSOLE_PROTOCOL),
            Some("terminal") => Some(TERMINAL_PROTOCOL),
            Some("console-socket") => Some("websocket"),
            _ => None,
        };
        let mut ticket = None;
        if upgrade == Some("websocket") {
            let tickets = path.replace("console-socket", "console-tickets");
            ticket = Some(text(&self.post(&tickets, json!({ "kind": "serial" })).await?, "ticket")?);
        }
        Ok(Call { method: operation.method.clone(), path, body, upgrade, ticket })
    }

    /// Creates an object for a parameter of the path. `collection` is the path before it.
    async fn parameter(
        &self,
        operation: &ApiOperation,
        parameter: &str,
        collection: &str,
    ) -> Result<String, Problem> {
        let is_deletion = operation.method == Method::DELETE;
        let is_at = |end: &str| operation.path.ends_with(end);
        match parameter {
            "file" if operation.path.starts_with("/docs/") => Ok("style.css".into()),
            "file" if operation.path.starts_with("/ui/") => Ok("main.js".into()),
            "file" => Ok("swagger-ui.css".into()),
            "algorithm" => Ok("sha512".into()),
            "offset" => Ok("10".into()),
            "index" => Ok("1".into()),
            "namespace" => self.namespace().await,
            "name" if collection == "/auth/issuers" => {
                let request = self.issuer_request();
                self.post(collection, request.clone()).await?;
                text(&request, "name")
            }
            "name" if collection == "/artifacts/upload" => Ok(self.name()),
            "key_name" => {
                let name = self.name();
                self.post(collection, json!({ "key_name": name })).await?;
                Ok(name)
            }
            "claim_ref" => self.claim(collection).await,
            "rule" => self.rule(collection).await,
            "webhook" => {
                let name = self.name();
                self.post(collection, json!({ "name": name, "url": "https://hooks.example" })).await?;
                Ok(name)
            }
            "delivery" => {
                let test = collection.replace("/deliveries", "/test");
                text(&self.post(&test, json!({})).await?, "uuid")
            }
            "quota" => {
                let body = RequestBody::Json(json!({ "limit": 9 }));
                self.session.call(self.home, Method::PUT, &format!("{collection}/networks"), body).await?;
                Ok("networks".into())
            }
            "external_namespace" => {
                let name = self.namespace().await?;
                self.post(collection, json!({ "external_namespace": name })).await?;
                Ok(name)
            }
            "key" => {
                let name = self.name();
                self.post(collection, json!({ "key": name, "value": 1 })).await?;
                Ok(name)
            }
            "artifact_ref" => {
                let changes = json!({ "shared": is_at("/unshare") });
                text(&self.artifact(self.home, &changes).await?, "uuid")
            }
            "blob_uuid" => {
                let artifact = self.artifact(self.home, &json!({})).await?;
                if is_deletion && is_at("{blob_uuid}") {
                    let path = format!("/artifacts/{}", text(&artifact, "uuid")?);
                    self.session.act(self.home, Method::DELETE, &path).await?;
                }
                text(&artifact, "blob_uuid")
            }
            "hash" => {
                let path = format!("/blobs/{}", self.blob(self.home).await?);
                text(&self.session.get(self.home, &path).await?, "sha512")
            }
            "path" => {
                let name = self.name();
                let body = json!({ "blob_uuid": self.blob(self.home).await? });
                self.post(&format!("/label/{name}"), body).await?;
                Ok(format!("system/{name}"))
            }
            "upload_uuid" => self.upload(self.home).await,
            "operation_type" => text(&self.operation().await?, "operation_type"),
            "operation_uuid" => text(&self.operation().await?, "uuid"),
            "agentoperation_uuid" => self.agent_operation().await,
            "instance_ref" => self.instance_reference(operation).await,
            "interface_uuid" => self.interface(is_at("/defloat")).await,
            "network_ref" if is_deletion && is_at("{network_ref}") => self.network(&json!({})).await,
            "network_ref" => Ok(self.network.clone()),
            "address" => self.address(operation, collection).await,
            "node" if operation.is("DELETE", "/nodes/{node}") || is_at("/evacuate") => self.dead_node().await,
            "node" => Ok(self.home_node().to_owned()),
            _ => Err(format!("there is no object for the parameter {parameter}")),
        }
    }

    /// Returns an instance on the other host in the state that an operation needs.
    async fn instance_reference(&self, operation: &ApiOperation) -> Result<String, Problem> {
        let call = operation.path.trim_start_matches("/instances/{instance_ref}");
        let power = match (operation.method.as_str(), call) {
            ("DELETE", "") => return self.instance(&json!({})).await,
            (_, "/unpause") => "paused",
            (_, "/poweron") => "off",
            (_, "/pause" | "/poweroff" | "/rebootsoft" | "/reboothard" | "/snapshot")
            | ("POST", "/interfaces") => "on",
            (_, "/migrate" | "/migrate/cancel") => return self.migrating_instance(call).await,
            _ => return Ok(self.guest.clone()),
        };
        self.set_power(power).await?;
        Ok(self.blank.clone())
    }

    /// Returns a new instance that can be migrated, or is being migrated so slowly that it can be cancelled.
    async fn migrating_instance(&self, call: &str) -> Result<String, Problem> {
        let instance = self.instance(&json!({})).await?;
        if call == "/migrate/cancel" {
            let body = json!({ "bandwidth_limit_mbps": 1 });
            self.post(&format!("/instances/{instance}/migrate"), body).await?;
        }
        Ok(instance)
    }

    /// Returns an address of the shared network in the state that an operation needs.
    async fn address(&self, operation: &ApiOperation, collection: &str) -> Result<String, Problem> {
        let number = self.number();
        let free = format!("10.0.{}.{}", 100 + number / 250, number % 250 + 1);
        match (operation.method.as_str(), collection.rsplit('/').next()) {
            ("GET", Some("ping")) => {
                let path = format!("/instances/{}/interfaces", self.guest);
                text(&self.session.get(self.home, &path).await?[0], "ipv4")
            }
            ("DELETE", Some("route")) => {
                let routed = self.session.act(self.home, Method::POST, collection).await?;
                Ok(routed.as_str().unwrap_or_default().to_owned())
            }
            ("DELETE", Some("addresses")) => {
                self.post(&format!("{collection}/{free}"), json!({})).await?;
                Ok(free)
            }
            _ => Ok(free),
        }
    }

    async fn body(
        &self,
        operation: &ApiOperation,
        servers: &Servers,
        path: &str,
    ) -> Result<RequestBody, Problem> {
        let name = self.name();
        let body = match (operation.method.as_str(), operation.path.as_str()) {
            ("POST", "/instances/{instance_ref}/migrate") => json!({}),
            ("POST", "/upload/{upload_uuid}") => return Ok(RequestBody::Bytes(self.content())),
            ("POST", "/auth") => {
                let body = json!({ "namespace": name, "key_name": "robot", "key": "correct horse" });
                self.post("/auth/namespaces", body).await?;
                json!({ "namespace": name, "key": "correct horse" })
            }
            ("POST", "/auth/session") => {
                let ticket = self.post("/auth/login-tickets", json!({})).await?;
                json!({ "ticket": text(&ticket, "ticket")? })
            }
            ("POST", "/auth/federated") => {
                let namespace = self.namespace().await?;
                let rule = self.rule(&format!("/auth/namespaces/{namespace}/rules")).await?;
                let mut claims = servers.issuer.claims("muster");
                claims["repository"] = "example/web".into();
                json!({ "token": servers.issuer.token(claims), "namespace": namespace, "rule": rule })
            }
            ("POST", "/auth/issuers") => self.issuer_request(),
            ("PUT", "/auth/issuers/{name}") => {
                let mut body = self.issuer_request();
                body.as_object_mut().unwrap().remove("name");
                body
            }
            ("POST", "/auth/namespaces") => json!({ "namespace": name }),
            ("PUT", "/auth/namespaces/{namespace}/keys") => {
                self.post(path, json!({ "key_name": "robot" })).await?;
                json!({ "key_name": "robot", "key": "correct horse" })
            }
            ("POST", "/auth/namespaces/{namespace}/claims") => claim_request(),
            ("PUT", "/auth/namespaces/{namespace}/claims/{claim_ref}") => json!({ "limit_cpus": 2 }),
            ("POST", "/auth/namespaces/{namespace}/trust") => {
                json!({ "external_namespace": self.namespace().await? })
            }
            ("POST", "/admin/invitations/redeem") => {
                let invitation = self.post("/admin/invitations", json!({})).await?;
                let token = InvitationToken::parse(&text(&invitation, "token")?)?;
                json!({ "invitation": token.id, "proof": token.proof() })
            }
            ("POST", "/artifacts") => json!({ "url": servers.images.url(&format!("/{name}")) }),
            ("POST", "/artifacts/upload/{name}") => {
                json!({ "upload_uuid": self.upload(self.home).await?, "artifact_type": "image" })
            }
            ("DELETE", "/artifacts") => {
                let namespace = self.namespace().await?;
                self.artifact(self.home, &json!({ "namespace": namespace })).await?;
                json!({ "confirm": true, "namespace": namespace })
            }
            ("POST", "/label/{path}") => json!({ "blob_uuid": self.blob(self.home).await? }),
            ("POST", "/networks") => {
                let netblock = format!("10.{}.0.0/24", 50 + self.via);
                json!({ "name": name, "netblock": netblock, "provide_dns": true })
            }
            ("DELETE", "/networks") => {
                let namespace = self.namespace().await?;
                self.network(&json!({ "namespace": namespace })).await?;
                json!({ "confirm": true, "namespace": namespace })
            }
            ("POST", "/instances") => instance_request(&name, self.home_node(), &json!({})),
            ("DELETE", "/instances") => {
                let namespace = self.namespace().await?;
                self.instance(&json!({ "namespace": namespace })).await?;
                json!({ "confirm": true, "namespace": namespace })
            }
            ("POST", "/instances/{instance_ref}/interfaces") => json!({ "network_uuid": self.network }),
            ("POST", "/instances/{instance_ref}/agent/put") => {
                // From a third host.
                json!({ "blob_uuid": self.blob(self.third()).await?, "path": "/root/file", "mode": "ugo+r" })
            }
            ("POST", "/instances/{instance_ref}/agent/get") => json!({ "path": "/etc/passwd" }),
            ("POST", "/instances/{instance_ref}/agent/terminal") => json!({ "command_line": "echo works" }),
            _ if operation.document.get("requestBody").is_some() => {
                operation.example.clone().ok_or("the request body has no example")?
            }
            _ => return Ok(RequestBody::None),
        };
        Ok(RequestBody::Json(body))
    }

    /// Waits for the effect of a request that succeeded.
    pub(super) async fn finish(
        &self,
        operation: &ApiOperation,
        call: &Call,
        answer: Answer,
    ) -> Result<(), Problem> {
        let record = answer.json();
        match (operation.method.as_str(), operation.path.as_str()) {
            ("POST", "/instances") => {
                let path = format!("/instances/{}", text(&record, "uuid")?);
                let created = self.session.wait_for(self.via, &path, "state", "created").await?;
                if created["node"] != self.home_node() {
                    return Err(format!("the instance is on another node: {created}"));
                }
                self.session.act(self.via, Method::DELETE, &path).await?;
            }
            ("POST", "/networks") => {
                let path = format!("/networks/{}", text(&record, "uuid")?);
                self.session.wait_for(self.via, &path, "state", "created").await?;
            }
            ("POST", "/artifacts") => {
                let path = format!("/artifacts/{}", text(&record, "uuid")?);
                self.session.wait_for(self.via, &path, "state", "created").await?;
            }
            ("POST", path) if path.contains("/agent/") && answer.upgraded.is_none() => {
                let path = format!("/agentoperations/{}", text(&record, "uuid")?);
                self.session.wait_for(self.via, &path, "state", "complete").await?;
            }
            ("POST", "/instances/{instance_ref}/migrate" | "/instances/{instance_ref}/migrate/cancel") => {
                let instance = call.path.split('/').nth(2).unwrap_or_default();
                self.wait_for_operations(instance).await?;
                self.session.act(self.via, Method::DELETE, &format!("/instances/{instance}")).await?;
            }
            ("POST", "/instances/{instance_ref}/snapshot" | "/instances/{instance_ref}/interfaces") => {
                self.wait_for_operations(&self.blank).await?;
            }
            ("GET", "/blobs/{blob_uuid}/data") if !answer.body.starts_with(b"content ") => {
                return Err(format!("{} bytes of other content", answer.body.len()));
            }
            ("GET", "/networks/{network_ref}/ping/{address}")
                if !record["stdout"].to_string().contains("bytes from") =>
            {
                return Err(format!("the guest does not answer: {record}"));
            }
            ("GET", "/events/stream") if !answer.body.ends_with(b"\n\n") => {
                return Err(format!("{} bytes that are not a message", answer.body.len()));
            }
            ("GET", "/blob_checksums/{algorithm}/{hash}") if record.is_null() => {
                return Err("the blob is not found".into());
            }
            ("DELETE", "/instances" | "/artifacts") if record.as_array().is_none_or(Vec::is_empty) => {
                return Err(format!("nothing was deleted: {record}"));
            }
            ("POST", "/nodes/{node}/maintenance") => {
                let path = format!("/nodes/{}/undrain", self.home_node());
                self.session.post(self.via, &path, json!({})).await?;
            }
            ("POST", "/nodes/{node}/evacuate") => self.wait_for_evacuation(record).await?,
            _ => {}
        }
        let Some(connection) = answer.upgraded else { return Ok(()) };
        let exchanged = async {
            match call.upgrade {
                Some(TERMINAL_PROTOCOL) => check_terminal(connection).await,
                Some("websocket") => check_socket(connection).await,
                _ => check_console(connection).await,
            }
        };
        tokio::time::timeout(UPGRADE_TIMEOUT, exchanged)
            .await
            .unwrap_or_else(|_| Err("no output on the upgraded connection".into()))
    }
}

impl Objects<'_> {
    /// Waits until the instance of the dead node runs elsewhere. An evacuation that found no capacity is repeated.
    async fn wait_for_evacuation(&self, mut records: Value) -> Result<(), Problem> {
        while records[0]["outcome"] == "waiting" {
            tokio::time::sleep(POLL_INTERVAL).await;
            let path = format!("/nodes/{}/evacuate", self.dead_node);
            records = self.session.post(self.via, &path, json!({ "dead": true })).await?;
        }
        let path = format!("/instances/{}", text(&records[0], "instance_uuid")?);
        let record = self.session.wait_for(self.via, &path, "state", "created").await?;
        if record["node"] == self.dead_node.as_str() {
            return Err(format!("the instance was not restarted: {records}"));
        }
        Ok(())
    }
}

/// Presses Enter on a serial console and waits for the prompt.
async fn check_console(mut connection: Upgraded) -> Result<(), Problem> {
    connection.write_all(b"\n").await.map_err(|error| error.to_string())?;
    let mut output = Vec::new();
    while !String::from_utf8_lossy(&output).contains("login:") {
        if connection.read_buf(&mut output).await.map_err(|error| error.to_string())? == 0 {
            return Err("the console was closed".into());
        }
    }
    Ok(())
}

/// Presses Enter on a serial console through a WebSocket, and waits for the prompt.
async fn check_socket(mut connection: Upgraded) -> Result<(), Problem> {
    let failed = |error: std::io::Error| error.to_string();
    // A frame with one byte and the mask 0.
    connection.write_all(b"\x82\x81\0\0\0\0\n").await.map_err(failed)?;
    let mut output = Vec::new();
    while !String::from_utf8_lossy(&output).contains("login:") {
        let (kind, length) =
            (connection.read_u8().await.map_err(failed)?, connection.read_u8().await.map_err(failed)?);
        let length = if length == 126 { connection.read_u16().await.map_err(failed)? } else { length.into() };
        let mut payload = vec![0; length.into()];
        connection.read_exact(&mut payload).await.map_err(failed)?;
        match kind {
            0x82 => output.extend(payload),
            0x89 => {}
            other => return Err(format!("a frame of the kind {other:x}")),
        }
    }
    Ok(())
}

/// Reads the output of a command and its exit code.
async fn check_terminal(mut connection: Upgraded) -> Result<(), Problem> {
    let (mut buffer, mut output) = (BytesMut::new(), Vec::new());
    loop {
        match take_frame(&mut buffer).map_err(|error| error.to_string())? {
            Some(TerminalFrame::Data(bytes)) => output.extend(bytes),
            Some(TerminalFrame::Exited(0)) if output.starts_with(b"works") => return Ok(()),
            Some(other) => return Err(format!("{other:?} after {}", String::from_utf8_lossy(&output))),
            None => {
                if connection.read_buf(&mut buffer).await.map_err(|error| error.to_string())? == 0 {
                    return Err("the terminal was closed".into());
                }
            }
        }
    }
}

/// Creates the issuer that all hosts trust.
pub(super) async fn create_issuer(
    session: &super::session::Session,
    issuer: &Issuer,
) -> Result<Value, Problem> {
    let body = json!({
        "name": ISSUER, "issuer_url": issuer.url(), "jwks_uri": issuer.jwks_uri(), "audience": "muster",
    });
    session.post(0, "/auth/issuers", body).await
}
