//! `/agent`: what a guest needs to get an agent, with one line: `curl -fsS <address>/agent/install.sh | sh`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::Mutex;

use crate::error::ApiResult;
use crate::response::text;
use muster_control::app::App;

const SCRIPT: &str = include_str!("../../packaging/agent/install.sh");
/// What stands in the script for the address of this API.
const URL: &str = "@URL@";
const NAME: &str = "muster-agent";
/// No name of a host is longer, with its port.
const LONGEST_HOST: usize = 255 + 6;

/// A script that installs the agent in a guest.
#[utoipa::path(get, path = "/agent/install.sh", tag = "agent", responses(
    (status = 200, description = "a shell script", content_type = "text/x-shellscript", body = String),
    (status = 400, description = "the request does not say for which host it is")))]
pub(crate) async fn install(State(app): State<Arc<App>>, headers: HeaderMap) -> ApiResult {
    let script = SCRIPT.replace(URL, &address(&app.settings, &headers)?);
    Ok(text("text/x-shellscript; charset=utf-8", script))
}

/// The agent: a program for guests that run Linux on the kind of processor that this machine has.
#[utoipa::path(get, path = "/agent/muster-agent", tag = "agent", responses(
    (status = 200, description = "the program", content_type = "application/octet-stream", body = Vec<u8>),
    (status = 404, description = "this daemon has no agent to hand out")))]
pub(crate) async fn program(State(app): State<Arc<App>>) -> ApiResult {
    let places = places(&app.settings, std::env::current_exe().ok().as_deref());
    for place in &places {
        match read(place).await {
            Ok(program) => return Ok(text("application/octet-stream", program)),
            Err(error) => tracing::debug!(place = %place.display(), %error, "no agent here"),
        }
    }
    let text = match app.settings.agent_program.is_empty() {
        true => "there is no muster-agent beside the program of this daemon, and AGENT_PROGRAM is not set",
        false => "the file that AGENT_PROGRAM names cannot be read",
    };
    Err(Error::NotFound(text.into()).into())
}

/// The program, of which all callers share one copy: anybody may ask for it, and take it as slowly as they like.
async fn read(place: &Path) -> std::io::Result<Bytes> {
    type Copy = (PathBuf, std::time::SystemTime, Bytes);
    static LAST: Mutex<Option<Copy>> = Mutex::const_new(None);
    let written = tokio::fs::metadata(place).await?.modified()?;
    let mut last = LAST.lock().await;
    match &*last {
        Some((path, time, program)) if path == place && *time == written => Ok(program.clone()),
        _ => {
            let program = Bytes::from(tokio::fs::read(place).await?);
            *last = Some((place.to_owned(), written, program.clone()));
            Ok(program)
        }
    }
}

/// Where the agent may be, the best place first.
fn places(settings: &Settings, own: Option<&Path>) -> Vec<PathBuf> {
    if !settings.agent_program.is_empty() {
        return vec![PathBuf::from(&settings.agent_program)];
    }
    let Some(folder) = own.and_then(Path::parent) else { return Vec::new() };
    // As it is installed, and as it is built.
    vec![folder.join(NAME), folder.join("../agent").join(NAME)]
}

/// The address that the caller used, as far as it can be told.
fn address(settings: &Settings, headers: &HeaderMap) -> Result<String> {
    let of = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = of(header::HOST.as_str()).unwrap_or_default();
    // It becomes part of a script.
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if host.is_empty() || host.len() > LONGEST_HOST || !host.bytes().all(harmless) {
        return Err(Error::Invalid("Host: must be the name or address of this service".into()));
    }
    // A proxy says how it was spoken to.
    let scheme = match of("x-forwarded-proto") {
        Some("https") => "https",
        Some("http") => "http",
        _ if settings.tls_certificate.is_empty() => "http",
        _ => "https",
    };
    Ok(format!("{scheme}://{host}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn the_address_is_that_of_the_caller_and_nothing_else() {
        let plain = Settings::defaults();
        let read =
            |settings: &Settings, pairs: &[(&'static str, &str)]| address(settings, &headers(pairs)).ok();
        assert_eq!(read(&plain, &[("host", "cloud:13000")]).unwrap(), "http://cloud:13000");
        assert_eq!(read(&plain, &[("host", "[fd00::1]:13000")]).unwrap(), "http://[fd00::1]:13000");
        let forwarded = [("host", "cloud"), ("x-forwarded-proto", "https")];
        assert_eq!(read(&plain, &forwarded).unwrap(), "https://cloud");
        let pairs = [("TLS_CERTIFICATE", "/a"), ("TLS_PRIVATE_KEY", "/b")];
        let encrypted = Settings::with(&pairs).unwrap();
        assert_eq!(read(&encrypted, &[("host", "cloud")]).unwrap(), "https://cloud");
        for bad in ["", "a b", "x;reboot", "$(reboot)", "a\"b", "user@host", "a/b"] {
            assert_eq!(read(&plain, &[("host", bad)]), None, "{bad}");
        }
        assert_eq!(read(&plain, &[]), None);
    }

    #[test]
    fn the_program_is_where_the_setting_says_or_beside_ours() {
        let own = Path::new("/opt/release/muster");
        let beside = ["/opt/release/muster-agent", "/opt/release/../agent/muster-agent"].map(PathBuf::from);
        assert_eq!(places(&Settings::defaults(), Some(own)), beside);
        let set = Settings::with(&[("AGENT_PROGRAM", "/x/agent")]).unwrap();
        assert_eq!(places(&set, Some(own)), [PathBuf::from("/x/agent")]);
        assert!(places(&Settings::defaults(), None).is_empty());
    }

    #[test]
    fn the_script_names_the_address_somewhere() {
        assert!(SCRIPT.starts_with("#!/bin/sh") && SCRIPT.contains(URL));
    }
}
