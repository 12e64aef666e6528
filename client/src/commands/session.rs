//! The global options and the session that they open.

use std::path::PathBuf;

use clap::Args;
use muster_types::key::Secret;
use serde::de::DeserializeOwned;

use super::arguments::{parse_secret, path_parser};
use crate::api::{ApiResponse, Client};
use crate::credentials::{self, CredentialFiles, CredentialOptions, Credentials, EnvironmentCredentials};
use crate::output::{self, Table};

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
    /// Print the server's JSON response
    #[arg(long, global = true)]
    pub json: bool,
}

impl Options {
    /// Creates a client with the given or saved credentials.
    pub fn client(self) -> anyhow::Result<Client> {
        let given = CredentialOptions {
            namespace: self.namespace,
            key: self.key,
            apiurl: self.api_url,
            file: self.credentials,
            environment: EnvironmentCredentials::read(),
        };
        let files = CredentialFiles::for_current_user();
        new_client(credentials::resolve(&given.without_empty(), &files)?, self.cacert)
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
    pub(super) json: bool,
}

impl Session {
    pub(super) fn new(options: Options) -> anyhow::Result<Self> {
        let json = options.json;
        Ok(Self { client: options.client()?, json })
    }

    /// Prints a response as JSON or as a table.
    pub(super) fn show<T: DeserializeOwned>(
        &self,
        response: ApiResponse<T>,
        table: impl FnOnce(T) -> Table,
    ) -> anyhow::Result<()> {
        if self.json {
            output::print_json(response.json())
        } else {
            output::print_table(&table(response.value()?))
        }
    }

    /// Prints one line for people, or the response as JSON.
    pub(super) fn print_line<T>(&self, response: &ApiResponse<T>, text: &str) -> anyhow::Result<()> {
        if self.json {
            return output::print_json(response.json());
        }
        println!("{}", output::escape_control(text));
        Ok(())
    }

    /// Confirms an action whose response contains no data.
    pub(super) fn confirm<T>(&self, response: &ApiResponse<T>, text: &str) -> anyhow::Result<()> {
        if self.json {
            return output::print_json(response.json());
        }
        eprintln!("{}", output::escape_control(text));
        Ok(())
    }
}
