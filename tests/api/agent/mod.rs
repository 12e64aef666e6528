//! Commands and files in the guests of simulated machines.

mod deletion;
mod installation;
mod ordering;
mod restarts;
mod results;
mod timeouts;
mod validation;

use axum::http::Method;
use muster_node::{GuestScript, SimulatedNode, SimulationScript};
use muster_types::ids::InstanceId;
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};

use crate::harness::{Answer, Cluster, wait_for};
use crate::instances::create;
use crate::networks::{cluster, get, post};

/// A cluster with an instance whose agent is ready.
struct World {
    cluster: Cluster,
    token: String,
    instance: String,
}

impl World {
    async fn new(settings: &[(&str, &str)]) -> Self {
        let (cluster, token) = cluster(settings).await;
        let instance = ready(&cluster, &token, "www").await;
        Self { cluster, token, instance }
    }

    fn id(&self) -> InstanceId {
        self.instance.parse().unwrap()
    }

    /// The node that has the machine.
    fn node(&self) -> &SimulatedNode {
        let nodes = [&self.cluster.node, &self.cluster.other];
        nodes.into_iter().find(|node| node.vm_ids().contains(&self.id())).unwrap()
    }

    /// Says what happens in guests from now on.
    fn script(&self, guest: GuestScript) {
        self.node().set_script(SimulationScript { guest, ..SimulationScript::default() });
    }

    async fn ask(&self, verb: &str, body: Value) -> Answer {
        post(&self.cluster, &self.token, &format!("/instances/{}/agent/{verb}", self.instance), body).await
    }

    /// Queues something; the operation as it began.
    async fn begin(&self, verb: &str, body: Value) -> Value {
        let answer = self.ask(verb, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.body
    }

    /// Does something, and returns the operation when it has ended.
    async fn done(&self, verb: &str, body: Value) -> Value {
        let begun = self.begin(verb, body).await;
        self.ended(&begun).await
    }

    async fn run(&self, line: &str) -> Value {
        self.done("execute", json!({"command_line": line})).await
    }

    async fn show(&self, operation: &Value) -> Value {
        get(&self.cluster, &self.token, &format!("/agentoperations/{}", id(operation))).await.body
    }

    async fn ended(&self, operation: &Value) -> Value {
        wait_for("an agent operation to end", async || {
            let found = self.show(operation).await;
            let open = ["preflight", "queued", "executing"].map(Value::from);
            (!open.contains(&found["state"])).then_some(found)
        })
        .await
    }

    async fn reaches(&self, operation: &Value, state: &str) -> Value {
        wait_for(state, async || Some(self.show(operation).await).filter(|found| found["state"] == state))
            .await
    }

    /// Waits until a command line was started so often.
    async fn started(&self, line: &str, times: u64) {
        wait_for("a command to be started", async || {
            (self.node().executions(self.id()).get(line).copied() == Some(times)).then_some(())
        })
        .await;
    }

    /// Waits until so many transfers were begun.
    async fn transferring(&self, times: u64) {
        wait_for("a transfer to be begun", async || {
            (self.node().transfers(self.id()) == times).then_some(())
        })
        .await;
    }

    async fn delete(&self, operation: &Value) -> Value {
        let path = format!("/agentoperations/{}", id(operation));
        let answer = self.cluster.call(&self.token, Method::DELETE, &path, None).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.body
    }

    /// The operations of the instance: those that have not ended, or all.
    async fn list(&self, all: bool) -> Vec<String> {
        let path = format!("/instances/{}/agentoperations?all={all}", self.instance);
        let list = get(&self.cluster, &self.token, &path).await.body;
        list.as_array().unwrap().iter().map(|operation| id(operation).to_owned()).collect()
    }

    async fn blob(&self, bytes: &[u8]) -> String {
        let record = crate::artifacts::upload(&self.cluster, &self.token, "file", bytes).await;
        record["blob_uuid"].as_str().unwrap().to_owned()
    }

    async fn data(&self, blob: &Value) -> Vec<u8> {
        self.cluster.try_data(&self.token, blob.as_str().unwrap()).await
    }

    /// The messages of the audit events of an operation, and those of its instance that name the operation.
    async fn audits(&self, operation: &Value) -> (Vec<String>, Vec<String>) {
        let own = self.cluster.events(&object(operation)).await;
        let of_instance = self.cluster.events(&ObjectRef::new(ObjectType::Instance, &self.instance)).await;
        let named = of_instance
            .into_iter()
            .filter(|event| event.extra.get("operation_uuid").is_some_and(|uuid| uuid == id(operation)));
        (own.into_iter().map(|event| event.message).collect(), named.map(|event| event.message).collect())
    }
}

/// An instance whose agent is ready; its id.
async fn ready(cluster: &Cluster, token: &str, name: &str) -> String {
    let record = create(cluster, token, name, &json!({})).await;
    let id = record["uuid"].as_str().unwrap().to_owned();
    agent_is(cluster, token, &id, "ready").await;
    id
}

async fn agent_is(cluster: &Cluster, token: &str, instance: &str, state: &str) -> Value {
    wait_for(&format!("the agent to be {state}"), async || {
        let record = get(cluster, token, &format!("/instances/{instance}")).await.body;
        (record["agent_state"] == state).then_some(record)
    })
    .await
}

fn id(operation: &Value) -> &str {
    operation["uuid"].as_str().unwrap()
}

fn object(operation: &Value) -> ObjectRef {
    ObjectRef::new(ObjectType::AgentOperation, id(operation))
}

fn refusal(answer: &Answer) -> (u16, &str) {
    (answer.status.as_u16(), answer.body["error"].as_str().unwrap_or_default())
}
