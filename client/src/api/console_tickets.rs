//! `/instances/{instance_ref}/console-tickets`, and the WebSockets that tickets open.

use muster_types::session::{ConsoleKind, ConsoleTicketRecord};
use muster_websocket::{BINARY, TICKET_PREFIX, WEBSOCKET, accept_key, generate_key};
use reqwest::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use reqwest::{Method, Upgraded};
use serde_json::json;

use super::client::{Client, TRANSFER_TIMEOUT};
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Creates a ticket for one connection to a console of an instance.
    pub async fn create_console_ticket(
        &self,
        instance: &str,
        kind: ConsoleKind,
    ) -> Result<ApiResponse<ConsoleTicketRecord>> {
        let path = path(&["instances", instance, "console-tickets"])?;
        self.call(Method::POST, path, Some(json!({ "kind": kind }))).await
    }

    /// Opens a console with its ticket. The connection is a WebSocket.
    pub async fn open_console_socket(&self, ticket: &ConsoleTicketRecord) -> Result<Upgraded> {
        // Appended to the URL of the API, where anything else could name another server.
        if !ticket.path.starts_with('/') {
            return Err(self.unexpected_response("a console that is not a path"));
        }
        let key = generate_key();
        let request = self
            .request(Method::GET, &ticket.path, None)
            .header(CONNECTION, "upgrade")
            .header(UPGRADE, WEBSOCKET)
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, &key)
            .header(SEC_WEBSOCKET_PROTOCOL, format!("{BINARY}, {TICKET_PREFIX}{}", ticket.ticket))
            .timeout(TRANSFER_TIMEOUT);
        let response = self.send_request(request).await?;
        let accept = response.headers().get(SEC_WEBSOCKET_ACCEPT).map(|accept| accept.as_bytes().to_vec());
        let socket = self.upgraded(&ticket.path, response).await?;
        if accept.as_deref() != Some(accept_key(&key).as_bytes()) {
            return Err(self.unexpected_response("an upgraded connection that is not a WebSocket"));
        }
        Ok(socket)
    }

    /// Opens a console of an instance. The connection is a WebSocket.
    pub async fn open_console(&self, instance: &str, kind: ConsoleKind) -> Result<Upgraded> {
        let ticket = self.create_console_ticket(instance, kind).await?.value()?;
        self.open_console_socket(&ticket).await
    }
}
