//! Tests of the single stages, and properties that hold for every cluster.

mod properties;

use std::collections::{BTreeMap, HashMap};

use muster_types::Error;
use muster_types::capacity::CommittedCapacity;
use muster_types::ids::{NodeId, StorageId};
use muster_types::node::{HostFeature, NodeIdentity, NodeReport, NodeState};
use muster_types::scheduling::SchedulingStage as Stage;
use muster_types::settings::Settings;
use muster_types::shared_storage::SharedStorageRecord;
use muster_types::spec::Affinity;
use serde_json::{Value, json};

use super::*;
use muster_store::nodes::NodeRow;

pub(super) const NOW: f64 = 1_000_000.0;

type Neighbours = HashMap<NodeId, Vec<Vec<String>>>;

/// Returns a node with capacity for 18 vCPUs, 42 GB of memory and 400 GB of disk.
pub(super) fn node(name: &str) -> NodeFacts {
    NodeFacts {
        id: NodeId::new(),
        name: name.into(),
        state: NodeState::Created,
        is_hypervisor: true,
        vms_unavailable: None,
        degraded: None,
        shared_storage: None,
        cordon: None,
        cpu_max: 8.0,
        cpu_max_per_instance: 8.0,
        cpu_schedulable: 6.0,
        load_1: 0.0,
        measured_vcpus: 0.0,
        memory_max_mb: 16384.0,
        memory_available_mb: 16000.0,
        memory_reserved_mb: 2048.0,
        memory_actual_mb: 0.0,
        disk_total_gb: 100.0,
        disk_free_gb: 90.0,
        disk_reserved_gb: 20.0,
        disk_busy_ms: 0.0,
        queued_operations: 0.0,
        silence: 1.0,
    }
}

pub(super) fn policy() -> SchedulerPolicy {
    SchedulerPolicy::from(&Settings::from_pairs(&[]).unwrap())
}

fn request() -> PlacementRequest {
    PlacementRequest { cpus: 2, memory_mb: 1024, disk_gb: 10, ..PlacementRequest::default() }
}

