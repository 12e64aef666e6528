//! Types of request fields. Each owns the sentence with which it refuses a value.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// A string.
#[derive(Debug, Clone, PartialEq, Eq, utoipa::ToSchema)]
#[schema(value_type = String)]
pub(crate) struct Text(pub(crate) String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl Visitor<'_> for Strings {
            type Value = Text;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Strings).map_err(|_| D::Error::custom("Not a valid string."))
    }
}

/// A whole number; numeric strings count, because released clients send them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, utoipa::ToSchema)]
#[schema(value_type = i64)]
pub(crate) struct Integer(pub(crate) i64);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Integers;
        impl Visitor<'_> for Integers {
            type Value = Integer;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an integer")
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Integer, E> {
                Ok(Integer(number))
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Integer, E> {
                Ok(Integer(i64::try_from(number).unwrap_or(i64::MAX)))
            }
            #[expect(clippy::cast_possible_truncation, reason = "checked to be whole; the cast saturates")]
            fn visit_f64<E: Error>(self, number: f64) -> Result<Integer, E> {
                if number.fract() == 0.0 { Ok(Integer(number as i64)) } else { Err(E::custom("fraction")) }
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Integer, E> {
                // Saturates: a number too large to count with is still a number.
                let number = text.trim().parse::<i128>().map_err(E::custom)?;
                let bounded = number.clamp(i64::MIN.into(), i64::MAX.into());
                Ok(Integer(i64::try_from(bounded).unwrap_or(i64::MAX)))
            }
        }
        deserializer.deserialize_any(Integers).map_err(|_| D::Error::custom("Not a valid integer."))
    }
}

/// Whether something is so; the spellings of released clients count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, utoipa::ToSchema)]
#[schema(value_type = bool)]
pub(crate) struct Boolean(pub(crate) bool);

impl<'de> Deserialize<'de> for Boolean {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Booleans;
        impl Visitor<'_> for Booleans {
            type Value = Boolean;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a boolean")
            }
            fn visit_bool<E: Error>(self, value: bool) -> Result<Boolean, E> {
                Ok(Boolean(value))
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Boolean, E> {
                match number {
                    0 => Ok(Boolean(false)),
                    1 => Ok(Boolean(true)),
                    _ => Err(E::custom("number")),
                }
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Boolean, E> {
                self.visit_i64(i64::try_from(number).unwrap_or(-1))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Boolean, E> {
                match text {
                    "t" | "T" | "true" | "True" | "TRUE" | "on" | "On" | "ON" | "y" | "Y" | "yes" | "Yes"
                    | "YES" | "1" => Ok(Boolean(true)),
                    "f" | "F" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" | "n" | "N" | "no"
                    | "No" | "NO" | "0" => Ok(Boolean(false)),
                    _ => Err(E::custom("text")),
                }
            }
        }
        deserializer.deserialize_any(Booleans).map_err(|_| D::Error::custom("Not a valid boolean."))
    }
}
