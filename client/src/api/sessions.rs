//! `/auth/login-tickets` and `/auth/session`.

use muster_types::session::{LoginTicketRecord, SessionRecord};
use reqwest::Method;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Returns the credentials that the client has logged in with.
    pub async fn session(&self) -> Result<ApiResponse<SessionRecord>> {
        self.get(path(&["auth", "session"])?).await
    }

    /// Creates a ticket with which a browser opens a session.
    pub async fn create_login_ticket(&self) -> Result<ApiResponse<LoginTicketRecord>> {
        self.call(Method::POST, path(&["auth", "login-tickets"])?, None).await
    }
}
