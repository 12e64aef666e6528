//! Copies JSON documents without secrets, up to a length, without building them in memory.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// The members of bodies and queries whose values are never recorded.
pub(crate) const UNRECORDED_FIELDS: &[&str] =
    &["user_data", "ssh_key", "key", "secret", "password", "token", "access_token", "ticket", "nonce"];
/// Replaces the values of [`UNRECORDED_FIELDS`].
pub(crate) const NOT_LOGGED: &str = "...not logged...";

/// Appends a document to `recorded`. Fails once that has `max` bytes or more.
#[derive(Debug)]
pub(crate) struct Redactor<'a> {
    pub(crate) recorded: &'a mut String,
    pub(crate) max: usize,
}

impl Redactor<'_> {
    fn nested(&mut self) -> Redactor<'_> {
        Redactor { recorded: self.recorded, max: self.max }
    }

    fn append<E: serde::de::Error>(&mut self, text: &str) -> Result<(), E> {
        self.recorded.push_str(text);
        if self.recorded.len() < self.max { Ok(()) } else { Err(E::custom("the recorded part ends here")) }
    }

    /// Appends the start of a string, quoted.
    fn append_string<E: serde::de::Error>(&mut self, text: &str) -> Result<(), E> {
        let end = (0..=self.max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
        let start = &text[..end.unwrap_or_default()];
        self.append(&Value::from(start).to_string())
    }
}

impl<'de> DeserializeSeed<'de> for Redactor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, document: D) -> Result<(), D::Error> {
        document.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Redactor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON document")
    }

    fn visit_unit<E: serde::de::Error>(mut self) -> Result<(), E> {
        self.append("null")
    }

    fn visit_bool<E: serde::de::Error>(mut self, value: bool) -> Result<(), E> {
        self.append(if value { "true" } else { "false" })
    }

    fn visit_i64<E: serde::de::Error>(mut self, value: i64) -> Result<(), E> {
        self.append(&value.to_string())
    }

    fn visit_u64<E: serde::de::Error>(mut self, value: u64) -> Result<(), E> {
        self.append(&value.to_string())
    }

    fn visit_f64<E: serde::de::Error>(mut self, value: f64) -> Result<(), E> {
        self.append(&Value::from(value).to_string())
    }

    fn visit_str<E: serde::de::Error>(mut self, value: &str) -> Result<(), E> {
        self.append_string(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        self.append("[")?;
        let mut separator = "";
        loop {
            let before = self.recorded.len();
            self.append(separator)?;
            if items.next_element_seed(self.nested())?.is_none() {
                self.recorded.truncate(before);
                return self.append("]");
            }
            separator = ",";
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        self.append("{")?;
        let mut separator = "";
        while let Some(name) = members.next_key::<String>()? {
            self.append(separator)?;
            separator = ",";
            self.append_string(&name)?;
            self.append(":")?;
            if !UNRECORDED_FIELDS.contains(&name.as_str()) {
                members.next_value_seed(self.nested())?;
            } else if members.next_value::<Option<IgnoredAny>>().map_err(A::Error::custom)?.is_some() {
                self.append_string(NOT_LOGGED)?;
            } else {
                self.append("null")?;
            }
        }
        self.append("}")
    }
}
