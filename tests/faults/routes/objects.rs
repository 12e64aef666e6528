//! Objects for the calls, which are created through another host and live there.

use std::cell::Cell;

use reqwest::Method;
use serde_json::{Value, json};

use super::session::{POLL_INTERVAL, Problem, RequestBody, Session};

/// The name of the issuer that all hosts trust, as in the examples of the OpenAPI document.
pub(super) const ISSUER: &str = "forge";

/// What the calls through one host are about.
#[derive(Debug)]
pub(super) struct Objects<'a> {
    pub(super) session: &'a Session,
    /// The host through which the calls are made.
    pub(super) via: usize,
    /// The host on which instances, uploads and blobs are, and through which objects are created.
    pub(super) home: usize,
    /// The network of the guest.
    pub(super) network: String,
    /// An instance with an agent.
    pub(super) guest: String,
    /// An instance without an operating system, whose power changes.
    pub(super) blank: String,
    /// A node whose host is off.
    pub(super) dead_node: String,
    pub(super) counter: Cell<u32>,
}

/// Returns the text of a field.
pub(super) fn text(record: &Value, field: &str) -> Result<String, Problem> {
    record[field].as_str().map(str::to_owned).ok_or_else(|| format!("no {field} in {record}"))
}

/// Returns the request for an instance on a node.
pub(super) fn instance_request(name: &str, node: &str, changes: &Value) -> Value {
    let mut body = json!({
        "name": name, "cpus": 1, "memory": 128, "disk": [{ "size": 1 }], "network": [], "placed_on": node,
    });
    body.as_object_mut().unwrap().extend(changes.as_object().cloned().unwrap_or_default());
    body
}

