//! The order of the records of a list.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The number of characters of a text that its position depends on, so that cursors stay short.
const MAX_COMPARED_CHARS: usize = 100;

/// The field that a list is sorted by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sort {
    pub(crate) field: String,
    pub(crate) is_descending: bool,
}

impl Sort {
    pub(crate) fn ascending(field: &str) -> Self {
        Self { field: field.to_owned(), is_descending: false }
    }

    pub(crate) fn descending(field: &str) -> Self {
        Self { field: field.to_owned(), is_descending: true }
    }

    pub(crate) fn parse(text: &str) -> Self {
        match text.strip_prefix('-') {
            Some(field) => Self::descending(field),
            None => Self::ascending(text),
        }
    }
}

impl std::fmt::Display for Sort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", if self.is_descending { "-" } else { "" }, self.field)
    }
}

/// A value that records are sorted by. Numbers are texts in cursors: JSON numbers lose digits when they are parsed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum SortValue {
    #[serde(rename = "b")]
    Boolean(bool),
    #[serde(rename = "n", with = "exact")]
    Number(f64),
    #[serde(rename = "t")]
    Text(String),
    /// Always last.
    #[serde(rename = "z")]
    Absent,
}

impl SortValue {
    pub(crate) fn of(value: Option<&Value>) -> Self {
        match value {
            Some(Value::Bool(value)) => Self::Boolean(*value),
            Some(Value::Number(number)) => number.as_f64().map_or(Self::Absent, Self::Number),
            Some(Value::String(text)) => Self::Text(text.chars().take(MAX_COMPARED_CHARS).collect()),
            _ => Self::Absent,
        }
    }

    /// Returns the value of a field that the key of a list consists of, whatever its length.
    pub(crate) fn of_key(value: Option<&Value>) -> Self {
        match value {
            Some(Value::String(text)) => Self::Text(text.clone()),
            other => Self::of(other),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Self::Boolean(_) => 0,
            Self::Number(_) => 1,
            Self::Text(_) => 2,
            Self::Absent => 3,
        }
    }

    fn compare(&self, other: &Self, is_descending: bool) -> Ordering {
        let ordering = match (self, other) {
            (Self::Boolean(a), Self::Boolean(b)) => a.cmp(b),
            (Self::Number(a), Self::Number(b)) => a.total_cmp(b),
            (Self::Text(a), Self::Text(b)) => a.cmp(b),
            (a, b) => return a.rank().cmp(&b.rank()),
        };
        if is_descending { ordering.reverse() } else { ordering }
    }
}

/// The position of a record in a sorted list. Equal values are sorted by the identity of their records, so that a page can
/// continue after any record, even if it was deleted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    #[serde(rename = "v")]
    value: SortValue,
    #[serde(rename = "i")]
    identity: SortValue,
}

impl Position {
    pub(crate) fn new(value: SortValue, identity: SortValue) -> Self {
        Self { value, identity }
    }

    pub(crate) fn compare(&self, other: &Self, sort: &Sort) -> Ordering {
        let by_value = self.value.compare(&other.value, sort.is_descending);
        by_value.then_with(|| self.identity.compare(&other.identity, false))
    }
}

mod exact {
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&number.to_string())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let number: f64 = String::deserialize(deserializer)?.parse().map_err(D::Error::custom)?;
        if number.is_finite() { Ok(number) } else { Err(D::Error::custom("not finite")) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sorted(values: &Value, sort: &Sort) -> Vec<Value> {
        let mut values = values.as_array().unwrap().clone();
        let position = |value: &Value| {
            Position::new(SortValue::of(value.get(&sort.field)), SortValue::of(value.get("uuid")))
        };
        values.sort_by(|a, b| position(a).compare(&position(b), sort));
        values.into_iter().map(|value| value["uuid"].clone()).collect()
    }

    #[test]
    fn sorts_by_value_then_identity_with_absent_values_last() {
        let values = json!([
            {"uuid": "d", "size": null}, {"uuid": "c", "size": 10}, {"uuid": "b", "size": 9.5}, {"uuid": "a", "size": 10},
        ]);
        assert_eq!(sorted(&values, &Sort::parse("size")), ["b", "a", "c", "d"]);
        assert_eq!(sorted(&values, &Sort::parse("-size")), ["a", "c", "b", "d"]);
    }

    #[test]
    fn positions_survive_their_serialization() {
        for value in [json!(1_763_408_882.123_456_7), json!(true), json!("ä\"\n"), json!(null), json!(-0.1)]
        {
            let position = Position::new(SortValue::of(Some(&value)), SortValue::of(Some(&json!("u"))));
            let text = serde_json::to_string(&position).unwrap();
            assert_eq!(serde_json::from_str::<Position>(&text).unwrap(), position, "{text}");
        }
        for hostile in [
            r#"{"v":{"n":"x"},"i":"z"}"#,
            r#"{"v":{"n":"inf"},"i":"z"}"#,
            r#"{"v":{"q":1},"i":"z"}"#,
            "[]",
            r#"{"v":"z"}"#,
        ] {
            assert!(serde_json::from_str::<Position>(hostile).is_err(), "{hostile}");
        }
    }

    #[test]
    fn position_of_a_long_text_is_short() {
        let value = SortValue::of(Some(&json!("ä".repeat(10_000))));
        assert_eq!(value, SortValue::Text("ä".repeat(MAX_COMPARED_CHARS)));
    }
}
