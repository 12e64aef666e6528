//! Tags and affinity of an instance. Both are metadata that is parsed when the instance is created.

use serde_json::{Map, Value};

use super::fields::{parse_integer, truncate};
use crate::{Error, Result};

/// The tags that the other instances on a node must, must not, should or should not have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Affinity {
    pub require_with: Vec<String>,
    pub require_without: Vec<String>,
    pub prefer_with: Vec<String>,
    pub prefer_without: Vec<String>,
}

impl Affinity {
    /// Returns whether there are required tags.
    #[must_use]
    pub fn has_requirements(&self) -> bool {
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

/// Parses the metadata key `tags`. Elements that are not strings are ignored.
pub fn parse_tags(value: &Value) -> Result<Vec<String>> {
    let Value::Array(elements) = value else {
        return Err(Error::Invalid("value for \"tags\" key should be a JSON list".into()));
    };
    Ok(elements.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// Parses the metadata key `affinity`, and returns whether it has the deprecated form with a weight for each tag.
pub fn parse_affinity(value: &Value) -> Result<(Affinity, bool)> {
    let Value::Object(values) = value else {
        let text = "value for \"affinity\" key should be a valid JSON dictionary";
        return Err(Error::Invalid(text.into()));
    };
    let mut affinity = Affinity::default();
    if values.keys().any(|key| affinity.constraint(key).is_some()) {
        return Ok((parse_constraints(values)?, false));
    }
    for (tag, weight) in values {
        if weight.is_boolean() {
            let text = "affinity dictionary values should be integers, not booleans";
            return Err(Error::Invalid(text.into()));
        }
        let Some(weight) = parse_integer(weight) else {
            return Err(Error::Invalid("affinity dictionary values should be integers".into()));
        };
        // Only the sign of the weight matters.
        match weight.signum() {
            1 => affinity.prefer_with.push(tag.clone()),
            -1 => affinity.prefer_without.push(tag.clone()),
            _ => {}
        }
    }
    Ok((affinity, !values.is_empty()))
}

fn parse_constraints(values: &Map<String, Value>) -> Result<Affinity> {
    let mut affinity = Affinity::default();
    let others: Vec<String> = values
        .keys()
        .filter(|key| affinity.constraint(key).is_none())
        .take(20)
        .map(|key| format!("'{}'", truncate(key)))
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
        let parse_tag = |element: &Value| {
            element.as_str().filter(|tag| !tag.is_empty()).map(str::to_owned).ok_or_else(|| {
                let why = "should contain only non-empty tag names";
                Error::Invalid(format!("affinity constraint \"{key}\" {why}"))
            })
        };
        let tags = elements.iter().map(parse_tag).collect::<Result<Vec<_>>>()?;
        if let Some(constraint) = affinity.constraint(key) {
            *constraint = tags;
        }
    }
    Ok(affinity)
}
