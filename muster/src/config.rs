//! Loads the settings from the environment and the config file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use muster_client::Format;
use muster_types::settings::{Settings, parse_file};
use serde_json::json;

const PREFIX: &str = "MUSTER_";
/// Variables of the command line that are not settings.
const CLIENT_VARIABLES: &[&str] = &["API_URL", "NAMESPACE", "KEY", "CREDENTIALS", "PROFILE", "CACERT"];

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Settings file with one NAME = value per line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Loads the effective settings.
pub(crate) fn load(file: Option<&Path>) -> anyhow::Result<Settings> {
    let from_file = match file {
        None => BTreeMap::new(),
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("config file {}", path.display()))?;
            parse_file(&text)
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("config file {}", path.display()))?
        }
    };
    let mut environment = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        if !Settings::NAMES.contains(&name) {
            if !CLIENT_VARIABLES.contains(&name) && !name.starts_with("TEST_") {
                muster_client::message!("warning: {PREFIX}{name} is not a setting and is ignored");
            }
            continue;
        }
        let Some(value) = value.to_str() else { bail!("{PREFIX}{name} is not UTF-8") };
        environment.insert(name.to_owned(), value.to_owned());
    }
    Settings::new(&from_file, &environment).map_err(anyhow::Error::msg).context("setting")
}

/// Prints all effective settings and their sources.
pub(crate) fn show(arguments: &Arguments, format: Format) -> anyhow::Result<()> {
    let settings = load(arguments.config.as_deref())?;
    if format.is_structured() {
        let list: Vec<_> = settings
            .effective
            .iter()
            .map(|setting| {
                json!({"name": setting.name, "value": setting.value, "source": setting.source.to_string(), "about": setting.description})
            })
            .collect();
        return crate::stdout::print(format.render(&json!(list)).as_bytes());
    }
    let width =
        settings.effective.iter().map(|setting| setting.name.len() + setting.value.len()).max().unwrap_or(0)
            + 3;
    let lines = settings.effective.iter().map(|setting| {
        let assignment = format!("{} = {}", setting.name, setting.value);
        format!("{assignment:width$}  # {}: {}\n", setting.source, setting.description)
    });
    crate::stdout::print(lines.collect::<String>().as_bytes())
}
