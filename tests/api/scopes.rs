//! Routes that a scoped token can call.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_api::{Access, RouteInfo};
use muster_control::auth::Caller;
use muster_control::auth::scopes::TRUST_SCOPES;
use muster_control::objects;
use muster_test_cluster::{ApiResponse, Cluster, ORIGIN, caller};
use muster_types::ids::KeyId;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;

const NOT_SCOPED: &str = "token is not scoped for this operation";
const NOT_ADMINISTRATIVE: &str = "token is not scoped for administrative operations";

/// Creates a token of a namespace with the given scopes.
pub(crate) async fn scoped_token<S: ToString>(cluster: &Cluster, namespace: &str, scopes: &[S]) -> String {
    let scopes = Some(scopes.iter().map(ToString::to_string).collect());
    // A key created by a scoped caller has at most the scopes of the caller.
    let name = format!("scoped-{}", KeyId::new());
    let secret = cluster.key(&Caller { scopes, ..caller() }, namespace, &name).await;
    objects::key::log_in(&cluster.app, namespace, &secret, ORIGIN).await.unwrap()
}

/// Calls a route with references to missing objects, so that an allowed call has no effect.
async fn call(cluster: &Cluster, token: &str, route: &RouteInfo) -> ApiResponse {
    let segments: Vec<&str> = route
        .path
        .split('/')
        .map(|segment| if segment.starts_with('{') { "absent" } else { segment })
        .collect();
    cluster.call(token, route.method.parse().unwrap(), &segments.join("/"), None).await
}

/// Returns the error if a call was rejected because of the token's scopes.
fn scope_error(response: &ApiResponse) -> Option<&str> {
    let text = response.body["error"].as_str().unwrap_or_default();
    (response.status == 403 && text.starts_with("token is not scoped")).then_some(text)
}

/// Returns the routes that require a scope.
fn protected_routes(cluster: &Cluster) -> Vec<RouteInfo> {
    cluster.routes.iter().filter(|route| !route.scope.is_empty()).cloned().collect()
}

