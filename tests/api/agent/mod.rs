//! Agent operations in the guests of simulated VMs.

mod deletion;
mod installation;
mod ordering;
mod restarts;
mod results;
mod terminal;
mod timeouts;
mod validation;

use axum::http::Method;
use muster_node::{GuestScript, SimulatedNode, SimulationScript};
use muster_test_cluster::{ApiResponse, Cluster, wait_for};
use muster_types::ids::InstanceId;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::instances::create;
use crate::networks::{cluster, get, post};

/// A cluster with one instance whose agent is ready.
struct Fixture {
    cluster: Cluster,
    token: String,
    instance: String,
}

impl Fixture {
    async fn new(settings: &[(&str, &str)]) -> Self {
        let (cluster, token) = cluster(settings).await;
        let instance = create_with_ready_agent(&cluster, &token, "www").await;
        Self { cluster, token, instance }
    }

    fn instance_id(&self) -> InstanceId {
        self.instance.parse().unwrap()
    }

    /// Returns the node that runs the VM.
    fn node(&self) -> &SimulatedNode {
        let nodes = [&self.cluster.node, &self.cluster.other];
        nodes.into_iter().find(|node| node.vm_ids().contains(&self.instance_id())).unwrap()
    }

    /// Sets the behaviour of the simulated guests.
    fn set_guest_script(&self, guest: GuestScript) {
        self.node().set_script(SimulationScript { guest, ..SimulationScript::default() });
    }

    async fn request(&self, verb: &str, body: Value) -> ApiResponse {
        post(&self.cluster, &self.token, &format!("/instances/{}/agent/{verb}", self.instance), body).await
    }

    /// Queues an operation and returns its initial record.
    async fn queue(&self, verb: &str, body: Value) -> Value {
        let response = self.request(verb, body).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    }

    /// Queues an operation and returns its record after it ended.
    async fn run_operation(&self, verb: &str, body: Value) -> Value {
        let operation = self.queue(verb, body).await;
        self.wait_until_ended(&operation).await
    }

    async fn run_command(&self, line: &str) -> Value {
        self.run_operation("execute", json!({"command_line": line})).await
    }

    async fn get_operation(&self, operation: &Value) -> Value {
        get(&self.cluster, &self.token, &format!("/agentoperations/{}", operation_id(operation))).await.body
    }

    async fn wait_until_ended(&self, operation: &Value) -> Value {
        wait_for("an agent operation to end", async || {
            let record = self.get_operation(operation).await;
            let unfinished = ["preflight", "queued", "executing"].map(Value::from);
            (!unfinished.contains(&record["state"])).then_some(record)
        })
        .await
    }

    async fn wait_for_state(&self, operation: &Value, state: &str) -> Value {
        wait_for(state, async || {
            Some(self.get_operation(operation).await).filter(|record| record["state"] == state)
        })
        .await
    }

    /// Waits until a command line was started the given number of times.
    async fn wait_for_execution(&self, line: &str, times: u64) {
        wait_for("a command to be started", async || {
            (self.node().executions(self.instance_id()).get(line).copied() == Some(times)).then_some(())
        })
        .await;
    }

    /// Waits until the given number of transfers were started.
    async fn wait_for_transfers(&self, times: u64) {
        wait_for("a transfer to start", async || {
            (self.node().transfers(self.instance_id()) == times).then_some(())
        })
        .await;
    }

    async fn delete_operation(&self, operation: &Value) -> Value {
        let path = format!("/agentoperations/{}", operation_id(operation));
        let response = self.cluster.call(&self.token, Method::DELETE, &path, None).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body
    }

    /// Lists the operations of the instance: the unfinished ones, or all.
    async fn list_operations(&self, all: bool) -> Vec<String> {
        let path = format!("/instances/{}/agentoperations?all={all}", self.instance);
        let list = get(&self.cluster, &self.token, &path).await.body;
        list.as_array().unwrap().iter().map(|operation| operation_id(operation).to_owned()).collect()
    }

    async fn upload_blob(&self, bytes: &[u8]) -> String {
        let record = crate::artifacts::upload(&self.cluster, &self.token, "file", bytes).await;
        record["blob_uuid"].as_str().unwrap().to_owned()
    }

    async fn blob_data(&self, blob: &Value) -> Vec<u8> {
        self.cluster.download_until_error(&self.token, blob.as_str().unwrap()).await
    }

    /// Returns the event messages of an operation, and those of its instance that refer to the operation.
    async fn event_messages(&self, operation: &Value) -> (Vec<String>, Vec<String>) {
        let own_events = self.cluster.events(&object(operation)).await;
        let instance_events =
            self.cluster.events(&ObjectRef::new(ObjectType::Instance, &self.instance)).await;
        let referring = instance_events.into_iter().filter(|event| {
            event.extra.get("operation_uuid").is_some_and(|uuid| uuid == operation_id(operation))
        });
        (
            own_events.into_iter().map(|event| event.message).collect(),
            referring.map(|event| event.message).collect(),
        )
    }
}

/// Creates an instance, waits for its agent, and returns its id.
async fn create_with_ready_agent(cluster: &Cluster, token: &str, name: &str) -> String {
    let record = create(cluster, token, name, &json!({})).await;
    let id = record["uuid"].as_str().unwrap().to_owned();
    wait_for_agent_state(cluster, token, &id, "ready").await;
    id
}

pub(crate) async fn wait_for_agent_state(
    cluster: &Cluster,
    token: &str,
    instance: &str,
    state: &str,
) -> Value {
    wait_for(&format!("the agent to be {state}"), async || {
        let record = get(cluster, token, &format!("/instances/{instance}")).await.body;
        (record["agent_state"] == state).then_some(record)
    })
    .await
}

fn operation_id(operation: &Value) -> &str {
    operation["uuid"].as_str().unwrap()
}

fn object(operation: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::AgentOperation, operation_id(operation))
}

fn status_and_error(response: &ApiResponse) -> (u16, &str) {
    (response.status.as_u16(), response.body["error"].as_str().unwrap_or_default())
}
