//! Rows of instances and what nodes have promised to them, on both engines.

use std::collections::BTreeMap;
use std::sync::Arc;

use muster_types::ids::{ArtifactId, BlobId, InstanceId, NodeId, OperationId};
use muster_types::instance::{
    ConfigDriveType, DiskRecord, DiskSpecRecord, InstanceState, MachineType, PowerState, SideChannel,
};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::operation::{OperationHandle, OperationType};
use muster_types::spec::{DiskBus, DiskSpec, DiskType, VideoSpec};
use muster_types::time::now;
use muster_types::vm::ConsolePorts;
use serde_json::json;

use super::instances::{Claimed, InstanceSpec, NewInstance};
use super::tests::{on_both_engines, operation};
use super::*;
use muster_types::capacity::CommittedCapacity;

fn spec() -> InstanceSpec {
    let disk = DiskSpec {
        size: Some(8),
        base: Some("https://a.example/ü".into()),
        bus: DiskBus::Nvme,
        disk_type: DiskType::Disk,
    };
    InstanceSpec {
        cpus: 2,
        memory: 1 << 20,
        disks: vec![DiskSpecRecord { spec: disk, blob_uuid: None }],
        awaited: BTreeMap::from([(0, ArtifactId::new())]),
        video: VideoSpec::default(),
        ssh_key: Some("ssh-rsa ü".into()),
        user_data: Some("x".repeat(1 << 20)),
        uefi: true,
        secure_boot: false,
        configdrive: ConfigDriveType::None,
        nvram_template: Some(BlobId::new().to_string()),
        machine_type: MachineType::Q35,
        side_channels: vec![SideChannel::Agent2],
        requested_placement: Some("node".into()),
    }
}

pub(super) fn new(name: &str, namespace: &str, node: Option<NodeId>) -> NewInstance {
    NewInstance {
        id: InstanceId::new(),
        name: name.into(),
        namespace: namespace.into(),
        state: InstanceState::Initial,
        error_message: None,
        spec: spec(),
        node,
        claimed: Claimed { cpus: 2, memory_mb: 1 << 20, disk_gb: 8 },
    }
}

pub(super) async fn add(store: &Store, new: &NewInstance) {
    transaction!(store, |tx| { Ok(instances::insert(tx, new).await?) }).unwrap();
}

pub(super) async fn step(store: &Store, id: InstanceId, from: InstanceState, to: InstanceState) -> bool {
    transaction!(store, |tx| { Ok(instances::set_state(tx, id, from, to, None).await?) }).unwrap()
}

fn ports(first: u16) -> ConsolePorts {
    ConsolePorts { console: first, vdi: first + 1, vdi_tls: Some(first + 2) }
}

