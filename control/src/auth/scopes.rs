//! Scopes limit what a token may be used for. A scope is `<family>.<verb>`, `<family>.*` or `*`. See
//! docs/decisions/0025.

/// The scope that every administrative route requires in addition to its own.
pub const CLUSTER_ADMIN: &str = "cluster-admin";

/// The scopes of the calls that a trust opens to every key of the trusted namespace.
pub const TRUST_SCOPES: &[&str] = &[
    "agentoperation.read",
    "artifact.read",
    "artifact.write",
    "auth.delete",
    "auth.read",
    "auth.write",
    "instance.read",
    "instance.write",
    "interface.read",
    "label.read",
    "label.write",
    "network.read",
    "network.write",
    "rule.delete",
    "rule.read",
    "rule.write",
];

/// Returns whether the scopes in `granted` include `required`. `None` includes everything, an empty list nothing.
#[must_use]
pub fn grants(granted: Option<&[String]>, required: &str) -> bool {
    let Some(granted) = granted else { return true };
    granted.iter().any(|scope| {
        scope == "*"
            || scope == required
            || scope.strip_suffix(".*").is_some_and(|family| {
                required.split_once('.').is_some_and(|(required_family, _)| required_family == family)
            })
    })
}

/// Returns whether `granted` includes all scopes in `other`.
#[must_use]
pub fn covers(granted: Option<&[String]>, other: Option<&[String]>) -> bool {
    match other {
        None => granted.is_none(),
        Some(other) => other.iter().all(|scope| grants(granted, scope)),
    }
}

/// Returns the scopes that both lists include.
#[must_use]
pub fn intersection(one: Option<&[String]>, other: Option<&[String]>) -> Option<Vec<String>> {
    let (Some(first), Some(second)) = (one, other) else { return one.or(other).map(<[String]>::to_vec) };
    let in_second = first.iter().filter(|scope| grants(other, scope));
    let in_first = second.iter().filter(|scope| grants(one, scope));
    let mut both: Vec<String> = in_second.chain(in_first).cloned().collect();
    both.sort_unstable();
    both.dedup();
    Some(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(scopes: &[&str]) -> Vec<String> {
        scopes.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn wildcard_matches_only_its_own_family() {
        assert!(grants(Some(&list(&["node.*"])), "node.read"));
        assert!(!grants(Some(&list(&["node.*"])), "nodegroup.read"));
        assert!(!grants(Some(&list(&["node.*", "auth.*"])), CLUSTER_ADMIN));
        assert!(grants(Some(&list(&["*"])), CLUSTER_ADMIN));
        assert!(!grants(Some(&list(&["*.*"])), "node.read"));
    }

    #[test]
    fn missing_list_grants_everything_and_empty_list_nothing() {
        assert!(grants(None, "auth.write"));
        assert!(!grants(Some(&[]), "auth.read"));
    }

    #[test]
    fn wildcard_is_granted_only_by_itself_or_a_wider_one() {
        assert!(grants(Some(&list(&["artifact.*"])), "artifact.*"));
        assert!(grants(Some(&list(&["*"])), "artifact.*"));
        assert!(!grants(Some(&list(&["artifact.read", "artifact.write", "artifact.delete"])), "artifact.*"));
        assert!(!grants(Some(&list(&["artifact.*", "*.*"])), "*"));
        assert!(!grants(Some(&list(&["artifact.*"])), "artifact"));
    }

    #[test]
    fn intersection_is_covered_by_both_lists() {
        let one = list(&["artifact.*", "blob.read", "node.read"]);
        let other = list(&["artifact.read", "blob.*", "auth.write"]);
        let both = list(&["artifact.read", "blob.read"]);
        assert_eq!(intersection(Some(&one), Some(&other)), Some(both));
        assert_eq!(intersection(Some(&one), None), Some(one.clone()));
        assert_eq!(intersection(None, Some(&other)), Some(other.clone()));
        assert_eq!(intersection(None, None), None);
        assert_eq!(intersection(Some(&one), Some(&list(&["*"]))), Some(one.clone()));
        assert_eq!(intersection(Some(&[]), Some(&other)), Some(vec![]));
        assert!(covers(Some(&one), intersection(Some(&one), Some(&other)).as_deref()));
        assert!(covers(None, None) && covers(None, Some(&one)) && !covers(Some(&one), None));
        assert!(!covers(Some(&one), Some(&other)));
    }
}
