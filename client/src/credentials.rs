//! Where the command line finds out which cluster to speak to, as whom, and with which key.
//!
//! What is given on the command line or in the environment wins, field by field. The rest comes from one
//! file: the one that is named, else the one that `muster login` wrote, else the one that `muster serve`
//! wrote on this machine.

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use muster_types::key::Secret;
use nix::unistd::geteuid;
use serde::Deserialize;
use serde_json::json;

use crate::api::io_text;

const FILE: &str = "credentials.json";
/// Where the data of a machine's own daemon is.
const SYSTEM_DATA: &str = "/var/lib/muster";

/// Which cluster, who, and the proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Who.
    pub namespace: String,
    /// The secret of one of the namespace's keys.
    pub key: Secret,
    /// Address of the API.
    pub apiurl: String,
}

/// What was given on the command line or in the environment.
#[derive(Debug, Clone, Default)]
pub struct Given {
    pub namespace: Option<String>,
    pub key: Option<Secret>,
    pub apiurl: Option<String>,
    /// A file of credentials; no other one is read.
    pub file: Option<PathBuf>,
}

impl Given {
    /// A variable that is set to nothing counts as not set.
    #[must_use]
    pub fn without_empty(self) -> Self {
        Self {
            namespace: self.namespace.filter(|text| !text.is_empty()),
            key: self.key.filter(|key| !key.expose().is_empty()),
            apiurl: self.apiurl.filter(|text| !text.is_empty()),
            file: self.file.filter(|path| !path.as_os_str().is_empty()),
        }
    }
}

/// The files that are looked at when none was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// Written by `muster login`; absent for a user without a home.
    pub login: Option<PathBuf>,
    /// Written by `muster serve`.
    pub daemon: PathBuf,
}

impl Places {
    /// The files of this user on this machine.
    #[must_use]
    pub fn of_this_user() -> Self {
        let config = user_dir(env::var_os("XDG_CONFIG_HOME"), env::home_dir(), ".config");
        Self { login: config.map(|dir| dir.join(FILE)), daemon: default_data_dir().join(FILE) }
    }
}

/// Where `muster serve` keeps its data unless told otherwise.
#[must_use]
pub fn default_data_dir() -> PathBuf {
    let system = || PathBuf::from(SYSTEM_DATA);
    if geteuid().is_root() {
        return system();
    }
    user_dir(env::var_os("XDG_DATA_HOME"), env::home_dir(), ".local/share").unwrap_or_else(system)
}

/// Where the command line keeps what it must remember between two runs; absent for a user without a home.
pub(crate) fn state_dir() -> Option<PathBuf> {
    user_dir(env::var_os("XDG_STATE_HOME"), env::home_dir(), ".local/state")
}

/// Our folder in one of the user's base folders. A relative setting is to be ignored, says its standard.
fn user_dir(set: Option<OsString>, home: Option<PathBuf>, default: &str) -> Option<PathBuf> {
    let set = set.map(PathBuf::from).filter(|path| path.is_absolute());
    let base = set.or_else(|| home.filter(|home| home.is_absolute()).map(|home| home.join(default)))?;
    Some(base.join("muster"))
}

/// The credentials to use.
pub fn find(given: &Given, places: &Places) -> anyhow::Result<Credentials> {
    if let (Some(namespace), Some(key), Some(apiurl)) = (&given.namespace, &given.key, &given.apiurl) {
        return Ok(Credentials { namespace: namespace.clone(), key: key.clone(), apiurl: apiurl.clone() });
    }
    let found = match &given.file {
        Some(file) => read(file)?.ok_or_else(|| anyhow!("credentials {}: no such file", file.display()))?,
        None => look(places)?,
    };
    Ok(Credentials {
        namespace: given.namespace.clone().unwrap_or(found.namespace),
        key: given.key.clone().unwrap_or(found.key),
        apiurl: given.apiurl.clone().unwrap_or(found.apiurl),
    })
}

fn look(places: &Places) -> anyhow::Result<Credentials> {
    let files: Vec<&Path> = places.login.iter().chain([&places.daemon]).map(PathBuf::as_path).collect();
    for file in &files {
        if let Some(found) = read(file)? {
            return Ok(found);
        }
    }
    let looked: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    bail!(
        "no credentials: looked in {}; start `muster serve` here, log in with `muster login`, or give --api-url, \
         --namespace and --key",
        looked.join(" and ")
    )
}

/// The credentials in a file, if there is one.
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
        Err(error) => bail!("cannot read credentials {}: {}", path.display(), io_text(&error)),
    };
    // The parser's own text could quote the secret.
    let file: File = serde_json::from_str(&text).map_err(|error| {
        anyhow!(
            "credentials {}: line {}: expected JSON with the strings namespace, key and apiurl",
            path.display(),
            error.line()
        )
    })?;
    Ok(Some(Credentials { namespace: file.namespace, key: Secret::new(file.key), apiurl: file.apiurl }))
}

/// Writes credentials to a file that only its owner may read.
pub fn save(path: &Path, credentials: &Credentials) -> anyhow::Result<()> {
    let text = json!({
        "namespace": credentials.namespace, "key": credentials.key.expose(), "apiurl": credentials.apiurl
    });
    write_private(path, &format!("{text:#}\n"))
}

