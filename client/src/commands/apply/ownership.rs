//! The mark of objects that `muster apply` manages: a metadata key. See docs/decisions/0095.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::manifest::Declared;

/// The metadata key of the mark.
pub(super) const MARK: &str = "muster-apply";
/// The fields with entries that other users may add to. Apply removes only entries that it has set.
const ENTRY_FIELDS: [&str; 5] = ["dns", "metadata", "quotas", "reserved", "trust"];

/// A set of objects: those of the files that are applied together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ObjectSet {
    /// The namespace that applies the set. Sets of other namespaces may have the same name.
    pub(super) owner: String,
    pub(super) name: String,
}

/// What the mark of an object says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Mark {
    pub(super) owner: String,
    pub(super) set: String,
    /// Whether apply created the object. It never deletes others.
    pub(super) created: bool,
    /// The entries of fields that apply has set, by field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) entries: BTreeMap<String, Map<String, Value>>,
}

impl Mark {
    /// Returns the mark in the metadata of an object. A mark that cannot be read counts as none, so that its object is never
    /// deleted.
    pub(super) fn of(metadata: Option<&Value>) -> Option<Self> {
        serde_json::from_value(metadata?.get(MARK)?.clone()).ok()
    }

    /// Returns the mark of an object without entries.
    pub(super) fn new(set: &ObjectSet, created: bool) -> Self {
        Self { owner: set.owner.clone(), set: set.name.clone(), created, entries: BTreeMap::new() }
    }

    /// Returns the mark with the entries of an object in a file.
    pub(super) fn with_entries(mut self, declared: &Declared) -> Self {
        self.entries.clear();
        for field in ENTRY_FIELDS {
            let mut entries = declared.entries(field);
            entries.retain(|_, value| !value.is_null());
            // The API does not return the names in the DNS of a network.
            if field != "dns" {
                entries.values_mut().for_each(|value| *value = true.into());
            }
            if !entries.is_empty() {
                self.entries.insert(field.to_owned(), entries);
            }
        }
        self
    }

    pub(super) fn is_of(&self, set: &ObjectSet) -> bool {
        self.owner == set.owner && self.set == set.name
    }

    /// Returns the entries of a field.
    pub(super) fn entries_of(&self, field: &str) -> Map<String, Value> {
        self.entries.get(field).cloned().unwrap_or_default()
    }

    pub(super) fn to_json(&self) -> Value {
        serde_json::json!(self)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unreadable_mark_is_none() {
        let mark = json!({ "owner": "ci", "set": "shop", "created": true });
        assert!(Mark::of(Some(&json!({ MARK: mark }))).unwrap().created);
        for metadata in
            [json!({}), json!({ MARK: "shop" }), json!({ MARK: { "owner": "ci", "set": "shop" } })]
        {
            assert_eq!(Mark::of(Some(&metadata)), None, "{metadata}");
        }
        assert_eq!(Mark::of(None), None);
    }
}
