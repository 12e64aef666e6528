//! The global options and the session that they open.

use std::path::PathBuf;

use clap::Args;
use muster_types::key::Secret;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::arguments::{parse_secret, path_parser};
use crate::api::{ApiResponse, Client};
use crate::credentials::{
    self, CredentialFiles, CredentialOptions, Credentials, EnvironmentCredentials, login_file,
};
use crate::output::{self, Format, Table};
use crate::profiles::{DEFAULT_PROFILE, Profiles};

/// The result of a dry run.
pub(super) const NOT_CREATED: &str = "the request is valid; nothing was created";

/// Options of all commands.
// The ids differ from the names because a global option and an argument of a command must not share one.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// URL of the API, such as http://localhost:13000
    #[arg(
        id = "as_api_url",
        long = "api-url",
        value_name = "URL",
        env = "MUSTER_API_URL",
        global = true,
        help_heading = "Connection"
    )]
    pub api_url: Option<String>,
    /// Namespace to act as
    #[arg(
        id = "as_namespace",
        long = "namespace",
        value_name = "NAMESPACE",
        env = "MUSTER_NAMESPACE",
        global = true,
        help_heading = "Connection"
    )]
    pub namespace: Option<String>,
    /// Secret of a key of that namespace; must precede the command. MUSTER_KEY is sent only to MUSTER_API_URL
    // Not global: some commands have their own --key for another key.
    #[arg(id = "as_key", long = "key", value_name = "SECRET", env = "MUSTER_KEY", hide_env_values = true,
          value_parser = parse_secret, help_heading = "Connection")]
    pub key: Option<Secret>,
    /// Credentials file with namespace, key and apiurl; used only for that URL
    #[arg(
        id = "as_credentials",
        long = "credentials",
        value_name = "FILE",
        env = "MUSTER_CREDENTIALS",
        value_parser = path_parser(),
        global = true,
        help_heading = "Connection"
    )]
    pub credentials: Option<PathBuf>,
    /// Profile with the credentials, instead of the one in use; takes precedence over --credentials
    #[arg(
        id = "as_profile",
        long = "profile",
        value_name = "NAME",
        env = "MUSTER_PROFILE",
        global = true,
        help_heading = "Connection"
    )]
    pub profile: Option<String>,
    /// Trust only the certificates in this PEM file for HTTPS
    #[arg(
        id = "as_cacert",
        long = "cacert",
        value_name = "FILE",
        env = "MUSTER_CACERT",
        value_parser = path_parser(),
        global = true,
        help_heading = "Connection"
    )]
    pub cacert: Option<PathBuf>,
    /// Output format [default: table]
    // Not `--output`, which some commands have for a file.
    #[arg(
        id = "as_format",
        short = 'o',
        long = "format",
        value_name = "FORMAT",
        global = true,
        help_heading = "Output"
    )]
    pub format: Option<Format>,
    /// Print the server's response as JSON, as -o json does
    #[arg(long, global = true, conflicts_with = "as_format", help_heading = "Output")]
    pub json: bool,
    /// Print no progress and no confirmations, only data, warnings and errors
    #[arg(id = "as_quiet", short = 'q', long = "quiet", global = true, help_heading = "Output")]
    pub quiet: bool,
}

impl Options {
    /// Returns the output format.
    #[must_use]
    pub fn format(&self) -> Format {
        if self.json { Format::Json } else { self.format.unwrap_or_default() }
    }

    /// Creates a client with the given or saved credentials.
    pub fn client(self) -> anyhow::Result<Client> {
        let profiles = Profiles::for_current_user();
        let profile = self.profile(profiles.as_ref())?;
        let profile_file = match (&profiles, &profile) {
            (Some(profiles), Some(name)) => Some(profiles.existing(name)?),
            _ => None,
        };
        let is_explicit = self.given_profile().is_some();
        let given = CredentialOptions {
            namespace: self.namespace,
            key: self.key,
            apiurl: self.api_url,
            file: if is_explicit { profile_file.clone() } else { self.credentials },
            environment: EnvironmentCredentials::read(),
        };
        let files = CredentialFiles { profile: profile_file, ..CredentialFiles::for_current_user() };
        let credentials = credentials::resolve(&given.without_empty(), &files)?;
        let cacert = self.cacert.filter(|file| !file.as_os_str().is_empty());
        let cacert = match (cacert, &profiles, &profile) {
            (None, Some(profiles), Some(name)) => profiles.cacert(name, &credentials.apiurl)?,
            (given, _, _) => given,
        };
        new_client(credentials, cacert)
    }

