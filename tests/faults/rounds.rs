//! Rounds: one fault under load, healing, and a comparison of what callers were told with what is true.

use std::time::{Duration, Instant};

use fastrand::Rng;
use muster_testing::wait;

use crate::cluster::FaultCluster;
use crate::fault::{Deck, Fault, inject};
use crate::guests::Guests;
use crate::load::{Expected, Load, instances, networks, uploads};
use crate::orphans;
use crate::referee::Referee;

/// The hosts of the cluster.
const HOSTS: usize = 3;
/// The number of rounds from which faults last longer, some of them until guests restart elsewhere.
const LONG_RUN: usize = 20;

/// Runs rounds on one cluster.
pub(crate) fn run(rounds: usize, seed: u64, is_galera: bool, image: &str) {
    let database = if is_galera { " MUSTER_FAULT_DATABASE=galera" } else { "" };
    println!("MUSTER_FAULT_SEED={seed} MUSTER_FAULT_ROUNDS={rounds}{database}");
    let settings = [
        ("NODE_CHECKIN_MAXIMUM", "6"),
        ("NODE_CHECKIN_INTERVAL", "1"),
        ("CLUSTER_OP_LEASE", "3"),
        ("NETWORK_NODE_LEASE", "4"),
        ("FENCING_LEASE", "5"),
    ];
    let began = Instant::now();
    let Some(mut cluster) = FaultCluster::start(HOSTS, image, is_galera, &settings) else { return };
    let mut guests = Guests::create(&cluster);
    println!("three hosts with guests after {:.1?}", began.elapsed());
    let mut random = Rng::with_seed(seed);
    let mut referee = Referee::start(&cluster, guests.floating);
    let is_long_run = rounds >= LONG_RUN;
    let mut deck = Deck::new(is_galera, is_long_run, std::env::var("MUSTER_FAULT_KIND").ok().as_deref());
    for round in 0..rounds {
        let (fault, host) = (deck.deal(&mut random), random.usize(..HOSTS));
        let short = Duration::from_millis(random.u64(2_000..if is_long_run { 9_000 } else { 5_000 }));
        let (host, pause) = match fault.long_pause() {
            Some(pause) => (guests.host_of_mobile(&cluster), pause),
            None => (host, short),
        };
        let load = Load::start(&cluster.client, &guests, round, random.u64(..));
        wait(Duration::from_millis(random.u64(..1_000)));
        let began = Instant::now();
        let mut violations = inject(&mut cluster, &guests, fault, host, pause);
        let repaired = Instant::now();
        let expected = load.finish();
        let answered = repaired.elapsed();
        cluster.wait_until_healthy();
        let healed = repaired.elapsed();
        let is_power_failure = matches!(fault, Fault::PowerFailure | Fault::PowerFailureLong);
        violations.extend(check(&cluster, &mut guests, &mut referee, &expected, is_power_failure));
        println!(
            "round {round}: {fault:?} of m{} for {:.1?}: {} networks, {} instances, {} uploads, {} commands, \
             callers answered after {answered:.1?}, healed after {healed:.1?}, checked after {:.1?}",
            host + 1,
            repaired - began,
            expected.networks.len(),
            expected.instances.len(),
            expected.uploads.len(),
            expected.commands.len(),
            repaired.elapsed(),
        );
        for call in &expected.slow_calls {
            println!("    {call}");
        }
        assert!(violations.is_empty(), "{}\n{}", violations.join("\n"), cluster.logs());
        cluster.database.wait_until_current();
    }
    let answered = referee.answered();
    println!("{} observations of all hosts, {answered} answers for addresses", referee.finish());
    assert!(answered > 0 && guests.has_gateway, "no host answered for an address");
    assert!(guests.has_neighbours, "no guest answered another one");
    guests.delete(&cluster);
    cluster.wait_until_healthy();
    for host in &mut cluster.hosts {
        host.stop_daemon();
    }
}

/// Compares what callers were told with what is true, deletes the objects of the round, and looks for remains.
fn check(
    cluster: &FaultCluster,
    guests: &mut Guests,
    referee: &mut Referee,
    expected: &Expected,
    is_power_failure: bool,
) -> Vec<String> {
    let mut violations = expected.server_errors.clone();
    for host in 0..HOSTS {
        violations.extend(networks::check(&cluster.client, host, &expected.networks));
        violations.extend(instances::check(&cluster.client, host, &expected.instances, is_power_failure));
    }
    violations.extend(uploads::check(&cluster.client, HOSTS, &expected.uploads));
    violations.extend(guests.check_power(cluster));
    violations.extend(guests.check_commands(cluster, &expected.commands));
    violations.extend(guests.restart(cluster));
    violations.extend(instances::delete(&cluster.client).err());
    cluster.wait_until_healthy();
    violations.extend(networks::delete(&cluster.client).err());
    cluster.wait_until_healthy();
    violations.extend(orphans::check(cluster, guests));
    violations.extend(referee.violations());
    violations
}
