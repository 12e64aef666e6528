//! Obtains the identity token for `muster login --federated` from a file, a variable or the CI system. A token is never
//! an argument of a program and never part of a message.

use std::fmt::Display;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Args;
use muster_types::key::Secret;
use reqwest::{Response, Url, redirect};
use serde_json::Value;
use tokio::process::Command;
use url::Host;

use crate::error_text::{io_error_text, root_cause};

/// The maximum size of a file or response with a token; servers accept far less.
const MAX_TOKEN_SIZE: u64 = 65_536;
/// How long a CI system may take to issue a token.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(30);
/// The program that issues tokens in Buildkite jobs.
const BUILDKITE_AGENT: &str = "buildkite-agent";
/// The token service of GitHub Actions and compatible systems, and the bearer token for it.
const REQUEST_URL: &str = "ACTIONS_ID_TOKEN_REQUEST_URL";
const REQUEST_TOKEN: &str = "ACTIONS_ID_TOKEN_REQUEST_TOKEN";
/// Variables that contain a token: our own, then those of GitLab and CircleCI.
const TOKEN_VARIABLES: [&str; 4] =
    ["MUSTER_ID_TOKEN", "CI_JOB_JWT_V2", "CIRCLE_OIDC_TOKEN_V2", "CIRCLE_OIDC_TOKEN"];
/// The variable with the path of a token file.
const TOKEN_FILE_VARIABLE: &str = "MUSTER_ID_TOKEN_FILE";

/// Returns the value of an environment variable, if it is set.
pub(super) type Environment<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// Where the token comes from, if not from the CI system.
#[derive(Debug, Default, Args)]
pub(super) struct TokenArguments {
    /// File with the identity token; - is standard input
    #[arg(long, value_name = "FILE", requires = "federated", conflicts_with_all = ["token_env", "audience"])]
    pub(super) token_file: Option<PathBuf>,
    /// Name of an environment variable with the identity token
    #[arg(long, value_name = "NAME", requires = "federated", conflicts_with = "audience")]
    pub(super) token_env: Option<String>,
    /// Audience of the identity token from the CI system: that of the trusted issuer
    #[arg(long, requires = "federated")]
    pub(super) audience: Option<String>,
}

/// Where a token comes from.
#[derive(Debug, PartialEq, Eq)]
enum TokenSource {
    StandardInput,
    File(PathBuf),
    Variable {
        name: String,
        value: Secret,
    },
    /// Requested over HTTPS.
    Service {
        url: String,
        bearer: Secret,
        audience: String,
    },
    /// Printed by a program.
    Program {
        audience: String,
    },
}

/// Obtains the identity token.
pub(super) async fn obtain(
    arguments: TokenArguments,
    environment: Environment<'_>,
) -> anyhow::Result<Secret> {
    match locate(arguments, environment)? {
        TokenSource::StandardInput => {
            validate(&read_limited(io::stdin(), &"standard input")?, &"standard input")
        }
        TokenSource::File(path) => {
            let name = path.display();
            let file = std::fs::File::open(&path).map_err(|error| {
                anyhow!("cannot read the identity token from {name}: {}", io_error_text(&error))
            })?;
            validate(&read_limited(file, &name)?, &name)
        }
        TokenSource::Variable { name, value } => validate(value.expose(), &name),
        TokenSource::Service { url, bearer, audience } => {
            let response =
                request_token(&url, &bearer, &audience).await.context("cannot get an identity token")?;
            validate(&response, &"the response of the CI system")
        }
        TokenSource::Program { audience } => {
            validate(&run_agent(Path::new(BUILDKITE_AGENT), &audience).await?, &BUILDKITE_AGENT)
        }
    }
}

/// Locates the token: as given, else as set in the environment, else from the CI system.
fn locate(arguments: TokenArguments, environment: Environment<'_>) -> anyhow::Result<TokenSource> {
    let variable = |name: &str| environment(name).filter(|value| !value.is_empty());
    let from_variable = |name: &str| {
        variable(name).map(|value| TokenSource::Variable { name: name.to_owned(), value: Secret::new(value) })
    };
    if let Some(path) = arguments.token_file {
        return Ok(if path.as_os_str() == "-" {
            TokenSource::StandardInput
        } else {
            TokenSource::File(path)
        });
    }
    if let Some(name) = arguments.token_env {
        // A user may give the token itself by mistake, which must not be shown.
        ensure!(is_variable_name(&name), "--token-env must be the name of a variable");
        return from_variable(&name).with_context(|| format!("the variable {name} is not set"));
    }
    if let Some(source) = from_variable(TOKEN_VARIABLES[0]) {
        return Ok(source);
    }
    if let Some(path) = variable(TOKEN_FILE_VARIABLE) {
        return Ok(TokenSource::File(path.into()));
    }
    let audience = |system: &str| {
        let audience = arguments.audience.clone();
        audience.with_context(|| {
            format!("{system} issues tokens for an audience: give that of the trusted issuer with --audience")
        })
    };
    if let (Some(url), Some(bearer)) = (variable(REQUEST_URL), variable(REQUEST_TOKEN)) {
        return Ok(TokenSource::Service {
            url,
            bearer: Secret::new(bearer),
            audience: audience("this CI system")?,
        });
    }
    if variable("BUILDKITE").is_some() {
        return Ok(TokenSource::Program { audience: audience("Buildkite")? });
    }
    TOKEN_VARIABLES.into_iter().find_map(from_variable).with_context(|| not_found_message(environment))
}

