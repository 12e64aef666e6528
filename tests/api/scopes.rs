//! Which routes a token with scopes reaches.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_api::{Access, RouteInfo};
use muster_control::auth::Caller;
use muster_control::objects;
use muster_test_cluster::{ApiResponse, Cluster, caller};
use muster_types::ids::KeyId;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;

const NOT_SCOPED: &str = "token is not scoped for this operation";
const NOT_ADMINISTRATIVE: &str = "token is not scoped for administrative operations";

/// A token of a namespace that is good for some scopes.
pub(crate) async fn scoped<S: ToString>(cluster: &Cluster, namespace: &str, scopes: &[S]) -> String {
    let scopes = Some(scopes.iter().map(ToString::to_string).collect());
    // A key made by a scoped caller can do no more than the caller.
    let name = format!("scoped-{}", KeyId::new());
    let secret = cluster.key(&Caller { scopes, ..caller() }, namespace, &name).await;
    objects::key::log_in(&cluster.app, namespace, &secret, "test").await.unwrap()
}

/// Calls a route about things that do not exist, so that a call which is let through changes nothing.
async fn call(cluster: &Cluster, token: &str, route: &RouteInfo) -> ApiResponse {
    let words: Vec<&str> =
        route.path.split('/').map(|word| if word.starts_with('{') { "absent" } else { word }).collect();
    cluster.call(token, route.method.parse().unwrap(), &words.join("/"), None).await
}

/// Why the scopes of a token do not let a call through.
fn refusal(answer: &ApiResponse) -> Option<&str> {
    let text = answer.body["error"].as_str().unwrap_or_default();
    (answer.status == 403 && text.starts_with("token is not scoped")).then_some(text)
}

/// The routes that need a token.
fn guarded(cluster: &Cluster) -> Vec<RouteInfo> {
    cluster.routes.iter().filter(|route| route.access != Access::Public).cloned().collect()
}

