//! `/auth/federated`.

use muster_types::key::Secret;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::keys::secret;
use super::{Answer, Client, Error, Result};

/// The key that an identity token was exchanged for. The server shows it only here.
#[derive(Debug, Deserialize)]
pub struct ExchangedKey {
    pub namespace: String,
    pub key_name: String,
    #[serde(deserialize_with = "secret")]
    pub key: Secret,
}

impl Client {
    /// Exchanges an identity token for a key of the client's own namespace. The client's key is not used, so it may
    /// be empty.
    pub async fn exchange(&self, token: &Secret, rule: &str) -> Result<Answer<ExchangedKey>> {
        let body = json!({ "token": token.expose(), "namespace": self.acts_as(), "rule": rule });
        let reply = self.send(Method::POST, "/auth/federated", None, Some(&body)).await?;
        if reply.status == StatusCode::OK {
            return self.parse(&reply.body).map(Answer::new);
        }
        let mut text = reply.refusal();
        if reply.status == StatusCode::TOO_MANY_REQUESTS {
            text.push_str("; they are counted by the minute, wait for the next one");
        }
        Err(Error::LoginRefused {
            url: self.url().to_owned(),
            namespace: self.acts_as().to_owned(),
            status: reply.status.as_u16(),
            text,
        })
    }
}