/// Writes a file that only its owner may read, whole or not at all.
pub fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let unfinished = path.with_extension(format!("{}.new", std::process::id()));
    let write = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        // The new name must survive a power cut, too.
        fs::File::open(folder)?.sync_all()
    };
    write().map_err(|error| {
        // What was written may be a secret; and if nothing was, there is nothing to remove.
        let _ = fs::remove_file(&unfinished);
        anyhow!("cannot write {}: {}", path.display(), io_text(&error))
    })
}

/// Removes a file of credentials. Says whether there was one.
pub fn remove(path: &Path) -> anyhow::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => bail!("cannot remove credentials {}: {}", path.display(), io_text(&error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tempfile::TempDir;

    use super::*;

    fn of(namespace: &str) -> Credentials {
        Credentials {
            namespace: namespace.into(),
            key: Secret::new(format!("key of {namespace}")),
            apiurl: format!("http://{namespace}:13000"),
        }
    }

    fn places(folder: &TempDir) -> Places {
        Places {
            login: Some(folder.path().join("config/muster/credentials.json")),
            daemon: folder.path().join("data/credentials.json"),
        }
    }

    #[test]
    fn flags_win_over_the_named_file_and_that_over_the_login_and_that_over_the_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(&folder);
        let named = folder.path().join("mine.json");
        let given = |file: Option<&Path>| Given { file: file.map(Path::to_owned), ..Given::default() };

        save(&places.daemon, &of("daemon")).unwrap();
        assert_eq!(find(&given(None), &places).unwrap(), of("daemon"));
        save(places.login.as_ref().unwrap(), &of("login")).unwrap();
        assert_eq!(find(&given(None), &places).unwrap(), of("login"));
        save(&named, &of("named")).unwrap();
        assert_eq!(find(&given(Some(&named)), &places).unwrap(), of("named"));
        let flags = of("flags");
        let all = Given {
            namespace: Some(flags.namespace.clone()),
            key: Some(flags.key.clone()),
            apiurl: Some(flags.apiurl.clone()),
            file: Some(named),
        };
        assert_eq!(find(&all, &places).unwrap(), flags);
    }

    #[test]
    fn a_flag_alone_replaces_one_field_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(&folder);
        save(&places.daemon, &of("daemon")).unwrap();
        let found = find(&Given { namespace: Some("ci".into()), ..Given::default() }, &places).unwrap();
        assert_eq!(found, Credentials { namespace: "ci".into(), ..of("daemon") });
        let found =
            find(&Given { apiurl: Some("http://other".into()), ..Given::default() }, &places).unwrap();
        assert_eq!(found, Credentials { apiurl: "http://other".into(), ..of("daemon") });
    }

    #[test]
    fn nothing_found_says_where_it_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(&folder);
        let error = find(&Given { namespace: Some("ci".into()), ..Given::default() }, &places).unwrap_err();
        let error = error.to_string();
        for part in [places.login.as_ref().unwrap(), &places.daemon].map(|path| path.display().to_string()) {
            assert!(error.contains(&part), "{error}");
        }
        assert!(error.contains("muster login") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_missing_file_is_said_plainly() {
        let folder = tempfile::tempdir().unwrap();
        save(&places(&folder).daemon, &of("daemon")).unwrap();
        let given = Given { file: Some("/no/such/file".into()), ..Given::default() };
        let error = find(&given, &places(&folder)).unwrap_err();
        assert_eq!(error.to_string(), "credentials /no/such/file: no such file");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_said_and_not_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(&folder);
        save(&places.daemon, &of("daemon")).unwrap();
        // A folder cannot be read as a file by anyone, not even by root, who may read everything else.
        let login = places.login.as_ref().unwrap();
        fs::create_dir_all(login).unwrap();
        let error = find(&Given::default(), &places).unwrap_err().to_string();
        assert_eq!(error, format!("cannot read credentials {}: is a directory", login.display()));
    }

    #[test]
    fn a_damaged_file_is_named_without_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let places = places(&folder);
        fs::create_dir_all(places.daemon.parent().unwrap()).unwrap();
        for text in ["\"hunter2\"", "{\"key\": \"hunter2\"}", "{\n\"key\": hunter2", "hunter2"] {
            fs::write(&places.daemon, text).unwrap();
            let error = find(&Given::default(), &places).unwrap_err().to_string();
            assert!(error.contains("data/credentials.json: line ") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_is_saved_only_its_owner_may_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = places(&folder).login.unwrap();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "open to all").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        save(&path, &of("ci")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(remove(&path).unwrap());
        assert!(!remove(&path).unwrap());
    }

    #[test]
    fn the_users_folders_follow_the_xdg_settings_when_those_are_absolute() {
        let dir = |set: &str| user_dir(Some(set.into()), Some("/home/me".into()), ".config");
        assert_eq!(dir("/elsewhere").unwrap(), Path::new("/elsewhere/muster"));
        for ignored in ["", "relative"] {
            assert_eq!(dir(ignored).unwrap(), Path::new("/home/me/.config/muster"));
        }
        assert_eq!(user_dir(None, None, ".config"), None);
    }
}
