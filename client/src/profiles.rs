//! Profiles: credentials for several clusters, one file for each, and which of them is in use.
//!
//! A profile is a credentials file, so its key is sent only to the URL that it was created for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use serde_json::{Value, json};

use crate::credentials::{self, Credentials, config_dir, write_private};
use crate::error_text::io_error_text;
use crate::similar_name::closest;

/// The name that stands for the credentials of `muster login` and of the daemon on this host.
pub const DEFAULT_PROFILE: &str = "default";
const EXTENSION: &str = "json";

/// The profiles of a user.
#[derive(Debug, Clone)]
pub struct Profiles {
    /// Contains `profile`, with the name of the profile in use, and the directory `profiles`.
    dir: PathBuf,
}

impl Profiles {
    /// Returns the profiles of the current user; `None` for a user without a home directory.
    #[must_use]
    pub fn for_current_user() -> Option<Self> {
        config_dir().map(|dir| Self { dir })
    }

    /// Returns the profiles of the current user, or why there cannot be any.
    pub fn require() -> anyhow::Result<Self> {
        Self::for_current_user().context("profiles need a home directory: set HOME or XDG_CONFIG_HOME")
    }

    /// Returns the credentials file of a profile, which need not exist.
    pub fn file(&self, name: &str) -> anyhow::Result<PathBuf> {
        let is_safe = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
        if name.is_empty() || name.starts_with(['.', '-']) || !name.chars().all(is_safe) {
            bail!("{name:?} cannot be the name of a profile: use letters, digits, `.`, `_` and `-`");
        }
        if name == DEFAULT_PROFILE {
            bail!("the profile {DEFAULT_PROFILE} is what `muster login` saves, or the daemon of this host");
        }
        Ok(self.dir.join("profiles").join(format!("{name}.{EXTENSION}")))
    }

    /// Returns the credentials file of an existing profile.
    pub fn existing(&self, name: &str) -> anyhow::Result<PathBuf> {
        let file = self.file(name)?;
        if !file.is_file() {
            let similar = closest(name, &self.names().unwrap_or_default());
            let hint = similar
                .map_or("see `muster profile list`".to_owned(), |name| format!("did you mean {name}?"));
            bail!("profile {name} does not exist; {hint}");
        }
        Ok(file)
    }

    /// Returns the name of the profile in use, if one was chosen.
    pub fn current(&self) -> anyhow::Result<Option<String>> {
        let path = self.current_file();
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim().to_owned()).filter(|name| !name.is_empty())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(&path, &error)),
        }
    }

    /// Chooses the profile that commands use.
    pub fn choose(&self, name: &str) -> anyhow::Result<()> {
        if name == DEFAULT_PROFILE {
            return credentials::remove(&self.current_file()).map(drop);
        }
        self.existing(name)?;
        write_private(&self.current_file(), &format!("{name}\n"))
    }

    /// Returns the names of all profiles, sorted.
    pub fn names(&self) -> anyhow::Result<Vec<String>> {
        let dir = self.dir.join("profiles");
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(error) => return Err(unreadable(&dir, &error)),
        };
        let files = entries.filter_map(|entry| Some(PathBuf::from(entry.ok()?.file_name())));
        let names = files.filter(|file| file.extension().is_some_and(|extension| extension == EXTENSION));
        let mut names: Vec<String> =
            names.filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect();
        names.sort();
        Ok(names)
    }

    /// Saves a profile, with the certificates that its server is verified with, if they are given.
    pub fn save(&self, name: &str, credentials: &Credentials, cacert: Option<&Path>) -> anyhow::Result<()> {
        let mut text = json!({
            "namespace": credentials.namespace, "key": credentials.key.expose(), "apiurl": credentials.apiurl
        });
        if let Some(cacert) = cacert {
            // Commands run in other directories, too.
            let cacert = fs::canonicalize(cacert).map_err(|error| unreadable(cacert, &error))?;
            text["cacert"] = json!(cacert);
        }
        write_private(&self.file(name)?, &format!("{text:#}\n"))
    }

    /// Returns the certificates with which a profile verifies the server at a URL.
    pub(crate) fn cacert(&self, name: &str, apiurl: &str) -> anyhow::Result<Option<PathBuf>> {
        let cacert = credentials::cacert_of(&self.file(name)?, apiurl);
        Ok(cacert.as_ref().and_then(Value::as_str).map(PathBuf::from))
    }

    /// Removes a profile. Returns whether it was in use.
    pub fn remove(&self, name: &str) -> anyhow::Result<bool> {
        let file = self.existing(name)?;
        let is_current = self.current()?.as_deref() == Some(name);
        if is_current {
            credentials::remove(&self.current_file())?;
        }
        credentials::remove(&file)?;
        Ok(is_current)
    }

    /// Returns URL, namespace and certificates of a profile, without its key.
    pub fn describe(&self, name: &str) -> anyhow::Result<Value> {
        let file = self.existing(name)?;
        let text = fs::read_to_string(&file).map_err(|error| unreadable(&file, &error))?;
        // The parser's own message could quote the secret.
        let mut profile: Value = serde_json::from_str(&text).map_err(|error| {
            anyhow!("profile {name}: line {} of {}: not JSON", error.line(), file.display())
        })?;
        if let Some(fields) = profile.as_object_mut() {
            fields.remove("key");
            fields.insert("name".to_owned(), name.into());
        }
        Ok(profile)
    }

    fn current_file(&self) -> PathBuf {
        self.dir.join("profile")
    }
}

