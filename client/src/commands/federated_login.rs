//! `muster login --federated`: an identity token becomes a key that expires.

use std::env;
use std::path::PathBuf;

use clap::Args;

use super::identity_token::{self, Environment, TokenPlace};
use super::{Options, client, login};
use crate::api::{Answer, ExchangedKey};
use crate::credentials::{self, Credentials};
use crate::output::{self, visible};

/// What a login with an identity token needs.
#[derive(Debug, Args)]
pub(super) struct Federated {
    /// Exchange an identity token for a key, instead of giving one
    #[arg(long, requires = "rule", conflicts_with = "key")]
    pub(super) federated: bool,
    /// Name of the rule that says what the token is good for
    #[arg(long, requires = "federated")]
    rule: Option<String>,
    #[command(flatten)]
    token: TokenPlace,
    /// Print the login as commands for a shell instead of remembering it; with --json as JSON
    #[arg(long, requires = "federated")]
    print: bool,
}

/// Exchanges a token for a key and writes that down, or prints it. `nobody` has no key yet.
pub(super) async fn log_in(
    arguments: Federated,
    nobody: Credentials,
    options: Options,
) -> anyhow::Result<()> {
    let Options { cacert, json, credentials: file, .. } = options;
    // Before the exchange: a token is good for only one.
    let file = if arguments.print { None } else { Some(login::login_file(file)?) };
    let (answer, credentials) = exchange(arguments, nobody, cacert, &|name| env::var(name).ok()).await?;
    let key_name = answer.clone().value()?.key_name;
    match file {
        Some(file) => credentials::save(&file, &credentials)?,
        None if json => output::print_json(answer.json())?,
        None => output::print(&exports(&credentials))?,
    }
    eprintln!(
        "logged in to {} as namespace {} with key {}, which expires",
        credentials.apiurl,
        visible(&credentials.namespace),
        visible(&key_name)
    );
    Ok(())
}

/// Exchanges the token, and tries the key that it gave.
async fn exchange(
    arguments: Federated,
    nobody: Credentials,
    cacert: Option<PathBuf>,
    environment: Environment<'_>,
) -> anyhow::Result<(Answer<ExchangedKey>, Credentials)> {
    let apiurl = nobody.apiurl.clone();
    let caller = client(nobody, cacert.clone())?;
    let token = identity_token::get(arguments.token, environment).await?;
    let answer = caller.exchange(&token, &arguments.rule.unwrap_or_default()).await?;
    let ExchangedKey { namespace, key, .. } = answer.clone().value()?;
    let credentials = Credentials { namespace, key, apiurl };
    client(credentials.clone(), cacert)?.log_in().await?;
    Ok((answer, credentials))
}

/// A login as commands for a shell.
fn exports(credentials: &Credentials) -> String {
    let Credentials { namespace, key, apiurl } = credentials;
    let variables = [("API_URL", apiurl.as_str()), ("NAMESPACE", namespace), ("KEY", key.expose())];
    variables.map(|(name, value)| format!("export MUSTER_{name}={}\n", quoted(value))).concat()
}

/// A text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use muster_types::key::Secret;
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::Fake;

    const TOKEN: &str = "aGVhZA.Ym9keQ.c2lnbg";

    fn nobody(apiurl: &str) -> Credentials {
        Credentials { namespace: "ci".into(), key: Secret::new(""), apiurl: apiurl.into() }
    }

    fn by_rule(rule: &str) -> Federated {
        let token = TokenPlace::default();
        Federated { federated: true, rule: Some(rule.into()), token, print: false }
    }

    /// What comes of an exchange that is answered so, and what was asked.
    async fn exchanged(status: u16, answer: Value) -> (anyhow::Result<Credentials>, Vec<String>) {
        let (client, fake) = Fake::serve(vec![("POST /auth/federated", vec![(status, answer)])]).await;
        let environment = |name: &str| (name == "MUSTER_ID_TOKEN").then(|| TOKEN.to_owned());
        let outcome = exchange(by_rule("deploy"), nobody(client.url()), None, &environment).await;
        (outcome.map(|(_, credentials)| credentials), fake.asked())
    }

    #[tokio::test]
    async fn a_token_becomes_the_credentials_of_the_key() {
        let minted = json!({ "namespace": "ci", "key_name": "robot-8fJ2mQab", "key": "sfk_x" });
        let (outcome, asked) = exchanged(200, minted).await;
        let credentials = outcome.unwrap();
        assert_eq!((credentials.namespace.as_str(), credentials.key.expose()), ("ci", "sfk_x"));
        let body = json!({ "token": TOKEN, "namespace": "ci", "rule": "deploy" });
        assert_eq!(asked, [format!("POST /auth/federated {body}")]);
    }

    #[tokio::test]
    async fn a_refusal_is_passed_on_without_the_token() {
        let refused = json!({ "error": "federated exchange refused: claims do not match", "status": 401 });
        let text = exchanged(401, refused).await.0.unwrap_err().to_string();
        assert!(
            text.ends_with(" as namespace ci: federated exchange refused: claims do not match"),
            "{text}"
        );
        assert!(!text.contains(TOKEN), "{text}");
    }

    #[tokio::test]
    async fn too_many_attempts_are_told_to_wait() {
        let refused = json!({ "error": "too many federated exchange attempts", "status": 429 });
        let text = exchanged(429, refused).await.0.unwrap_err().to_string();
        assert!(text.contains("too many federated exchange attempts; ") && text.contains("wait"), "{text}");
    }

    #[tokio::test]
    async fn an_answer_without_a_key_is_no_login() {
        let text = exchanged(200, json!({ "namespace": "ci" })).await.0.unwrap_err().to_string();
        assert!(text.contains("a form this client does not know"), "{text}");
    }

    #[tokio::test]
    async fn nothing_is_asked_without_a_token() {
        let (client, fake) = Fake::serve(vec![]).await;
        exchange(by_rule("deploy"), nobody(client.url()), None, &|_| None).await.unwrap_err();
        assert!(fake.asked().is_empty());
    }

    #[test]
    fn a_shell_reads_what_is_printed() {
        let credentials = Credentials { key: Secret::new("sfk_x"), ..nobody("http://host/it's") };
        let expected = "export MUSTER_API_URL='http://host/it'\\''s'\n\
                        export MUSTER_NAMESPACE='ci'\n\
                        export MUSTER_KEY='sfk_x'\n";
        assert_eq!(exports(&credentials), expected);
    }
}
