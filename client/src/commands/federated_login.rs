//! `muster login --federated`: exchanges an identity token for a temporary key.

use std::env;
use std::path::PathBuf;

use clap::Args;

use super::arguments::shell_quote;
use super::identity_token::{self, Environment, TokenArguments};
use super::session::{Options, new_client};
use crate::api::{ApiResponse, ExchangedKey};
use crate::credentials::{self, Credentials};
use crate::output::{self, escape_control};

/// Arguments of a login with an identity token.
#[derive(Debug, Args)]
pub(super) struct FederatedLogin {
    /// Exchange an identity token for a key instead of giving a key
    #[arg(long, requires = "rule", conflicts_with = "key")]
    pub(super) federated: bool,
    /// Name of the mapping rule for the exchange
    #[arg(long, requires = "federated")]
    rule: Option<String>,
    #[command(flatten)]
    token: TokenArguments,
    /// Print the credentials as shell commands, or with --json as JSON, instead of saving them
    #[arg(long, requires = "federated")]
    print: bool,
}

/// Exchanges a token for a key and saves or prints it. `without_key` has no key yet.
pub(super) async fn log_in(
    arguments: FederatedLogin,
    without_key: Credentials,
    options: Options,
) -> anyhow::Result<()> {
    let format = options.format();
    // Resolved before the exchange, because a token can be used only once.
    let file = if arguments.print { None } else { Some(options.login_file()?) };
    let cacert = options.cacert;
    let (response, credentials) =
        exchange(arguments, without_key, cacert, &|name| env::var(name).ok()).await?;
    let key_name = response.clone().value()?.key_name;
    match file {
        Some(file) => credentials::save(&file, &credentials)?,
        None if format.is_structured() => output::print_value(format, response.json())?,
        None => output::print(&export_commands(&credentials))?,
    }
    crate::message!(
        "logged in to {} as namespace {} with key {}, which will expire",
        credentials.apiurl,
        escape_control(&credentials.namespace),
        escape_control(&key_name)
    );
    Ok(())
}

/// Exchanges the token and checks the new key.
async fn exchange(
    arguments: FederatedLogin,
    without_key: Credentials,
    cacert: Option<PathBuf>,
    environment: Environment<'_>,
) -> anyhow::Result<(ApiResponse<ExchangedKey>, Credentials)> {
    let apiurl = without_key.apiurl.clone();
    let caller = new_client(without_key, cacert.clone())?;
    let token = identity_token::obtain(arguments.token, environment).await?;
    let response = caller.exchange(&token, &arguments.rule.unwrap_or_default()).await?;
    let ExchangedKey { namespace, key, .. } = response.clone().value()?;
    let credentials = Credentials { namespace, key, apiurl };
    new_client(credentials.clone(), cacert)?.log_in().await?;
    Ok((response, credentials))
}

/// Formats credentials as shell commands.
fn export_commands(credentials: &Credentials) -> String {
    let Credentials { namespace, key, apiurl } = credentials;
    let variables = [("API_URL", apiurl.as_str()), ("NAMESPACE", namespace), ("KEY", key.expose())];
    variables.map(|(name, value)| format!("export MUSTER_{name}={}\n", shell_quote(value))).concat()
}

#[cfg(test)]
mod tests;
