//! Affinity to the instances that are already on a node, by their tags.

use muster_types::spec::Affinity;

use super::reject_reason::RejectReason;

/// Checks the required tags.
pub(super) fn check_required<'a>(
    affinity: &'a Affinity,
    neighbours: &[Vec<String>],
) -> Result<(), RejectReason<'a>> {
    let is_present = |tag: &String| neighbours.iter().any(|tags| tags.contains(tag));
    if let Some(missing) = affinity.require_with.iter().find(|tag| !is_present(tag)) {
        return Err(RejectReason::TagMissing(missing));
    }
    if let Some(unwanted) = affinity.require_without.iter().find(|tag| is_present(tag)) {
        return Err(RejectReason::TagUnwanted(unwanted));
    }
    Ok(())
}

/// Returns the number of preferred tags on a node, minus the number of tags to avoid.
pub(super) fn preference_score(affinity: &Affinity, neighbours: &[Vec<String>]) -> i64 {
    neighbours
        .iter()
        .flatten()
        .map(|tag| {
            i64::from(affinity.prefer_with.contains(tag)) - i64::from(affinity.prefer_without.contains(tag))
        })
        .sum()
}
