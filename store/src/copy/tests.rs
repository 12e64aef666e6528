use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::json;

use crate::leases::LeaseOwner;
use crate::testing::{event, key, operation};
use crate::*;

#[tokio::test(flavor = "multi_thread")]
async fn copies_a_cluster_from_sqlite_to_mariadb_and_back() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let folder = tempfile::tempdir().unwrap();
    let sqlite = |name: &str| format!("sqlite:{}", folder.path().join(name).display());
    let store = Store::open(&sqlite("a.db")).await.unwrap();
    transaction!(store, |tx| {
        for n in 0..1200 {
            namespaces::insert(tx, &format!("ns-{n}")).await?;
        }
        keys::put(tx, "ns-1", "k", &key(7, Some(1e10 + 0.1))).await?;
        trusts::put(tx, "ns-1", "ns-2", None).await?;
        metadata::set(tx, ObjectType::Namespace, "ns-1", "ключ", &json!("\u{1f600}")).await?;
        Ok(operations::insert(tx, &operation("ns-1", vec![])).await?)
    })
    .unwrap();
    let events: Vec<Event> = (0..900)
        .map(|n| event(&ObjectRef::namespace("ns-1"), EventType::Audit, "e", f64::from(n % 3)))
        .collect();
    events::insert(&store, &events).await.unwrap();
    let owner = LeaseOwner::new("running");
    assert!(leases::acquire(&store, "maintainer", &owner, 60.0).await.unwrap());
    let refused = copy::run(&sqlite("a.db"), &url, |_, _| {}).await.unwrap_err().to_string();
    assert!(refused.contains("stop it first"), "{refused}");
    leases::release(&store, "maintainer", &owner).await.unwrap();

    let forward = copy::run(&sqlite("a.db"), &url, |_, _| {}).await.unwrap();
    let again = copy::run(&sqlite("a.db"), &url, |_, _| {}).await.unwrap_err().to_string();
    assert!(again.contains("not empty"), "{again}");
    let back = copy::run(&url, &sqlite("b.db"), |_, _| {}).await.unwrap();
    assert_eq!(forward, back, "counts and checksums");
    let returned = Store::open(&sqlite("b.db")).await.unwrap();
    assert!(namespaces::get(&returned, "ns-7").await.unwrap().is_some(), "text columns are text again");
    assert_eq!(forward.iter().find(|c| c.table == "event_links").unwrap().rows, 900);
}
