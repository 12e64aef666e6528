use std::sync::Arc;

use muster_types::capacity::Capacity;
use muster_types::ids::{BlobId, NodeId, OperationId};
use muster_types::instance::{DiskRecord, InstanceState, PowerState};
use muster_types::node::{NodeIdentity, NodeState};
use muster_types::object::{NameOrId, ObjectRef, ObjectType};
use muster_types::operation::{OperationHandle, OperationType};
use muster_types::spec::DiskBus;
use muster_types::time::now;
use muster_types::vm::ConsolePorts;
use serde_json::json;

use super::AgentStatus;
use crate::testing::{
    add_instance, created_instance, new_instance, on_both_engines, operation, set_instance_state,
};
use crate::*;

fn ports(first: u16) -> ConsolePorts {
    ConsolePorts { console: first, vdi: first + 1, vdi_tls: Some(first + 2) }
}

on_both_engines! {
    async fn stores_configuration_and_observed_state(store: Arc<Store>) {
        let node = NodeId::new();
        let new = new_instance("www", "alpha", Some(node));
        let row = transaction!(store, |tx| { Ok(instances::insert(tx, &new).await?) }).unwrap();
        assert_eq!((&row.spec, row.committed, row.node), (&new.spec, new.committed, Some(node)));
        assert_eq!((row.power_state, row.power_wanted, row.ports), (PowerState::Initial, PowerState::On, None));
        let mut found = new.spec.clone();
        found.awaited.clear();
        found.disks[0].blob_uuid = Some(BlobId::new());
        let disks = vec![DiskRecord {
            device: "nvme0".into(),
            bus: DiskBus::Nvme,
            size: Some(8),
            blob_uuid: found.disks[0].blob_uuid,
            snapshot_ignores: false,
        }];
        let handle = OperationHandle { op_type: OperationType::Instance, op_uuid: OperationId::new() };
        transaction!(store, |tx| {
            instances::set_spec(tx, new.id, &found, &disks).await?;
            assert!(instances::set_power(tx, new.id, PowerState::On).await?);
            assert!(!instances::set_power(tx, new.id, PowerState::On).await?, "unchanged");
            instances::set_power_wanted(tx, new.id, PowerState::Paused).await?;
            instances::set_agent_state(tx, new.id, Some("not ready (ü)")).await?;
            instances::set_operation(tx, new.id, &handle).await?;
            instances::clear_committed(tx, new.id).await?;
            Ok(())
        })
        .unwrap();
        let row = instances::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((&row.spec, &row.disks), (&found, &disks));
        assert_eq!((row.power_state, row.power_wanted), (PowerState::On, PowerState::Paused));
        assert_eq!((row.agent_state.as_deref(), row.last_operation), (Some("not ready (ü)"), Some(handle)));
        assert_eq!((row.committed, row.node), (Capacity::default(), Some(node)), "the node is kept");
        transaction!(store, |tx| { Ok(instances::clear_node(tx, new.id).await?) }).unwrap();
        let row = instances::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((row.node, row.generation), (None, 2));
    }

    async fn instances_of_silent_nodes_are_unknown_and_placed_again_once(store: Arc<Store>) {
        let identity = |name: &str| NodeIdentity {
            id: NodeId::new(), name: name.into(), ip: [127, 0, 0, 1].into(), release: "x".into(), simulated: true,
            is_hypervisor: true, is_network_node: false, is_database_node: true,
        };
        let (lost, other) = (identity("lost"), identity("other"));
        transaction!(store, |tx| {
            nodes::insert(tx, &lost).await?;
            Ok(nodes::insert(tx, &other).await?)
        })
        .unwrap();
        let id = created_instance(&store, lost.id).await;
        created_instance(&store, other.id).await;
        assert_eq!(instances::unobserved(&*store, now() + 1.0, 10).await.unwrap(), []);
        let row = nodes::get(&*store, &NameOrId::Id(lost.id)).await.unwrap().unwrap();
        assert!(!transaction!(store, |tx| { Ok(nodes::lock_silent(tx, &row).await?) }).unwrap());
        transaction!(store, |tx| {
            instances::set_agent_state(tx, id, Some("ready")).await?;
            assert!(!instances::set_unknown(tx, id, now()).await?, "the node is active");
            Ok(nodes::set_state(tx, &row, NodeState::Missing).await?)
        })
        .unwrap();
        let found = instances::unobserved(&*store, 0.0, 10).await.unwrap();
        assert_eq!(found.iter().map(|found| (found.id, found.node.as_str())).collect::<Vec<_>>(), [(id, "lost")]);
        let missing = nodes::get(&*store, &NameOrId::Id(lost.id)).await.unwrap().unwrap();
        transaction!(store, |tx| {
            assert!(nodes::lock_silent(tx, &missing).await?);
            assert!(instances::set_unknown(tx, id, 0.0).await?);
            assert!(!instances::set_unknown(tx, id, 0.0).await?, "unchanged");
            Ok(())
        })
        .unwrap();
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        assert_eq!((row.power_state, row.agent_state.as_deref()), (PowerState::Unknown, Some("unknown")));
        assert!(row.power_state_since.unwrap() > 1e9);
        let committed = Capacity { cpus: 1, memory_mb: 2, disk_gb: 3 };
        let place = async || {
            transaction!(store, |tx| { Ok(instances::place_again(tx, &row, other.id, &committed).await?) }).unwrap()
        };
        let is_placed = async |row: &instances::InstanceRow| {
            transaction!(store, |tx| { Ok(instances::lock_placed(tx, row).await?) }).unwrap()
        };
        assert!(is_placed(&row).await);
        assert!(place().await);
        assert!(!place().await, "by another request");
        assert!(!is_placed(&row).await, "a daemon of its former node records nothing");
        let former = instances::InstanceRow { generation: 2, ..row.clone() };
        assert!(!is_placed(&former).await, "on another node");
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        assert_eq!((row.node, row.generation, row.committed), (Some(other.id), 2, committed));
        assert!(is_placed(&row).await);
        transaction!(store, |tx| { Ok(instances::clear_node(tx, id).await?) }).unwrap();
        assert!(!is_placed(&row).await);
        assert!(is_placed(&instances::get(&*store, id).await.unwrap().unwrap()).await, "without a node");
    }

    async fn changes_state_only_along_valid_transitions(store: Arc<Store>) {
        use InstanceState as S;
        let new = new_instance("www", "alpha", None);
        add_instance(&store, &new).await;
        assert!(set_instance_state(&store, new.id, S::Initial, S::Preflight).await);
        assert!(!set_instance_state(&store, new.id, S::Initial, S::Preflight).await, "the state has changed");
        let wrong = transaction!(store, |tx| { Ok(instances::set_state(tx, new.id, S::Preflight, S::Created, None).await?) });
        assert!(wrong.is_err(), "invalid transition");
        let moved = transaction!(store, |tx| {
            assert!(instances::set_state(tx, new.id, S::Preflight, S::PreflightError, Some("why")).await?);
            Ok(instances::set_state(tx, new.id, S::PreflightError, S::Error, None).await?)
        });
        assert!(moved.unwrap());
        let row = instances::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.error_message.as_deref()), (S::Error, Some("why")), "the reason is kept");
        let locked = transaction!(store, |tx| {
            Ok((
                instances::lock(tx, new.id, &[S::Created, S::Error]).await?,
                instances::lock(tx, new.id, &[S::Created]).await?,
                instances::lock_undeleted(tx, new.id).await?,
            ))
        });
        assert_eq!(locked.unwrap(), (true, false, true));
        assert!(set_instance_state(&store, new.id, S::Error, S::DeleteWait).await && set_instance_state(&store, new.id, S::DeleteWait, S::Deleted).await);
        assert!(!transaction!(store, |tx| { Ok(instances::lock_undeleted(tx, new.id).await?) }).unwrap());
        assert!(instances::deleted_before(&*store, now() - 10.0, 10).await.unwrap().is_empty());
        assert_eq!(instances::deleted_before(&*store, now() + 1.0, 10).await.unwrap(), [new.id]);
        assert!(transaction!(store, |tx| { Ok(instances::remove(tx, new.id).await?) }).unwrap());
        assert!(instances::get(&*store, new.id).await.unwrap().is_none());
    }

    async fn finds_visible_instances_by_name_namespace_and_node(store: Arc<Store>) {
        use InstanceState as S;
        let (one, two) = (NodeId::new(), NodeId::new());
        let own = new_instance("www", "alpha", Some(one));
        let twin = new_instance("www", "alpha", Some(two));
        let foreign = new_instance("www", "beta", Some(one));
        let other = new_instance("db", "beta", None);
        for new in [&own, &twin, &foreign, &other] {
            add_instance(&store, new).await;
        }
        let named = async |name: &str, namespace: Option<&str>| instances::by_name(&*store, name, namespace).await.unwrap().len();
        assert_eq!((named("www", Some("alpha")).await, named("www", Some("beta")).await), (2, 1));
        assert_eq!((named("www", None).await, named("WWW", None).await), (3, 0));
        transaction!(store, |tx| { Ok(trusts::put(tx, "beta", "alpha", None).await?) }).unwrap();
        let page = async |seen_by: Option<&str>, all, after, limit| {
            let rows = instances::page(&*store, seen_by, all, after, limit).await.unwrap();
            rows.into_iter().map(|row| row.id).collect::<Vec<_>>()
        };
        let everything = page(None, false, None, 10).await;
        assert_eq!(everything.len(), 4);
        assert_eq!(page(None, false, Some(everything[1]), 10).await, everything[2..]);
        assert_eq!(page(None, false, None, 2).await, everything[..2]);
        assert_eq!((page(Some("alpha"), false, None, 10).await.len(), page(Some("beta"), false, None, 10).await.len()), (4, 2));

        transaction!(store, |tx| {
            metadata::set(tx, ObjectType::Instance, &own.id.to_string(), "tags", &json!(["a", "b"])).await?;
            metadata::set(tx, ObjectType::Instance, &own.id.to_string(), "x", &json!(["c"])).await?;
            metadata::set(tx, ObjectType::Instance, &other.id.to_string(), "tags", &json!(["d"])).await?;
            Ok(())
        })
        .unwrap();
        assert_eq!(instances::tags(&*store, "alpha").await.unwrap(), [(one, json!(["a", "b"]))]);
        assert!(instances::tags(&*store, "beta").await.unwrap().is_empty(), "it is not placed");

        assert!(set_instance_state(&store, own.id, S::Initial, S::Deleted).await);
        assert_eq!((named("www", Some("alpha")).await, page(None, false, None, 10).await.len()), (1, 3));
        assert_eq!(page(None, true, None, 10).await.len(), 4);
        assert_eq!(instances::of_namespace(&*store, "alpha").await.unwrap().len(), 1);
        assert_eq!(instances::of_namespace(&*store, "beta").await.unwrap().len(), 2);
        assert_eq!(instances::of_node(&*store, one).await.unwrap()[0].id, foreign.id);
        assert!(instances::tags(&*store, "alpha").await.unwrap().is_empty());
    }

    async fn finds_instances_without_operation(store: Arc<Store>) {
        use InstanceState as S;
        let (waiting, with_operation, failed) = (new_instance("a", "x", None), new_instance("b", "x", None), new_instance("c", "x", None));
        for new in [&waiting, &with_operation, &failed] {
            add_instance(&store, new).await;
        }
        let mut pending = operation("x", vec![]);
        pending.target = ObjectRef::new(ObjectType::Instance, with_operation.id);
        transaction!(store, |tx| { Ok(operations::insert(tx, &pending).await?) }).unwrap();
        for (from, to) in [(S::Initial, S::InitialError), (S::InitialError, S::Error)] {
            assert!(set_instance_state(&store, failed.id, from, to).await);
        }
        let found: Vec<_> = instances::without_operation(&*store).await.unwrap().into_iter().map(|row| row.id).collect();
        assert_eq!(found, [waiting.id]);
    }

    async fn port_of_a_node_has_one_owner(store: Arc<Store>) {
        let (one, two) = (NodeId::new(), NodeId::new());
        let (first, second) = (new_instance("a", "x", Some(one)), new_instance("b", "x", Some(one)));
        add_instance(&store, &first).await;
        add_instance(&store, &second).await;
        let set_ports = async |id, node, ports: Option<ConsolePorts>| {
            let outcome: Result<bool, muster_types::Error> = transaction!(store, |tx| {
                if instances::set_ports(tx, id, node, ports).await? {
                    return Ok(true);
                }
                Err(muster_types::Error::Unavailable("taken".into()).into())
            });
            outcome.unwrap_or(false)
        };
        assert!(set_ports(first.id, one, Some(ports(30000))).await);
        assert!(set_ports(second.id, one, Some(ports(31000))).await);
        assert!(!set_ports(second.id, one, Some(ports(30002))).await, "one of the three ports is in use");
        let row = instances::get(&*store, second.id).await.unwrap().unwrap();
        assert_eq!(row.ports, Some(ports(31000)), "its ports are unchanged");
        assert_eq!(instances::ports(&*store, one).await.unwrap().len(), 6);
        assert!(set_ports(second.id, two, Some(ports(30002))).await, "each node has its own ports");
        assert_eq!(instances::ports(&*store, one).await.unwrap(), [30000, 30001, 30002]);
        assert!(set_ports(first.id, one, None).await);
        assert!(instances::ports(&*store, one).await.unwrap().is_empty());
        assert_eq!(instances::get(&*store, first.id).await.unwrap().unwrap().ports, None);
        let plain = ConsolePorts { console: 40000, vdi: 40001, vdi_tls: None };
        assert!(set_ports(first.id, one, Some(plain)).await);
        assert_eq!(instances::get(&*store, first.id).await.unwrap().unwrap().ports, Some(plain));
    }

    async fn sums_committed_capacity_of_a_namespace(store: Arc<Store>) {
        assert_eq!(instances::committed_of(&*store, "alpha").await.unwrap(), Capacity::default());
        let node = Some(NodeId::new());
        let ours = [new_instance("one", "alpha", node), new_instance("two", "alpha", node)];
        for one in &ours {
            add_instance(&store, one).await;
        }
        add_instance(&store, &new_instance("one", "beta", node)).await;
        let both = Capacity { cpus: 4, memory_mb: 2 << 20, disk_gb: 16 };
        assert_eq!(instances::committed_of(&*store, "alpha").await.unwrap(), both);
        transaction!(store, |tx| { Ok(instances::clear_committed(tx, ours[0].id).await?) }).unwrap();
        let one = Capacity { cpus: 2, memory_mb: 1 << 20, disk_gb: 8 };
        assert_eq!(instances::committed_of(&*store, "alpha").await.unwrap(), one);
    }

    async fn records_agent_only_while_instance_is_on(store: Arc<Store>) {
        let id = created_instance(&store, NodeId::new()).await;
        let status = AgentStatus { state: "ready".into(), start_time: Some(2.5), system_boot_time: Some(1.25) };
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        let write = async |row: &instances::InstanceRow| {
            transaction!(store, |tx| { Ok(instances::set_agent(tx, row, &status).await?) }).unwrap()
        };
        assert!(!write(&row).await);
        transaction!(store, |tx| { Ok(instances::set_power(tx, id, PowerState::On).await?) }).unwrap();
        assert!(!write(&instances::InstanceRow { generation: 2, ..row.clone() }).await, "another generation");
        assert!(!write(&instances::InstanceRow { node: Some(NodeId::new()), ..row.clone() }).await, "another node");
        assert!(write(&row).await);
        let row = instances::get(&*store, id).await.unwrap().unwrap();
        assert_eq!((row.agent_state.as_deref(), row.agent_start_time, row.agent_system_boot_time), (Some("ready"), Some(2.5), Some(1.25)));
    }
}