on_both_engines! {
    async fn an_instance_keeps_everything_that_was_asked_for_and_seen(store: Arc<Store>) {
        let node = NodeId::new();
        let new = new("www", "alpha", Some(node));
        let row = transaction!(store, |tx| { Ok(instances::insert(tx, &new).await?) }).unwrap();
        assert_eq!((&row.spec, row.claimed, row.node), (&new.spec, new.claimed, Some(node)));
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
            assert!(!instances::set_power(tx, new.id, PowerState::On).await?, "that is not new");
            instances::set_wanted(tx, new.id, PowerState::Paused).await?;
            instances::set_agent_state(tx, new.id, Some("not ready (ü)")).await?;
            instances::set_operation(tx, new.id, &handle).await?;
            instances::unclaim(tx, new.id).await?;
            Ok(())
        })
        .unwrap();
        let row = instances::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((&row.spec, &row.disks), (&found, &disks));
        assert_eq!((row.power_state, row.power_wanted), (PowerState::On, PowerState::Paused));
        assert_eq!((row.agent_state.as_deref(), row.last_operation), (Some("not ready (ü)"), Some(handle)));
        assert_eq!((row.claimed, row.node), (Claimed::default(), Some(node)), "where it was is still known");
        transaction!(store, |tx| { Ok(instances::unplace(tx, new.id).await?) }).unwrap();
        assert_eq!(instances::get(&*store, new.id).await.unwrap().unwrap().node, None);
    }

    async fn a_state_is_left_only_by_who_knows_it_and_only_to_where_it_leads(store: Arc<Store>) {
        use InstanceState as S;
        let new = new("www", "alpha", None);
        add(&store, &new).await;
        assert!(step(&store, new.id, S::Initial, S::Preflight).await);
        assert!(!step(&store, new.id, S::Initial, S::Preflight).await, "somebody was faster");
        let wrong = transaction!(store, |tx| { Ok(instances::set_state(tx, new.id, S::Preflight, S::Created, None).await?) });
        assert!(wrong.is_err(), "there is no such way");
        let why = transaction!(store, |tx| {
            assert!(instances::set_state(tx, new.id, S::Preflight, S::PreflightError, Some("why")).await?);
            Ok(instances::set_state(tx, new.id, S::PreflightError, S::Error, None).await?)
        });
        assert!(why.unwrap());
        let row = instances::get(&*store, new.id).await.unwrap().unwrap();
        assert_eq!((row.state, row.error_message.as_deref()), (S::Error, Some("why")), "the reason stays");
        let held = transaction!(store, |tx| {
            Ok((
                instances::hold(tx, new.id, &[S::Created, S::Error]).await?,
                instances::hold(tx, new.id, &[S::Created]).await?,
                instances::hold_present(tx, new.id).await?,
            ))
        });
        assert_eq!(held.unwrap(), (true, false, true));
        assert!(step(&store, new.id, S::Error, S::DeleteWait).await && step(&store, new.id, S::DeleteWait, S::Deleted).await);
        assert!(!transaction!(store, |tx| { Ok(instances::hold_present(tx, new.id).await?) }).unwrap());
        assert!(instances::deleted_before(&*store, now() - 10.0, 10).await.unwrap().is_empty());
        assert_eq!(instances::deleted_before(&*store, now() + 1.0, 10).await.unwrap(), [new.id]);
        assert!(transaction!(store, |tx| { Ok(instances::remove(tx, new.id).await?) }).unwrap());
        assert!(instances::get(&*store, new.id).await.unwrap().is_none());
    }

    async fn instances_are_found_by_name_namespace_and_node_as_far_as_one_may_see(store: Arc<Store>) {
        use InstanceState as S;
        let (one, two) = (NodeId::new(), NodeId::new());
        let mine = new("www", "alpha", Some(one));
        let twin = new("www", "alpha", Some(two));
        let theirs = new("www", "beta", Some(one));
        let other = new("db", "beta", None);
        for new in [&mine, &twin, &theirs, &other] {
            add(&store, new).await;
        }
        let named = async |name: &str, namespace: Option<&str>| instances::by_name(&*store, name, namespace).await.unwrap().len();
        assert_eq!((named("www", Some("alpha")).await, named("www", Some("beta")).await), (2, 1));
        assert_eq!((named("www", None).await, named("WWW", None).await), (2, 0), "two are enough to know that they are many");
        transaction!(store, |tx| { Ok(trusts::put(tx, "beta", "alpha", None).await?) }).unwrap();
        assert_eq!(instances::by_name_trusting(&*store, "db", "alpha").await.unwrap()[0].id, other.id);
        assert!(instances::by_name_trusting(&*store, "www", "beta").await.unwrap().is_empty());
        let page = async |seen_by: Option<&str>, all, after, limit| {
            let rows = instances::page(&*store, seen_by, all, after, limit).await.unwrap();
            rows.into_iter().map(|row| row.id).collect::<Vec<_>>()
        };
        let everything = page(None, false, None, 10).await;
        assert_eq!(everything.len(), 4);
        assert_eq!(page(None, false, Some(everything[1]), 10).await, everything[2..]);
        assert_eq!(page(None, false, None, 2).await, everything[..2]);
        assert_eq!((page(Some("alpha"), false, None, 10).await.len(), page(Some("beta"), false, None, 10).await.len()), (4, 2));
        let ids: Vec<String> = everything.iter().map(ToString::to_string).collect();
        assert_eq!(instances::visible(&*store, &ids, "beta").await.unwrap().len(), 2);
        assert!(instances::visible(&*store, &[], "beta").await.unwrap().is_empty());

        transaction!(store, |tx| {
            metadata::set(tx, ObjectType::Instance, &mine.id.to_string(), "tags", &json!(["a", "b"])).await?;
            metadata::set(tx, ObjectType::Instance, &mine.id.to_string(), "x", &json!(["c"])).await?;
            metadata::set(tx, ObjectType::Instance, &other.id.to_string(), "tags", &json!(["d"])).await?;
            Ok(())
        })
        .unwrap();
        assert_eq!(instances::tags(&*store, "alpha").await.unwrap(), [(one, json!(["a", "b"]))]);
        assert!(instances::tags(&*store, "beta").await.unwrap().is_empty(), "it has no place");

        assert!(step(&store, mine.id, S::Initial, S::Deleted).await);
        assert_eq!((named("www", Some("alpha")).await, page(None, false, None, 10).await.len()), (1, 3));
        assert_eq!(page(None, true, None, 10).await.len(), 4);
        assert_eq!(instances::of_namespace(&*store, Some("alpha")).await.unwrap().len(), 1);
        assert_eq!(instances::of_namespace(&*store, None).await.unwrap().len(), 3);
        assert_eq!(instances::of_node(&*store, one).await.unwrap()[0].id, theirs.id);
        assert!(instances::tags(&*store, "alpha").await.unwrap().is_empty());
    }

    async fn who_waits_for_an_operation_that_is_gone_is_found(store: Arc<Store>) {
        use InstanceState as S;
        let (waits, served, settled) = (new("a", "x", None), new("b", "x", None), new("c", "x", None));
        for new in [&waits, &served, &settled] {
            add(&store, new).await;
        }
        let mut at_it = operation("x", vec![]);
        at_it.target = ObjectRef::new(ObjectType::Instance, served.id);
        transaction!(store, |tx| { Ok(operations::insert(tx, &at_it).await?) }).unwrap();
        for (from, to) in [(S::Initial, S::InitialError), (S::InitialError, S::Error)] {
            assert!(step(&store, settled.id, from, to).await);
        }
        let found: Vec<_> = instances::abandoned(&*store).await.unwrap().into_iter().map(|row| row.id).collect();
        assert_eq!(found, [waits.id]);
    }

    async fn a_port_of_a_node_has_one_owner(store: Arc<Store>) {
        let (one, two) = (NodeId::new(), NodeId::new());
        let (first, second) = (new("a", "x", Some(one)), new("b", "x", Some(one)));
        add(&store, &first).await;
        add(&store, &second).await;
        let take = async |id, node, ports: Option<ConsolePorts>| {
            let outcome: Result<bool, muster_types::Error> = transaction!(store, |tx| {
                if instances::set_ports(tx, id, node, ports).await? {
                    return Ok(true);
                }
                Err(muster_types::Error::Unavailable("taken".into()).into())
            });
            outcome.unwrap_or(false)
        };
        assert!(take(first.id, one, Some(ports(30000))).await);
        assert!(take(second.id, one, Some(ports(31000))).await);
        assert!(!take(second.id, one, Some(ports(30002))).await, "one of the three is taken");
        let row = instances::get(&*store, second.id).await.unwrap().unwrap();
        assert_eq!(row.ports, Some(ports(31000)), "what it had stays");
        assert_eq!(instances::ports(&*store, one).await.unwrap().len(), 6);
        assert!(take(second.id, two, Some(ports(30002))).await, "another node has ports of its own");
        assert_eq!(instances::ports(&*store, one).await.unwrap(), [30000, 30001, 30002]);
        assert!(take(first.id, one, None).await);
        assert!(instances::ports(&*store, one).await.unwrap().is_empty());
        assert_eq!(instances::get(&*store, first.id).await.unwrap().unwrap().ports, None);
        let plain = ConsolePorts { console: 40000, vdi: 40001, vdi_tls: None };
        assert!(take(first.id, one, Some(plain)).await);
        assert_eq!(instances::get(&*store, first.id).await.unwrap().unwrap().ports, Some(plain));
    }

    async fn what_a_node_promises_at_once_adds_up(store: Arc<Store>) {
        let (one, two) = (NodeId::new(), NodeId::new());
        assert!(node_claims::list(&*store).await.unwrap().is_empty());
        let claims: Vec<_> = (0..40)
            .map(|number| {
                let store = Arc::clone(&store);
                let node = if number % 4 == 0 { two } else { one };
                tokio::spawn(async move {
                    let most = 20;
                    transaction!(store, |tx| {
                        let held = node_claims::hold(tx, node).await?;
                        if held.cpus == most {
                            return Ok(false);
                        }
                        let more = CommittedCapacity {
                            cpus: held.cpus + 1,
                            memory_mb: held.memory_mb + 512,
                            disk_gb: held.disk_gb + 3,
                            demand: held.demand + 0.5,
                            demand_at: 7.25,
                        };
                        node_claims::set(tx, node, &more).await?;
                        Ok(true)
                    })
                })
            })
            .collect();
        let mut given = 0;
        for claim in claims {
            given += usize::from(claim.await.unwrap().unwrap());
        }
        assert_eq!(given, 30, "twenty of one, ten of the other");
        let ledgers = node_claims::list(&*store).await.unwrap();
        let full = CommittedCapacity { cpus: 20, memory_mb: 20 * 512, disk_gb: 60, demand: 10.0, demand_at: 7.25 };
        assert_eq!(ledgers[&one], full);
        assert_eq!(ledgers[&two].cpus, 10);
        // A claim that is not kept changes nothing.
        let refused: Result<(), muster_types::Error> = transaction!(store, |tx| {
            node_claims::hold(tx, one).await?;
            node_claims::set(tx, one, &CommittedCapacity::default()).await?;
            Err(muster_types::Error::Conflict("no".into()).into())
        });
        assert!(refused.is_err());
        assert_eq!(node_claims::list(&*store).await.unwrap()[&one], full);
    }
}
