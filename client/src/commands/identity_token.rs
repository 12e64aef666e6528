//! Where `muster login --federated` finds an identity token: in a file, in a variable, or with the CI system that it
//! runs in. A token is never an argument of a program and never part of a message.

use std::fmt::Display;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Args;
use muster_types::key::Secret;
use reqwest::{Response, Url, redirect};
use serde_json::Value;
use tokio::process::Command;

use crate::api::{innermost, io_text};

/// The largest file or answer with a token; servers take far less.
const LARGEST: u64 = 65_536;
/// How long a CI system may take to make one.
const PATIENCE: Duration = Duration::from_secs(30);
/// What makes tokens in jobs of Buildkite.
const BUILDKITE_AGENT: &str = "buildkite-agent";
/// Where to ask for a token in jobs of GitHub Actions and of those that imitate them, and the proof to ask with.
const REQUEST_URL: &str = "ACTIONS_ID_TOKEN_REQUEST_URL";
const REQUEST_TOKEN: &str = "ACTIONS_ID_TOKEN_REQUEST_TOKEN";
/// Variables that hold a token: the one that people name for us, then those of GitLab and CircleCI.
const VARIABLES: [&str; 4] =
    ["MUSTER_ID_TOKEN", "CI_JOB_JWT_V2", "CIRCLE_OIDC_TOKEN_V2", "CIRCLE_OIDC_TOKEN"];
/// The variable that names a file with a token.
const FILE_VARIABLE: &str = "MUSTER_ID_TOKEN_FILE";

/// The value of a variable, if it has one.
pub(super) type Environment<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// Where the token is to come from, if not from the CI system.
#[derive(Debug, Default, Args)]
pub(super) struct TokenPlace {
    /// Read the identity token from this file, or from standard input if it is -
    #[arg(long, value_name = "FILE", requires = "federated", conflicts_with_all = ["token_env", "audience"])]
    pub(super) token_file: Option<PathBuf>,
    /// Name of the environment variable that holds the identity token
    #[arg(long, value_name = "NAME", requires = "federated", conflicts_with = "audience")]
    pub(super) token_env: Option<String>,
    /// Whom the CI system is to make the identity token for: the audience of the issuer
    #[arg(long, requires = "federated")]
    pub(super) audience: Option<String>,
}

/// Where a token is.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    StandardInput,
    File(PathBuf),
    Variable {
        name: String,
        value: Secret,
    },
    /// Asked for over HTTPS.
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

/// The identity token.
pub(super) async fn get(arguments: TokenPlace, environment: Environment<'_>) -> anyhow::Result<Secret> {
    match find(arguments, environment)? {
        Source::StandardInput => check(&read(io::stdin(), &"standard input")?, &"standard input"),
        Source::File(path) => {
            let name = path.display();
            let file = std::fs::File::open(&path).map_err(|error| {
                anyhow!("cannot read the identity token from {name}: {}", io_text(&error))
            })?;
            check(&read(file, &name)?, &name)
        }
        Source::Variable { name, value } => check(value.expose(), &name),
        Source::Service { url, bearer, audience } => {
            let answer = ask(&url, &bearer, &audience).await.context("cannot get an identity token")?;
            check(&answer, &"what the CI system answered")
        }
        Source::Program { audience } => {
            check(&print(Path::new(BUILDKITE_AGENT), &audience).await?, &BUILDKITE_AGENT)
        }
    }
}

/// Where the token is: where the caller says, else where the caller's environment says, else where a CI system has it.
fn find(arguments: TokenPlace, environment: Environment<'_>) -> anyhow::Result<Source> {
    let variable = |name: &str| environment(name).filter(|value| !value.is_empty());
    let holding = |name: &str| {
        variable(name).map(|value| Source::Variable { name: name.to_owned(), value: Secret::new(value) })
    };
    if let Some(path) = arguments.token_file {
        return Ok(if path.as_os_str() == "-" { Source::StandardInput } else { Source::File(path) });
    }
    if let Some(name) = arguments.token_env {
        // Somebody may give the token itself, which must not be shown.
        ensure!(is_name(&name), "--token-env takes the name of a variable");
        return holding(&name).with_context(|| format!("the variable {name} is not set"));
    }
    if let Some(source) = holding(VARIABLES[0]) {
        return Ok(source);
    }
    if let Some(path) = variable(FILE_VARIABLE) {
        return Ok(Source::File(path.into()));
    }
    let audience = |system: &str| {
        let audience = arguments.audience.clone();
        audience.with_context(|| {
            format!("{system} makes tokens for an audience: give --audience, that of the issuer")
        })
    };
    if let (Some(url), Some(bearer)) = (variable(REQUEST_URL), variable(REQUEST_TOKEN)) {
        return Ok(Source::Service {
            url,
            bearer: Secret::new(bearer),
            audience: audience("this CI system")?,
        });
    }
    if variable("BUILDKITE").is_some() {
        return Ok(Source::Program { audience: audience("Buildkite")? });
    }
    VARIABLES.into_iter().find_map(holding).with_context(|| nowhere(environment))
}

