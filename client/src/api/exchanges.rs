//! `/auth/federated`.

use muster_types::key::Secret;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::client::Client;
use super::error::{Error, Result};
use super::keys::deserialize_secret;
use super::response::ApiResponse;

/// The key that an identity token was exchanged for. The server returns the secret only once.
#[derive(Debug, Deserialize)]
pub struct ExchangedKey {
    pub namespace: String,
    pub key_name: String,
    #[serde(deserialize_with = "deserialize_secret")]
    pub key: Secret,
}

impl Client {
    /// Exchanges an identity token for a key of the client's own namespace. The client's key is not used and may be
    /// empty.
    pub async fn exchange(&self, token: &Secret, rule: &str) -> Result<ApiResponse<ExchangedKey>> {
        let body = json!({ "token": token.expose(), "namespace": self.own_namespace(), "rule": rule });
        let raw = self.send(Method::POST, "/auth/federated", None, Some(&body)).await?;
        if raw.status == StatusCode::OK {
            return self.parse_json(&raw.body).map(ApiResponse::new);
        }
        let mut message = raw.refusal_message();
        if raw.status == StatusCode::TOO_MANY_REQUESTS {
            message.push_str("; wait a minute and try again");
        }
        Err(Error::LoginRefused {
            url: self.url().to_owned(),
            namespace: self.own_namespace().to_owned(),
            status: raw.status.as_u16(),
            message,
        })
    }
}
