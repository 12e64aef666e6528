//! What the whole cluster has room for, and how much of that is promised to namespaces.

use muster_types::capacity::{Capacity, CommittedCapacity};

use super::ledger::{Denied, limits};
use super::shortage::Shortage;
use super::{Facts, Policy, is_hypervisor, pre_schedule};

/// What the nodes that can run machines may promise in all, and what of it they have not. In the order of
/// [`Capacity::parts`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Room {
    pub total: [f64; 3],
    pub free: [f64; 3],
}

/// The room of a cluster; nothing if no node that can run machines has reported lately.
pub fn room<'a>(
    nodes: impl IntoIterator<Item = (&'a Facts, CommittedCapacity)>,
    policy: &Policy,
    now: f64,
) -> Option<Room> {
    let mut room = None;
    for (facts, committed) in nodes {
        if pre_schedule(facts, now).and_then(|()| is_hypervisor(facts)).is_err() {
            continue;
        }
        let room = room.get_or_insert_with(Room::default);
        let taken = [
            (committed.cpus as f64).max(facts.measured_vcpus),
            committed.memory_mb as f64,
            committed.disk_gb as f64,
        ];
        for (part, (limit, taken)) in limits(facts, policy).into_iter().zip(taken).enumerate() {
            // A part of a processor or of a gigabyte is nothing that can be promised.
            let limit = limit.floor();
            room.total[part] += limit;
            // What one node promised beyond its limit is not missing on another.
            room.free[part] += (limit - taken).max(0.0).floor();
        }
    }
    room
}

/// Refuses an instance that would take what is promised to other namespaces and not used yet. `own` is what its own
/// namespace was promised and has not used: that is taken in any case.
pub fn spare(wanted: &Capacity, own: &Capacity, others: &Capacity, room: &Room) -> Result<(), Denied> {
    let each = wanted.parts().into_iter().zip(own.parts()).zip(others.parts()).zip(room.free);
    for (what, (((wanted, own), promised), free)) in Capacity::NAMES.into_iter().zip(each) {
        if wanted > own && promised > 0 && free - (wanted as f64) < promised as f64 {
            return Err(Denied::new(&Shortage::PromisedElsewhere { what, free, promised, wanted }, false));
        }
    }
    Ok(())
}

/// Refuses a promise of `unspent` on top of those to `others` and of what is taken. The answer names the parts that
/// do not fit: what there is in all, and what of it is taken or promised.
pub fn promise(unspent: &Capacity, others: &Capacity, room: &Room) -> Result<(), Vec<Lacking>> {
    let each = unspent.parts().into_iter().zip(others.parts()).zip(room.total.into_iter().zip(room.free));
    let lacking: Vec<Lacking> = each
        .enumerate()
        .filter(|(_, ((unspent, others), (_, free)))| {
            *unspent > 0 && free - (*others as f64) < *unspent as f64
        })
        .map(|(part, ((_, others), (total, free)))| Lacking {
            part,
            total,
            taken: total - free + others as f64,
        })
        .collect();
    if lacking.is_empty() { Ok(()) } else { Err(lacking) }
}

/// A part of which a cluster has too little.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lacking {
    /// Its place in [`Capacity::parts`].
    pub part: usize,
    pub total: f64,
    pub taken: f64,
}

#[cfg(test)]
mod tests {
    use muster_types::node::NodeState;
    use proptest::prelude::*;

    use super::super::tests::{NOW, node, policy};
    use super::*;

    fn amount(cpus: i64) -> Capacity {
        Capacity { cpus, memory_mb: 0, disk_gb: 0 }
    }

    /// With so many processors of twenty free, and as much of the rest as anyone could want.
    fn with_cpus(free: i64) -> Room {
        Room { total: [20.0, 1e9, 1e9], free: [free as f64, 1e9, 1e9] }
    }

    #[test]
    fn the_room_is_that_of_the_nodes_that_can_run_machines() {
        let (first, mut second) = (node("a"), node("b"));
        let some = CommittedCapacity { cpus: 4, memory_mb: 1000, disk_gb: 7, ..CommittedCapacity::default() };
        let found = room([(&first, some), (&second, CommittedCapacity::default())], &policy(), NOW).unwrap();
        assert_eq!(found.total, [36.0, 86016.0, 800.0]);
        assert_eq!(found.free, [32.0, 85016.0, 793.0]);
        second.measured_vcpus = 5.0;
        let too_much = CommittedCapacity { cpus: 40, ..some };
        let found =
            room([(&first, too_much), (&second, CommittedCapacity::default())], &policy(), NOW).unwrap();
        assert_eq!(found.free[0], 13.0, "what is too much on one node is not missing on the other");
        for change in [
            (|facts: &mut Facts| facts.state = NodeState::Missing) as fn(&mut Facts),
            |facts| facts.lastseen = NOW - 121.0,
            |facts| facts.is_hypervisor = false,
            |facts| facts.refuses = Some("no".into()),
            |facts| facts.cpu_max = 0.0,
        ] {
            let mut gone = node("c");
            change(&mut gone);
            assert_eq!(room([(&gone, some)], &policy(), NOW), None);
            assert_eq!(room([(&first, some), (&gone, some)], &policy(), NOW).unwrap().total[0], 18.0);
        }
    }

