//! The metadata commands, which all types of objects have.

use clap::Args;
use serde_json::{Map, Value};

use super::session::Session;
use crate::api::ObjectPath;
use crate::output::{Table, compact};

/// A metadata key and its value.
#[derive(Debug, Args)]
pub struct MetadataItem {
    /// Metadata key
    #[arg(value_name = "KEY")]
    item: String,
    /// Value; if it is not JSON, a string
    #[arg(allow_hyphen_values = true)]
    value: String,
}

/// Prints the metadata of an object.
pub(super) async fn show(session: &Session, object: ObjectPath<'_>) -> anyhow::Result<()> {
    session.show(session.client.metadata(object).await?, table)
}

/// Sets a metadata key.
pub(super) async fn set(
    session: &Session,
    object: ObjectPath<'_>,
    item: &MetadataItem,
) -> anyhow::Result<()> {
    let response = session.client.set_metadata(object, &item.item, &parse(&item.value)).await?;
    session.confirm(&response, &format!("metadata {} set", item.item))
}

/// Deletes a metadata key.
pub(super) async fn delete(session: &Session, object: ObjectPath<'_>, item: &str) -> anyhow::Result<()> {
    let response = session.client.delete_metadata(object, item).await?;
    session.confirm(&response, &format!("metadata {item} deleted"))
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

fn table(metadata: Map<String, Value>) -> Table {
    Table::new(&["KEY"], &["VALUE"]).rows(metadata.into_iter().map(|(key, value)| [key, compact(&value)]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn value_that_is_not_json_is_a_string() {
        assert_eq!(parse("7"), json!(7));
        assert_eq!(parse("{\"a\": [true]}"), json!({ "a": [true] }));
        assert_eq!(parse("\"7\""), json!("7"));
        assert_eq!(parse("two words"), json!("two words"));
        assert_eq!(parse("{broken"), json!("{broken"));
    }

    #[test]
    fn shows_metadata_as_keys_and_values() {
        let metadata = json!({ "size": 7, "owner": "me" });
        let Value::Object(metadata) = metadata else { unreachable!() };
        let text = table(metadata).render(None);
        assert!(text.starts_with("KEY    VALUE\n") && text.contains("\nsize   7\n"), "{text}");
    }
}
