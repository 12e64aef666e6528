//! `/agent`: the agent and its installer, for `curl -fsS <address>/agent/install.sh | sh` in a guest.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::Mutex;

use crate::error::ApiResult;
use crate::response::content;
use muster_control::app::App;

const SCRIPT: &str = include_str!("../../../packaging/agent/install.sh");
/// The placeholder for the URL of this API in the script.
const URL_PLACEHOLDER: &str = "@URL@";
const PROGRAM_NAME: &str = "muster-agent";
/// The maximum length of a host name with a port.
const MAX_HOST_LENGTH: usize = 255 + 6;

/// Returns a script that installs the agent in a guest.
#[utoipa::path(get, path = "/agent/install.sh", tag = "agent", responses((status = 200, description = "A shell script.", content_type = "text/x-shellscript", body = String),
    (status = 400, description = "The request has no valid `Host` header.")))]
pub(crate) async fn install(State(app): State<Arc<App>>, headers: HeaderMap) -> ApiResult<Response> {
    let script = SCRIPT.replace(URL_PLACEHOLDER, &base_url(&app.settings, &headers)?);
    Ok(content("text/x-shellscript; charset=utf-8", script))
}

/// Returns the agent, a program for Linux guests with the CPU architecture of this host.
#[utoipa::path(get, path = "/agent/muster-agent", tag = "agent", responses((status = 200, description = "The program.", content_type = "application/octet-stream", body = Vec<u8>),
    (status = 404, description = "This daemon has no agent.")))]
pub(crate) async fn program(State(app): State<Arc<App>>) -> ApiResult<Response> {
    let candidates = candidates(&app.settings, std::env::current_exe().ok().as_deref());
    for path in &candidates {
        match read(path).await {
            Ok(program) => return Ok(content("application/octet-stream", program)),
            Err(error) => tracing::debug!(path = %path.display(), %error, "failed to read agent"),
        }
    }
    let text = match app.settings.agent_program.is_empty() {
        true => "there is no muster-agent next to the daemon's executable; set AGENT_PROGRAM to its path",
        false => "the file that AGENT_PROGRAM names cannot be read",
    };
    Err(Error::NotFound(text.into()).into())
}

/// Reads the program. All callers share one copy, because anyone may request it and read it slowly.
async fn read(path: &Path) -> std::io::Result<Bytes> {
    type CachedProgram = (PathBuf, std::time::SystemTime, Bytes);
    static CACHE: Mutex<Option<CachedProgram>> = Mutex::const_new(None);
    let modified = tokio::fs::metadata(path).await?.modified()?;
    let mut cache = CACHE.lock().await;
    match &*cache {
        Some((cached, time, program)) if cached == path && *time == modified => Ok(program.clone()),
        _ => {
            let program = Bytes::from(tokio::fs::read(path).await?);
            *cache = Some((path.to_owned(), modified, program.clone()));
            Ok(program)
        }
    }
}

/// Returns the paths where the agent may be, in order of preference.
fn candidates(settings: &Settings, executable: Option<&Path>) -> Vec<PathBuf> {
    if !settings.agent_program.is_empty() {
        return vec![PathBuf::from(&settings.agent_program)];
    }
    let Some(directory) = executable.and_then(Path::parent) else { return Vec::new() };
    // The installed layouts, then the one of a build directory.
    ["", "../lib/muster", "../agent"].map(|layout| directory.join(layout).join(PROGRAM_NAME)).into()
}

/// Returns the URL of this API from the point of view of the caller.
fn base_url(settings: &Settings, headers: &HeaderMap) -> Result<String> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = header(axum::http::header::HOST.as_str()).unwrap_or_default();
    // The host becomes part of a shell script.
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if host.is_empty() || host.len() > MAX_HOST_LENGTH || !host.bytes().all(is_safe) {
        return Err(Error::Invalid("Host: must be the name or address of this service".into()));
    }
    let scheme = match header("x-forwarded-proto") {
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
    fn base_url_follows_the_request_and_rejects_unsafe_hosts() {
        let plain = Settings::defaults();
        let read =
            |settings: &Settings, pairs: &[(&'static str, &str)]| base_url(settings, &headers(pairs)).ok();
        assert_eq!(read(&plain, &[("host", "cloud:13000")]).unwrap(), "http://cloud:13000");
        assert_eq!(read(&plain, &[("host", "[fd00::1]:13000")]).unwrap(), "http://[fd00::1]:13000");
        let forwarded = [("host", "cloud"), ("x-forwarded-proto", "https")];
        assert_eq!(read(&plain, &forwarded).unwrap(), "https://cloud");
        let pairs = [("TLS_CERTIFICATE", "/a"), ("TLS_PRIVATE_KEY", "/b")];
        let encrypted = Settings::from_pairs(&pairs).unwrap();
        assert_eq!(read(&encrypted, &[("host", "cloud")]).unwrap(), "https://cloud");
        for bad in ["", "a b", "x;reboot", "$(reboot)", "a\"b", "user@host", "a/b"] {
            assert_eq!(read(&plain, &[("host", bad)]), None, "{bad}");
        }
        assert_eq!(read(&plain, &[]), None);
    }

    #[test]
    fn looks_for_the_program_at_the_setting_or_next_to_the_executable() {
        let executable = Path::new("/opt/release/muster");
        let expected = ["muster-agent", "../lib/muster/muster-agent", "../agent/muster-agent"]
            .map(|path| Path::new("/opt/release").join(path));
        assert_eq!(candidates(&Settings::defaults(), Some(executable)), expected);
        let set = Settings::from_pairs(&[("AGENT_PROGRAM", "/x/agent")]).unwrap();
        assert_eq!(candidates(&set, Some(executable)), [PathBuf::from("/x/agent")]);
        assert!(candidates(&Settings::defaults(), None).is_empty());
    }

    #[test]
    fn script_contains_the_url_placeholder() {
        assert!(SCRIPT.starts_with("#!/bin/sh") && SCRIPT.contains(URL_PLACEHOLDER));
    }
}