/// Names the sources that were checked, and what a job of a known CI system lacks.
fn not_found_message(environment: Environment<'_>) -> String {
    let hint = if environment("FORGEJO_ACTIONS").is_some() {
        "; set `enable-openid-connect: true` in the Forgejo workflow"
    } else if environment("GITHUB_ACTIONS").is_some() {
        "; give the GitHub job the permission `id-token: write`"
    } else if environment("GITLAB_CI").is_some() {
        "; add `id_tokens` with the name MUSTER_ID_TOKEN to the GitLab job"
    } else {
        ""
    };
    format!(
        "no identity token found in {}, {TOKEN_FILE_VARIABLE}, {REQUEST_URL} and Buildkite; give --token-file or \
         --token-env{hint}",
        TOKEN_VARIABLES.join(", ")
    )
}

fn is_variable_name(text: &str) -> bool {
    let word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    (1..=128).contains(&text.len()) && text.chars().all(word)
}

/// Reads a token up to the maximum size.
fn read_limited(from: impl io::Read, origin: &dyn Display) -> anyhow::Result<String> {
    let mut text = String::new();
    match from.take(MAX_TOKEN_SIZE + 1).read_to_string(&mut text) {
        Ok(length) if length as u64 > MAX_TOKEN_SIZE => bail!("{origin} is too large for an identity token"),
        Ok(_) => Ok(text),
        Err(error) => bail!("cannot read the identity token from {origin}: {}", io_error_text(&error)),
    }
}

/// Returns the token if the text has the form of one. Prevents sending the content of a wrong file to the server.
fn validate(text: &str, origin: &dyn Display) -> anyhow::Result<Secret> {
    let text = text.trim();
    let encoded = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    ensure!(!text.is_empty(), "{origin} is empty instead of an identity token");
    ensure!(
        text.split('.').count() == 3 && text.split('.').all(encoded),
        "{origin} is not an identity token"
    );
    Ok(Secret::new(text))
}

/// Requests a token from the service of GitHub Actions.
async fn request_token(url: &str, bearer: &Secret, audience: &str) -> anyhow::Result<String> {
    let mut url = Url::parse(url).map_err(|error| anyhow!("{REQUEST_URL}: {error}"))?;
    ensure!(
        url.scheme() == "https" || url.scheme() == "http" && is_loopback(&url),
        "{REQUEST_URL} is not https, so the bearer token for it would not be protected"
    );
    url.query_pairs_mut().append_pair("audience", audience);
    let mut http = reqwest::Client::builder().timeout(TOKEN_TIMEOUT).redirect(redirect::Policy::none());
    if url.scheme() == "http" {
        // The request stays on this host and needs no certificates.
        http = http.no_proxy().tls_certs_only([]);
    }
    let http =
        http.build().map_err(|error| anyhow!("cannot create the HTTPS client: {}", root_cause(&error)))?;
    let host = url.host_str().unwrap_or_default().to_owned();
    let unreachable = |error: &reqwest::Error| {
        anyhow!(
            "{host}: {}",
            if error.is_timeout() { "the request timed out".to_owned() } else { root_cause(error) }
        )
    };
    let request = http.get(url).bearer_auth(bearer.expose());
    let response = request.send().await.map_err(|error| unreachable(&error))?;
    ensure!(response.status().is_success(), "{host} responded with {}", response.status());
    let body = read_body(response).await.map_err(|error| unreachable(&error))?;
    let response: Value =
        serde_json::from_slice(&body).map_err(|_| anyhow!("the response of {host} is not JSON"))?;
    let token = response.get("value").and_then(Value::as_str);
    token.map(str::to_owned).with_context(|| format!("the response of {host} contains no token"))
}

/// Reads a response body up to the maximum size.
async fn read_body(mut response: Response) -> reqwest::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() as u64 > MAX_TOKEN_SIZE {
            break;
        }
    }
    Ok(body)
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(domain)) => domain == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// Runs Buildkite's agent to print a token. Its standard error is inherited.
async fn run_agent(program: &Path, audience: &str) -> anyhow::Result<String> {
    let name = program.display();
    let mut command = Command::new(program);
    command.args(["oidc", "request-token", "--audience", audience]);
    command.stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = tokio::time::timeout(TOKEN_TIMEOUT, command.output())
        .await
        .map_err(|_| anyhow!("{name} issued no identity token in {} seconds", TOKEN_TIMEOUT.as_secs()))?
        .map_err(|error| anyhow!("cannot run {name}: {}", io_error_text(&error)))?;
    ensure!(output.status.success(), "{name} issued no identity token: {}", output.status);
    read_limited(output.stdout.as_slice(), &name)
}

#[cfg(test)]
mod tests;
