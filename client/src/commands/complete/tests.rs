use clap::CommandFactory as _;
use serde_json::json;

use super::super::tests::Cli;
use super::*;
use crate::fake_server::FakeServer;

fn complete(line: &str) -> Candidates {
    let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    candidates(Cli::command(), &words)
}

fn words(line: &str) -> Vec<String> {
    complete(line).words.into_iter().map(|(word, _)| word).collect()
}

fn lists(line: &str) -> Vec<String> {
    match complete(line).objects {
        Some(Objects::Lists(lists)) => lists,
        _ => vec![],
    }
}

#[test]
fn completes_commands_options_and_values() {
    assert_eq!(words("instance sna"), ["snapshot", "snapshots"]);
    assert!(words("").contains(&"network".to_owned()));
    assert_eq!(words("instance list --wa"), ["--watch"]);
    assert_eq!(words("instance list -o js"), ["json"]);
    assert_eq!(words("events node sim-1 --type au"), ["audit"]);
    assert!(words("instance show web ").is_empty());
    assert!(words("exec web -- ls -").is_empty(), "options of the guest's command are unknown");
}

#[test]
fn names_come_from_the_lists_of_the_cluster() {
    for (line, list) in [
        ("instance show w", "/instances"),
        ("instance delete web d", "/instances"),
        ("console ", "/instances"),
        ("exec --wait 60 w", "/instances"),
        ("network create lan 10.0.0.0/24 --in-namespace ", "/auth/namespaces"),
        ("network ping ", "/networks"),
        ("artifact share ", "/artifacts"),
        ("node drain ", "/nodes"),
        ("namespace delete ", "/auth/namespaces"),
        ("key delete ci ", "/auth/namespaces/ci/keys"),
        ("events node ", "/nodes"),
        ("--namespace ", "/auth/namespaces"),
    ] {
        assert_eq!(lists(line), [list], "{line}");
    }
    for line in ["instance create ", "namespace create ", "network create lan ", "key delete ../x "] {
        assert!(lists(line).is_empty(), "{line}");
    }
}

#[tokio::test]
async fn completes_values_behind_an_equals_sign() {
    assert_eq!(
        complete("instance list --format=js").lines(None).await.split('\t').next(),
        Some("--format=json")
    );
    assert_eq!(lists("instance create x --placed-on=sim"), ["/nodes"]);
    assert!(complete("--credentials=/etc/").files);
    for line in ["instance list --nonsense=x", "exec web -- ls --format=js", "--namespace --format=js"] {
        assert!(!complete(line).words.iter().any(|(word, _)| word == "json"), "{line}");
    }
}

#[test]
fn paths_are_completed_by_the_shell() {
    assert!(complete("artifact upload tiny ").files);
    assert!(complete("--credentials ").files);
    assert!(!complete("instance show ").files);
}

#[test]
fn keeps_the_options_that_select_the_cluster() {
    let found = complete("--api-url http://host instance --namespace=ci show ");
    assert_eq!(found.options, ["--api-url=http://host", "--namespace=ci"]);
}

#[tokio::test]
async fn prints_names_with_their_state() {
    let list = json!([{ "name": "web", "state": "created" }, { "name": "b\u{1b}d", "state": "error" }]);
    let (client, _) = FakeServer::start(vec![("GET /instances", vec![(200, list)])]).await;
    let found = complete("instance show ");
    assert!(found.need_client());
    assert_eq!(found.lines(Some(&client)).await, "web\tcreated\n");
}
