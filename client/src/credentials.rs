//! Resolves the credentials: API URL, namespace and key.
//!
//! Command line options and environment variables take precedence, field by field. The remaining fields come from one
//! file: the one given with `--profile` or `--credentials`, else the profile in use, else the one written by
//! `muster login`, else the one written by `muster serve` on this host.
//!
//! A key is sent only to the URL that it was created for: a file is used only for its own URL, and `MUSTER_KEY` only for
//! `MUSTER_API_URL`. `MUSTER_KEY` alone is never combined with the URL of a file or of the command line.

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use muster_types::key::Secret;
use nix::unistd::geteuid;
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use crate::error_text::io_error_text;
use crate::output::escape_control;

const FILE_NAME: &str = "credentials.json";
/// The data directory of a daemon that runs as root.
const SYSTEM_DATA_DIR: &str = "/var/lib/muster";

/// The credentials for a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The namespace to act as.
    pub namespace: String,
    /// The secret of one of the namespace's keys.
    pub key: Secret,
    /// The URL of the API.
    pub apiurl: String,
}

/// Credentials from the command line and the environment.
#[derive(Debug, Clone, Default)]
pub struct CredentialOptions {
    pub namespace: Option<String>,
    pub key: Option<Secret>,
    pub apiurl: Option<String>,
    /// A credentials file, which replaces the default ones.
    pub file: Option<PathBuf>,
    pub environment: EnvironmentCredentials,
}

/// The key of the environment and its URL, which command line options may replace one by one.
#[derive(Debug, Clone, Default)]
pub struct EnvironmentCredentials {
    pub key: Option<Secret>,
    pub apiurl: Option<String>,
}

impl EnvironmentCredentials {
    /// Reads `MUSTER_KEY` and `MUSTER_API_URL`. Empty variables count as unset.
    #[must_use]
    pub fn read() -> Self {
        let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
        Self { key: variable("MUSTER_KEY").map(Secret::new), apiurl: variable("MUSTER_API_URL") }
    }

    /// Fails if `key` is the one of the environment and `apiurl` is not the URL that it is for.
    pub(crate) fn check(&self, key: Option<&Secret>, apiurl: Option<&str>) -> anyhow::Result<()> {
        if key.is_none() || key != self.key.as_ref() {
            return Ok(());
        }
        match (apiurl, &self.apiurl) {
            (Some(given), Some(own)) if !is_same_url(given, own) => bail!(
                "MUSTER_KEY is for MUSTER_API_URL {}, not for {}, and was not sent; give --key, or set both variables",
                escape_control(own),
                escape_control(given)
            ),
            (_, None) => bail!(
                "MUSTER_KEY is set without a URL and was not sent; set MUSTER_API_URL to the URL of its cluster, or give the key with --key"
            ),
            (None | Some(_), Some(_)) => Ok(()),
        }
    }
}

/// Returns whether two API URLs have the same scheme, host, port and path.
fn is_same_url(a: &str, b: &str) -> bool {
    let normalize = |url: &str| Url::parse(url).map(|url| url.as_str().trim_end_matches('/').to_owned());
    match (normalize(a), normalize(b)) {
        (Ok(a), Ok(b)) => a == b,
        (Err(_), _) | (_, Err(_)) => a == b,
    }
}

impl CredentialOptions {
    /// Treats empty values as absent.
    #[must_use]
    pub fn without_empty(self) -> Self {
        Self {
            namespace: self.namespace.filter(|text| !text.is_empty()),
            key: self.key.filter(|key| !key.expose().is_empty()),
            apiurl: self.apiurl.filter(|text| !text.is_empty()),
            file: self.file.filter(|path| !path.as_os_str().is_empty()),
            environment: self.environment,
        }
    }
}

/// The default credentials files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialFiles {
    /// The profile in use, if one was chosen.
    pub profile: Option<PathBuf>,
    /// Written by `muster login`; `None` for a user without a home directory.
    pub login: Option<PathBuf>,
    /// Written by `muster serve`.
    pub daemon: PathBuf,
}

