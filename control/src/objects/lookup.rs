//! Where objects are looked up by name: in the caller's namespace, then among those that `system` shares. `system` also finds
//! objects of all namespaces. Other namespaces, even those that trust the caller, are only searched if they are named.

use std::collections::BTreeSet;

use muster_types::artifact::ArtifactState;
use muster_types::instance::InstanceState;
use muster_types::network::NetworkState;
use muster_types::time::now;
use muster_types::{Error, Result};

use crate::auth::Caller;
use muster_store::artifacts::ArtifactRow;
use muster_store::instances::InstanceRow;
use muster_store::networks::NetworkRow;

/// A place to look for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SearchScope<'a> {
    Namespace(&'a str),
    /// The objects that `system` shares with all namespaces.
    Shared,
    AllNamespaces,
}

/// Returns the places to look for a name, in order. The first one with a match counts.
pub(crate) fn search_order<'a>(caller: &'a Caller, namespace: Option<&'a str>) -> Vec<SearchScope<'a>> {
    match namespace {
        Some(namespace) => vec![SearchScope::Namespace(namespace)],
        None if caller.is_system() => {
            vec![SearchScope::Namespace(&caller.namespace), SearchScope::AllNamespaces]
        }
        None => vec![SearchScope::Namespace(&caller.namespace), SearchScope::Shared],
    }
}

/// An object with the name in question.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) id: String,
    pub(crate) namespace: &'a str,
    pub(crate) state: String,
    /// Whether it could not be created.
    pub(crate) is_failed: bool,
    /// When it was created, if this is stored.
    pub(crate) created: Option<f64>,
}

impl<'a> From<&'a InstanceRow> for Candidate<'a> {
    fn from(row: &'a InstanceRow) -> Self {
        Self {
            id: row.id.to_string(),
            namespace: &row.namespace,
            state: row.state.to_string(),
            is_failed: row.state == InstanceState::Error,
            created: Some(row.created),
        }
    }
}

impl<'a> From<&'a NetworkRow> for Candidate<'a> {
    fn from(row: &'a NetworkRow) -> Self {
        Self {
            id: row.id.to_string(),
            // The one that all namespaces use has none.
            namespace: row.namespace.as_deref().unwrap_or_default(),
            state: row.state.to_string(),
            is_failed: row.state == NetworkState::Error,
            created: None,
        }
    }
}

impl<'a> From<&'a ArtifactRow> for Candidate<'a> {
    fn from(row: &'a ArtifactRow) -> Self {
        Self {
            id: row.id.to_string(),
            namespace: &row.namespace,
            state: row.state.to_string(),
            is_failed: row.state == ArtifactState::Error,
            created: None,
        }
    }
}

/// Returns the only match of a name in one place, if there is one. An object that could not be created does not keep its
/// name from another one. `noun` is the plural of the type of object.
pub(crate) fn only_match<R>(mut found: Vec<R>, noun: &str, name: &str) -> Result<Option<R>>
where
    for<'a> Candidate<'a>: From<&'a R>,
{
    let is_usable = |row: &R| !Candidate::from(row).is_failed;
    if found.len() > 1 && found.iter().filter(|row| is_usable(row)).count() == 1 {
        found.retain(is_usable);
    }
    if found.len() < 2 {
        return Ok(found.pop());
    }
    let candidates: Vec<Candidate> = found.iter().map(Candidate::from).collect();
    let namespaces: BTreeSet<String> =
        candidates.iter().map(|candidate| format!("\"{}\"", candidate.namespace)).collect();
    let namespaces: Vec<String> = namespaces.into_iter().take(MAX_CANDIDATES).collect();
    let listed: Vec<String> = candidates.iter().take(MAX_CANDIDATES).map(describe).collect();
    let more = if candidates.len() > MAX_CANDIDATES { " and others" } else { "" };
    let listed = format!("{}{more}", listed.join(", "));
    Err(Error::Invalid(match namespaces.as_slice() {
        [namespace] => format!(
            "multiple {noun} have the name \"{name}\" in namespace {namespace}: {listed}; use a UUID instead"
        ),
        _ => format!(
            "multiple {noun} have the name \"{name}\", in namespaces {}: specify the namespace or use a UUID: {listed}",
            namespaces.join(", ")
        ),
    }))
}

fn describe(candidate: &Candidate) -> String {
    let age = candidate.created.map_or_else(String::new, |created| format!(", {} old", age_text(created)));
    format!("{} ({}{age})", candidate.id, candidate.state)
}

/// Returns the time since `created` in the largest unit that is not too coarse.
fn age_text(created: f64) -> String {
    let seconds = (now() - created).max(0.0);
    let (size, unit) = match seconds {
        ..120.0 => (1.0, "s"),
        ..7_200.0 => (60.0, "min"),
        ..172_800.0 => (3600.0, "h"),
        _ => (86400.0, "d"),
    };
    format!("{:.0} {unit}", (seconds / size).floor())
}

/// The maximum number of objects in an error. One more is queried, so that the error can say that there are others.
const MAX_CANDIDATES: usize = muster_store::MAX_NAMESAKES - 1;
