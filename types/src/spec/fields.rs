//! Access to the fields of a spec, with the error texts that clients expect.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The maximum number of characters of a caller's text in an error message.
const MAX_ECHO_LENGTH: usize = 64;
/// The maximum number of findings per request.
const MAX_FINDINGS: usize = 20;

/// How strictly request parameters are validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValidationMode {
    /// Findings are ignored.
    Off,
    /// Findings are logged.
    Warn,
    /// Findings are rejected with status 400.
    Enforce,
}

/// Violations that do not make a request unusable. Depending on the mode they are rejected, collected for the log, or
/// ignored.
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

    /// Returns the texts to log; empty unless the mode is `warn`.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    pub(super) fn add(&mut self, text: String) -> Result<()> {
        match self.mode {
            ValidationMode::Enforce => return Err(Error::Invalid(text)),
            ValidationMode::Warn if self.texts.len() < MAX_FINDINGS => self.texts.push(text),
            ValidationMode::Warn | ValidationMode::Off => {}
        }
        Ok(())
    }
}

/// A JSON object with its path in the request.
pub(super) struct Fields<'a> {
    path: &'a str,
    values: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Wraps an object. Keys that are not in `known` are findings.
    pub(super) fn new(
        path: &'a str,
        values: &'a Map<String, Value>,
        known: &[&str],
        findings: &mut ValidationFindings,
    ) -> Result<Self> {
        for key in values.keys().filter(|key| !known.contains(&key.as_str())) {
            findings.add(format!("{path}.{}: Unknown field.", truncate(key)))?;
        }
        Ok(Self { path, values })
    }

    /// Returns a value, or `None` if it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn error_text(&self, key: &str, detail: &str) -> String {
        format!("{}.{key}: {detail}", self.path)
    }

    pub(super) fn reject<T>(&self, key: &str, detail: &str) -> Result<T> {
        Err(Error::Invalid(self.error_text(key, detail)))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => self.reject(key, "Not a valid string."),
        }
    }

    /// Returns a non-empty text. Released clients that cannot omit a field send an empty one.
    pub(super) fn filled_text(&self, key: &str) -> Result<Option<&'a str>> {
        Ok(self.text(key)?.filter(|text| !text.is_empty()))
    }

    /// Returns an integer from 0 to `max`, which may be sent as a string.
    pub(super) fn count(&self, key: &str, max: u64) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Some(number) = parse_integer(value) else { return self.reject(key, "Not a valid integer.") };
        if number < 0 {
            return self.reject(key, "Must be greater than or equal to 0.");
        }
        match u64::try_from(number).ok().filter(|number| *number <= max) {
            Some(number) => Ok(Some(number)),
            None => self
                .reject(key, &format!("Must be greater than or equal to 0 and less than or equal to {max}.")),
        }
    }

    /// Parses the value of an enum; `all` and `as_str` are for the error message.
    pub(super) fn string_enum<T: std::str::FromStr + Copy>(
        &self,
        key: &str,
        text: Option<&str>,
        all: &[T],
        as_str: fn(T) -> &'static str,
    ) -> Result<Option<T>> {
        let Some(text) = text else { return Ok(None) };
        match text.parse() {
            Ok(value) => Ok(Some(value)),
            Err(_) => {
                let valid: Vec<&str> = all.iter().copied().map(as_str).collect();
                self.reject(key, &format!("Must be one of: {}.", valid.join(", ")))
            }
        }
    }

    /// Checks the name of a device model, which becomes part of a command line.
    pub(super) fn model(&self, key: &str, text: Option<&str>) -> Result<Option<String>> {
        let Some(text) = text else { return Ok(None) };
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.is_empty() || text.len() > 32 || !text.chars().all(is_allowed) {
            return self.reject(key, "String does not match expected pattern.");
        }
        Ok(Some(text.to_owned()))
    }
}

/// Parses an integer, which released clients may send as a string. Numbers that exceed the range saturate.
pub(super) fn parse_integer(value: &Value) -> Option<i128> {
    match value {
        Value::Number(number) => match number.as_i128() {
            Some(number) => Some(number),
            None => to_integer(number.as_f64()?),
        },
        Value::String(text) => text.trim().parse().ok(),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the number has no fraction, and the cast saturates")]
fn to_integer(number: f64) -> Option<i128> {
    (number.fract() == 0.0).then_some(number as i128)
}

/// Truncates a caller's text for an error message.
pub(super) fn truncate(text: &str) -> String {
    text.chars().take(MAX_ECHO_LENGTH).collect()
}
