//! What an instance says of itself to its neighbours, and what it wants of them. Both are metadata that is read
//! when the instance is created.

use serde_json::{Map, Value};

use super::fields::{cut, integer};
use crate::{Error, Result};

/// What an instance wants of its neighbours, by their tags.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Affinity {
    pub require_with: Vec<String>,
    pub require_without: Vec<String>,
    pub prefer_with: Vec<String>,
    pub prefer_without: Vec<String>,
}

impl Affinity {
    /// Whether there are neighbours that it must have or must not have.
    #[must_use]
    pub fn is_hard(&self) -> bool {
        !self.require_with.is_empty() || !self.require_without.is_empty()
    }

    fn constraint(&mut self, key: &str) -> Option<&mut Vec<String>> {
        match key {
            "require_with_tag" => Some(&mut self.require_with),
            "require_without_tag" => Some(&mut self.require_without),
            "prefer_with_tag" => Some(&mut self.prefer_with),
            "prefer_without_tag" => Some(&mut self.prefer_without),
            _ => None,
        }
    }
}

/// The value of the metadata key `tags`. Metadata may hold anything, but only texts are tags: the others match nothing.
pub fn parse_tags(value: &Value) -> Result<Vec<String>> {
    let Value::Array(elements) = value else {
        return Err(Error::Invalid("value for \"tags\" key should be a JSON list".into()));
    };
    Ok(elements.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// The value of the metadata key `affinity`, and whether it has the deprecated form of a weight for each tag.
pub fn parse_affinity(value: &Value) -> Result<(Affinity, bool)> {
    let Value::Object(values) = value else {
        let text = "value for \"affinity\" key should be a valid JSON dictionary";
        return Err(Error::Invalid(text.into()));
    };
    let mut affinity = Affinity::default();
    if values.keys().any(|key| affinity.constraint(key).is_some()) {
        return Ok((constraints(values)?, false));
    }
    for (tag, weight) in values {
        if weight.is_boolean() {
            let text = "affinity dictionary values should be integers, not booleans";
            return Err(Error::Invalid(text.into()));
        }
        let Some(weight) = integer(weight) else {
            return Err(Error::Invalid("affinity dictionary values should be integers".into()));
        };
        // How heavy it is does not matter.
        match weight.signum() {
            1 => affinity.prefer_with.push(tag.clone()),
            -1 => affinity.prefer_without.push(tag.clone()),
            _ => {}
        }
    }
    Ok((affinity, !values.is_empty()))
}

fn constraints(values: &Map<String, Value>) -> Result<Affinity> {
    let mut affinity = Affinity::default();
    let others: Vec<String> = values
        .keys()
        .filter(|key| affinity.constraint(key).is_none())
        .take(20)
        .map(|key| format!("'{}'", cut(key)))
        .collect();
    if !others.is_empty() {
        let others = others.join(", ");
        return Err(Error::Invalid(format!(
            "affinity keys [{others}] are not valid alongside the binary affinity constraints; the weighted and \
             binary forms cannot be mixed"
        )));
    }
    for (key, value) in values {
        let Value::Array(elements) = value else {
            return Err(Error::Invalid(format!(
                "value for affinity constraint \"{key}\" should be a JSON list of tags"
            )));
        };
        let read = |element: &Value| {
            element.as_str().filter(|tag| !tag.is_empty()).map(str::to_owned).ok_or_else(|| {
                let why = "should contain only non-empty tag names";
                Error::Invalid(format!("affinity constraint \"{key}\" {why}"))
            })
        };
        let tags = elements.iter().map(read).collect::<Result<Vec<_>>>()?;
        if let Some(wanted) = affinity.constraint(key) {
            *wanted = tags;
        }
    }
    Ok(affinity)
}
