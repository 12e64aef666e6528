//! Scopes: what a token may be used for, as `<family>.<verb>`.

/// Needed in addition on every administrative route.
pub const CLUSTER_ADMIN: &str = "cluster-admin";

/// Whether `held` covers `needed`. `None` covers everything, an empty list nothing.
#[must_use]
pub fn grants(held: Option<&[String]>, needed: &str) -> bool {
    let Some(held) = held else { return true };
    held.iter().any(|scope| {
        scope == "*"
            || scope == needed
            || scope.strip_suffix(".*").is_some_and(|family| {
                needed.split_once('.').is_some_and(|(needed_family, _)| needed_family == family)
            })
    })
}

/// Whether `held` covers all of `other`.
#[must_use]
pub fn cover(held: Option<&[String]>, other: Option<&[String]>) -> bool {
    match other {
        None => held.is_none(),
        Some(other) => other.iter().all(|scope| grants(held, scope)),
    }
}

/// What both lists cover.
#[must_use]
pub fn common(one: Option<&[String]>, other: Option<&[String]>) -> Option<Vec<String>> {
    let (Some(first), Some(second)) = (one, other) else { return one.or(other).map(<[String]>::to_vec) };
    let in_second = first.iter().filter(|scope| grants(other, scope));
    let in_first = second.iter().filter(|scope| grants(one, scope));
    let mut common: Vec<String> = in_second.chain(in_first).cloned().collect();
    common.sort_unstable();
    common.dedup();
    Some(common)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(scopes: &[&str]) -> Vec<String> {
        scopes.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn wildcards_reach_their_own_family_only() {
        assert!(grants(Some(&held(&["node.*"])), "node.read"));
        assert!(!grants(Some(&held(&["node.*"])), "nodegroup.read"));
        assert!(!grants(Some(&held(&["node.*", "auth.*"])), CLUSTER_ADMIN));
        assert!(grants(Some(&held(&["*"])), CLUSTER_ADMIN));
        assert!(!grants(Some(&held(&["*.*"])), "node.read"));
    }

    #[test]
    fn no_list_allows_everything_and_an_empty_list_nothing() {
        assert!(grants(None, "auth.write"));
        assert!(!grants(Some(&[]), "auth.read"));
    }

    #[test]
    fn what_covers_a_wildcard_is_the_wildcard_or_a_wider_one() {
        assert!(grants(Some(&held(&["artifact.*"])), "artifact.*"));
        assert!(grants(Some(&held(&["*"])), "artifact.*"));
        assert!(!grants(Some(&held(&["artifact.read", "artifact.write", "artifact.delete"])), "artifact.*"));
        assert!(!grants(Some(&held(&["artifact.*", "*.*"])), "*"));
        assert!(!grants(Some(&held(&["artifact.*"])), "artifact"));
    }

    #[test]
    fn what_is_common_is_covered_by_both() {
        let one = held(&["artifact.*", "blob.read", "node.read"]);
        let other = held(&["artifact.read", "blob.*", "auth.write"]);
        let both = held(&["artifact.read", "blob.read"]);
        assert_eq!(common(Some(&one), Some(&other)), Some(both));
        assert_eq!(common(Some(&one), None), Some(one.clone()));
        assert_eq!(common(None, Some(&other)), Some(other.clone()));
        assert_eq!(common(None, None), None);
        assert_eq!(common(Some(&one), Some(&held(&["*"]))), Some(one.clone()));
        assert_eq!(common(Some(&[]), Some(&other)), Some(vec![]));
        assert!(cover(Some(&one), common(Some(&one), Some(&other)).as_deref()));
        assert!(cover(None, None) && cover(None, Some(&one)) && !cover(Some(&one), None));
        assert!(!cover(Some(&one), Some(&other)));
    }
}