/// Every scope that some route needs, and the one of administrators.
fn vocabulary(cluster: &Cluster) -> BTreeSet<String> {
    let scopes = guarded(cluster).into_iter().map(|route| route.scope);
    scopes.chain(["cluster-admin".to_owned()]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_reaches_only_the_routes_of_its_scopes() {
    let cluster = Cluster::new().await;
    let token = scoped(&cluster, "system", &["node.read"]).await;
    let answer = cluster.call(&token, Method::GET, "/auth/namespaces", None).await;
    assert_eq!(refusal(&answer), Some(NOT_SCOPED));
    let answer = cluster.call(&token, Method::GET, "/nodes", None).await;
    assert_eq!(refusal(&answer), Some(NOT_ADMINISTRATIVE));
    let token = scoped(&cluster, "system", &["node.*", "cluster-admin"]).await;
    assert_eq!(cluster.call(&token, Method::GET, "/nodes", None).await.status, 200);
    assert_eq!(cluster.call(&token, Method::DELETE, "/nodes/absent", None).await.status, 404);
    assert_eq!(cluster.call(&token, Method::GET, "/admin/locks", None).await.status, 403);
    cluster.create_namespace("beta").await;
    let token = scoped(&cluster, "beta", &["auth.read"]).await;
    // Without the scope 403 comes first; with it, the admin route's 401.
    assert_eq!(cluster.call(&token, Method::GET, "/nodes", None).await.status, 403);
    assert_eq!(cluster.call(&token, Method::GET, "/auth/namespaces/beta/events", None).await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_scope_opens_its_routes_and_all_others_together_do_not() {
    let cluster = Cluster::new().await;
    let (routes, all) = (guarded(&cluster), vocabulary(&cluster));
    for scope in &all {
        let family = scope.split_once('.').map(|(family, _)| format!("{family}.*"));
        let mut without: Vec<String> = all.iter().filter(|other| *other != scope).cloned().collect();
        let families =
            all.iter().filter_map(|other| other.split_once('.').map(|(name, _)| format!("{name}.*")));
        without.extend(families.filter(|other| Some(other) != family.as_ref()).collect::<BTreeSet<_>>());
        let token = scoped(&cluster, "system", &without).await;
        for route in &routes {
            let expected = if route.scope == *scope {
                Some(NOT_SCOPED)
            } else if scope == "cluster-admin" && route.access == Access::Admin {
                Some(NOT_ADMINISTRATIVE)
            } else {
                continue;
            };
            assert_eq!(refusal(&call(&cluster, &token, route).await), expected, "{route:?} with {without:?}");
        }
        for enough in [Some(scope), family.as_ref()].into_iter().flatten() {
            let token = scoped(&cluster, "system", &[enough.as_str(), "cluster-admin"]).await;
            for route in routes.iter().filter(|route| route.scope == *scope) {
                assert_eq!(refusal(&call(&cluster, &token, route).await), None, "{route:?} with {enough}");
            }
        }
    }
}

/// Whether scopes reach a route, said anew and plainly.
fn reaches(scopes: &BTreeSet<String>, route: &RouteInfo) -> bool {
    let family = route.scope.split('.').next().unwrap();
    let opened = scopes.contains(&route.scope) || scopes.contains(&format!("{family}.*"));
    let administrative = route.access != Access::Admin || scopes.contains("cluster-admin");
    scopes.contains("*") || (opened && administrative)
}

/// Real scopes, wildcards, and what looks like them.
fn words(cluster: &Cluster) -> Vec<String> {
    let mut words = vocabulary(cluster);
    for scope in words.clone() {
        let (family, verb) = scope.split_once('.').unwrap_or((&scope, ""));
        let near = ["*", "", "reading", "READ", " read", "read ", "re*", "*.*"]
            .map(|verb| format!("{family}.{verb}"));
        words.extend(near);
        words.extend([family.to_owned(), format!("{family}s.*"), format!("*.{verb}"), scope.to_uppercase()]);
    }
    words.extend(["*", "", ".", "**", "*.*", " *", ".*", "cluster-*", "cluster-admin.*"].map(str::to_owned));
    words.into_iter().collect()
}

#[test]
fn no_combination_of_scopes_reaches_a_route_outside_its_row() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let cluster = runtime.block_on(Cluster::new());
    let routes = guarded(&cluster);
    let words = prop::sample::select(words(&cluster));
    let combinations = prop::collection::btree_set(words, 0..12);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let tried = runner.run(&combinations, |scopes| {
        let scopes: BTreeSet<String> = scopes;
        runtime.block_on(async {
            let list: Vec<&String> = scopes.iter().collect();
            let token = scoped(&cluster, "system", &list).await;
            for route in &routes {
                let answer = call(&cluster, &token, route).await;
                let reached = refusal(&answer).is_none();
                prop_assert_eq!(reached, reaches(&scopes, route), "{:?}: {}", route, answer.text);
                prop_assert_ne!(answer.status.as_u16(), 401, "{:?}", route);
            }
            Ok(())
        })
    });
    tried.unwrap_or_else(|failure| panic!("{failure}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trust_hands_on_no_more_than_its_giver_holds() {
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
    let some = |scopes: &[&str]| Some(scopes.iter().map(ToString::to_string).collect::<Vec<_>>());
    let trust = async |giver: &str, other: &str| {
        let body = json!({"external_namespace": other});
        let answer = cluster.call(giver, Method::POST, "/auth/namespaces/alpha/trust", Some(body)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    };
    let giver = scoped(&cluster, "alpha", &["auth.write", "artifact.*"]).await;
    trust(&giver, "beta").await;
    assert_eq!(scopes_of("beta").await, some(&["auth.write", "artifact.*"]));
    // Nor is there a way around by a third one.
    let beta = cluster.token("beta").await;
    trust(&beta, "gamma").await;
    assert_eq!(scopes_of("gamma").await, some(&["auth.write", "artifact.*"]));
    let rule = json!({"name": "r", "issuer": "none", "bound_claims": {"sub": "x"}, "scopes": ["blob.read"],
                                  "key_ttl": 60, "key_name_prefix": "r"});
    let answer = cluster.call(&beta, Method::POST, "/auth/namespaces/alpha/rules", Some(rule)).await;
    assert_eq!(answer.body["error"], "a rule cannot grant scopes you do not hold: blob.read");
    // Given again by others it hands on what they hold, too.
    let giver = scoped(&cluster, "alpha", &["auth.*"]).await;
    trust(&giver, "beta").await;
    assert_eq!(scopes_of("beta").await, some(&["artifact.*", "auth.*", "auth.write"]));
    trust(&cluster.token("alpha").await, "beta").await;
    assert_eq!(scopes_of("beta").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_can_do_more_is_not_replaced_by_one_that_can_do_less() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("alpha").await;
    cluster.key(&caller(), "alpha", "main").await;
    let few = Caller { scopes: Some(vec!["blob.read".into(), "auth.write".into()]), ..caller() };
    cluster.key(&few, "alpha", "few").await;
    let keys = "/auth/namespaces/alpha/keys";
    let token = scoped(&cluster, "alpha", &["auth.write"]).await;
    for name in ["main", "few"] {
        let answer = cluster.call(&token, Method::POST, keys, Some(json!({"key_name": name}))).await;
        let expected = (403, "a key cannot be replaced by a token that is scoped for less");
        assert_eq!((answer.status.as_u16(), answer.body["error"].as_str().unwrap()), expected, "{name}");
    }
    let token = scoped(&cluster, "alpha", &["auth.*", "blob.*"]).await;
    for (name, status) in [("main", 403), ("few", 200), ("another", 200)] {
        let answer = cluster.call(&token, Method::POST, keys, Some(json!({"key_name": name}))).await;
        assert_eq!(answer.status, status, "{name}: {}", answer.text);
    }
}