impl Objects<'_> {
    /// Returns a number that no other object of this test has.
    pub(super) fn number(&self) -> u32 {
        self.counter.set(self.counter.get() + 1);
        self.counter.get() * 10 + u32::try_from(self.via).unwrap()
    }

    pub(super) fn name(&self) -> String {
        format!("x{}", self.number())
    }

    pub(super) fn home_node(&self) -> &str {
        &self.session.names[self.home]
    }

    /// The host that is neither the caller's nor the one of the instances.
    pub(super) fn third(&self) -> usize {
        3 - self.via - self.home
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> Result<Value, Problem> {
        self.session.post(self.home, path, body).await
    }

    pub(super) async fn namespace(&self) -> Result<String, Problem> {
        let name = self.name();
        self.post("/auth/namespaces", json!({ "namespace": name })).await?;
        Ok(name)
    }

    /// Creates an upload with some bytes of its own through a host.
    pub(super) async fn upload(&self, host: usize) -> Result<String, Problem> {
        let id = text(&self.session.act(host, Method::POST, "/upload").await?, "uuid")?;
        let body = RequestBody::Bytes(self.content());
        self.session.call(host, Method::POST, &format!("/upload/{id}"), body).await?;
        Ok(id)
    }

    /// Returns bytes that no other object of this test has.
    pub(super) fn content(&self) -> Vec<u8> {
        format!("content {}\n", self.number()).repeat(100).into_bytes()
    }

    /// Creates an artifact whose blob is on one host only.
    pub(super) async fn artifact(&self, host: usize, changes: &Value) -> Result<Value, Problem> {
        let mut body = json!({ "upload_uuid": self.upload(host).await?, "artifact_type": "other" });
        body.as_object_mut().unwrap().extend(changes.as_object().cloned().unwrap_or_default());
        self.session.post(host, &format!("/artifacts/upload/{}", self.name()), body).await
    }

    pub(super) async fn blob(&self, host: usize) -> Result<String, Problem> {
        text(&self.artifact(host, &json!({})).await?, "blob_uuid")
    }

    /// Creates an isolated network and waits until it is ready.
    pub(super) async fn network(&self, changes: &Value) -> Result<String, Problem> {
        let number = self.number();
        let netblock = format!("10.{}.{}.0/24", 100 + number / 250, number % 250);
        let name = format!("x{number}");
        let mut body =
            json!({ "name": name, "netblock": netblock, "provide_dhcp": false, "provide_nat": false });
        body.as_object_mut().unwrap().extend(changes.as_object().cloned().unwrap_or_default());
        let id = text(&self.post("/networks", body).await?, "uuid")?;
        let query =
            changes["namespace"].as_str().map(|name| format!("?namespace={name}")).unwrap_or_default();
        self.session.wait_for(self.home, &format!("/networks/{id}{query}"), "state", "created").await?;
        Ok(id)
    }

    /// Creates an instance without an operating system on the other host.
    pub(super) async fn instance(&self, changes: &Value) -> Result<String, Problem> {
        let body = instance_request(&self.name(), self.home_node(), changes);
        let id = text(&self.post("/instances", body).await?, "uuid")?;
        self.session.wait_for(self.home, &format!("/instances/{id}"), "state", "created").await?;
        Ok(id)
    }

    /// Brings the blank instance into a power state.
    pub(super) async fn set_power(&self, wanted: &str) -> Result<(), Problem> {
        let path = format!("/instances/{}", self.blank);
        loop {
            let power = text(&self.session.get(self.home, &path).await?, "power_state")?;
            let action = match (power.as_str(), wanted) {
                (power, wanted) if power == wanted => return Ok(()),
                ("paused", _) => "unpause",
                ("off", _) => "poweron",
                (_, "paused") => "pause",
                _ => "poweroff",
            };
            self.session.act(self.home, Method::POST, &format!("{path}/{action}")).await?;
            self.session
                .wait_for(
                    self.home,
                    &path,
                    "power_state",
                    match action {
                        "poweroff" => "off",
                        "pause" => "paused",
                        _ => "on",
                    },
                )
                .await?;
        }
    }

    /// Returns the interface of the guest, after it got a floating address or lost it.
    pub(super) async fn interface(&self, is_floating: bool) -> Result<String, Problem> {
        let path = format!("/instances/{}/interfaces", self.guest);
        let interfaces = self.session.get(self.home, &path).await?;
        let id = text(&interfaces[0], "uuid")?;
        if interfaces[0]["floating"].is_string() != is_floating {
            let action = if is_floating { "float" } else { "defloat" };
            let path = format!("/interfaces/{id}/{action}");
            self.session.act(self.home, Method::POST, &path).await?;
        }
        Ok(id)
    }

    /// Returns the first operation on the guest.
    pub(super) async fn operation(&self) -> Result<Value, Problem> {
        let path = format!("/instances/{}/clusteroperations", self.guest);
        Ok(self.session.get(self.home, &path).await?[0].clone())
    }

    /// Waits until an instance has no unfinished operation.
    pub(super) async fn wait_for_operations(&self, instance: &str) -> Result<(), Problem> {
        let path = format!("/instances/{instance}/clusteroperations?all=false");
        while self.session.get(self.via, &path).await?.as_array().is_none_or(|list| !list.is_empty()) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Returns the node whose host lost power, once the cluster knows it: it is `missing`, and `error` after some
    /// time without check-ins.
    pub(super) async fn dead_node(&self) -> Result<String, Problem> {
        let path = format!("/nodes/{}", self.dead_node);
        while !["missing", "error"]
            .contains(&text(&self.session.get(self.home, &path).await?, "state")?.as_str())
        {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(self.dead_node.clone())
    }

    /// Queues a command in the guest.
    pub(super) async fn agent_operation(&self) -> Result<String, Problem> {
        let path = format!("/instances/{}/agent/execute", self.guest);
        text(&self.post(&path, json!({ "command_line": "true" })).await?, "uuid")
    }

    pub(super) async fn claim(&self, collection: &str) -> Result<String, Problem> {
        text(&self.post(collection, claim_request()).await?, "uuid")
    }

    /// Creates a rule that accepts tokens of the issuer.
    pub(super) async fn rule(&self, collection: &str) -> Result<String, Problem> {
        let name = self.name();
        let body = json!({
            "name": name, "issuer": ISSUER, "bound_claims": { "repository": "example/web" },
            "scopes": ["network.read"], "key_ttl": 900, "key_name_prefix": "deploy",
        });
        self.post(collection, body).await?;
        Ok(name)
    }

    pub(super) fn issuer_request(&self) -> Value {
        let url = format!("https://{}.example.com", self.name());
        json!({ "name": self.name(), "issuer_url": url, "audience": "muster", "jwks_uri": format!("{url}/keys") })
    }
}

/// Returns the request for a small claim.
pub(super) fn claim_request() -> Value {
    json!({ "limit_cpus": 1, "limit_memory_mb": 1, "limit_disk_gb": 1, "expires_in_seconds": 3600 })
}
