//! `muster profile`: credentials for several clusters.

use anyhow::Context as _;
use clap::{Args, Subcommand};
use muster_types::key::Secret;
use serde_json::{Value, json};

use super::arguments::{parse_secret, prompt_secret};
use super::session::{Options, new_client};
use crate::credentials::{Credentials, EnvironmentCredentials};
use crate::output::{self, Table, compact, or_dash};
use crate::profiles::{DEFAULT_PROFILE, Profiles};

/// Commands for profiles.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the profiles, and which one is in use
    List,
    /// Log in to a cluster and save the credentials as a profile
    Add(NewProfile),
    /// Choose the profile that commands use; `default` is what `muster login` has saved
    Use { name: String },
    /// Remove a profile with its credentials
    Remove { name: String },
}

/// Arguments of `muster profile add`. The namespace and the URL are global options.
#[derive(Debug, Args)]
#[command(
    after_help = "Without --key, the command prompts for the secret or reads it from standard input. With --cacert, the profile \
                  remembers the file."
)]
pub struct NewProfile {
    name: String,
    /// Secret of a key of the namespace
    #[arg(long, value_name = "SECRET", value_parser = parse_secret)]
    key: Option<Secret>,
    /// Use it from now on
    #[arg(long = "use")]
    choose: bool,
}

pub(super) async fn run(command: Command, options: Options) -> anyhow::Result<()> {
    let profiles = Profiles::require()?;
    match command {
        Command::List => list(&profiles, &options),
        Command::Add(new) => add(&profiles, new, options).await,
        Command::Use { name } => {
            profiles.choose(&name)?;
            output::status(&format!("commands use profile {name}"));
            Ok(())
        }
        Command::Remove { name } => {
            let was_current = profiles.remove(&name)?;
            output::status(&format!("profile {name} removed"));
            if was_current {
                output::status(&format!("commands use profile {DEFAULT_PROFILE} again"));
            }
            Ok(())
        }
    }
}

fn list(profiles: &Profiles, options: &Options) -> anyhow::Result<()> {
    let current = profiles.current()?;
    let mut list = vec![];
    for name in profiles.names()? {
        let mut profile = profiles.describe(&name)?;
        profile["current"] = json!(current.as_ref() == Some(&name));
        list.push(profile);
    }
    if options.format().is_structured() {
        return output::print_value(options.format(), &list.into());
    }
    output::print_table(&table(&list))
}

fn table(profiles: &[Value]) -> Table {
    let text = |profile: &Value, name: &str| or_dash(profile.get(name).map(compact).unwrap_or_default());
    Table::new(&["NAME", "IN USE", "NAMESPACE"], &["URL"]).rows(profiles.iter().map(|profile| {
        let in_use = if profile["current"] == true { "yes" } else { "no" }.to_owned();
        [text(profile, "name"), in_use, text(profile, "namespace"), text(profile, "apiurl")]
    }))
}

async fn add(profiles: &Profiles, new: NewProfile, options: Options) -> anyhow::Result<()> {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let apiurl = given(options.api_url).context("the URL of the cluster is missing: give --api-url")?;
    let namespace = given(options.namespace).context("the namespace is missing: give --namespace")?;
    // Fails before the user types a secret.
    profiles.file(&new.name)?;
    let key = match new.key.or(options.key).filter(|key| !key.expose().is_empty()) {
        Some(key) => {
            EnvironmentCredentials::read().check(Some(&key), Some(&apiurl))?;
            key
        }
        None => prompt_secret(&format!("key of namespace {namespace}"))?,
    };
    let credentials = Credentials { namespace, key, apiurl };
    new_client(credentials.clone(), options.cacert.clone())?.log_in().await?;
    let cacert = options.cacert.filter(|file| !file.as_os_str().is_empty());
    profiles.save(&new.name, &credentials, cacert.as_deref())?;
    output::status(&format!("profile {} added", new.name));
    if new.choose {
        profiles.choose(&new.name)?;
        output::status(&format!("commands use profile {}", new.name));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_profiles_without_keys() {
        let profiles =
            [json!({ "name": "work", "apiurl": "http://work", "namespace": "ci", "current": true })];
        let text = table(&profiles).render(None);
        assert_eq!(text, "NAME  IN USE  NAMESPACE  URL\nwork  yes     ci         http://work\n");
    }
}
