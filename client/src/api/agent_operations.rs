//! `/instances/{instance}/agent` and `/agentoperations`: what is done inside guests.

use muster_types::agent_operation::{AgentOperationRecord, Mode};
use muster_types::ids::BlobId;
use reqwest::Method;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{Answer, Client, Result, path, with_query};

/// How long something inside a guest may take. What is absent the server decides, 0 is no end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Budgets {
    /// From now to its end.
    #[serde(rename = "deadline_seconds", skip_serializing_if = "Option::is_none")]
    pub deadline: Option<f64>,
    /// That a transfer may stand still.
    #[serde(rename = "progress_timeout_seconds", skip_serializing_if = "Option::is_none")]
    pub progress_timeout: Option<f64>,
}

impl Client {
    /// Has a command line run by the shell of a guest.
    pub async fn execute(
        &self,
        instance: &str,
        command_line: &str,
        deadline: Option<f64>,
    ) -> Result<Answer<AgentOperationRecord>> {
        let budgets = Budgets { deadline, progress_timeout: None };
        self.ask_guest(instance, "execute", json!({ "command_line": command_line }), budgets).await
    }

    /// Has a blob written to a file of a guest.
    pub async fn put(
        &self,
        instance: &str,
        blob: BlobId,
        file: &str,
        mode: Option<&Mode>,
        budgets: Budgets,
    ) -> Result<Answer<AgentOperationRecord>> {
        let mut body = json!({ "blob_uuid": blob, "path": file });
        if let Some(mode) = mode {
            body["mode"] = json!(mode);
        }
        self.ask_guest(instance, "put", body, budgets).await
    }

    /// Has a file of a guest made a blob.
    pub async fn get_file(
        &self,
        instance: &str,
        file: &str,
        budgets: Budgets,
    ) -> Result<Answer<AgentOperationRecord>> {
        self.ask_guest(instance, "get", json!({ "path": file }), budgets).await
    }

    async fn ask_guest(
        &self,
        instance: &str,
        what: &str,
        mut body: Value,
        budgets: Budgets,
    ) -> Result<Answer<AgentOperationRecord>> {
        for (name, value) in json!(budgets).as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        self.call(Method::POST, path(&["instances", instance, "agent", what])?, Some(body)).await
    }

    /// What a guest says of itself.
    pub async fn guest_facts(&self, instance: &str) -> Result<Answer<Map<String, Value>>> {
        self.get(path(&["instances", instance, "agent", "facts"])?).await
    }

    /// What is to be done inside a guest, in its order; on request with what was done.
    pub async fn agent_operations(
        &self,
        instance: &str,
        all: bool,
    ) -> Result<Answer<Vec<AgentOperationRecord>>> {
        let path = path(&["instances", instance, "agentoperations"])?;
        self.get(with_query(path, &[("all", all.then_some("true"))])).await
    }

    /// One operation inside a guest.
    pub async fn agent_operation(&self, id: &str) -> Result<Answer<AgentOperationRecord>> {
        self.get(path(&["agentoperations", id])?).await
    }

    /// Deletes an operation inside a guest; a command that runs is ended.
    pub async fn delete_agent_operation(&self, id: &str) -> Result<Answer<AgentOperationRecord>> {
        self.delete(path(&["agentoperations", id])?).await
    }
}