impl CredentialFiles {
    /// Returns the files of the current user.
    #[must_use]
    pub fn for_current_user() -> Self {
        Self {
            profile: None,
            login: config_dir().map(|dir| dir.join(FILE_NAME)),
            daemon: default_data_dir().join(FILE_NAME),
        }
    }
}

/// Returns the default data directory of `muster serve`.
#[must_use]
pub fn default_data_dir() -> PathBuf {
    let system = || PathBuf::from(SYSTEM_DATA_DIR);
    if geteuid().is_root() {
        return system();
    }
    user_dir(env::var_os("XDG_DATA_HOME"), env::home_dir(), ".local/share").unwrap_or_else(system)
}

/// Returns where the command line keeps credentials; `None` for a user without a home directory.
pub(crate) fn config_dir() -> Option<PathBuf> {
    user_dir(env::var_os("XDG_CONFIG_HOME"), env::home_dir(), ".config")
}

/// Returns where the command line keeps state between runs; `None` for a user without a home directory.
pub(crate) fn state_dir() -> Option<PathBuf> {
    user_dir(env::var_os("XDG_STATE_HOME"), env::home_dir(), ".local/state")
}

/// Returns our directory in one of the user's base directories. The XDG specification ignores relative settings.
fn user_dir(set: Option<OsString>, home: Option<PathBuf>, default: &str) -> Option<PathBuf> {
    let set = set.map(PathBuf::from).filter(|path| path.is_absolute());
    let base = set.or_else(|| home.filter(|home| home.is_absolute()).map(|home| home.join(default)))?;
    Some(base.join("muster"))
}

/// Resolves the credentials to use. Fails if a key would be sent to another URL than its own.
pub fn resolve(given: &CredentialOptions, files: &CredentialFiles) -> anyhow::Result<Credentials> {
    given.environment.check(given.key.as_ref(), given.apiurl.as_deref())?;
    if let (Some(namespace), Some(key), Some(apiurl)) = (&given.namespace, &given.key, &given.apiurl) {
        return Ok(Credentials { namespace: namespace.clone(), key: key.clone(), apiurl: apiurl.clone() });
    }
    let apiurl = given.apiurl.as_deref();
    let found = match &given.file {
        Some(file) => read_first(&[file], apiurl)?
            .ok_or_else(|| anyhow!("credentials {}: no such file", file.display()))?,
        None => read_default(files, apiurl)?,
    };
    Ok(Credentials {
        namespace: given.namespace.clone().unwrap_or(found.namespace),
        key: given.key.clone().unwrap_or(found.key),
        apiurl: given.apiurl.clone().unwrap_or(found.apiurl),
    })
}

fn read_default(files: &CredentialFiles, apiurl: Option<&str>) -> anyhow::Result<Credentials> {
    let paths: Vec<&Path> =
        files.profile.iter().chain(&files.login).chain([&files.daemon]).map(PathBuf::as_path).collect();
    if let Some(found) = read_first(&paths, apiurl)? {
        return Ok(found);
    }
    let searched: Vec<String> = paths.iter().map(|file| file.display().to_string()).collect();
    bail!(
        "no credentials found in {}; start `muster serve` on this host, log in with `muster login`, or give --api-url, \
         --namespace and --key",
        searched.join(" or ")
    )
}

/// Returns the first credentials for `apiurl`, or without a URL the first ones. Returns `None` if no file exists, and
/// fails if all files are for other URLs.
fn read_first(paths: &[&Path], apiurl: Option<&str>) -> anyhow::Result<Option<Credentials>> {
    let mut others = vec![];
    for path in paths {
        let Some(found) = read(path)? else { continue };
        if apiurl.is_none_or(|apiurl| is_same_url(apiurl, &found.apiurl)) {
            return Ok(Some(found));
        }
        others.push(format!("{} are for {}", path.display(), escape_control(&found.apiurl)));
    }
    let Some(apiurl) = apiurl.filter(|_| !others.is_empty()) else { return Ok(None) };
    let apiurl = escape_control(apiurl);
    bail!(
        "credentials {}, not for {apiurl}, and were not sent; log in with `muster --api-url {apiurl} --namespace NAMESPACE \
         login`, or give --namespace and --key",
        others.join(", and credentials ")
    )
}

