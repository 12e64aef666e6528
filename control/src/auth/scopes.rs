//! Scopes: what a token may be used for, as `<family>.<verb>`.

use axum::http::Method;

/// Needed in addition on every administrative route.
pub const CLUSTER_ADMIN: &str = "cluster-admin";

/// The scope of a call: the route's family, and its own verb or else that of the method.
#[must_use]
pub fn required(family: &str, verb: Option<&str>, method: &Method) -> String {
    let usual = match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => "read",
        Method::DELETE => "delete",
        _ => "write",
    };
    format!("{family}.{}", verb.unwrap_or(usual))
}

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
    fn the_verb_follows_the_method() {
        assert_eq!(required("auth", None, &Method::GET), "auth.read");
        assert_eq!(required("auth", None, &Method::HEAD), "auth.read");
        assert_eq!(required("auth", None, &Method::PUT), "auth.write");
        assert_eq!(required("auth", None, &Method::DELETE), "auth.delete");
        assert_eq!(required("instance", Some("execute"), &Method::POST), "instance.execute");
    }
}