/// Returns every scope that a route requires, and the administrators' scope.
fn all_scopes(cluster: &Cluster) -> BTreeSet<String> {
    let scopes = protected_routes(cluster).into_iter().map(|route| route.scope);
    scopes.chain(["cluster-admin".to_owned()]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn token_reaches_only_routes_of_its_scopes() {
    let cluster = Cluster::new().await;
    let token = scoped_token(&cluster, "system", &["node.read"]).await;
    let response = cluster.call(&token, Method::GET, "/auth/namespaces", None).await;
    assert_eq!(scope_error(&response), Some(NOT_SCOPED));
    let response = cluster.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(scope_error(&response), Some(NOT_ADMINISTRATIVE));
    let token = scoped_token(&cluster, "system", &["node.*", "cluster-admin"]).await;
    assert_eq!(cluster.call(&token, Method::GET, "/nodes", None).await.status, 200);
    assert_eq!(cluster.call(&token, Method::DELETE, "/nodes/absent", None).await.status, 404);
    assert_eq!(cluster.call(&token, Method::GET, "/admin/locks", None).await.status, 403);
    cluster.create_namespace("beta").await;
    let token = scoped_token(&cluster, "beta", &["auth.read"]).await;
    // Without the scope the call returns 403; with it, the admin route returns 401.
    assert_eq!(cluster.call(&token, Method::GET, "/nodes", None).await.status, 403);
    assert_eq!(cluster.call(&token, Method::GET, "/auth/namespaces/beta/events", None).await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_scope_allows_exactly_its_routes() {
    let cluster = Cluster::new().await;
    let (routes, all) = (protected_routes(&cluster), all_scopes(&cluster));
    for scope in &all {
        let family = scope.split_once('.').map(|(family, _)| format!("{family}.*"));
        let mut without: Vec<String> = all.iter().filter(|other| *other != scope).cloned().collect();
        let families =
            all.iter().filter_map(|other| other.split_once('.').map(|(name, _)| format!("{name}.*")));
        without.extend(families.filter(|other| Some(other) != family.as_ref()).collect::<BTreeSet<_>>());
        let token = scoped_token(&cluster, "system", &without).await;
        for route in &routes {
            let expected = if route.scope == *scope {
                Some(NOT_SCOPED)
            } else if scope == "cluster-admin" && route.access == Access::Admin {
                Some(NOT_ADMINISTRATIVE)
            } else {
                continue;
            };
            assert_eq!(
                scope_error(&call(&cluster, &token, route).await),
                expected,
                "{route:?} with {without:?}"
            );
        }
        for sufficient in [Some(scope), family.as_ref()].into_iter().flatten() {
            let token = scoped_token(&cluster, "system", &[sufficient.as_str(), "cluster-admin"]).await;
            for route in routes.iter().filter(|route| route.scope == *scope) {
                assert_eq!(
                    scope_error(&call(&cluster, &token, route).await),
                    None,
                    "{route:?} with {sufficient}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn some_routes_need_a_token_but_no_scope() {
    let cluster = Cluster::new().await;
    let token = scoped_token::<&str>(&cluster, "system", &[]).await;
    let routes =
        cluster.routes.iter().filter(|route| route.access == Access::Token && route.scope.is_empty());
    let mut paths = Vec::new();
    for route in routes {
        assert_eq!(call(&cluster, &token, route).await.status, 200, "{route:?}");
        assert_eq!(call(&cluster, "", route).await.status, 401, "{route:?}");
        paths.push(format!("{} {}", route.method, route.path));
    }
    assert_eq!(paths, ["POST /auth/login-tickets", "GET /auth/session", "GET /events/stream"]);
}

/// Returns whether scopes allow a route: an independent reference implementation.
fn allows(scopes: &BTreeSet<String>, route: &RouteInfo) -> bool {
    let family = route.scope.split('.').next().unwrap();
    let scope_allowed = scopes.contains(&route.scope) || scopes.contains(&format!("{family}.*"));
    let admin_allowed = route.access != Access::Admin || scopes.contains("cluster-admin");
    scopes.contains("*") || (scope_allowed && admin_allowed)
}

/// Returns valid scopes, wildcards and similar-looking strings.
fn candidates(cluster: &Cluster) -> Vec<String> {
    let mut candidates = all_scopes(cluster);
    for scope in candidates.clone() {
        let (family, verb) = scope.split_once('.').unwrap_or((&scope, ""));
        let similar = ["*", "", "reading", "READ", " read", "read ", "re*", "*.*"]
            .map(|verb| format!("{family}.{verb}"));
        candidates.extend(similar);
        candidates.extend([
            family.to_owned(),
            format!("{family}s.*"),
            format!("*.{verb}"),
            scope.to_uppercase(),
        ]);
    }
    candidates
        .extend(["*", "", ".", "**", "*.*", " *", ".*", "cluster-*", "cluster-admin.*"].map(str::to_owned));
    candidates.into_iter().collect()
}

#[test]
fn no_scope_combination_reaches_routes_beyond_it() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let cluster = runtime.block_on(Cluster::new());
    let routes = protected_routes(&cluster);
    let candidates = prop::sample::select(candidates(&cluster));
    let combinations = prop::collection::btree_set(candidates, 0..12);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&combinations, |scopes| {
        let scopes: BTreeSet<String> = scopes;
        runtime.block_on(async {
            let list: Vec<&String> = scopes.iter().collect();
            let token = scoped_token(&cluster, "system", &list).await;
            for route in &routes {
                let response = call(&cluster, &token, route).await;
                let reached = scope_error(&response).is_none();
                prop_assert_eq!(reached, allows(&scopes, route), "{:?}: {}", route, response.text);
                prop_assert_ne!(response.status.as_u16(), 401, "{:?}", route);
            }
            Ok(())
        })
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_grants_at_most_the_scopes_of_its_creator() {
    let cluster = Cluster::new().await;
    for name in ["alpha", "beta", "gamma"] {
        cluster.create_namespace(name).await;
    }
    let scopes_of = async |namespace: &str| -> Option<Vec<String>> {
        let trusted = Caller { namespace: namespace.into(), ..caller() };
        let name = format!("made-{}", KeyId::new());
        cluster.key(&trusted, "alpha", &name).await;
        let sql = "SELECT scopes FROM namespace_keys WHERE name = ?";
        let rows = cluster.app.store.query(sql, &[name.into()]).await.unwrap();
        rows[0].scalar::<muster_store::Json<_>>().unwrap().0
    };
    let some_scopes = |scopes: &[&str]| Some(scopes.iter().map(ToString::to_string).collect::<Vec<_>>());
    let trust = async |creator: &str, other: &str| {
        let body = json!({"external_namespace": other});
        let response = cluster.call(creator, Method::POST, "/auth/namespaces/alpha/trust", Some(body)).await;
        assert_eq!(response.status, 200, "{}", response.text);
    };
    let sorted = |mut scopes: Vec<&'static str>| {
        scopes.sort_unstable();
        scopes
    };
    let creator = scoped_token(&cluster, "alpha", TRUST_SCOPES).await;
    trust(&creator, "beta").await;
    assert_eq!(scopes_of("beta").await, some_scopes(TRUST_SCOPES));
    // A third namespace cannot be used to escalate either.
    let beta = cluster.token("beta").await;
    trust(&beta, "gamma").await;
    assert_eq!(scopes_of("gamma").await, some_scopes(TRUST_SCOPES));
    let rule = json!({"name": "r", "issuer": "none", "bound_claims": {"sub": "x"}, "scopes": ["blob.read"],
                                  "key_ttl": 60, "key_name_prefix": "r"});
    let response = cluster.call(&beta, Method::POST, "/auth/namespaces/alpha/rules", Some(rule)).await;
    assert_eq!(response.body["error"], "a rule cannot grant scopes you do not hold: blob.read");
    // Granting the trust again with other scopes adds those scopes.
    let more = [TRUST_SCOPES, &["blob.read"]].concat();
    trust(&scoped_token(&cluster, "alpha", &more).await, "beta").await;
    assert_eq!(scopes_of("beta").await, some_scopes(&sorted(more)));
    trust(&cluster.token("alpha").await, "beta").await;
    assert_eq!(scopes_of("beta").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_needs_every_scope_that_it_grants() {
    let cluster = Cluster::new().await;
    for name in ["alpha", "beta", "gamma"] {
        cluster.create_namespace(name).await;
    }
    let trust = async |token: &str, other: &str| {
        let body = json!({"external_namespace": other});
        cluster.call(token, Method::POST, "/auth/namespaces/alpha/trust", Some(body)).await
    };
    for missing in TRUST_SCOPES.iter().filter(|scope| **scope != "auth.write") {
        let held: Vec<&str> = TRUST_SCOPES.iter().copied().filter(|scope| scope != missing).collect();
        let response = trust(&scoped_token(&cluster, "alpha", &held).await, "beta").await;
        let expected = format!("a trust cannot grant scopes you do not hold: {missing}");
        assert_eq!(
            (response.status.as_u16(), response.body["error"].as_str()),
            (403, Some(expected.as_str()))
        );
    }
    let beta = cluster.token("beta").await;
    assert_eq!(cluster.call(&beta, Method::GET, "/auth/namespaces/alpha", None).await.status, 404);
    // Neither can a namespace that is trusted itself, with a scoped key.
    assert_eq!(trust(&cluster.token("alpha").await, "beta").await.status, 200);
    assert_eq!(trust(&scoped_token(&cluster, "beta", &["auth.write"]).await, "gamma").await.status, 403);
    for held in [
        &["*"][..],
        &[
            "agentoperation.*",
            "artifact.*",
            "auth.*",
            "instance.*",
            "interface.*",
            "label.*",
            "network.*",
            "rule.*",
        ],
    ] {
        assert_eq!(trust(&scoped_token(&cluster, "alpha", held).await, "gamma").await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_cannot_replace_key_with_more_scopes() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("alpha").await;
    cluster.key(&caller(), "alpha", "main").await;
    let limited = Caller { scopes: Some(vec!["blob.read".into(), "auth.write".into()]), ..caller() };
    cluster.key(&limited, "alpha", "few").await;
    let keys = "/auth/namespaces/alpha/keys";
    let token = scoped_token(&cluster, "alpha", &["auth.write"]).await;
    for name in ["main", "few"] {
        let response = cluster.call(&token, Method::POST, keys, Some(json!({"key_name": name}))).await;
        let expected = (403, "a key cannot be replaced by a token that is scoped for less");
        assert_eq!((response.status.as_u16(), response.body["error"].as_str().unwrap()), expected, "{name}");
    }
    let token = scoped_token(&cluster, "alpha", &["auth.*", "blob.*"]).await;
    for (name, status) in [("main", 403), ("few", 200), ("another", 200)] {
        let response = cluster.call(&token, Method::POST, keys, Some(json!({"key_name": name}))).await;
        assert_eq!(response.status, status, "{name}: {}", response.text);
    }
}
