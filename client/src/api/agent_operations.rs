//! `/instances/{instance}/agent` and `/agentoperations`: operations inside guests.

use muster_types::agent_operation::{AgentOperationRecord, ChmodMode};
use muster_types::ids::BlobId;
use muster_types::terminal::{TERMINAL_PROTOCOL, TerminalRequest};
use reqwest::{Method, Upgraded};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::{path, with_query};

/// Timeouts of an agent operation in seconds. The server chooses absent values; 0 is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct AgentTimeouts {
    /// For the whole operation, from now.
    #[serde(rename = "deadline_seconds", skip_serializing_if = "Option::is_none")]
    pub deadline: Option<f64>,
    /// For a transfer without progress.
    #[serde(rename = "progress_timeout_seconds", skip_serializing_if = "Option::is_none")]
    pub progress_timeout: Option<f64>,
}

impl Client {
    /// Runs a command line in the shell of a guest.
    pub async fn execute(
        &self,
        instance: &str,
        command_line: &str,
        deadline: Option<f64>,
    ) -> Result<ApiResponse<AgentOperationRecord>> {
        let timeouts = AgentTimeouts { deadline, progress_timeout: None };
        self.create_agent_operation(instance, "execute", json!({ "command_line": command_line }), timeouts)
            .await
    }

    /// Runs a command line with a terminal in a guest. Returns the connection, which carries frames.
    pub async fn open_terminal(&self, instance: &str, request: &TerminalRequest) -> Result<Upgraded> {
        let body = json!({
            "command_line": request.command_line, "term": request.term,
            "rows": request.size.rows, "columns": request.size.columns,
        });
        let path = path(&["instances", instance, "agent", "terminal"])?;
        self.upgrade(Method::POST, &path, TERMINAL_PROTOCOL, Some(&body)).await
    }

    /// Writes a blob to a file in a guest.
    pub async fn put(
        &self,
        instance: &str,
        blob: BlobId,
        file: &str,
        mode: Option<&ChmodMode>,
        timeouts: AgentTimeouts,
    ) -> Result<ApiResponse<AgentOperationRecord>> {
        let mut body = json!({ "blob_uuid": blob, "path": file });
        if let Some(mode) = mode {
            body["mode"] = json!(mode);
        }
        self.create_agent_operation(instance, "put", body, timeouts).await
    }

    /// Stores a file of a guest as a blob.
    pub async fn get_file(
        &self,
        instance: &str,
        file: &str,
        timeouts: AgentTimeouts,
    ) -> Result<ApiResponse<AgentOperationRecord>> {
        self.create_agent_operation(instance, "get", json!({ "path": file }), timeouts).await
    }

    async fn create_agent_operation(
        &self,
        instance: &str,
        action: &str,
        mut body: Value,
        timeouts: AgentTimeouts,
    ) -> Result<ApiResponse<AgentOperationRecord>> {
        for (name, value) in json!(timeouts).as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        self.call(Method::POST, path(&["instances", instance, "agent", action])?, Some(body)).await
    }

    /// Returns the facts that the agent in a guest reported.
    pub async fn guest_facts(&self, instance: &str) -> Result<ApiResponse<Map<String, Value>>> {
        self.get(path(&["instances", instance, "agent", "facts"])?).await
    }

    /// Lists the agent operations of an instance in execution order, with `all` including finished ones.
    pub async fn agent_operations(
        &self,
        instance: &str,
        all: bool,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<AgentOperationRecord>>> {
        let path = path(&["instances", instance, "agentoperations"])?;
        self.get_list(with_query(path, &[("all", all.then_some("true"))]), query).await
    }

    /// Returns an agent operation.
    pub async fn agent_operation(&self, id: &str) -> Result<ApiResponse<AgentOperationRecord>> {
        self.get(path(&["agentoperations", id])?).await
    }

    /// Deletes an agent operation; a running command is killed.
    pub async fn delete_agent_operation(&self, id: &str) -> Result<ApiResponse<AgentOperationRecord>> {
        self.delete(path(&["agentoperations", id])?).await
    }
}
