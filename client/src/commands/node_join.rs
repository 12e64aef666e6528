//! `muster node join`: writes the settings with which an invited host joins a cluster.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use muster_types::invitation::{InvitationToken, JoinSettings, RedeemedInvitation};
use muster_types::settings::parse_file;
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::credentials::PrivateFile;
use crate::output::{escape_control, print};

const TIMEOUT: Duration = Duration::from_secs(30);
/// The settings that an invitation contains.
const NAMES: [&str; 2] = ["DATABASE_URL", "AUTH_SECRET_SEED"];

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Token that `muster node invite` has printed
    token: String,
    /// Settings file of this host, which is created or extended
    #[arg(long, value_name = "FILE", default_value = "/etc/muster/muster.conf")]
    config: PathBuf,
}

pub(super) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let token = InvitationToken::parse(&arguments.token).map_err(|why| anyhow!("TOKEN: {why}"))?;
    // Before the token is used, because that is possible only once.
    let existing = existing_settings(&arguments.config)?;
    let file = PrivateFile::create(&arguments.config)?;
    let settings = redeem(&token).await?;
    let quote = |text: &str| if text.contains('"') { format!("'{text}'") } else { format!("\"{text}\"") };
    let values = [settings.database_url.expose(), settings.auth_secret_seed.expose()];
    let lines = NAMES.iter().zip(values).map(|(name, value)| format!("{name} = {}\n", quote(value)));
    let separator = if existing.is_empty() || existing.ends_with('\n') { "" } else { "\n" };
    let text =
        format!("{existing}{separator}# Written by `muster node join`.\n{}", lines.collect::<String>());
    file.write(&text)?;
    let file = arguments.config.display();
    print(&format!(
        "wrote {file}. Start this host as a node with:\n  muster serve --config {file} --listen 0.0.0.0:13000\n"
    ))
}

/// Returns the text of the settings file, which must not belong to a cluster already.
fn existing_settings(path: &Path) -> anyhow::Result<String> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let settings = parse_file(&text).map_err(|why| anyhow!("{}: {why}", path.display()))?;
    if let Some(name) = NAMES.iter().find(|name| settings.contains_key(**name)) {
        bail!("{} already sets {name}: remove it, or use another file with --config", path.display());
    }
    Ok(text)
}

/// Exchanges the token for the settings of the cluster.
async fn redeem(token: &InvitationToken) -> anyhow::Result<JoinSettings> {
    let unreachable = || format!("cannot reach the cluster at {}", escape_control(&token.api_url));
    // The response is encrypted with the secret of the token, so the certificate of the server does not matter.
    let client = reqwest::Client::builder().timeout(TIMEOUT).tls_danger_accept_invalid_certs(true).build()?;
    let request = client.post(format!("{}/admin/invitations/redeem", token.api_url));
    let request = request.json(&json!({ "invitation": token.id, "proof": token.proof() }));
    let response = request.send().await.with_context(unreachable)?;
    let status = response.status();
    if !status.is_success() {
        let body: Value = response.json().await.unwrap_or_default();
        let reason = escape_control(body["error"].as_str().unwrap_or("the cluster refused the token"));
        match status {
            StatusCode::NOT_FOUND => bail!("{reason}: create another one with `muster node invite`"),
            _ => bail!("{reason} (status {}): run the command again", status.as_u16()),
        }
    }
    let redeemed: RedeemedInvitation = response.json().await.with_context(unreachable)?;
    token.open(&redeemed.sealed).ok_or_else(|| {
        anyhow!(
            "the response of {} is not from the cluster that issued the token",
            escape_control(&token.api_url)
        )
    })
}