fn tags(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Returns a deterministic random source.
fn random() -> impl FnMut() -> f64 {
    let mut state = 7_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn place(
    request: &PlacementRequest,
    nodes: &[(&NodeFacts, CommittedCapacity)],
    neighbours: &Neighbours,
) -> PlacementOutcome {
    candidates(request, nodes, neighbours, &policy(), &mut random())
}

fn names(outcome: &PlacementOutcome, nodes: &[(&NodeFacts, CommittedCapacity)]) -> Vec<String> {
    let name = |id: &NodeId| nodes.iter().find(|(facts, _)| facts.id == *id).unwrap().0.name.clone();
    outcome.result.as_ref().unwrap().iter().map(name).collect()
}

#[test]
fn each_stage_drops_nodes_with_a_reason() {
    type Change = fn(&mut NodeFacts, &mut CommittedCapacity, &mut PlacementRequest);
    let cases: [(Change, Stage, &str); 17] = [
        (|f, _, _| f.state = NodeState::Missing, Stage::PreSchedule, "its state is missing"),
        (|f, _, _| f.cpu_max = 0.0, Stage::PreSchedule, "it has not reported its resources"),
        (|f, _, _| f.silence = 7.6, Stage::PreSchedule, "its last check-in was 8 seconds ago"),
        (|f, _, _| f.is_hypervisor = false, Stage::IsHypervisor, "it is not a hypervisor"),
        (
            |f, _, _| f.vms_unavailable = Some("no QEMU".into()),
            Stage::IsHypervisor,
            "it cannot run VMs: no QEMU",
        ),
        (|_, _, w| w.cpus = 9, Stage::CpuMaxPerInstance, "an instance may have 8 vCPUs, 9 are requested"),
        (
            |_, c, _| c.cpus = 17,
            Stage::SufficientIdleCpu,
            "17 of 18 vCPUs are committed, 2 more are requested",
        ),
        (
            |f, c, _| (f.measured_vcpus, c.cpus) = (18.0, 4),
            Stage::SufficientIdleCpu,
            "18 of 18 vCPUs are in use, 2 more are requested",
        ),
        (
            |f, _, _| f.memory_available_mb = 3071.0,
            Stage::SufficientIdleMemory,
            "1023 MB of memory are free beyond the reserve, 1024 MB are requested",
        ),
        (
            |f, _, _| f.memory_available_mb = 1000.0,
            Stage::SufficientIdleMemory,
            "0 MB of memory are free beyond the reserve, 1024 MB are requested",
        ),
        (
            |f, _, _| f.memory_actual_mb = 49000.0,
            Stage::SufficientIdleMemory,
            "instances use 49000 of 49152 MB of memory, 1024 MB more are requested",
        ),
        (
            |_, c, _| c.memory_mb = 42000,
            Stage::SufficientIdleMemory,
            "42000 of 43008 MB of memory are committed, 1024 MB more are requested",
        ),
        (
            |f, _, _| f.disk_free_gb = 29.5,
            Stage::SufficientFreeDisk,
            "9.5 GB of disk are free beyond the reserve, 10 GB are requested",
        ),
        (
            |_, c, _| c.disk_gb = 391,
            Stage::SufficientFreeDisk,
            "391 of 400.0 GB of disk are committed, 10 GB more are requested",
        ),
        (
            |_, _, w| w.affinity.require_with = tags(&["db", "x"]),
            Stage::AffinityConstraints,
            "it has no instance with the tag \"x\"",
        ),
        (
            |_, _, w| w.affinity.require_without = tags(&["x", "web"]),
            Stage::AffinityConstraints,
            "it has an instance with the tag \"web\"",
        ),
        // The first stage that fails is reported.
        (|f, c, _| (f.is_hypervisor, c.cpus) = (false, 99), Stage::IsHypervisor, "it is not a hypervisor"),
    ];
    for (change, stage, reason) in cases {
        let (mut facts, mut committed, mut request) = (node("n1"), CommittedCapacity::default(), request());
        let neighbours = Neighbours::from([(facts.id, vec![tags(&["db"]), tags(&["web", "a"])])]);
        let before = place(&request, &[(&facts, committed)], &neighbours);
        assert!(before.result.is_ok());
        change(&mut facts, &mut committed, &mut request);
        let outcome = place(&request, &[(&facts, committed)], &neighbours);
        let last = outcome.stages.last().unwrap();
        assert_eq!(last.dropped, [("n1".to_owned(), reason.to_owned())]);
        assert_eq!((last.stage, last.kept, last.dropped_count), (stage, 0, 1), "{reason}");
        let refusal = outcome.result.unwrap_err();
        assert_eq!(refusal.stage, stage);
        assert!(refusal.text.starts_with(&format!("No nodes remaining at scheduling stage {stage}")));
        assert!(
            outcome.stages.iter().rev().skip(1).all(|report| report.kept == 1 && report.dropped.is_empty())
        );
    }
}

#[test]
fn accepts_instance_that_fits_exactly() {
    let facts = NodeFacts { memory_available_mb: 3072.0, disk_free_gb: 30.0, silence: 7.5, ..node("n") };
    let committed =
        CommittedCapacity { cpus: 16, memory_mb: 43008 - 1024, disk_gb: 390, ..CommittedCapacity::default() };
    assert!(place(&request(), &[(&facts, committed)], &Neighbours::new()).result.is_ok());
    let huge = PlacementRequest {
        cpus: i64::MAX,
        memory_mb: i64::MAX,
        disk_gb: i64::MAX,
        ..PlacementRequest::default()
    };
    let outcome = place(&huge, &[(&facts, committed)], &Neighbours::new());
    assert_eq!(outcome.result.unwrap_err().stage, Stage::CpuMaxPerInstance);
}

#[test]
fn refusals_become_api_errors() {
    let error = |outcome: PlacementOutcome| Error::from(outcome.result.unwrap_err());
    let facts = node("n");
    match error(place(&request(), &[], &Neighbours::new())) {
        Error::Unschedulable { text, stage: Stage::PreSchedule, transient: false } => {
            assert_eq!(text, "No nodes remaining at scheduling stage pre_schedule");
        }
        other => panic!("{other:?}"),
    }
    let full = CommittedCapacity { cpus: 18, ..CommittedCapacity::default() };
    match error(place(&request(), &[(&facts, full)], &Neighbours::new())) {
        Error::Unschedulable { text, stage: Stage::SufficientIdleCpu, transient: true } => {
            assert_eq!(text, "No nodes remaining at scheduling stage sufficient_idle_cpu");
        }
        other => panic!("{other:?}"),
    }
    let affinity =
        Affinity { require_with: tags(&["a", "b"]), require_without: tags(&["c"]), ..Affinity::default() };
    let request = PlacementRequest { affinity, ..request() };
    match error(place(&request, &[(&facts, CommittedCapacity::default())], &Neighbours::new())) {
        Error::Conflict(text) => assert_eq!(
            text,
            "No nodes remaining at scheduling stage affinity_constraints: require_with_tag=['a', 'b'], \
             require_without_tag=['c']"
        ),
        other => panic!("{other:?}"),
    }
    match Error::from(PlacementRefusal::no_capacity(3)) {
        Error::Unschedulable { text, stage: Stage::CapacityGuard, transient: true } => {
            assert_eq!(text, "no node had capacity for this instance, 3 candidates refused it");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn refusal_is_final_if_no_node_is_large_enough() {
    let (small, large) =
        (node("small"), NodeFacts { memory_max_mb: 2e6, memory_available_mb: 10.0, ..node("large") });
    let huge = PlacementRequest { memory_mb: 999_999, ..request() };
    let empty = CommittedCapacity::default;
    let refusal = |nodes: &[(&NodeFacts, CommittedCapacity)]| {
        let refusal = place(&huge, nodes, &Neighbours::new()).result.unwrap_err();
        assert_eq!(refusal.stage, Stage::SufficientIdleMemory);
        (refusal.transient, refusal.text)
    };
    let text = "No nodes remaining at scheduling stage sufficient_idle_memory";
    let too_large = format!("{text}: no node is large enough for this instance");
    assert_eq!(refusal(&[(&small, empty())]), (false, too_large.clone()));
    assert_eq!(refusal(&[(&small, empty()), (&large, empty())]), (true, text.to_owned()));
    // A node that is down may return.
    let down = NodeFacts { state: NodeState::Missing, ..large.clone() };
    assert_eq!(refusal(&[(&small, empty()), (&down, empty())]), (true, text.to_owned()));
    let deleted = NodeFacts { state: NodeState::Deleted, ..large };
    assert_eq!(refusal(&[(&small, empty()), (&deleted, empty())]), (false, too_large));
}

#[test]
fn required_node_passes_the_same_stages() {
    let (a, b) = (node("a"), node("b"));
    let full = CommittedCapacity { cpus: 18, ..CommittedCapacity::default() };
    let nodes = [(&a, CommittedCapacity::default()), (&b, full)];
    let required = |id| PlacementRequest { required_node: Some(id), ..request() };
    let outcome = place(&required(a.id), &nodes, &Neighbours::new());
    assert_eq!(names(&outcome, &nodes), ["a"]);
    let outcome = place(&required(b.id), &nodes, &Neighbours::new());
    assert_eq!(outcome.result.unwrap_err().stage, Stage::SufficientIdleCpu);
    let outcome = place(&required(NodeId::new()), &nodes, &Neighbours::new());
    assert_eq!(outcome.result.unwrap_err().stage, Stage::PreSchedule);
}

#[test]
fn sorts_by_affinity_then_busyness_then_load() {
    let loaded = NodeFacts { load_1: 7.9, ..node("preferred and loaded") };
    let queued = NodeFacts { queued_operations: 21.0, ..node("preferred and queued") };
    let disk_busy = NodeFacts { disk_busy_ms: 1201.0, ..node("preferred and disk busy") };
    let (idle, avoided) = (node("idle"), node("avoided"));
    let filled = node("filled");
    let half = CommittedCapacity { memory_mb: 8192, ..CommittedCapacity::default() };
    let none = CommittedCapacity::default();
    let nodes = [
        (&avoided, none),
        (&filled, half),
        (&idle, none),
        (&queued, none),
        (&disk_busy, half),
        (&loaded, none),
    ];
    let affinity = Affinity {
        prefer_with: tags(&["web", "cache"]),
        prefer_without: tags(&["noisy"]),
        ..Affinity::default()
    };
    let preferred = vec![tags(&["web", "x"])];
    let neighbours = Neighbours::from([
        (loaded.id, vec![tags(&["web"]), tags(&["web", "noisy"])]),
        (queued.id, preferred.clone()),
        (disk_busy.id, preferred),
        (avoided.id, vec![tags(&["noisy"])]),
        (idle.id, vec![tags(&["web", "noisy"])]),
    ]);
    let outcome = place(&PlacementRequest { affinity, ..request() }, &nodes, &neighbours);
    let expected = [
        "preferred and loaded",
        "preferred and queued",
        "preferred and disk busy",
        "idle",
        "filled",
        "avoided",
    ];
    assert_eq!(names(&outcome, &nodes), expected);
    let report = |stage| outcome.stages.iter().find(|report| report.stage == stage).unwrap();
    assert_eq!(
        report(Stage::QueueState).dropped,
        [("preferred and queued".to_owned(), "21 operations are queued for it".to_owned())]
    );
    assert_eq!(
        report(Stage::SufficientIdleDisk).dropped,
        [("preferred and disk busy".to_owned(), "its disks are busy for 1201 ms per second".to_owned())]
    );
}

#[test]
fn busy_cluster_still_accepts_instances() {
    let a = NodeFacts { queued_operations: 100.0, disk_busy_ms: 5000.0, ..node("a") };
    let nodes = [(&a, CommittedCapacity::default())];
    let outcome = place(&request(), &nodes, &Neighbours::new());
    assert_eq!(names(&outcome, &nodes), ["a"]);
    assert_eq!(outcome.stages.last().unwrap().kept, 0);
}

#[test]
fn node_with_more_headroom_ranks_first_more_often() {
    // Both have the lowest fullness.
    let (idle, warm) = (node("idle"), NodeFacts { load_1: 1.9, ..node("warm") });
    let filled = CommittedCapacity { memory_mb: 4000, ..CommittedCapacity::default() };
    let nodes = [(&warm, filled), (&idle, CommittedCapacity::default())];
    let mut random = random();
    let first = (0..2000)
        .filter(|_| {
            let outcome = candidates(&request(), &nodes, &Neighbours::new(), &policy(), &mut random);
            outcome.result.unwrap()[0] == idle.id
        })
        .count();
    // Headroom 0.75 against (0.75 - 0.2375) * (1 - 0.244): about two to one.
    assert!((1240..1400).contains(&first), "{first}");
}

#[test]
fn node_with_higher_fullness_never_ranks_first() {
    let (idle, loaded, filled) = (node("idle"), NodeFacts { load_1: 2.0, ..node("loaded") }, node("filled"));
    let quarter = CommittedCapacity { memory_mb: 4096, ..CommittedCapacity::default() };
    let nodes =
        [(&filled, quarter), (&loaded, CommittedCapacity::default()), (&idle, CommittedCapacity::default())];
    let mut random = random();
    for _ in 0..200 {
        let outcome = candidates(&request(), &nodes, &Neighbours::new(), &policy(), &mut random);
        assert_eq!(outcome.result.unwrap()[0], idle.id);
    }
}

#[test]
fn report_names_a_limited_number_of_nodes() {
    let facts: Vec<NodeFacts> =
        (0..200).map(|at| NodeFacts { is_hypervisor: at < 3, ..node(&format!("n{at}")) }).collect();
    let nodes: Vec<_> = facts.iter().map(|facts| (facts, CommittedCapacity::default())).collect();
    let outcome = place(&request(), &nodes, &Neighbours::new());
    let report = &outcome.stages[1];
    assert_eq!((report.kept, report.dropped.len(), report.dropped_count), (3, 50, 197));
    assert_eq!(report.dropped[0].0, "n3");
}

#[test]
fn node_with_capacity_for_30_commits_exactly_30() {
    let facts = NodeFacts { cpu_schedulable: 20.0, ..node("n") };
    let request = PlacementRequest { cpus: 2, memory_mb: 512, disk_gb: 1, ..PlacementRequest::default() };
    let mut committed = CommittedCapacity::default();
    let mut denied = Vec::new();
    for _ in 0..50 {
        match commit_capacity(&request, &facts, &committed, &policy(), NOW, false) {
            Ok(more) => committed = more,
            Err(why) => denied.push(why),
        }
    }
    assert_eq!((committed.cpus, committed.memory_mb, committed.disk_gb), (60, 30 * 512, 30));
    assert_eq!(denied.len(), 20);
    let reason = "60 of 60 vCPUs are committed, 2 more are requested".to_owned();
    assert!(denied.iter().all(|why| *why == CapacityDenied { reason: reason.clone(), only_demand: false }));
    for _ in 0..30 {
        committed = release_capacity(&committed, 2, 512, 1);
    }
    assert_eq!((committed.cpus, committed.memory_mb, committed.disk_gb), (0, 0, 0));
    let below = release_capacity(&committed, 1, 1, 1);
    assert_eq!((below.cpus, below.memory_mb, below.disk_gb), (0, 0, 0));
}

#[test]
fn denies_capacity_for_each_exhausted_resource() {
    let facts = node("n");
    let full =
        CommittedCapacity { cpus: 16, memory_mb: 43008 - 1024, disk_gb: 390, ..CommittedCapacity::default() };
    let commit = |request: &PlacementRequest, committed: &CommittedCapacity| {
        commit_capacity(request, &facts, committed, &policy(), NOW, false)
    };
    assert!(commit(&request(), &full).is_ok());
    for (request, committed, reason) in [
        (
            PlacementRequest { cpus: 9, ..request() },
            CommittedCapacity::default(),
            "an instance may have 8 vCPUs, 9 are requested",
        ),
        (
            request(),
            CommittedCapacity { cpus: 17, ..full },
            "17 of 18 vCPUs are committed, 2 more are requested",
        ),
        (
            request(),
            CommittedCapacity { memory_mb: 42000, ..full },
            "42000 of 43008 MB of memory are committed, 1024 MB more are requested",
        ),
        (
            request(),
            CommittedCapacity { disk_gb: 391, ..full },
            "391 of 400.0 GB of disk are committed, 10 GB more are requested",
        ),
    ] {
        let denied = commit(&request, &committed).unwrap_err();
        assert_eq!(denied, CapacityDenied { reason: reason.into(), only_demand: false });
    }
}

#[test]
fn expected_demand_denies_capacity_until_it_decays() {
    let (facts, policy) = (node("n"), policy());
    let request = PlacementRequest { cpus: 4, ..request() };
    let commit = |committed: &CommittedCapacity, now, include_demand| {
        commit_capacity(&request, &facts, committed, &policy, now, include_demand)
    };
    // 0.6 for each of 4 vCPUs, with a target of 0.75 for each of 8 threads.
    let one = commit(&CommittedCapacity::default(), NOW, true).unwrap();
    assert!((one.demand - 2.4).abs() < 1e-9);
    let two = commit(&one, NOW, true).unwrap();
    let denied = commit(&two, NOW, true).unwrap_err();
    assert!(denied.only_demand);
    assert_eq!(denied.reason, "the expected load of 4.8 plus 2.4 exceeds the target of 6.0");
    assert_eq!(commit(&two, NOW, false).unwrap().cpus, 12);
    let later = commit(&two, NOW + 600.0, true).unwrap();
    assert!((later.demand - 2.4 - 4.8 * 0.05).abs() < 0.01, "{}", later.demand);
    // The clock of the daemon that wrote the ledger was ahead.
    let earlier = commit(&two, NOW - 5.0, false).unwrap();
    assert!((earlier.demand - 7.2).abs() < 1e-9, "{}", earlier.demand);
    let full = CommittedCapacity { cpus: 18, ..two };
    assert!(!commit(&full, NOW, true).unwrap_err().only_demand);
}

#[test]
fn reads_facts_from_a_report() {
    let mut row = NodeRow {
        identity: NodeIdentity {
            id: NodeId::new(),
            name: "n1".into(),
            ip: [10, 0, 0, 1].into(),
            release: "muster".into(),
            simulated: false,
            is_hypervisor: true,
            is_network_node: false,
            is_database_node: false,
        },
        state: NodeState::Created,
        lastseen: NOW,
        report: NodeReport::default(),
        created: NOW,
        version: 1,
        epoch: 1,
        started: NOW,
        lock_file: String::new(),
        clock_skew: 0.0,
        cordon: None,
    };
    let silent = NodeFacts::from_row(&row, 1.0);
    assert_eq!((silent.cpu_max, silent.memory_max_mb), (0.0, 0.0));
    let reasons = place(&request(), &[(&silent, CommittedCapacity::default())], &Neighbours::new()).stages;
    assert_eq!(reasons[0].dropped[0].1, "it has not reported its resources");

    let resources = json!({
        "cpu_max": 8, "cpu_load_1": 0.5, "cpu_total_instance_vcpus": 3, "memory_max": 16384,
        "memory_available": 9000, "memory_reserved_mb": 2048, "memory_total_instance_actual": 700,
        "disk_total": 107_374_182_400_u64, "disk_free": 53_687_091_200_u64, "disk_reservation_gb": 20.0,
        "disk_busy_time_delta_per_second": 12.5, "node_queue_waiting": 4,
    });
    let Value::Object(resources) = resources else { unreachable!() };
    row.report.resources = resources;
    row.report.limits = BTreeMap::from([(HostFeature::Vms, "no QEMU".to_owned())]);
    let expected = NodeFacts {
        id: row.identity.id,
        vms_unavailable: Some("no QEMU".into()),
        cpu_schedulable: 8.0,
        load_1: 0.5,
        measured_vcpus: 3.0,
        memory_available_mb: 9000.0,
        memory_actual_mb: 700.0,
        disk_free_gb: 50.0,
        disk_busy_ms: 12.5,
        queued_operations: 4.0,
        ..node("n1")
    };
    assert_eq!(NodeFacts::from_row(&row, 1.0), expected);
}

fn shared_storage(uuid: StorageId, free_gb: i64) -> SharedStorageRecord {
    SharedStorageRecord {
        path: "/mnt/nfs".into(),
        uuid: Some(uuid),
        total: 100 << 30,
        free: free_gb << 30,
        problem: None,
    }
}

#[test]
fn disks_on_shared_storage_need_a_node_that_has_mounted_it() {
    let (uuid, other) = (StorageId::new(), StorageId::new());
    let with = |name: &str, storage: Option<SharedStorageRecord>| NodeFacts {
        shared_storage: storage,
        // The disk of the node does not matter.
        disk_free_gb: 0.0,
        ..node(name)
    };
    let problem = Some("it is not mounted".into());
    let unmounted = SharedStorageRecord { uuid: None, problem, ..shared_storage(uuid, 50) };
    let nodes = [
        with("none", None),
        with("unmounted", Some(unmounted)),
        with("other", Some(shared_storage(other, 50))),
        with("full", Some(shared_storage(uuid, 5))),
        with("large", Some(shared_storage(uuid, 50))),
    ];
    let nodes: Vec<_> = nodes.iter().map(|facts| (facts, CommittedCapacity::default())).collect();
    let place = |storage, nodes: &[(&NodeFacts, CommittedCapacity)]| {
        let request = PlacementRequest { storage, ..request() };
        candidates(&request, nodes, &Neighbours::new(), &policy(), &mut || 0.5)
    };
    let names = |outcome: &PlacementOutcome| -> Vec<&str> {
        let ids = outcome.result.as_ref().unwrap();
        nodes.iter().filter(|(facts, _)| ids.contains(&facts.id)).map(|(facts, _)| &*facts.name).collect()
    };
    assert_eq!(names(&place(StorageRequest::AnyShared, &nodes)), ["other", "large"]);
    let existing = place(StorageRequest::Shared(uuid), &nodes);
    assert_eq!(names(&existing), ["full", "large"], "the disks exist already");
    let dropped: Vec<&str> = existing.stages[2].dropped.iter().map(|(_, reason)| reason.as_str()).collect();
    assert_eq!(
        dropped,
        [
            "it has no shared storage (SHARED_STORAGE)",
            "its shared storage /mnt/nfs cannot be used: it is not mounted",
            &format!("its shared storage /mnt/nfs is not {uuid}, which has the disks"),
        ]
    );
    let refusal = place(StorageRequest::AnyShared, &nodes[1..2]).result.unwrap_err();
    assert_eq!((refusal.stage, refusal.transient), (Stage::SharedStorage, false));
    assert_eq!(
        refusal.text,
        "No nodes remaining at scheduling stage shared_storage: node unmounted: its shared storage /mnt/nfs cannot be used: \
         it is not mounted"
    );

    // The ledger of the node has no disks that are elsewhere.
    let request = PlacementRequest { storage: StorageRequest::AnyShared, ..request() };
    let committed =
        commit_capacity(&request, nodes[4].0, &CommittedCapacity::default(), &policy(), NOW, true);
    assert_eq!(committed.map(|committed| (committed.cpus, committed.disk_gb)), Ok((2, 0)));
}
