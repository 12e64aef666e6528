//! `/auth/login-tickets`.

use muster_types::session::LoginTicketRecord;
use reqwest::Method;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Creates a ticket with which a browser opens a session.
    pub async fn create_login_ticket(&self) -> Result<ApiResponse<LoginTicketRecord>> {
        self.call(Method::POST, path(&["auth", "login-tickets"])?, None).await
    }
}
