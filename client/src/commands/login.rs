//! `muster login` and `muster logout`: the saved credentials.

use anyhow::Context as _;
use clap::Args;
use muster_types::key::Secret;

use super::arguments::{parse_secret, prompt_secret};
use super::federated_login::{self, FederatedLogin};
use super::session::{Options, new_client};
use crate::credentials::{self, Credentials, EnvironmentCredentials};
use crate::output;

/// The default API URL of `muster serve`.
const DEFAULT_URL: &str = "http://localhost:13000";

/// Arguments of `muster login`. The namespace and the URL are global options.
#[derive(Debug, Args)]
#[command(
    after_help = "Without --key and MUSTER_KEY, the command prompts for the secret or reads it from standard input.\n\n\
    With --federated, the identity token comes from --token-file or --token-env, else from MUSTER_ID_TOKEN or \
    MUSTER_ID_TOKEN_FILE, else from the CI system: GitHub Actions, Forgejo, GitLab, Buildkite or CircleCI."
)]
pub struct Arguments {
    /// Secret of a key of the namespace
    #[arg(long, value_name = "SECRET", value_parser = parse_secret)]
    key: Option<Secret>,
    #[command(flatten)]
    federated: FederatedLogin,
}

/// Checks the credentials and saves them.
pub(super) async fn log_in(arguments: Arguments, options: Options) -> anyhow::Result<()> {
    let not_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
    let namespace = not_empty(options.namespace.clone())
        .context("the namespace to log in to is missing: give --namespace")?;
    let given_url = not_empty(options.api_url.clone());
    let apiurl = given_url.clone().unwrap_or_else(|| DEFAULT_URL.to_owned());
    if arguments.federated.federated {
        let without_key = Credentials { namespace, key: Secret::new(""), apiurl };
        return federated_login::log_in(arguments.federated, without_key, options).await;
    }
    let file = options.login_file()?;
    let key = match arguments.key.or(options.key).filter(|key| !key.expose().is_empty()) {
        Some(key) => {
            EnvironmentCredentials::read().check(Some(&key), given_url.as_deref())?;
            key
        }
        None => prompt_secret(&format!("key of namespace {namespace}"))?,
    };
    let credentials = Credentials { namespace, key, apiurl };
    new_client(credentials.clone(), options.cacert)?.log_in().await?;
    credentials::save(&file, &credentials)?;
    output::status(&format!("logged in to {} as namespace {}", credentials.apiurl, credentials.namespace));
    Ok(())
}

/// Deletes the saved credentials.
pub(super) fn log_out(options: &Options) -> anyhow::Result<()> {
    let existed = credentials::remove(&options.login_file()?)?;
    output::status(if existed { "logged out" } else { "was not logged in" });
    Ok(())
}
