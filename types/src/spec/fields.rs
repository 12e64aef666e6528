//! The fields of a spec, and the sentences with which a value is refused.

use serde_json::{Map, Value};

use crate::settings::ValidationMode;
use crate::{Error, Result};

/// How much of a caller's key is repeated.
const LONGEST_KEY: usize = 64;
/// How many findings of one request are kept.
const MOST_FINDINGS: usize = 20;

/// What is wrong with a request without making it unusable. What becomes of it is up to the mode: refused, kept
/// for the log, or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidationFindings {
    mode: ValidationMode,
    texts: Vec<String>,
}

impl ValidationFindings {
    #[must_use]
    pub fn new(mode: ValidationMode) -> Self {
        Self { mode, texts: Vec::new() }
    }

    /// What a log should say; empty unless the mode is `warn`.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    pub(super) fn add(&mut self, text: String) -> Result<()> {
        match self.mode {
            ValidationMode::Enforce => return Err(Error::Invalid(text)),
            ValidationMode::Warn if self.texts.len() < MOST_FINDINGS => self.texts.push(text),
            ValidationMode::Warn | ValidationMode::Off => {}
        }
        Ok(())
    }
}

/// A JSON object of which the place in the request is known.
pub(super) struct Fields<'a> {
    path: &'a str,
    values: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Keys that are not `known` are findings.
    pub(super) fn new(
        path: &'a str,
        values: &'a Map<String, Value>,
        known: &[&str],
        findings: &mut ValidationFindings,
    ) -> Result<Self> {
        for key in values.keys().filter(|key| !known.contains(&key.as_str())) {
            findings.add(format!("{path}.{}: Unknown field.", cut(key)))?;
        }
        Ok(Self { path, values })
    }

    /// A value that was supplied; null is none.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn text_of(&self, key: &str, detail: &str) -> String {
        format!("{}.{key}: {detail}", self.path)
    }

    pub(super) fn refuse<T>(&self, key: &str, detail: &str) -> Result<T> {
        Err(Error::Invalid(self.text_of(key, detail)))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => self.refuse(key, "Not a valid string."),
        }
    }

    /// A text in which nothing but emptiness means that it was not supplied: released clients that cannot leave
    /// a field out send it empty.
    pub(super) fn filled_text(&self, key: &str) -> Result<Option<&'a str>> {
        Ok(self.text(key)?.filter(|text| !text.is_empty()))
    }

    /// A whole number from 0 to `most`; numeric strings count.
    pub(super) fn count(&self, key: &str, most: u64) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Some(number) = integer(value) else { return self.refuse(key, "Not a valid integer.") };
        if number < 0 {
            return self.refuse(key, "Must be greater than or equal to 0.");
        }
        match u64::try_from(number).ok().filter(|number| *number <= most) {
            Some(number) => Ok(Some(number)),
            None => self.refuse(
                key,
                &format!("Must be greater than or equal to 0 and less than or equal to {most}."),
            ),
        }
    }

    /// One of some words. `""` is none of them here.
    pub(super) fn word<T: std::str::FromStr + Copy>(
        &self,
        key: &str,
        text: Option<&str>,
        all: &[T],
        spell: fn(T) -> &'static str,
    ) -> Result<Option<T>> {
        let Some(text) = text else { return Ok(None) };
        match text.parse() {
            Ok(word) => Ok(Some(word)),
            Err(_) => {
                let words: Vec<&str> = all.iter().copied().map(spell).collect();
                self.refuse(key, &format!("Must be one of: {}.", words.join(", ")))
            }
        }
    }

    /// The name of a kind of emulated hardware. It becomes part of the arguments of a program, hence the pattern.
    pub(super) fn model(&self, key: &str, text: Option<&str>) -> Result<Option<String>> {
        let Some(text) = text else { return Ok(None) };
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.is_empty() || text.len() > 32 || !text.chars().all(fits) {
            return self.refuse(key, "String does not match expected pattern.");
        }
        Ok(Some(text.to_owned()))
    }
}

/// A whole number, or a text that is one, as released clients send it. Numbers beyond all limits saturate.
pub(super) fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::Number(number) => match number.as_i128() {
            Some(number) => Some(number),
            None => whole(number.as_f64()?),
        },
        Value::String(text) => text.trim().parse().ok(),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "it is whole, and the cast saturates")]
fn whole(number: f64) -> Option<i128> {
    (number.fract() == 0.0).then_some(number as i128)
}

/// A caller's word as it may be repeated.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(LONGEST_KEY).collect()
}