/// What was looked for, and what the job of a known system lacks.
fn nowhere(environment: Environment<'_>) -> String {
    let hint = if environment("FORGEJO_ACTIONS").is_some() {
        "; a workflow of Forgejo gets one with `enable-openid-connect: true`"
    } else if environment("GITHUB_ACTIONS").is_some() {
        "; a job of GitHub gets one with the permission `id-token: write`"
    } else if environment("GITLAB_CI").is_some() {
        "; a job of GitLab gets one with `id_tokens` and the name MUSTER_ID_TOKEN in it"
    } else {
        ""
    };
    format!(
        "no identity token: looked for {}, {FILE_VARIABLE}, {REQUEST_URL} and Buildkite; give --token-file or \
         --token-env{hint}",
        VARIABLES.join(", ")
    )
}

fn is_name(text: &str) -> bool {
    let word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    (1..=128).contains(&text.len()) && text.chars().all(word)
}

/// All that somebody has to say, within bounds.
fn read(from: impl io::Read, whence: &dyn Display) -> anyhow::Result<String> {
    let mut text = String::new();
    match from.take(LARGEST + 1).read_to_string(&mut text) {
        Ok(length) if length as u64 > LARGEST => bail!("{whence} is too large for an identity token"),
        Ok(_) => Ok(text),
        Err(error) => bail!("cannot read the identity token from {whence}: {}", io_text(&error)),
    }
}

/// A token, if the text can be one. Nothing else is sent anywhere: the file may have been the wrong one.
fn check(text: &str, whence: &dyn Display) -> anyhow::Result<Secret> {
    let text = text.trim();
    let encoded = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    ensure!(!text.is_empty(), "{whence} is empty, where an identity token should be");
    ensure!(text.split('.').count() == 3 && text.split('.').all(encoded), "{whence} is no identity token");
    Ok(Secret::new(text))
}

/// Asks the service of GitHub Actions for a token.
async fn ask(url: &str, bearer: &Secret, audience: &str) -> anyhow::Result<String> {
    let mut url = Url::parse(url).map_err(|error| anyhow!("{REQUEST_URL}: {error}"))?;
    ensure!(
        url.scheme() == "https" || url.scheme() == "http" && is_loopback(&url),
        "{REQUEST_URL} is not https, so the proof to ask with would be seen on its way"
    );
    url.query_pairs_mut().append_pair("audience", audience);
    let mut http = reqwest::Client::builder().timeout(PATIENCE).redirect(redirect::Policy::none());
    if url.scheme() == "http" {
        // It stays on this machine; and certificates are not needed, of which a small one may have none.
        http = http.no_proxy().tls_certs_only([]);
    }
    let http = http.build().map_err(|error| anyhow!("cannot prepare for HTTPS: {}", innermost(&error)))?;
    let host = url.host_str().unwrap_or_default().to_owned();
    let unreachable = |error: &reqwest::Error| {
        anyhow!(
            "{host}: {}",
            if error.is_timeout() { "no answer in time".to_owned() } else { innermost(error) }
        )
    };
    let request = http.get(url).bearer_auth(bearer.expose());
    let response = request.send().await.map_err(|error| unreachable(&error))?;
    ensure!(response.status().is_success(), "{host} answered {}", response.status());
    let body = body(response).await.map_err(|error| unreachable(&error))?;
    let answer: Value =
        serde_json::from_slice(&body).map_err(|_| anyhow!("{host} did not answer with JSON"))?;
    let token = answer.get("value").and_then(Value::as_str);
    token.map(str::to_owned).with_context(|| format!("the answer of {host} has no token in it"))
}

/// The beginning of an answer, which is all of one that makes sense.
async fn body(mut response: Response) -> reqwest::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await? {
        body.extend_from_slice(&piece);
        if body.len() as u64 > LARGEST {
            break;
        }
    }
    Ok(body)
}

fn is_loopback(url: &Url) -> bool {
    let Some(host) = url.host_str() else { return false };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Has Buildkite's agent print a token. Its complaints are shown as they are.
async fn print(program: &Path, audience: &str) -> anyhow::Result<String> {
    let name = program.display();
    let mut command = Command::new(program);
    command.args(["oidc", "request-token", "--audience", audience]);
    command.stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output())
        .await
        .map_err(|_| anyhow!("{name} made no identity token in {} seconds", PATIENCE.as_secs()))?
        .map_err(|error| anyhow!("cannot run {name}: {}", io_text(&error)))?;
    ensure!(output.status.success(), "{name} made no identity token: {}", output.status);
    read(output.stdout.as_slice(), &name)
}

#[cfg(test)]
#[path = "identity_token/tests.rs"]
mod tests;