/// Returns whether a credentials file is for the server at a URL.
pub(crate) fn is_for(path: &Path, apiurl: &str) -> bool {
    matches!(read(path), Ok(Some(found)) if is_same_url(&found.apiurl, apiurl))
}

/// Reads a credentials file. Returns `None` if it does not exist.
fn read(path: &Path) -> anyhow::Result<Option<Credentials>> {
    #[derive(Deserialize)]
    struct File {
        namespace: String,
        key: String,
        apiurl: String,
    }
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => bail!("cannot read credentials {}: {}", path.display(), io_error_text(&error)),
    };
    // The parser's own message could quote the secret.
    let file: File = serde_json::from_str(&text).map_err(|error| {
        anyhow!(
            "credentials {}: line {}: expected JSON with the strings namespace, key and apiurl",
            path.display(),
            error.line()
        )
    })?;
    Ok(Some(Credentials { namespace: file.namespace, key: Secret::new(file.key), apiurl: file.apiurl }))
}

/// Writes credentials to a file that only its owner can read.
pub fn save(path: &Path, credentials: &Credentials) -> anyhow::Result<()> {
    let mut text = json!({
        "namespace": credentials.namespace, "key": credentials.key.expose(), "apiurl": credentials.apiurl
    });
    if let Some(cacert) = cacert_of(path, &credentials.apiurl) {
        text["cacert"] = cacert;
    }
    write_private(path, &format!("{text:#}\n"))
}

/// Returns the certificates that a file names for the server at a URL.
pub(crate) fn cacert_of(path: &Path, apiurl: &str) -> Option<Value> {
    let mut file: Value = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
    let is_for_url = file["apiurl"].as_str().is_some_and(|own| is_same_url(own, apiurl));
    is_for_url.then(|| file["cacert"].take()).filter(|cacert| !cacert.is_null())
}

/// Writes a file atomically that only its owner can read.
pub fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    PrivateFile::create(path)?.write(text)
}

/// A file that only its owner can read, and that does not have its name until it is written.
#[derive(Debug)]
pub(crate) struct PrivateFile<'a> {
    path: &'a Path,
    temporary: PathBuf,
    file: fs::File,
}

impl<'a> PrivateFile<'a> {
    /// Creates the file under a temporary name, and the directories of its path.
    pub(crate) fn create(path: &'a Path) -> anyhow::Result<Self> {
        let temporary = path.with_extension(format!("{}.new", std::process::id()));
        let create = || {
            DirBuilder::new().recursive(true).mode(0o700).create(parent(path))?;
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)
        };
        let file = create().map_err(|error| cannot_write(path, &error))?;
        Ok(Self { path, temporary, file })
    }

    /// Writes the file, and replaces the one that has its name.
    pub(crate) fn write(mut self, text: &str) -> anyhow::Result<()> {
        let mut write = || {
            self.file.write_all(text.as_bytes())?;
            self.file.sync_all()?;
            fs::rename(&self.temporary, self.path)?;
            // The rename must survive a power failure, too.
            fs::File::open(parent(self.path))?.sync_all()
        };
        write().map_err(|error| cannot_write(self.path, &error))
    }
}

impl Drop for PrivateFile<'_> {
    fn drop(&mut self) {
        // Exists only if the file was not written; it may contain a secret then.
        let _ = fs::remove_file(&self.temporary);
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn cannot_write(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("cannot write {}: {}", path.display(), io_error_text(error))
}

/// Removes a credentials file. Returns whether it existed.
pub fn remove(path: &Path) -> anyhow::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => bail!("cannot remove credentials {}: {}", path.display(), io_error_text(&error)),
    }
}

/// Returns the file that a login is saved in: the given one, or the default of the current user.
pub(crate) fn login_file(given: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let given = given.filter(|file| !file.as_os_str().is_empty());
    given
        .or_else(|| CredentialFiles::for_current_user().login)
        .context("cannot save the login: set HOME or XDG_CONFIG_HOME, or give --credentials")
}

#[cfg(test)]
mod tests;