    /// Returns the file that a login is saved in: the one of the profile, the given one, or the default.
    pub(super) fn login_file(&self) -> anyhow::Result<PathBuf> {
        let profiles = Profiles::for_current_user();
        let profile = self.profile(profiles.as_ref())?;
        match (profiles, profile) {
            (Some(profiles), Some(name)) => profiles.file(&name),
            _ => login_file(self.credentials.clone()),
        }
    }

    /// Returns the name of the profile to use: the given one, or without a credentials file the chosen one.
    fn profile(&self, profiles: Option<&Profiles>) -> anyhow::Result<Option<String>> {
        match (self.given_profile(), profiles) {
            (Some(DEFAULT_PROFILE), _) => Ok(None),
            (Some(name), Some(_)) => Ok(Some(name.to_owned())),
            (Some(_), None) => Profiles::require().map(|_| None),
            (None, Some(profiles))
                if self.credentials.as_ref().is_none_or(|file| file.as_os_str().is_empty()) =>
            {
                profiles.current()
            }
            (None, _) => Ok(None),
        }
    }

    fn given_profile(&self) -> Option<&str> {
        self.profile.as_deref().filter(|name| !name.is_empty())
    }
}

/// Creates a client. An empty `cacert` counts as not given.
pub(super) fn new_client(credentials: Credentials, cacert: Option<PathBuf>) -> anyhow::Result<Client> {
    Ok(match cacert.filter(|file| !file.as_os_str().is_empty()) {
        Some(file) => Client::with_cacert(credentials, &file)?,
        None => Client::new(credentials)?,
    })
}

/// A client and the output format.
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) format: Format,
}

impl Session {
    pub(super) fn new(options: Options) -> anyhow::Result<Self> {
        let format = options.format();
        Ok(Self { client: options.client()?, format })
    }

    /// Returns whether the output is for programs, without texts for people.
    pub(super) fn is_structured(&self) -> bool {
        self.format.is_structured()
    }

    /// Prints data in the output format.
    pub(super) fn print_value(&self, value: &Value) -> anyhow::Result<()> {
        output::print_value(self.format, value)
    }

    /// Prints a response as a table or in the output format.
    pub(super) fn show<T: DeserializeOwned>(
        &self,
        response: ApiResponse<T>,
        table: impl FnOnce(T) -> Table,
    ) -> anyhow::Result<()> {
        if self.is_structured() {
            self.print_value(response.json())
        } else {
            output::print_table(&table(response.value()?))
        }
    }

    /// Prints what was created, or with `is_dry_run` what would be.
    pub(super) fn show_created<T: DeserializeOwned>(
        &self,
        response: ApiResponse<T>,
        is_dry_run: bool,
        table: impl FnOnce(T) -> Table,
    ) -> anyhow::Result<()> {
        if is_dry_run {
            output::status(NOT_CREATED);
        }
        self.show(response, table)
    }

    /// Prints one line for people, or the response in the output format.
    pub(super) fn print_line<T>(&self, response: &ApiResponse<T>, text: &str) -> anyhow::Result<()> {
        if self.is_structured() {
            return self.print_value(response.json());
        }
        output::print(&format!("{}\n", output::escape_control(text)))
    }

    /// Confirms an action whose response contains no data.
    pub(super) fn confirm<T>(&self, response: &ApiResponse<T>, text: &str) -> anyhow::Result<()> {
        if self.is_structured() {
            return self.print_value(response.json());
        }
        output::status(text);
        Ok(())
    }
}
