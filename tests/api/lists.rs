//! `limit`, `cursor`, `sort` and `filter`, which all lists have.

use std::collections::BTreeSet;

use axum::http::Method;
use muster_test_cluster::{ApiResponse, Cluster};
use muster_types::event::Event;
use muster_types::object::ObjectRef;
use serde_json::{Value, json};

async fn get(cluster: &Cluster, token: &str, path: &str) -> ApiResponse {
    cluster.call(token, Method::GET, path, None).await
}

fn values(list: &Value, field: &str) -> Vec<String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    list.as_array().unwrap().iter().map(|record| text(&record[field])).collect()
}

/// Reads a list page by page through the links of the responses. `between` runs after each page.
async fn read_pages(
    cluster: &Cluster,
    token: &str,
    path: &str,
    between: impl AsyncFn(usize),
) -> Vec<Vec<Value>> {
    let (base, _) = path.split_once('?').unwrap();
    let (mut pages, mut next) = (Vec::new(), Some(path.to_owned()));
    while let Some(path) = next {
        let page = get(cluster, token, &path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        let link = page.headers.get("link").map(|link| link.to_str().unwrap());
        let cursor = page.headers.get("x-next-cursor").map(|cursor| cursor.to_str().unwrap());
        assert_eq!(link.is_some(), cursor.is_some());
        next = link.map(|link| {
            let query = link.strip_prefix('<').unwrap().strip_suffix(">; rel=\"next\"").unwrap();
            assert!(query.ends_with(&format!("cursor={}", cursor.unwrap())), "{link}");
            format!("{base}{query}")
        });
        pages.push(page.body.as_array().unwrap().clone());
        between(pages.len()).await;
        assert!(pages.len() < 100, "the pages do not end");
    }
    pages
}

async fn create_networks(cluster: &Cluster, token: &str, names: &[&str]) {
    for (n, name) in names.iter().enumerate() {
        let netblock = format!("10.{n}.0.0/24");
        let body =
            json!({"name": name, "netblock": netblock, "provide_dhcp": true, "provide_nat": n % 2 == 0});
        let created = cluster.call(token, Method::POST, "/networks", Some(body)).await;
        assert_eq!(created.status, 200, "{}", created.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_contain_every_record_once_in_any_order() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    create_networks(&cluster, &token, &["c", "a", "e", "b", "d", "a", "g"]).await;
    let all = get(&cluster, &token, "/networks").await;
    assert!(!all.headers.contains_key("link"));
    for (query, sizes) in [
        ("limit=3", vec![3, 3, 1]),
        ("limit=7", vec![7]),
        ("limit=1000", vec![7]),
        ("limit=2&sort=name", vec![2, 2, 2, 1]),
        ("limit=2&sort=-name", vec![2, 2, 2, 1]),
        ("limit=3&sort=namespace", vec![3, 3, 1]),
        ("limit=5&sort=floating_gateway", vec![5, 2]),
        ("limit=2&filter=name:a", vec![2]),
        ("limit=1&filter=name:a", vec![1, 1]),
        ("limit=4&sort=vxid&filter=namespace:ci&filter=provide_dhcp:false", vec![0]),
        ("limit=4&sort=vxid&filter=namespace:ci&filter=provide_dhcp:true", vec![4, 3]),
    ] {
        let pages = read_pages(&cluster, &token, &format!("/networks?{query}"), async |_| {}).await;
        let counts: Vec<usize> = pages.iter().map(Vec::len).collect();
        assert_eq!(counts, sizes, "{query}");
        let records: Vec<Value> = pages.concat();
        let ids: BTreeSet<&str> = records.iter().map(|record| record["uuid"].as_str().unwrap()).collect();
        assert_eq!(ids.len(), records.len(), "{query}: no record twice");
        // A record in a page is the same as in the whole list.
        for record in &records {
            assert!(all.body.as_array().unwrap().contains(record), "{query}");
        }
    }
    let sorted = get(&cluster, &token, "/networks?sort=-name").await.body;
    assert_eq!(values(&sorted, "name"), ["g", "e", "d", "c", "b", "a", "a"]);
    let first = get(&cluster, &token, "/networks?limit=3").await.body;
    assert_eq!(values(&first, "uuid"), values(&all.body, "uuid")[..3], "the order of the list");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_parameters_lists_are_unchanged() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    create_networks(&cluster, &token, &["a", "b"]).await;
    for path in ["/networks", "/nodes", "/auth/namespaces", "/auth/namespaces/system/keys", "/auth/issuers"] {
        let whole = get(&cluster, &token, path).await;
        assert!(
            !whole.headers.contains_key("link") && !whole.headers.contains_key("x-next-cursor"),
            "{path}"
        );
        let page = get(&cluster, &token, &format!("{path}?limit=1000")).await;
        let lines = |text: &str| {
            let values: Vec<Value> = serde_json::from_str(text).unwrap();
            values.iter().map(Value::to_string).collect::<BTreeSet<_>>()
        };
        assert_eq!(lines(&whole.text), lines(&page.text), "{path}");
        assert_eq!(whole.text.len(), page.text.len(), "{path}: the same bytes for each record");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cursors_survive_insertions_and_deletions() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    for query in ["sort=name", "sort=-name", "all=false"] {
        create_networks(&cluster, &token, &["b", "d", "f", "h", "j", "l"]).await;
        cluster.settle_networks().await;
        let before = get(&cluster, &token, "/networks").await.body;
        let path = format!("/networks?limit=2&{query}");
        let pages = read_pages(&cluster, &token, &path, async |page| {
            if page == 1 {
                // The last record of the first page, which the cursor names, and others before and after it.
                let first = get(&cluster, &token, &path).await.body;
                let last = values(&first, "uuid")[1].clone();
                cluster.call(&token, Method::DELETE, &format!("/networks/{last}"), None).await;
                create_networks(&cluster, &token, &["a", "e", "z"]).await;
            }
        })
        .await;
        let seen: Vec<Value> = pages.concat();
        let ids: BTreeSet<String> = seen.iter().map(|record| record["uuid"].to_string()).collect();
        assert_eq!(ids.len(), seen.len(), "{query}: no record twice");
        for record in before.as_array().unwrap() {
            assert!(ids.contains(&record["uuid"].to_string()), "{query}: {} is missing", record["name"]);
        }
        cluster.call(&token, Method::DELETE, "/networks", Some(json!({"confirm": true}))).await;
        muster_test_cluster::wait_for("the networks to be deleted", async || {
            cluster.worker.run_once().await.unwrap();
            let left = get(&cluster, &token, "/networks").await.body;
            left.as_array().unwrap().is_empty().then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_by_texts_prefixes_numbers_and_flags() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("ci").await;
    let token = cluster.token("ci").await;
    create_networks(&cluster, &token, &["web-1", "web-2", "db", "web"]).await;
    for (query, expected) in [
        ("filter=name:web", vec!["web"]),
        ("filter=name:web*", vec!["web", "web-1", "web-2"]),
        ("filter=name:*", vec!["db", "web", "web-1", "web-2"]),
        ("filter=name:web*&filter=netblock:10.1.0.0/24", vec!["web-2"]),
        ("filter=name:WEB", vec![]),
        ("filter=provide_nat:true", vec!["db", "web-1"]),
        ("filter=provide_nat:false&filter=name:web*", vec!["web", "web-2"]),
        ("filter=error_message:null&filter=name:web", vec!["web"]),
        ("filter=version:-1", vec![]),
    ] {
        let list = get(&cluster, &token, &format!("/networks?sort=name&{query}")).await;
        assert_eq!(list.status, 200, "{query}: {}", list.text);
        assert_eq!(values(&list.body, "name"), expected, "{query}");
    }
    let vxid = get(&cluster, &token, "/networks?filter=name:web").await.body[0]["vxid"].clone();
    let by_number = get(&cluster, &token, &format!("/networks?filter=vxid:{vxid}")).await.body;
    assert_eq!(values(&by_number, "name"), ["web"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_the_parameter_and_the_allowed_values() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for (query, text) in [
        ("limit=0", "limit: must be an integer from 1 to 1000, not \"0\""),
        ("limit=-1", "limit: must be an integer"),
        ("limit=1001", "limit: must be an integer from 1 to 1000"),
        ("limit=x", "not \"x\""),
        ("limit=1&limit=2", "limit: given more than once"),
        ("limit=99999999999999999999", "limit: must be an integer"),
        ("sort=", "sort: unknown field \"\""),
        ("sort=metadata", "sort: unknown field \"metadata\", use one of: error_message, "),
        ("sort=name;DROP", "sort: unknown field"),
        ("filter=name", "filter: must be FIELD:VALUE, not \"name\""),
        ("filter=secret:x", "filter: unknown field \"secret\", use one of: error_message, "),
        ("filter=vxid:x", "filter: vxid: must be a number or null, not \"x\""),
        ("filter=vxid:NaN", "filter: vxid: must be a number"),
        ("filter=provide_nat:1", "filter: provide_nat: must be true, false or null"),
        ("cursor=x", "cursor: must be the value of X-Next-Cursor"),
        ("cursor=eyJrIjp7fX0", "cursor: belongs to another list or sort"),
        ("cursor=eyJrIjp7fX0&sort=name", "cursor: belongs to another list or sort"),
        ("unknown=1&limit=5", "unknown: not declared by this endpoint"),
    ] {
        let response = get(&cluster, &token, &format!("/networks?{query}")).await;
        assert_eq!(response.status, 400, "{query}: {}", response.text);
        let error = response.body["error"].as_str().unwrap();
        assert!(error.contains(text), "{query}: {error}");
    }
    let long = "x".repeat(5000);
    for query in [format!("cursor={long}"), format!("filter={long}"), format!("sort={long}")] {
        let response = get(&cluster, &token, &format!("/networks?{query}")).await;
        assert_eq!(response.status, 400);
        assert!(response.text.len() < 1000, "the value is shortened");
    }
    let many = "filter=name:x&".repeat(17);
    assert_eq!(get(&cluster, &token, &format!("/networks?{many}")).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_show_only_records_that_the_caller_may_read() {
    let cluster = Cluster::new().await;
    for name in ["ci", "other"] {
        cluster.create_namespace(name).await;
    }
    let (ci, other) = (cluster.token("ci").await, cluster.token("other").await);
    create_networks(&cluster, &other, &["secret-1", "secret-2", "secret-3"]).await;
    create_networks(&cluster, &ci, &["own"]).await;
    for query in ["filter=namespace:other", "filter=name:secret*", "filter=namespace:other&sort=name&limit=1"]
    {
        let list = get(&cluster, &ci, &format!("/networks?{query}")).await;
        assert_eq!((list.status.as_u16(), &list.body), (200, &json!([])), "{query}");
    }
    // The cursor of another namespace selects nothing of it.
    let page = get(&cluster, &other, "/networks?limit=1&sort=name").await;
    let cursor = page.headers["x-next-cursor"].to_str().unwrap().to_owned();
    let list = get(&cluster, &ci, &format!("/networks?sort=name&cursor={cursor}")).await;
    assert!(values(&list.body, "name").iter().all(|name| name == "own"));
    // A token without a scope for reading is rejected before its parameters are read.
    assert_eq!(get(&cluster, "", "/networks?limit=0").await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_list_accepts_the_parameters() {
    let cluster = Cluster::new().await;
    let document: Value = serde_json::from_str(cluster.service.openapi()).unwrap();
    let mut lists = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let operation = &item["get"];
        if operation["responses"]["200"]["content"]["application/json"]["schema"]["type"] != "array" {
            continue;
        }
        lists += 1;
        let names: Vec<&str> = operation["parameters"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|parameter| parameter["in"] == "query")
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect();
        for name in ["limit", "cursor", "sort", "filter"] {
            assert_eq!(names.iter().filter(|known| **known == name).count(), 1, "{path}: {name}");
        }
    }
    assert!(lists > 25, "{lists}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_all_events_in_pages() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let object = ObjectRef::namespace("system");
    for n in 0..250 {
        let event = Event::audit(object.clone(), format!("number {}", n % 10));
        cluster.app.events.record(event);
    }
    let all = cluster.events(&object).await.len();
    let path = "/auth/namespaces/system/events";
    let first = get(&cluster, &token, &format!("{path}?limit=100")).await;
    assert_eq!(first.body, get(&cluster, &token, path).await.body, "the same events as without a limit");
    let pages = read_pages(&cluster, &token, &format!("{path}?limit=100"), async |_| {}).await;
    let events: Vec<Value> = pages.concat();
    assert_eq!(events.len(), all);
    let ids: BTreeSet<String> = events.iter().map(|event| event["event_uuid"].to_string()).collect();
    assert_eq!(ids.len(), all, "no event twice");
    let times: Vec<f64> = events.iter().map(|event| event["timestamp"].as_f64().unwrap()).collect();
    assert!(times.is_sorted_by(|a, b| a >= b), "newest first");
    let filtered = format!("{path}?limit=10&filter=message:number%203&sort=-timestamp");
    let pages = read_pages(&cluster, &token, &filtered, async |_| {}).await;
    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [10, 10, 5]);
    let wrong = get(&cluster, &token, &format!("{path}?sort=message")).await;
    assert_eq!(wrong.status, 400);
    assert!(wrong.text.contains("sort: must be -timestamp"), "{}", wrong.text);
    assert_eq!(get(&cluster, &token, &format!("{path}?limit=x&filter=node:sim-1")).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_names_and_of_instances_have_pages() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    for name in ["k3", "k1", "k2"] {
        cluster.key(&muster_test_cluster::caller(), "system", name).await;
    }
    let keys = "/auth/namespaces/system/keys";
    let list = get(&cluster, &token, &format!("{keys}?filter=name:k*&limit=2")).await;
    assert_eq!(list.body, json!(["k1", "k2"]));
    let cursor = list.headers["x-next-cursor"].to_str().unwrap();
    let list = get(&cluster, &token, &format!("{keys}?filter=name:k*&limit=2&cursor={cursor}")).await;
    assert_eq!(list.body, json!(["k3"]));
    for (name, cpus) in [("one", 1), ("two", 2), ("three", 1)] {
        let body = json!({"name": name, "cpus": cpus, "memory": 512, "disk": [{"size": 1}]});
        let created = cluster.call(&token, Method::POST, "/instances", Some(body)).await;
        assert_eq!(created.status, 200, "{}", created.text);
    }
    let list = get(&cluster, &token, "/instances?sort=-cpus&limit=1").await;
    assert_eq!(values(&list.body, "name"), ["two"]);
    let list = get(&cluster, &token, "/instances?filter=cpus:1&sort=name").await;
    assert_eq!(values(&list.body, "name"), ["one", "three"]);
    cluster.allow_unfinished_operations("instances are being created");
}
