//! Every query, on SQLite and on a real MariaDB.

use std::collections::HashSet;
use std::sync::Arc;

use muster_types::Error;
use muster_types::event::{Event, EventType};
use muster_types::ids::NodeId;
use muster_types::namespace::NamespaceState;
use muster_types::node::{NodeIdentity, NodeReport, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::operation::{ErrorReport, OperationState, OperationType};
use muster_types::time::now;
use serde_json::{Map, json};

use super::keys::{NewKey, Put, StoredSecret};
use super::operations::NewOperation;
use super::*;

/// Makes two tests of each function, one for each engine.
macro_rules! on_both_engines {
    ($(async fn $name:ident($store:ident: Arc<Store>) $body:block)+) => {$(
        mod $name {
            use super::*;

            async fn check($store: Arc<Store>) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn sqlite() {
                let folder = tempfile::tempdir().unwrap();
                let url = format!("sqlite:{}", folder.path().join("muster.db").display());
                check(Arc::new(Store::open(&url).await.unwrap())).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn mariadb() {
                match muster_testing::database_url() {
                    Some(url) => check(Arc::new(Store::open(&url).await.unwrap())).await,
                    None => muster_testing::skipped("mariadb-server"),
                }
            }
        }
    )+};
}
pub(super) use on_both_engines;

fn key(tag: i64, expiry: Option<f64>) -> NewKey {
    let secret = StoredSecret { tag, hash: format!("hash {tag}"), nonce: format!("nonce {tag}") };
    NewKey { secret, expiry, scopes: None, provenance: None }
}

pub(super) fn operation(
    target: &str,
    depends_on: Vec<muster_types::operation::OperationHandle>,
) -> NewOperation {
    NewOperation {
        operation_type: OperationType::Namespace,
        name: "delete_namespace",
        tasks: vec!["one", "two"],
        arguments: json!({"n": 1}),
        depends_on,
        namespace: Some(target.to_owned()),
        target: ObjectRef::namespace(target),
        request_id: Some("request".into()),
        node: None,
    }
}

/// What a daemon can do that knows one operation.
fn able(name: &'static str) -> operations::Able {
    operations::Able { names: vec![name], nodes: vec![NodeId::new()] }
}

fn event(object: &ObjectRef, event_type: EventType, message: &str, age: f64) -> Event {
    let mut event = Event::new(event_type, object.clone(), message).with("a", "ü");
    event.timestamp = now() - age;
    event.node = "node".into();
    event
}

on_both_engines! {
    async fn names_are_compared_byte_by_byte(store: Arc<Store>) {
        let names = ["a", "A", "ä", "a.", "b b", "名前", "\u{1f600}"];
        transaction!(store, |tx| {
            for name in names {
                namespaces::insert(tx, name).await?;
            }
            Ok(())
        }).unwrap();
        let listed = namespaces::page(&*store, None, None, 100).await.unwrap();
        let mut expected = names.map(str::to_owned);
        expected.sort_unstable();
        assert_eq!(listed.into_iter().map(|row| row.name).collect::<Vec<_>>(), expected);
        assert!(namespaces::get(&*store, "a ").await.unwrap().is_none(), "no padding");
        let again = transaction!(store, |tx| { Ok(namespaces::insert(tx, "a").await.is_err()) }).unwrap();
        assert!(again);
    }

    async fn a_failed_body_leaves_nothing_behind(store: Arc<Store>) {
        let refused: Result<(), Error> = transaction!(store, |tx| {
            namespaces::insert(tx, "gone").await?;
            Err(Error::Conflict("no".into()).into())
        });
        assert!(matches!(refused, Err(Error::Conflict(_))));
        assert!(namespaces::get(&*store, "gone").await.unwrap().is_none());
        // A dropped transaction rolls back as well, and the next one is not in its way.
        let mut tx = store.begin().await.unwrap();
        namespaces::insert(&mut tx, "dropped").await.unwrap();
        drop(tx);
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "kept").await?) }).unwrap();
        assert!(namespaces::get(&*store, "dropped").await.unwrap().is_none());
        assert!(namespaces::get(&*store, "kept").await.unwrap().is_some());
    }

    async fn concurrent_transactions_lose_no_update(store: Arc<Store>) {
        transaction!(store, |tx| { Ok(values::set(tx, "counter", "0").await?) }).unwrap();
        let mut tasks = Vec::new();
        for _ in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                for _ in 0..25 {
                    transaction!(store, |tx| {
                        let row = tx.query_one("SELECT value, version FROM cluster_values WHERE name = 'counter'", &[]).await?;
                        let row = row.expect("the counter");
                        let (value, version) = (row.parse::<i64>(0)?, row.get::<i64>(1)?);
                        let met = tx.execute(
                            "UPDATE cluster_values SET value = ?, version = version + 1 WHERE name = 'counter' AND version = ?",
                            params![(value + 1).to_string(), version],
                        ).await?;
                        if met == 1 { Ok(()) } else { Err(StoreError::Conflict("changed".into()).into()) }
                    }).unwrap();
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(values::get(&*store, "counter").await.unwrap().as_deref(), Some("200"));
    }

    async fn namespaces_move_only_from_the_state_they_are_in(store: Arc<Store>) {
        let (created, deleted) = (NamespaceState::Created, NamespaceState::Deleted);
        transaction!(store, |tx| { Ok(namespaces::insert(tx, "ns").await?) }).unwrap();
        assert!(transaction!(store, |tx| { Ok(namespaces::hold(tx, "ns", created).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(namespaces::remove(tx, "ns").await?) }).unwrap());
        assert!(transaction!(store, |tx| { Ok(namespaces::set_state(tx, "ns", created, deleted).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(namespaces::set_state(tx, "ns", created, deleted).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(namespaces::hold(tx, "ns", created).await?) }).unwrap());
        assert!(namespaces::page(&*store, None, None, 10).await.unwrap().is_empty());
        assert_eq!(namespaces::deleted_before(&*store, now() + 1.0, 10).await.unwrap().len(), 1);
        assert!(namespaces::deleted_before(&*store, now() - 60.0, 10).await.unwrap().is_empty());
        assert!(transaction!(store, |tx| { Ok(namespaces::remove(tx, "ns").await?) }).unwrap());
    }

    async fn pages_hold_what_a_namespace_may_see(store: Arc<Store>) {
        transaction!(store, |tx| {
            for name in ["a", "b", "c", "d"] {
                namespaces::insert(tx, name).await?;
            }
            trusts::put(tx, "c", "b", None).await?;
            trusts::put(tx, "c", "zz", None).await?;
            Ok(())
        }).unwrap();
        let names = |rows: Vec<namespaces::NamespaceRow>| rows.into_iter().map(|r| r.name).collect::<Vec<_>>();
        assert_eq!(names(namespaces::page(&*store, Some("b"), None, 10).await.unwrap()), ["b", "c"]);
        assert_eq!(names(namespaces::page(&*store, Some("b"), Some("b"), 10).await.unwrap()), ["c"]);
        assert_eq!(names(namespaces::page(&*store, None, Some("b"), 1).await.unwrap()), ["c"]);
        assert!(trusts::exists(&*store, "c", "b").await.unwrap());
        assert!(!trusts::exists(&*store, "b", "c").await.unwrap());
        assert_eq!(trusts::trusting(&*store, "b").await.unwrap(), ["c"]);
        assert_eq!(trusts::range(&*store, "a", "d").await.unwrap().len(), 2);
        transaction!(store, |tx| { Ok(trusts::remove_naming(tx, "b").await?) }).unwrap();
        assert_eq!(trusts::range(&*store, "c", "c").await.unwrap(), [("c".into(), "zz".into())]);
        transaction!(store, |tx| { trusts::put(tx, "c", "d", None).await?; Ok(trusts::remove(tx, "c", "d").await?) }).unwrap();
        transaction!(store, |tx| { Ok(trusts::remove_of(tx, "c").await?) }).unwrap();
        assert!(trusts::range(&*store, "a", "d").await.unwrap().is_empty());
    }

    async fn keys_are_found_by_tag_while_they_live(store: Arc<Store>) {
        transaction!(store, |tx| {
            namespaces::insert(tx, "ns").await?;
            keys::put(tx, "ns", "forever", &key(7, None)).await?;
            keys::put(tx, "ns", "same tag", &key(7, Some(now() + 60.0))).await?;
            keys::put(tx, "ns", "expired", &key(7, Some(now() - 60.0))).await?;
            keys::put(tx, "other", "elsewhere", &key(7, None)).await?;
            Ok(())
        }).unwrap();
        let names: Vec<_> = keys::candidates(&store, "ns", 7).await.unwrap().into_iter().map(|c| c.name).collect();
        assert_eq!(names, ["forever", "same tag"]);
        assert_eq!(keys::names(&*store, "ns", "ns").await.unwrap().len(), 2);
        assert!(keys::find(&*store, "ns", "expired").await.unwrap().is_none());
        assert!(keys::credential(&store, "nowhere", "x").await.unwrap().is_none());
        assert!(keys::credential(&store, "ns", "x").await.unwrap().unwrap().key.is_none());
        assert_eq!(keys::credential(&store, "ns", "forever").await.unwrap().unwrap().key.unwrap().nonce, "nonce 7");

        let Put::Rotated(id) = transaction!(store, |tx| { Ok(keys::put(tx, "ns", "forever", &key(8, None)).await?) }).unwrap()
            else { panic!("the name existed") };
        assert_eq!(keys::find(&*store, "ns", "forever").await.unwrap(), Some(id));
        assert_eq!(keys::candidates(&store, "ns", 8).await.unwrap().len(), 1);
        assert!(transaction!(store, |tx| { Ok(keys::soft_delete(tx, "ns", "forever").await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(keys::soft_delete(tx, "ns", "forever").await?) }).unwrap());
    }

    async fn expired_keys_are_swept_and_removed_and_may_come_back(store: Arc<Store>) {
        transaction!(store, |tx| {
            keys::put(tx, "ns", "old", &key(1, Some(now() - 100.0))).await?;
            keys::put(tx, "ns", "young", &key(2, Some(now() - 1.0))).await?;
            Ok(())
        }).unwrap();
        let expired = keys::expired_before(&*store, now() - 50.0, 10).await.unwrap();
        assert_eq!(expired.iter().map(|k| k.name.as_str()).collect::<Vec<_>>(), ["old"]);
        let id = expired[0].id;
        assert!(transaction!(store, |tx| { Ok(keys::soft_delete_expired(tx, id, now() - 50.0).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(keys::soft_delete_expired(tx, id, now() - 50.0).await?) }).unwrap());
        assert_eq!(keys::deleted_before(&*store, now() + 1.0, 10).await.unwrap().len(), 1);
        // The name of a swept key may be used again, under the same id.
        let Put::Created(again) = transaction!(store, |tx| { Ok(keys::put(tx, "ns", "old", &key(3, None)).await?) }).unwrap()
            else { panic!("the row existed") };
        assert_eq!(again, id);
        assert!(!transaction!(store, |tx| { Ok(keys::remove_deleted(tx, id).await?) }).unwrap());
        transaction!(store, |tx| { Ok(keys::soft_delete_of(tx, "ns").await?) }).unwrap();
        assert_eq!(keys::some_of(&*store, "ns", 10).await.unwrap().len(), 2);
        assert!(transaction!(store, |tx| { Ok(keys::remove_deleted(tx, id).await?) }).unwrap());
    }

    async fn the_same_key_added_by_many_at_once_exists_once(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for n in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                transaction!(store, |tx| { Ok(keys::put(tx, "ns", "same", &key(n, None)).await?) }).unwrap()
            }));
        }
        let mut ids = HashSet::new();
        let mut created = 0;
        for task in tasks {
            match task.await.unwrap() {
                Put::Created(id) => { created += 1; ids.insert(id); }
                Put::Rotated(id) => { ids.insert(id); }
            }
        }
        assert_eq!((created, ids.len()), (1, 1));
    }

    async fn metadata_keeps_any_json(store: Arc<Store>) {
        let values = [("a", json!({"deep": [1, 2.5, null]})), ("b", json!("ünïcode \u{1f600}")), ("c", json!(true))];
        transaction!(store, |tx| {
            for (name, value) in &values {
                metadata::set(tx, ObjectType::Namespace, "ns", name, value).await?;
            }
            metadata::set(tx, ObjectType::Node, "ns", "a", &json!("a node's")).await?;
            Ok(())
        }).unwrap();
        let expected: Map<_, _> = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        assert_eq!(metadata::get(&*store, ObjectType::Namespace, "ns").await.unwrap(), expected);
        transaction!(store, |tx| {
            metadata::set(tx, ObjectType::Namespace, "ns", "a", &json!(1)).await?;
            metadata::remove(tx, ObjectType::Namespace, "ns", "b").await?;
            Ok(metadata::remove(tx, ObjectType::Namespace, "ns", "absent").await?)
        }).unwrap();
        assert_eq!(metadata::get(&*store, ObjectType::Namespace, "ns").await.unwrap().len(), 2);
        transaction!(store, |tx| { Ok(metadata::remove_of(tx, ObjectType::Namespace, "ns").await?) }).unwrap();
        assert!(metadata::get(&*store, ObjectType::Namespace, "ns").await.unwrap().is_empty());
        assert_eq!(metadata::get(&*store, ObjectType::Node, "ns").await.unwrap().len(), 1);
    }

    async fn a_lease_has_one_holder_until_it_runs_out(store: Arc<Store>) {
        let (a, b) = (leases::Holder::new("a"), leases::Holder::new("b"));
        assert!(leases::take(&store, "job", &a, 60.0).await.unwrap());
        assert!(leases::take(&store, "job", &a, 60.0).await.unwrap(), "renewal");
        assert!(!leases::take(&store, "job", &b, 60.0).await.unwrap());
        assert_eq!(leases::holder_node(&store, "job").await.unwrap().as_deref(), Some("a"));
        leases::release(&store, "job", &b).await.unwrap();
        assert_eq!(leases::list(&store).await.unwrap().len(), 1);
        assert!(leases::take(&store, "job", &a, -1.0).await.unwrap(), "runs out at once");
        assert_eq!(leases::holder_node(&store, "job").await.unwrap(), None);
        assert!(leases::take(&store, "job", &b, 60.0).await.unwrap());
        assert!(!leases::take(&store, "job", &a, 60.0).await.unwrap());
        leases::release(&store, "job", &b).await.unwrap();
        assert!(leases::list(&store).await.unwrap().is_empty());
    }

    async fn many_who_want_a_new_lease_get_it_once(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for n in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                leases::take(&store, "job", &leases::Holder::new(&n.to_string()), 60.0).await.unwrap()
            }));
        }
        let mut won = 0;
        for task in tasks {
            won += usize::from(task.await.unwrap());
        }
        assert_eq!(won, 1);
    }

    async fn nodes_are_found_by_name_and_id(store: Arc<Store>) {
        let mut identity = NodeIdentity {
            id: NodeId::new(), name: "n1".into(), ip: "127.0.0.1".into(), release: "x".into(), simulated: true,
            is_hypervisor: true, is_network_node: false, is_database_node: true,
        };
        transaction!(store, |tx| { Ok(nodes::insert(tx, &identity).await?) }).unwrap();
        identity.ip = "127.0.0.2".into();
        let report = NodeReport { resources: Map::from_iter([("cpu".into(), json!(2))]), ..NodeReport::default() };
        transaction!(store, |tx| {
            nodes::set_identity(tx, &identity).await?;
            Ok(nodes::set_report(tx, identity.id, &report).await?)
        }).unwrap();
        let by_id = nodes::get(&*store, &NameOrId::Id(identity.id)).await.unwrap().unwrap();
        let by_name = nodes::get(&*store, &NameOrId::Name("n1".into())).await.unwrap().unwrap();
        assert_eq!((&by_id.identity, &by_id.report), (&identity, &report));
        assert_eq!(by_name.identity, identity);
        assert!(transaction!(store, |tx| { Ok(nodes::set_state(tx, &by_id, NodeState::Missing).await?) }).unwrap());
        assert!(!transaction!(store, |tx| { Ok(nodes::set_state(tx, &by_id, NodeState::Error).await?) }).unwrap(), "stale");
        assert_eq!(nodes::list(&*store).await.unwrap()[0].state, NodeState::Missing);
        let twin = NodeIdentity { id: NodeId::new(), ..identity };
        assert!(transaction!(store, |tx| { Ok(nodes::insert(tx, &twin).await.is_err()) }).unwrap());
    }

    async fn an_operation_is_claimed_by_one_worker_and_taken_over_when_its_lease_ends(store: Arc<Store>) {
        let handle = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("ns", vec![])).await?) }).unwrap();
        let target = ObjectRef::namespace("ns");
        assert!(operations::is_pending(&*store, &target, "delete_namespace").await.unwrap());
        assert!(operations::next_due(&store, &able("delete_namespace")).await.unwrap().is_some());
        assert!(operations::due(&store, &able("other"), 10).await.unwrap().is_empty(), "left to who knows it");
        assert!(operations::next_due(&store, &able("other")).await.unwrap().is_none());
        let due = operations::due(&store, &able("delete_namespace"), 10).await.unwrap().remove(0);
        assert_eq!((due.id, due.arguments.clone(), due.step), (handle.op_uuid, json!({"n": 1}), 0));

        let mut tasks = Vec::new();
        for _ in 0..8 {
            let (store, due) = (Arc::clone(&store), due.clone());
            tasks.push(tokio::spawn(async move { operations::claim(&store, &due, 60.0).await.unwrap() }));
        }
        let mut claims = Vec::new();
        for task in tasks {
            claims.extend(task.await.unwrap());
        }
        assert_eq!(claims.len(), 1, "one claim wins");
        let first = claims.remove(0);
        assert!(operations::due(&store, &able("delete_namespace"), 10).await.unwrap().is_empty(), "claimed and alive");
        assert!(operations::claim(&store, &first, 60.0).await.unwrap().is_none(), "not even by the same daemon");
        assert!(transaction!(store, |tx| { Ok(operations::set_step(tx, &first, 1).await?) }).unwrap());
        let other = operations::OperationRow { holder: "other".into(), ..first.clone() };
        assert!(!transaction!(store, |tx| { Ok(operations::set_step(tx, &other, 2).await?) }).unwrap());
        assert!(operations::renew(&store, &first, -1.0).await.unwrap(), "the lease ends");

        let stale = operations::due(&store, &able("delete_namespace"), 10).await.unwrap().remove(0);
        assert_eq!((stale.step, stale.attempts), (1, 1));
        let second = operations::claim(&store, &stale, 60.0).await.unwrap().unwrap();
        assert_eq!(second.attempts, 2);
        assert!(!operations::renew(&store, &first, 60.0).await.unwrap(), "the first has lost it");
        let report = ErrorReport { code: "x.y".into(), message: "why".into(), details: Map::new() };
        let lost = transaction!(store, |tx| {
            Ok(operations::release(tx, &first, OperationState::Complete, 0.0, None).await?)
        }).unwrap();
        assert!(!lost);
        let ended = transaction!(store, |tx| {
            Ok(operations::release(tx, &second, OperationState::Error, 0.0, Some(&report)).await?)
        }).unwrap();
        assert!(ended);
        let row = operations::get(&*store, due.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.error_report), (OperationState::Error, Some(report)));
        assert!(!operations::is_pending(&*store, &target, "delete_namespace").await.unwrap());
        assert_eq!(operations::of_target(&*store, &target).await.unwrap().len(), 1);
        assert_eq!(operations::finished_before(&*store, now() + 1.0, 10).await.unwrap(), [due.id]);
        transaction!(store, |tx| { Ok(operations::remove(tx, due.id).await?) }).unwrap();
        assert!(operations::get(&*store, due.id).await.unwrap().is_none());
        assert!(references::around(&*store, &target).await.unwrap().to.is_empty());
    }

    async fn references_are_listed_from_both_ends_and_go_with_their_source(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::new(ObjectType::Node, "b"));
        transaction!(store, |tx| {
            references::insert(tx, &a, "disk", Some("0"), &b).await?;
            references::insert(tx, &a, "disk", Some("1"), &b).await?;
            references::insert(tx, &a, "nvram_template", None, &b).await?;
            Ok(())
        }).unwrap();
        let from = references::around(&*store, &a).await.unwrap().from;
        assert_eq!(from.keys().collect::<Vec<_>>(), ["disk", "nvram_template"]);
        assert_eq!(from["disk"].iter().map(|r| r.relationship_value.as_deref()).collect::<Vec<_>>(), [Some("0"), Some("1")]);
        assert_eq!(references::around(&*store, &b).await.unwrap().to, from);
        assert!(references::around(&*store, &a).await.unwrap().to.is_empty());
        transaction!(store, |tx| { Ok(references::remove_from(tx, &a).await?) }).unwrap();
        assert!(references::around(&*store, &b).await.unwrap().to.is_empty());
        // An operation uses its target until it is removed.
        let handle = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("ns", vec![])).await?) }).unwrap();
        let target = ObjectRef::namespace("ns");
        let used = references::around(&*store, &target).await.unwrap().to;
        assert_eq!(used["operation_target"][0].source_uuid, handle.op_uuid.to_string());
    }

    async fn waiting_operations_can_be_put_off_and_aborted(store: Arc<Store>) {
        let first = transaction!(store, |tx| { Ok(operations::insert(tx, &operation("a", vec![])).await?) }).unwrap();
        let second = transaction!(store, |tx| {
            Ok(operations::insert(tx, &operation("b", vec![first.clone()])).await?)
        }).unwrap();
        let row = operations::get(&*store, second.op_uuid).await.unwrap().unwrap();
        assert_eq!(row.depends_on, [first]);
        transaction!(store, |tx| { Ok(operations::put_off(tx, &row, now() + 100.0).await?) }).unwrap();
        assert_eq!(operations::due(&store, &able("delete_namespace"), 10).await.unwrap().len(), 1);
        let report = ErrorReport { code: "dependency.failed".into(), message: "why".into(), details: Map::new() };
        assert!(!transaction!(store, |tx| { Ok(operations::abort(tx, &row, &report).await?) }).unwrap(), "stale");
        let row = operations::get(&*store, second.op_uuid).await.unwrap().unwrap();
        assert!(transaction!(store, |tx| { Ok(operations::abort(tx, &row, &report).await?) }).unwrap());
    }

    async fn events_are_written_once_however_often_they_are_sent(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::namespace("b"));
        let mut events: Vec<Event> = (0..237).map(|n| event(&a, EventType::Audit, &format!("{n}"), 237.0 - f64::from(n))).collect();
        events[236] = events[236].clone().also(b.clone());
        events[5].event_type = EventType::Status;
        events[5].duration = Some(1.5);
        events[5].request_id = Some("r".into());
        events::insert(&store, &events).await.unwrap();
        events::insert(&store, &events).await.unwrap();
        let listed = events::list(&*store, &a, None, 1000).await.unwrap();
        assert_eq!(listed.len(), 237);
        assert_eq!(listed.iter().take(2).map(|e| e.message.as_str()).collect::<Vec<_>>(), ["236", "235"], "newest first");
        assert_eq!(listed[0].extra, Map::from_iter([("a".to_owned(), json!("ü"))]));
        let status = events::list(&*store, &a, Some(EventType::Status), 10).await.unwrap();
        assert_eq!(status.len(), 1);
        assert_eq!((status[0].duration, status[0].request_id.as_deref(), status[0].fqdn.as_str()), (Some(1.5), Some("r"), "node"));
        assert_eq!(events::list(&*store, &b, None, 10).await.unwrap().len(), 1);
        assert_eq!(events::list(&*store, &a, None, 3).await.unwrap().len(), 3);
        assert!(store.estimate_rows("events").await.unwrap() >= 0);
    }

    async fn pruning_removes_links_by_age_and_events_with_their_last_link(store: Arc<Store>) {
        let (a, b) = (ObjectRef::namespace("a"), ObjectRef::namespace("b"));
        let request = ObjectRef::new(ObjectType::ApiRequest, "r");
        let shared = event(&a, EventType::Audit, "shared", 1000.0).also(b.clone());
        let mut all = vec![
            shared.clone(),
            event(&a, EventType::Audit, "old", 1000.0),
            event(&a, EventType::Status, "old status", 1000.0),
            event(&a, EventType::Audit, "new", 1.0),
            event(&request, EventType::Audit, "request", 1000.0),
        ];
        all.extend((0..30).map(|n| event(&a, EventType::Usage, &n.to_string(), 1000.0)));
        events::insert(&store, &all).await.unwrap();
        let before = now() - 500.0;
        let prune = async |kind| transaction!(store, |tx| { Ok(events::prune_links(tx, kind, before, 20).await?) }).unwrap();
        assert_eq!((prune(EventType::Usage).await, prune(EventType::Usage).await), (20, 10), "in batches");
        let gone = transaction!(store, |tx| { Ok(events::prune_request_links(tx, "", before, 20).await?) }).unwrap();
        assert_eq!(gone, (1, Some("r".into())));
        let gone = transaction!(store, |tx| { Ok(events::prune_object_links(tx, &a, 20).await?) }).unwrap();
        assert_eq!(gone, 4);
        let mut cursor = String::new();
        let mut orphans = 0;
        loop {
            let (gone, next) = transaction!(store, |tx| {
                Ok(events::prune_orphans(tx, &cursor, 10).await?)
            }).unwrap();
            orphans += gone;
            match next { Some(place) => cursor = place, None => break }
        }
        // All but the one that the other object links.
        assert_eq!(orphans, 34);
        assert_eq!(events::list(&*store, &b, None, 10).await.unwrap()[0].message, "shared");
    }

    async fn a_seed_is_the_clusters_only_if_it_was_first(store: Arc<Store>) {
        let (mine, other) = (muster_types::key::Secret::new("mine"), muster_types::key::Secret::new("other"));
        assert!(seed::is_ours(&store, &mine).await.unwrap());
        assert!(seed::is_ours(&store, &mine).await.unwrap());
        assert!(!seed::is_ours(&store, &other).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_nodes_may_migrate_a_new_database_at_once() {
    let Some(url) = muster_testing::database_url() else { return muster_testing::skipped("mariadb-server") };
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { Store::open(&url).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_moves_from_sqlite_to_mariadb_and_back_whole() {
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
    let holder = leases::Holder::new("running");
    assert!(leases::take(&store, "maintainer", &holder, 60.0).await.unwrap());
    let refused = copy::run(&sqlite("a.db"), &url, |_, _| {}).await.unwrap_err().to_string();
    assert!(refused.contains("stop it first"), "{refused}");
    leases::release(&store, "maintainer", &holder).await.unwrap();

    let there = copy::run(&sqlite("a.db"), &url, |_, _| {}).await.unwrap();
    let again = copy::run(&sqlite("a.db"), &url, |_, _| {}).await.unwrap_err().to_string();
    assert!(again.contains("not empty"), "{again}");
    let back = copy::run(&url, &sqlite("b.db"), |_, _| {}).await.unwrap();
    assert_eq!(there, back, "counts and checksums");
    let returned = Store::open(&sqlite("b.db")).await.unwrap();
    assert!(namespaces::get(&returned, "ns-7").await.unwrap().is_some(), "text is text again");
    assert_eq!(there.iter().find(|c| c.table == "event_links").unwrap().rows, 900);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_a_newer_muster_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("muster.db").display());
    let store = Store::open(&url).await.unwrap();
    transaction!(store, |tx| {
        Ok(tx.execute("INSERT INTO migrations (number, statements_done) VALUES (999, 1)", &[]).await?)
    })
    .unwrap();
    assert!(Store::open(&url).await.unwrap_err().to_string().contains("newer muster"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_sqlite_is_one_moment() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("muster.db").display());
    let store = Store::open(&url).await.unwrap();
    let snapshot = store.snapshot().unwrap();
    assert!(namespaces::get(&snapshot, "late").await.unwrap().is_none());
    transaction!(store, |tx| { Ok(namespaces::insert(tx, "late").await?) }).unwrap();
    assert!(namespaces::get(&snapshot, "late").await.unwrap().is_none(), "it came after the moment");
    drop(snapshot);
    let snapshot = store.snapshot().unwrap();
    assert!(namespaces::get(&snapshot, "late").await.unwrap().is_some());
}
