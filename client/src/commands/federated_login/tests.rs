use muster_types::key::Secret;
use serde_json::{Value, json};

use super::*;
use crate::fake_server::FakeServer;

const TOKEN: &str = "aGVhZA.Ym9keQ.c2lnbg";

fn without_key(apiurl: &str) -> Credentials {
    Credentials { namespace: "ci".into(), key: Secret::new(""), apiurl: apiurl.into() }
}

fn login_by_rule(rule: &str) -> FederatedLogin {
    let token = TokenArguments::default();
    FederatedLogin { federated: true, rule: Some(rule.into()), token, print: false }
}

/// Runs an exchange with a response of the server. Returns the outcome and the requests.
async fn exchange_with(status: u16, response: Value) -> (anyhow::Result<Credentials>, Vec<String>) {
    let (client, fake) = FakeServer::start(vec![("POST /auth/federated", vec![(status, response)])]).await;
    let environment = |name: &str| (name == "MUSTER_ID_TOKEN").then(|| TOKEN.to_owned());
    let outcome = exchange(login_by_rule("deploy"), without_key(client.url()), None, &environment).await;
    (outcome.map(|(_, credentials)| credentials), fake.requests())
}

#[tokio::test]
async fn exchange_returns_credentials_with_the_new_key() {
    let minted = json!({ "namespace": "ci", "key_name": "robot-8fJ2mQab", "key": "sfk_x" });
    let (outcome, requests) = exchange_with(200, minted).await;
    let credentials = outcome.unwrap();
    assert_eq!((credentials.namespace.as_str(), credentials.key.expose()), ("ci", "sfk_x"));
    let body = json!({ "token": TOKEN, "namespace": "ci", "rule": "deploy" });
    assert_eq!(requests, [format!("POST /auth/federated {body}")]);
}

#[tokio::test]
async fn refusal_does_not_contain_the_token() {
    let refused = json!({ "error": "federated exchange refused: claims do not match", "status": 401 });
    let text = exchange_with(401, refused).await.0.unwrap_err().to_string();
    assert!(text.ends_with(" as namespace ci: federated exchange refused: claims do not match"), "{text}");
    assert!(!text.contains(TOKEN), "{text}");
}

#[tokio::test]
async fn rate_limited_exchange_advises_to_wait() {
    let refused = json!({ "error": "too many federated exchange attempts", "status": 429 });
    let text = exchange_with(429, refused).await.0.unwrap_err().to_string();
    assert!(text.contains("too many federated exchange attempts; ") && text.contains("wait"), "{text}");
}

#[tokio::test]
async fn response_without_a_key_is_an_error() {
    let text = exchange_with(200, json!({ "namespace": "ci" })).await.0.unwrap_err().to_string();
    assert!(text.contains("a format that this client does not know"), "{text}");
}

#[tokio::test]
async fn sends_nothing_without_a_token() {
    let (client, fake) = FakeServer::start(vec![]).await;
    exchange(login_by_rule("deploy"), without_key(client.url()), None, &|_| None).await.unwrap_err();
    assert!(fake.requests().is_empty());
}

#[test]
fn printed_commands_are_quoted_for_a_shell() {
    let credentials = Credentials { key: Secret::new("sfk_x"), ..without_key("http://host/it's") };
    let expected = "export MUSTER_API_URL='http://host/it'\\''s'\n\
                    export MUSTER_NAMESPACE='ci'\n\
                    export MUSTER_KEY='sfk_x'\n";
    assert_eq!(export_commands(&credentials), expected);
}
