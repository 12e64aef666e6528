//! How an instance gets on with those that are on a node already, by their tags.

use muster_types::spec::Affinity;

use super::shortage::Shortage;

/// Whether what it insists on is so.
pub(super) fn require<'a>(affinity: &'a Affinity, neighbours: &[Vec<String>]) -> Result<(), Shortage<'a>> {
    let here = |tag: &String| neighbours.iter().any(|tags| tags.contains(tag));
    if let Some(missing) = affinity.require_with.iter().find(|tag| !here(tag)) {
        return Err(Shortage::TagMissing(missing));
    }
    if let Some(unwanted) = affinity.require_without.iter().find(|tag| here(tag)) {
        return Err(Shortage::TagUnwanted(unwanted));
    }
    Ok(())
}

/// How many of the tags here it likes, less those that it dislikes.
pub(super) fn score(affinity: &Affinity, neighbours: &[Vec<String>]) -> i64 {
    let count = |wanted: &[String], tags: &[String]| {
        i64::try_from(tags.iter().filter(|tag| wanted.contains(tag)).count()).unwrap_or(i64::MAX)
    };
    neighbours
        .iter()
        .map(|tags| count(&affinity.prefer_with, tags) - count(&affinity.prefer_without, tags))
        .sum()
}
