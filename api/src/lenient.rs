//! The deserializer of request arguments. It accepts the spellings that released clients send, such as numbers in
//! strings, so that argument structs consist of plain types.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, Error as _, IntoDeserializer, Visitor};
use serde_json::{Error, Number, Value};

/// A JSON value that converts strings, integers and booleans leniently. All other types are read as they are.
#[derive(Debug)]
pub(crate) struct Lenient(pub(crate) Value);

/// Returns the integer that a value stands for. Integers out of range saturate: the handler rejects them by its limits.
fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::Number(number) => whole(number),
        Value::String(text) => {
            let number = text.trim().parse::<i128>().ok()?;
            Some(i64::try_from(number).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX }))
        }
        _ => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "checked to be whole; the cast saturates")]
fn whole(number: &Number) -> Option<i64> {
    if let Some(number) = number.as_i64() {
        return Some(number);
    }
    if number.is_u64() {
        return Some(i64::MAX);
    }
    number.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i64)
}

fn boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::Number(number) => match number.as_i64()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
        Value::String(text) => match text.as_str() {
            "t" | "T" | "true" | "True" | "TRUE" | "on" | "On" | "ON" | "y" | "Y" | "yes" | "Yes" | "YES"
            | "1" => Some(true),
            "f" | "F" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" | "n" | "N" | "no" | "No"
            | "NO" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

impl<'de> IntoDeserializer<'de, Error> for Lenient {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Lenient {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.0.deserialize_any(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(boolean(&self.0).ok_or_else(|| Error::custom("Not a valid boolean."))?)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i64(integer(&self.0).ok_or_else(|| Error::custom("Not a valid integer."))?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::String(text) => visitor.visit_string(text),
            _ => Err(Error::custom("Not a valid string.")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(Self))),
            other => other.deserialize_seq(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(members) => {
                let members = members.into_iter().map(|(name, value)| (name, Self(value)));
                visitor.visit_map(MapDeserializer::new(members))
            }
            other => other.deserialize_struct(name, fields, visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i128 u8 u16 u32 u64 u128 f32 f64 char str bytes byte_buf unit unit_struct newtype_struct tuple
        tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Example {
        count: Option<i64>,
        flag: Option<bool>,
        names: Option<Vec<String>>,
        any: Option<Value>,
    }

    fn read(value: Value) -> Result<Example, String> {
        serde_path_to_error::deserialize(Lenient(value)).map_err(|error| error.to_string())
    }

    #[test]
    fn accepts_the_spellings_of_released_clients() {
        let given = json!({"count": " 7 ", "flag": "yes", "names": ["a"], "any": "1"});
        let expected = Example {
            count: Some(7),
            flag: Some(true),
            names: Some(vec!["a".into()]),
            any: Some(json!("1")),
        };
        assert_eq!(read(given).unwrap(), expected);
        let none = Example { count: None, flag: None, names: None, any: None };
        assert_eq!(read(json!({"count": null})).unwrap(), none);
        for (value, number) in [(json!(7.0), 7), (json!(u64::MAX), i64::MAX), (json!("-9"), -9)] {
            assert_eq!(integer(&value), Some(number), "{value}");
        }
        assert_eq!(integer(&json!("99999999999999999999")), Some(i64::MAX));
        assert_eq!(
            [boolean(&json!(0)), boolean(&json!("on")), boolean(&json!(false))],
            [Some(false), Some(true), Some(false)]
        );
    }

    #[test]
    fn names_the_field_and_the_expected_type() {
        for (given, text) in [
            (json!({"count": "x"}), "count: Not a valid integer."),
            (json!({"count": 1.5}), "count: Not a valid integer."),
            (json!({"count": true}), "count: Not a valid integer."),
            (json!({"flag": 2}), "flag: Not a valid boolean."),
            (json!({"flag": "maybe"}), "flag: Not a valid boolean."),
            (json!({"names": ["a", 7]}), "names[1]: Not a valid string."),
        ] {
            assert_eq!(read(given).unwrap_err(), text);
        }
    }
}
