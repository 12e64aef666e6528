//! Who may call each route.

use axum::http::Method;

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Anyone, without a token.
    Public,
    /// Any namespace's token.
    Token,
    /// Only the namespace `system`.
    Admin,
}

/// A route, for tests and documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteInfo {
    pub method: String,
    pub path: String,
    pub access: Access,
    /// The scope that a token needs; empty for public routes and for those that any token may call. Administrative routes need
    /// [`CLUSTER_ADMIN`](muster_control::auth::scopes::CLUSTER_ADMIN) as well.
    pub scope: String,
}

/// Returns the scope that a request needs: the family of the route and its verb, which follows from the method by
/// default. It is empty for a route without a family.
pub(crate) fn required_scope(family: &str, verb: Option<&str>, method: &Method) -> String {
    let default = match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => "read",
        Method::DELETE => "delete",
        _ => "write",
    };
    if family.is_empty() { String::new() } else { format!("{family}.{}", verb.unwrap_or(default)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verb_of_the_scope_follows_the_method() {
        assert_eq!(required_scope("auth", None, &Method::GET), "auth.read");
        assert_eq!(required_scope("auth", None, &Method::HEAD), "auth.read");
        assert_eq!(required_scope("auth", None, &Method::PUT), "auth.write");
        assert_eq!(required_scope("auth", None, &Method::DELETE), "auth.delete");
        assert_eq!(required_scope("", None, &Method::GET), "");
        assert_eq!(required_scope("instance", Some("execute"), &Method::POST), "instance.execute");
    }
}
