//! The stages one by one, and what holds for every cluster.

use std::collections::BTreeMap;

use muster_types::Error;
use muster_types::node::{HostFeature, NodeIdentity, NodeReport, NodeState};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use muster_store::nodes::NodeRow;

pub(super) const NOW: f64 = 1_000_000.0;

type Neighbours = HashMap<NodeId, Vec<Vec<String>>>;

/// With room for 18 vCPUs, 42 GB of memory and 400 GB of disk.
pub(super) fn node(name: &str) -> Facts {
    Facts {
        id: NodeId::new(),
        name: name.into(),
        state: NodeState::Created,
        is_hypervisor: true,
        refuses: None,
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
        waiting: 0.0,
        lastseen: NOW - 1.0,
    }
}

pub(super) fn policy() -> Policy {
    Policy::from(&Settings::from_pairs(&[]).unwrap())
}

fn wish() -> Wish {
    Wish { cpus: 2, memory_mb: 1024, disk_gb: 10, ..Wish::default() }
}

fn tags(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Dice that throw the same numbers each time.
fn dice() -> impl FnMut() -> f64 {
    let mut state = 7_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn place(wish: &Wish, nodes: &[(&Facts, CommittedCapacity)], neighbours: &Neighbours) -> Outcome {
    candidates(wish, nodes, neighbours, &policy(), NOW, &mut dice())
}

fn names(outcome: &Outcome, nodes: &[(&Facts, CommittedCapacity)]) -> Vec<String> {
    let name = |id: &NodeId| nodes.iter().find(|(facts, _)| facts.id == *id).unwrap().0.name.clone();
    outcome.result.as_ref().unwrap().iter().map(name).collect()
}

#[test]
fn each_stage_drops_a_node_with_its_reason() {
    type Change = fn(&mut Facts, &mut CommittedCapacity, &mut Wish);
    let cases: [(Change, Stage, &str); 17] = [
        (|f, _, _| f.state = NodeState::Missing, Stage::PreSchedule, "its state is missing"),
        (|f, _, _| f.cpu_max = 0.0, Stage::PreSchedule, "it has not reported its resources"),
        (|f, _, _| f.lastseen = NOW - 121.0, Stage::PreSchedule, "it was last heard of 121 seconds ago"),
        (|f, _, _| f.is_hypervisor = false, Stage::IsHypervisor, "it is not a hypervisor"),
        (
            |f, _, _| f.refuses = Some("no QEMU".into()),
            Stage::IsHypervisor,
            "it cannot run machines: no QEMU",
        ),
        (|_, _, w| w.cpus = 9, Stage::CpuMaxPerInstance, "an instance may have 8 vCPUs, 9 are wanted"),
        (|_, c, _| c.cpus = 17, Stage::SufficientIdleCpu, "17 of 18 vCPUs are promised, 2 more are wanted"),
        (
            |f, c, _| (f.measured_vcpus, c.cpus) = (18.0, 4),
            Stage::SufficientIdleCpu,
            "18 of 18 vCPUs are in use, 2 more are wanted",
        ),
        (
            |f, _, _| f.memory_available_mb = 3071.0,
            Stage::SufficientIdleMemory,
            "1023 MB of memory are free beside the reserve, 1024 MB are wanted",
        ),
        (
            |f, _, _| f.memory_available_mb = 1000.0,
            Stage::SufficientIdleMemory,
            "0 MB of memory are free beside the reserve, 1024 MB are wanted",
        ),
        (
            |f, _, _| f.memory_actual_mb = 49000.0,
            Stage::SufficientIdleMemory,
            "instances use 49000 MB of memory where 49152 MB are allowed, 1024 MB more are wanted",
        ),
        (
            |_, c, _| c.memory_mb = 42000,
            Stage::SufficientIdleMemory,
            "42000 of 43008 MB of memory are promised, 1024 MB more are wanted",
        ),
        (
            |f, _, _| f.disk_free_gb = 29.5,
            Stage::SufficientFreeDisk,
            "9.5 GB of disk are free beside the reserve, 10 GB are wanted",
        ),
        (
            |_, c, _| c.disk_gb = 391,
            Stage::SufficientFreeDisk,
            "391 of 400.0 GB of disk are promised, 10 GB more are wanted",
        ),
        (
            |_, _, w| w.affinity.require_with = tags(&["db", "x"]),
            Stage::AffinityConstraints,
            "no instance with the tag \"x\" is here",
        ),
        (
            |_, _, w| w.affinity.require_without = tags(&["x", "web"]),
            Stage::AffinityConstraints,
            "an instance with the tag \"web\" is here",
        ),
        // A node may be short of several things: the first stage tells.
        (|f, c, _| (f.is_hypervisor, c.cpus) = (false, 99), Stage::IsHypervisor, "it is not a hypervisor"),
    ];
    for (change, stage, reason) in cases {
        let (mut facts, mut committed, mut wish) = (node("n1"), CommittedCapacity::default(), wish());
        let neighbours = Neighbours::from([(facts.id, vec![tags(&["db"]), tags(&["web", "a"])])]);
        let before = place(&wish, &[(&facts, committed)], &neighbours);
        assert!(before.result.is_ok());
        change(&mut facts, &mut committed, &mut wish);
        let outcome = place(&wish, &[(&facts, committed)], &neighbours);
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
fn what_just_fits_is_taken() {
    let facts = Facts { memory_available_mb: 3072.0, disk_free_gb: 30.0, lastseen: NOW - 120.0, ..node("n") };
    let committed =
        CommittedCapacity { cpus: 16, memory_mb: 43008 - 1024, disk_gb: 390, ..CommittedCapacity::default() };
    assert!(place(&wish(), &[(&facts, committed)], &Neighbours::new()).result.is_ok());
    let huge = Wish { cpus: i64::MAX, memory_mb: i64::MAX, disk_gb: i64::MAX, ..Wish::default() };
    let outcome = place(&huge, &[(&facts, committed)], &Neighbours::new());
    assert_eq!(outcome.result.unwrap_err().stage, Stage::CpuMaxPerInstance);
}

#[test]
fn refusals_are_what_callers_know() {
    let error = |outcome: Outcome| Error::from(outcome.result.unwrap_err());
    let facts = node("n");
    match error(place(&wish(), &[], &Neighbours::new())) {
        Error::Unschedulable { text, stage: Stage::PreSchedule } => {
            assert_eq!(text, "No nodes remaining at scheduling stage pre_schedule");
        }
        other => panic!("{other:?}"),
    }
    let full = CommittedCapacity { cpus: 18, ..CommittedCapacity::default() };
    match error(place(&wish(), &[(&facts, full)], &Neighbours::new())) {
        Error::Unschedulable { text, stage: Stage::SufficientIdleCpu } => {
            assert_eq!(text, "No nodes remaining at scheduling stage sufficient_idle_cpu");
        }
        other => panic!("{other:?}"),
    }
    let affinity =
        Affinity { require_with: tags(&["a", "b"]), require_without: tags(&["c"]), ..Affinity::default() };
    let wish = Wish { affinity, ..wish() };
    match error(place(&wish, &[(&facts, CommittedCapacity::default())], &Neighbours::new())) {
        Error::Conflict(text) => assert_eq!(
            text,
            "No nodes remaining at scheduling stage affinity_constraints: require_with_tag=['a', 'b'], \
             require_without_tag=['c']"
        ),
        other => panic!("{other:?}"),
    }
    match Error::from(Refusal::full(3)) {
        Error::Unschedulable { text, stage: Stage::CapacityGuard } => {
            assert_eq!(text, "no node had capacity for this instance, 3 candidates refused it");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_instance_that_is_placed_by_hand_passes_the_same_stages() {
    let (a, b) = (node("a"), node("b"));
    let full = CommittedCapacity { cpus: 18, ..CommittedCapacity::default() };
    let nodes = [(&a, CommittedCapacity::default()), (&b, full)];
    let only = |id| Wish { only: Some(id), ..wish() };
    let outcome = place(&only(a.id), &nodes, &Neighbours::new());
    assert_eq!(names(&outcome, &nodes), ["a"]);
    let outcome = place(&only(b.id), &nodes, &Neighbours::new());
    assert_eq!(outcome.result.unwrap_err().stage, Stage::SufficientIdleCpu);
    let outcome = place(&only(NodeId::new()), &nodes, &Neighbours::new());
    assert_eq!(outcome.result.unwrap_err().stage, Stage::PreSchedule);
}

#[test]
fn liked_neighbours_come_before_idle_nodes_and_idle_nodes_before_busy_ones() {
    let loaded = Facts { load_1: 7.9, ..node("liked and loaded") };
    let waiting = Facts { waiting: 21.0, ..node("liked and waiting") };
    let grinding = Facts { disk_busy_ms: 1201.0, ..node("liked and grinding") };
    let (idle, disliked) = (node("idle"), node("disliked"));
    let filled = node("filled");
    let half = CommittedCapacity { memory_mb: 8192, ..CommittedCapacity::default() };
    let none = CommittedCapacity::default();
    let nodes = [
        (&disliked, none),
        (&filled, half),
        (&idle, none),
        (&waiting, none),
        (&grinding, half),
        (&loaded, none),
    ];
    let affinity = Affinity {
        prefer_with: tags(&["web", "cache"]),
        prefer_without: tags(&["noisy"]),
        ..Affinity::default()
    };
    let liked = vec![tags(&["web", "x"])];
    let neighbours = Neighbours::from([
        (loaded.id, vec![tags(&["web"]), tags(&["web", "noisy"])]),
        (waiting.id, liked.clone()),
        (grinding.id, liked),
        (disliked.id, vec![tags(&["noisy"])]),
        (idle.id, vec![tags(&["web", "noisy"])]),
    ]);
    let outcome = place(&Wish { affinity, ..wish() }, &nodes, &neighbours);
    let expected =
        ["liked and loaded", "liked and waiting", "liked and grinding", "idle", "filled", "disliked"];
    assert_eq!(names(&outcome, &nodes), expected);
    let report = |stage| outcome.stages.iter().find(|report| report.stage == stage).unwrap();
    assert_eq!(
        report(Stage::QueueState).dropped,
        [("liked and waiting".to_owned(), "21 jobs wait for it".to_owned())]
    );
    assert_eq!(
        report(Stage::SufficientIdleDisk).dropped,
        [("liked and grinding".to_owned(), "its disks are busy for 1201 ms of a second".to_owned())]
    );
}

#[test]
fn a_cluster_that_is_busy_everywhere_still_takes_instances() {
    let a = Facts { waiting: 100.0, disk_busy_ms: 5000.0, ..node("a") };
    let nodes = [(&a, CommittedCapacity::default())];
    let outcome = place(&wish(), &nodes, &Neighbours::new());
    assert_eq!(names(&outcome, &nodes), ["a"]);
    assert_eq!(outcome.stages.last().unwrap().kept, 0);
}

#[test]
fn a_node_with_more_headroom_comes_first_more_often() {
    // Both are in the lowest step.
    let (idle, warm) = (node("idle"), Facts { load_1: 1.9, ..node("warm") });
    let filled = CommittedCapacity { memory_mb: 4000, ..CommittedCapacity::default() };
    let nodes = [(&warm, filled), (&idle, CommittedCapacity::default())];
    let mut dice = dice();
    let first = (0..2000)
        .filter(|_| {
            let outcome = candidates(&wish(), &nodes, &Neighbours::new(), &policy(), NOW, &mut dice);
            outcome.result.unwrap()[0] == idle.id
        })
        .count();
    // Headroom 0.75 against (0.75 - 0.2375) * (1 - 0.244): about two to one.
    assert!((1240..1400).contains(&first), "{first}");
}

#[test]
fn a_node_that_is_a_step_fuller_never_comes_first() {
    let (idle, loaded, filled) = (node("idle"), Facts { load_1: 2.0, ..node("loaded") }, node("filled"));
    let quarter = CommittedCapacity { memory_mb: 4096, ..CommittedCapacity::default() };
    let nodes =
        [(&filled, quarter), (&loaded, CommittedCapacity::default()), (&idle, CommittedCapacity::default())];
    let mut dice = dice();
    for _ in 0..200 {
        let outcome = candidates(&wish(), &nodes, &Neighbours::new(), &policy(), NOW, &mut dice);
        assert_eq!(outcome.result.unwrap()[0], idle.id);
    }
}

#[test]
fn reports_name_a_bounded_number_of_nodes() {
    let facts: Vec<Facts> =
        (0..200).map(|at| Facts { is_hypervisor: at < 3, ..node(&format!("n{at}")) }).collect();
    let nodes: Vec<_> = facts.iter().map(|facts| (facts, CommittedCapacity::default())).collect();
    let outcome = place(&wish(), &nodes, &Neighbours::new());
    let report = &outcome.stages[1];
    assert_eq!((report.kept, report.dropped.len(), report.dropped_count), (3, 50, 197));
    assert_eq!(report.dropped[0].0, "n3");
}

#[test]
fn a_node_with_room_for_thirty_promises_exactly_thirty() {
    let facts = Facts { cpu_schedulable: 20.0, ..node("n") };
    let wish = Wish { cpus: 2, memory_mb: 512, disk_gb: 1, ..Wish::default() };
    let mut committed = CommittedCapacity::default();
    let mut denied = Vec::new();
    for _ in 0..50 {
        match claim(&wish, &facts, &committed, &policy(), NOW, false) {
            Ok(more) => committed = more,
            Err(why) => denied.push(why),
        }
    }
    assert_eq!((committed.cpus, committed.memory_mb, committed.disk_gb), (60, 30 * 512, 30));
    assert_eq!(denied.len(), 20);
    let reason = "60 of 60 vCPUs are promised, 2 more are wanted".to_owned();
    assert!(denied.iter().all(|why| *why == Denied { reason: reason.clone(), only_demand: false }));
    for _ in 0..30 {
        committed = release(&committed, 2, 512, 1);
    }
    assert_eq!((committed.cpus, committed.memory_mb, committed.disk_gb), (0, 0, 0));
    let below = release(&committed, 1, 1, 1);
    assert_eq!((below.cpus, below.memory_mb, below.disk_gb), (0, 0, 0));
}

#[test]
fn a_claim_is_denied_for_want_of_anything() {
    let facts = node("n");
    let full =
        CommittedCapacity { cpus: 16, memory_mb: 43008 - 1024, disk_gb: 390, ..CommittedCapacity::default() };
    let claim =
        |wish: &Wish, committed: &CommittedCapacity| claim(wish, &facts, committed, &policy(), NOW, false);
    assert!(claim(&wish(), &full).is_ok());
    for (wish, committed, reason) in [
        (
            Wish { cpus: 9, ..wish() },
            CommittedCapacity::default(),
            "an instance may have 8 vCPUs, 9 are wanted",
        ),
        (wish(), CommittedCapacity { cpus: 17, ..full }, "17 of 18 vCPUs are promised, 2 more are wanted"),
        (
            wish(),
            CommittedCapacity { memory_mb: 42000, ..full },
            "42000 of 43008 MB of memory are promised, 1024 MB more are wanted",
        ),
        (
            wish(),
            CommittedCapacity { disk_gb: 391, ..full },
            "391 of 400.0 GB of disk are promised, 10 GB more are wanted",
        ),
    ] {
        let denied = claim(&wish, &committed).unwrap_err();
        assert_eq!(denied, Denied { reason: reason.into(), only_demand: false });
    }
}

#[test]
fn expected_demand_denies_a_claim_only_when_it_is_heeded_and_fades() {
    let (facts, policy) = (node("n"), policy());
    let wish = Wish { cpus: 4, ..wish() };
    let claim =
        |committed: &CommittedCapacity, now, heed| claim(&wish, &facts, committed, &policy, now, heed);
    // 0.6 for each of 4 vCPUs, towards an aim of 0.75 for each of 8 threads.
    let one = claim(&CommittedCapacity::default(), NOW, true).unwrap();
    assert!((one.demand - 2.4).abs() < 1e-9);
    let two = claim(&one, NOW, true).unwrap();
    let denied = claim(&two, NOW, true).unwrap_err();
    assert!(denied.only_demand);
    assert_eq!(denied.reason, "a load of 4.8 is expected, 2.4 would be added, 6.0 is the aim");
    assert_eq!(claim(&two, NOW, false).unwrap().cpus, 12);
    let later = claim(&two, NOW + 600.0, true).unwrap();
    assert!((later.demand - 2.4 - 4.8 * 0.05).abs() < 0.01, "{}", later.demand);
    // The clock of the daemon that wrote it was ahead.
    let earlier = claim(&two, NOW - 5.0, false).unwrap();
    assert!((earlier.demand - 7.2).abs() < 1e-9, "{}", earlier.demand);
    let full = CommittedCapacity { cpus: 18, ..two };
    assert!(!claim(&full, NOW, true).unwrap_err().only_demand);
}

#[test]
fn a_report_becomes_facts() {
    let mut row = NodeRow {
        identity: NodeIdentity {
            id: NodeId::new(),
            name: "n1".into(),
            ip: "10.0.0.1".into(),
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
    };
    let silent = Facts::read(&row);
    assert_eq!((silent.cpu_max, silent.memory_max_mb), (0.0, 0.0));
    let reasons = place(&wish(), &[(&silent, CommittedCapacity::default())], &Neighbours::new()).stages;
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
    let expected = Facts {
        id: row.identity.id,
        refuses: Some("no QEMU".into()),
        cpu_schedulable: 8.0,
        load_1: 0.5,
        measured_vcpus: 3.0,
        memory_available_mb: 9000.0,
        memory_actual_mb: 700.0,
        disk_free_gb: 50.0,
        disk_busy_ms: 12.5,
        waiting: 4.0,
        lastseen: NOW,
        ..node("n1")
    };
    assert_eq!(Facts::read(&row), expected);
}

fn some_tags() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(str::to_owned), 0..3)
}

/// A node, its ledger and the tags of its instances.
fn some_node() -> impl Strategy<Value = (Facts, CommittedCapacity, Vec<Vec<String>>)> {
    let machine = (
        prop::sample::select(vec![0.0, 2.0, 8.0, 64.0]),
        0.0..70.0,
        prop::sample::select(vec![1024.0, 8192.0, 65536.0]),
        0.0..70000.0,
        0.0..500.0,
        0.0..40.0,
        0.0..3000.0,
    );
    let flags = (0..20_u8, 0.0..130.0);
    let ledger = (0..100_i64, 0..100_000_i64, 0..1000_i64, 0.0..10.0);
    let neighbours = prop::collection::vec(some_tags(), 0..3);
    (machine, flags, ledger, neighbours).prop_map(|(machine, (flag, age), ledger, neighbours)| {
        let (threads, vcpus, memory, available, disk, waiting, busy) = machine;
        let facts = Facts {
            state: if flag == 0 { NodeState::Stopped } else { NodeState::Created },
            is_hypervisor: flag != 1,
            refuses: (flag == 2).then(|| "broken".into()),
            cpu_max: threads,
            cpu_max_per_instance: threads,
            cpu_schedulable: threads,
            load_1: vcpus / 4.0,
            measured_vcpus: vcpus,
            memory_max_mb: memory,
            memory_available_mb: available,
            memory_actual_mb: available / 3.0,
            disk_total_gb: disk * 2.0,
            disk_free_gb: disk,
            waiting,
            disk_busy_ms: busy,
            lastseen: NOW - age,
            ..node("n")
        };
        let (cpus, memory_mb, disk_gb, demand) = ledger;
        (facts, CommittedCapacity { cpus, memory_mb, disk_gb, demand, demand_at: NOW - age }, neighbours)
    })
}

fn some_wish() -> impl Strategy<Value = Wish> {
    let affinity = prop::option::of((some_tags(), some_tags(), some_tags(), some_tags()));
    (0..12_i64, 0..9000_i64, 0..100_i64, affinity).prop_map(|(cpus, memory_mb, disk_gb, affinity)| {
        let (require_with, require_without, prefer_with, prefer_without) = affinity.unwrap_or_default();
        let affinity = Affinity { require_with, require_without, prefer_with, prefer_without };
        Wish { cpus, memory_mb, disk_gb, only: None, affinity }
    })
}

/// Whether the ledger is within what the node may promise, counted in the plainest way.
fn within_limits(committed: &CommittedCapacity, facts: &Facts) -> bool {
    let memory = (facts.memory_max_mb - facts.memory_reserved_mb).max(0.0) * 3.0;
    let disk = (facts.disk_total_gb - facts.disk_reserved_gb).max(0.0) * 5.0;
    committed.cpus as f64 <= facts.cpu_schedulable * 3.0
        && committed.memory_mb as f64 <= memory
        && committed.disk_gb as f64 <= disk
}

/// Whether a node can take it, by the words of the stages.
fn can_take(wish: &Wish, facts: &Facts, committed: &CommittedCapacity, neighbours: &[Vec<String>]) -> bool {
    let after = CommittedCapacity {
        cpus: committed.cpus + wish.cpus,
        memory_mb: committed.memory_mb + wish.memory_mb,
        disk_gb: committed.disk_gb + wish.disk_gb,
        ..*committed
    };
    let memory = wish.memory_mb as f64;
    let tags = neighbours.concat();
    facts.state == NodeState::Created
        && NOW - facts.lastseen <= 120.0
        && facts.cpu_max > 0.0
        && facts.is_hypervisor
        && facts.refuses.is_none()
        && wish.cpus as f64 <= facts.cpu_max_per_instance
        && facts.measured_vcpus + wish.cpus as f64 <= facts.cpu_schedulable * 3.0
        && facts.memory_available_mb - facts.memory_reserved_mb >= memory
        && facts.memory_actual_mb + memory <= facts.memory_max_mb * 3.0
        && facts.disk_free_gb - facts.disk_reserved_gb >= wish.disk_gb as f64
        && within_limits(&after, facts)
        && wish.affinity.require_with.iter().all(|tag| tags.contains(tag))
        && !wish.affinity.require_without.iter().any(|tag| tags.contains(tag))
}

fn likes(wish: &Wish, neighbours: &[Vec<String>]) -> i64 {
    let mut score = 0;
    for tag in neighbours.iter().flatten() {
        score += i64::from(wish.affinity.prefer_with.contains(tag));
        score -= i64::from(wish.affinity.prefer_without.contains(tag));
    }
    score
}

proptest! {
    #[test]
    fn a_claimed_ledger_is_within_the_limits(
        (facts, committed, _) in some_node(), wish in some_wish(), heed in any::<bool>(),
    ) {
        if let Ok(after) = claim(&wish, &facts, &committed, &policy(), NOW, heed) {
            prop_assert!(within_limits(&after, &facts));
            let back = release(&after, wish.cpus, wish.memory_mb, wish.disk_gb);
            let sums = |ledger: &CommittedCapacity| (ledger.cpus, ledger.memory_mb, ledger.disk_gb);
            prop_assert_eq!(sums(&back), sums(&committed));
        }
    }

    #[test]
    fn the_candidates_are_those_that_can_take_it_with_the_best_liked_first(
        cluster in prop::collection::vec(some_node(), 0..12), wish in some_wish(), place_by_hand in 0..40_usize,
    ) {
        let wish = Wish { only: cluster.get(place_by_hand).map(|(facts, ..)| facts.id), ..wish };
        let nodes: Vec<_> = cluster.iter().map(|(facts, committed, _)| (facts, *committed)).collect();
        let neighbours: Neighbours =
            cluster.iter().map(|(facts, _, tags)| (facts.id, tags.clone())).collect();
        let outcome = place(&wish, &nodes, &neighbours);

        let asked = nodes.iter().filter(|(facts, _)| wish.only.is_none_or(|only| only == facts.id));
        let mut expected: Vec<NodeId> = asked
            .clone()
            .filter(|(facts, committed)| can_take(&wish, facts, committed, &neighbours[&facts.id]))
            .map(|(facts, _)| facts.id)
            .collect();
        let found = outcome.result.clone().unwrap_or_default();
        let mut sorted = found.clone();
        sorted.sort();
        expected.sort();
        prop_assert_eq!(&sorted, &expected);
        prop_assert_eq!(outcome.result.is_err(), expected.is_empty());

        for id in &found {
            let (facts, committed) = nodes.iter().find(|(facts, _)| facts.id == *id).unwrap();
            prop_assert!(claim(&wish, facts, committed, &policy(), NOW, false).is_ok());
        }
        let scores: Vec<i64> = found.iter().map(|id| likes(&wish, &neighbours[id])).collect();
        prop_assert!(scores.is_sorted_by(|a, b| a >= b), "{:?}", scores);

        // Every node is accounted for at every stage that came into play.
        let mut left = asked.count();
        for report in &outcome.stages {
            prop_assert_eq!(report.kept + report.dropped_count, left, "{}", report.stage);
            if !matches!(report.stage, Stage::QueueState | Stage::SufficientIdleDisk) {
                left = report.kept;
            }
        }
    }
}
