//! The metadata commands, which every kind of object has alike.

use clap::Args;
use serde_json::{Map, Value};

use super::Session;
use crate::api::Object;
use crate::output::{Table, compact};

/// What to set.
#[derive(Debug, Args)]
pub struct Item {
    /// Name of the item
    #[arg(value_name = "KEY")]
    item: String,
    /// JSON; anything else is taken as a string
    #[arg(allow_hyphen_values = true)]
    value: String,
}

/// Prints the metadata of an object.
pub(super) async fn show(session: &Session, object: Object<'_>) -> anyhow::Result<()> {
    session.show(session.client.metadata(object).await?, table)
}

/// Creates or replaces an item.
pub(super) async fn set(session: &Session, object: Object<'_>, item: &Item) -> anyhow::Result<()> {
    let answer = session.client.set_metadata(object, &item.item, &parse(&item.value)).await?;
    session.done(&answer, &format!("metadata {} set", item.item))
}

/// Deletes an item.
pub(super) async fn delete(session: &Session, object: Object<'_>, item: &str) -> anyhow::Result<()> {
    let answer = session.client.delete_metadata(object, item).await?;
    session.done(&answer, &format!("metadata {item} deleted"))
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
    fn a_value_is_json_or_else_a_string() {
        assert_eq!(parse("7"), json!(7));
        assert_eq!(parse("{\"a\": [true]}"), json!({ "a": [true] }));
        assert_eq!(parse("\"7\""), json!("7"));
        assert_eq!(parse("two words"), json!("two words"));
        assert_eq!(parse("{broken"), json!("{broken"));
    }

    #[test]
    fn metadata_is_a_table_of_keys_and_values() {
        let metadata = json!({ "size": 7, "owner": "me" });
        let Value::Object(metadata) = metadata else { unreachable!() };
        let text = table(metadata).render(None);
        assert!(text.starts_with("KEY    VALUE\n") && text.contains("\nsize   7\n"), "{text}");
    }
}
