use muster_types::Error;
use nix::mount::{MsFlags, mount};

use crate::*;

#[tokio::test(flavor = "multi_thread")]
async fn snapshot_sees_one_state() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("muster.db").display());
    let store = Store::open(&url).await.unwrap();
    let snapshot = store.snapshot().unwrap();
    assert!(namespaces::get(&snapshot, "late").await.unwrap().is_none());
    transaction!(store, |tx| { Ok(namespaces::insert(tx, "late").await?) }).unwrap();
    assert!(
        namespaces::get(&snapshot, "late").await.unwrap().is_none(),
        "it was inserted after the snapshot began"
    );
    drop(snapshot);
    let snapshot = store.snapshot().unwrap();
    assert!(namespaces::get(&snapshot, "late").await.unwrap().is_some());
}

#[test]
fn full_disk_is_an_outage_and_loses_nothing() {
    if !muster_testing::enter_namespaces("sqlite::tests::full_disk_is_an_outage_and_loses_nothing", &["ip"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    mount(Some("none"), folder.path(), Some("tmpfs"), MsFlags::empty(), Some("size=8m")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", folder.path().join("muster.db").display());
        let store = Store::open(&url).await.unwrap();
        let mut stored = 0;
        let error = loop {
            let text = "x".repeat(100_000);
            let name = format!("value {stored}");
            let written: Result<(), Error> =
                transaction!(store, |tx| { Ok(cluster_values::set(tx, &name, &text).await?) });
            match written {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(&error, Error::Unavailable(text) if text.contains("disk is full")), "{error:?}");
        let last = format!("value {}", stored - 1);
        assert!(cluster_values::get(&store, &last).await.unwrap().is_some());
        assert!(cluster_values::get(&store, &format!("value {stored}")).await.unwrap().is_none());
        // With space, it is writable again.
        mount(None::<&str>, folder.path(), None::<&str>, MsFlags::MS_REMOUNT, Some("size=64m")).unwrap();
        transaction!(store, |tx| { Ok(cluster_values::set(tx, "after", "x").await?) }).unwrap();
    });
}
