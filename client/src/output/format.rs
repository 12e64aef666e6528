//! Output formats.

use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;
use serde_json::Value;

use super::{compact, escape_control, print, yaml};

/// Whether [`status`] prints nothing. One process runs one command.
static QUIET: AtomicBool = AtomicBool::new(false);

/// The fields that identify a record for people, most readable first.
const NAMES: [&str; 8] =
    ["name", "key_name", "address", "uuid", "network_uuid", "event_uuid", "blob_uuid", "op_uuid"];

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// A table
    #[default]
    Table,
    /// A table with more columns
    Wide,
    /// The server's response as JSON
    Json,
    /// The server's response as YAML
    Yaml,
    /// Only names, or UUIDs of objects without a name
    Name,
}

impl Format {
    /// Returns whether the output is for programs, without texts for people.
    #[must_use]
    pub fn is_structured(self) -> bool {
        match self {
            Self::Table | Self::Wide => false,
            Self::Json | Self::Yaml | Self::Name => true,
        }
    }

    /// Formats a response. Formats for people show JSON if the response has no table.
    #[must_use]
    pub fn render(self, value: &Value) -> String {
        match self {
            Self::Table | Self::Wide | Self::Json => format!("{value:#}\n"),
            Self::Yaml => yaml::render(value),
            Self::Name => names(value).iter().map(|name| escape_control(name) + "\n").collect(),
        }
    }

    /// Formats one of several documents.
    pub(crate) fn render_document(self, value: &Value) -> String {
        match self {
            Self::Table | Self::Wide | Self::Json => format!("{value}\n"),
            Self::Yaml => format!("---\n{}", yaml::render(value)),
            Self::Name => self.render(value),
        }
    }
}

/// Prints a response in a format.
pub(crate) fn print_value(format: Format, value: &Value) -> anyhow::Result<()> {
    print(&format.render(value))
}

/// Returns the name of a record, or of each record of a list.
pub(crate) fn names(value: &Value) -> Vec<String> {
    match value {
        Value::Array(items) => items.iter().flat_map(names).collect(),
        Value::Object(fields) => {
            let name = NAMES.iter().find_map(|name| fields.get(*name).filter(|value| !value.is_null()));
            // Some commands print an object together with others.
            let object = || ["instance", "network"].iter().find_map(|name| fields.get(*name)).map(names);
            name.map(|name| vec![compact(name)]).or_else(object).unwrap_or_default()
        }
        Value::Null => vec![],
        other => vec![compact(other)],
    }
}

/// Suppresses status messages and progress.
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Returns whether status messages and progress are suppressed.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Prints a message about what the command does, unless the user wants none.
pub(crate) fn status(text: &str) {
    if !is_quiet() {
        crate::message!("{}", escape_control(text));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_those_that_people_use() {
        let list = json!([{ "uuid": "u", "name": "web" }, { "uuid": "v", "name": null }, "deploy", 7]);
        assert_eq!(names(&list), ["web", "v", "deploy", "7"]);
        assert_eq!(names(&json!({ "network": { "name": "lan" }, "interfaces": [] })), ["lan"]);
        assert!(names(&json!(null)).is_empty());
    }

    #[test]
    fn documents_are_separated() {
        assert_eq!(Format::Json.render_document(&json!({ "a": 1 })), "{\"a\":1}\n");
        assert_eq!(Format::Yaml.render_document(&json!({ "a": 1 })), "---\na: 1\n");
        assert_eq!(Format::Name.render_document(&json!({ "name": "web\u{1b}" })), "web\\u{1b}\n");
    }
}