fn unreadable(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("cannot read {}: {}", path.display(), io_error_text(error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use muster_types::key::Secret;

    use super::*;

    fn credentials(url: &str) -> Credentials {
        Credentials { namespace: "ci".into(), key: Secret::new("hunter2"), apiurl: url.into() }
    }

    #[test]
    fn profiles_are_saved_chosen_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let profiles = Profiles { dir: directory.path().join("muster") };
        assert!(profiles.names().unwrap().is_empty());
        profiles.save("work", &credentials("http://work"), None).unwrap();
        profiles.save("home", &credentials("http://home"), None).unwrap();
        assert_eq!(profiles.names().unwrap(), ["home", "work"]);
        let mode = fs::metadata(profiles.file("work").unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        assert_eq!(profiles.current().unwrap(), None);
        profiles.choose("work").unwrap();
        assert_eq!(profiles.current().unwrap().as_deref(), Some("work"));
        assert!(profiles.choose("other").is_err());
        assert!(profiles.choose("wrok").unwrap_err().to_string().ends_with("did you mean work?"));
        profiles.choose(DEFAULT_PROFILE).unwrap();
        assert_eq!(profiles.current().unwrap(), None);

        profiles.choose("work").unwrap();
        assert!(!profiles.remove("home").unwrap());
        assert!(profiles.remove("work").unwrap());
        assert_eq!(profiles.current().unwrap(), None, "a profile that does not exist is not in use");
    }

    #[test]
    fn description_has_no_key() {
        let directory = tempfile::tempdir().unwrap();
        let profiles = Profiles { dir: directory.path().to_owned() };
        let cacert = directory.path().join("ca.pem");
        fs::write(&cacert, "x").unwrap();
        profiles.save("work", &credentials("http://work"), Some(&cacert)).unwrap();
        let profile = profiles.describe("work").unwrap();
        assert_eq!((&profile["apiurl"], &profile["name"]), (&json!("http://work"), &json!("work")));
        assert!(profile["cacert"].as_str().unwrap().ends_with("/ca.pem"));
        assert!(!profile.to_string().contains("hunter2"));
    }

    #[test]
    fn names_cannot_leave_the_directory() {
        let profiles = Profiles { dir: "/nonexistent".into() };
        for name in ["", "..", "../x", "a/b", "-x", ".hidden", DEFAULT_PROFILE] {
            assert!(profiles.file(name).is_err(), "{name:?}");
        }
    }
}