    #[test]
    fn what_is_promised_to_others_is_left_to_them() {
        let none = Capacity::default();
        assert!(spare(&amount(4), &none, &amount(6), &with_cpus(10)).is_ok());
        let denied = spare(&amount(5), &none, &amount(6), &with_cpus(10)).unwrap_err();
        let why =
            "6 of the 10 cpus that are free in the cluster are promised to other namespaces, 5 are wanted";
        assert_eq!((denied.reason.as_str(), denied.only_demand), (why, false));
        assert!(spare(&amount(5), &none, &none, &with_cpus(3)).is_ok(), "that is a matter of the nodes");
        assert!(spare(&amount(5), &amount(4), &amount(6), &with_cpus(10)).is_err(), "more than its own");
        // Nodes are gone, and not everybody can have what was promised: who comes first.
        assert!(spare(&amount(4), &amount(4), &amount(6), &with_cpus(7)).is_ok());
    }

    #[test]
    fn a_promise_is_refused_part_by_part() {
        let others = Capacity { cpus: 3, memory_mb: 10, disk_gb: 0 };
        let room = Room { total: [20.0, 100.0, 50.0], free: [10.0, 20.0, 50.0] };
        let wanted =
            |cpus, memory_mb, disk_gb| promise(&Capacity { cpus, memory_mb, disk_gb }, &others, &room);
        assert_eq!(wanted(7, 10, 50), Ok(()));
        assert_eq!(wanted(0, 0, 0), Ok(()));
        let lacking = [
            Lacking { part: 0, total: 20.0, taken: 13.0 },
            Lacking { part: 1, total: 100.0, taken: 90.0 },
            Lacking { part: 2, total: 50.0, taken: 0.0 },
        ];
        assert_eq!(wanted(8, 11, 51), Err(lacking.to_vec()));
        assert_eq!(wanted(8, i64::MAX, 0).unwrap_err().len(), 2);
    }

    /// What may happen to a cluster of one kind of thing.
    #[derive(Debug, Clone)]
    enum Act {
        Claim(usize, i64),
        Place(usize, i64),
        End(usize),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            (0..3_usize, 0..12_i64).prop_map(|(who, limit)| Act::Claim(who, limit)),
            (0..3_usize, 1..6_i64).prop_map(|(who, size)| Act::Place(who, size)),
            (0..3_usize).prop_map(Act::End),
        ];
        prop::collection::vec(act, 0..60)
    }

    proptest! {
        #[test]
        fn whatever_happens_promises_that_are_not_used_are_free(acts in acts()) {
            let (mut limits, mut placed) = ([0_i64; 3], [Vec::<i64>::new(), vec![], vec![]]);
            for act in acts {
                let used = |who: usize| -> i64 { placed[who].iter().sum() };
                let unspent = |who: usize, limit: i64| (limit - used(who)).max(0);
                let others = |who: usize| -> Capacity {
                    amount((0..3).filter(|one| *one != who).map(|one| unspent(one, limits[one])).sum())
                };
                let room = with_cpus(20 - (0..3).map(used).sum::<i64>());
                match act {
                    Act::Claim(who, limit) => {
                        if promise(&amount(unspent(who, limit)), &others(who), &room).is_ok() {
                            limits[who] = limit;
                        }
                    }
                    Act::Place(who, size) => {
                        let own = amount(unspent(who, limits[who]));
                        let spared = spare(&amount(size), &own, &others(who), &room).is_ok();
                        let within = size <= own.cpus;
                        prop_assert!(!within || (spared && size as f64 <= room.free[0]), "a promise is kept");
                        if spared && size as f64 <= room.free[0] {
                            placed[who].push(size);
                        }
                    }
                    Act::End(who) => {
                        placed[who].pop();
                    }
                }
                let used: i64 = placed.iter().flatten().sum();
                let promised: i64 =
                    (0..3).map(|who| (limits[who] - placed[who].iter().sum::<i64>()).max(0)).sum();
                prop_assert!(used + promised <= 20, "{limits:?} {placed:?}");
            }
        }
    }
}
