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
