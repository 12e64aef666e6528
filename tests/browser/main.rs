//! The web UI in headless Chromium: on simulated nodes, and with the consoles of a real guest.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod accessibility;
mod administration;
mod chromium;
mod guests;
mod interaction;
mod nodes;
mod security;
mod simulated;

use std::time::Duration;

use muster_testing::{Daemon, DaemonSetup, wait_for};
use reqwest::Method;
use serde_json::{Value, json};

/// The timeout for conditions that must hold eventually, on a busy host.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The size of a desktop window, in pixels.
const DESKTOP: (u32, u32) = (1280, 800);

/// Shapes of text that would become markup or code if they were not inserted as text.
const HOSTILE: &str = "<img src=x onerror=\"document.title='owned'\">";

/// A daemon with simulated nodes, and the token of its system key.
struct Server {
    daemon: Daemon,
    token: String,
    runtime: tokio::runtime::Runtime,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        // A thread of its own serves the web servers of tests.
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let setup = DaemonSetup::new(env!("CARGO_BIN_EXE_muster"), &directory.path().join("data"));
        let setup = setup.arguments(&["--simulate", "3"]).set("WEBHOOK_ALLOWED_NETWORKS", "127.0.0.1");
        let daemon = setup.start();
        let token = runtime.block_on(daemon.log_in("system", &daemon.system_key()));
        Self { daemon, token, runtime, _directory: directory }
    }

    /// Calls the API as another client; it must succeed.
    fn call(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let (status, answer) = self.runtime.block_on(self.daemon.call(&self.token, method, path, body));
        assert!(status.is_success(), "{path}: {status} {answer}");
        answer
    }

    fn post(&self, path: &str, body: Value) -> Value {
        self.call(Method::POST, path, Some(body))
    }

    /// Creates a network, waits until it is ready, and returns its UUID.
    fn create_network(&self, name: &str, netblock: &str) -> String {
        let body = json!({ "name": name, "netblock": netblock, "provide_dns": true });
        let uuid = self.post("/networks", body)["uuid"].as_str().unwrap().to_owned();
        wait_for("the network to be created", TIMEOUT, || {
            let record = self.call(Method::GET, &format!("/networks/{uuid}"), None);
            (record["state"] == "created").then_some(())
        });
        uuid
    }

    /// Creates an instance on a network, and returns its UUID.
    fn create_instance(&self, name: &str, network: &str) -> String {
        let body = json!({ "name": name, "cpus": 1, "memory": 256, "disk": [{ "size": 1 }],
            "network": [{ "network_uuid": network }] });
        let uuid = self.post("/instances", body)["uuid"].as_str().unwrap().to_owned();
        wait_for("the instance to run", TIMEOUT, || {
            let record = self.call(Method::GET, &format!("/instances/{uuid}"), None);
            (record["power_state"] == "on" && record["agent_state"] == "ready").then_some(())
        });
        uuid
    }

    /// Returns the path of the UI with a login ticket.
    fn login_path(&self) -> String {
        let ticket = self.call(Method::POST, "/auth/login-tickets", None);
        format!("/ui/#ticket={}", ticket["ticket"].as_str().unwrap())
    }
}
