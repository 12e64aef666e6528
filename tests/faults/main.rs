//! Faults of hosts, links and the database under load, with a referee that observes all hosts.
//!
//! `MUSTER_FAULT_ROUNDS` sets the number of rounds and `MUSTER_FAULT_SEED` repeats a run; `make test-faults` runs many.
//! `MUSTER_FAULT_DATABASE=galera` runs them with three database servers. `MUSTER_FAULT_KIND=CutDatabaseLong` injects only
//! that kind of fault.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod client;
mod cluster;
mod database;
mod fault;
mod full_disk;
mod guests;
mod host;
mod load;
mod mesh;
mod orphans;
mod referee;
mod rounds;
mod routes;

use std::path::Path;

/// The small guest.
const IMAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/image/tiny.qcow2");

/// The rounds of a short run, each with another kind of fault.
const SHORT_RUN: usize = 5;

#[test]
fn faults_neither_run_a_vm_twice_nor_lose_a_write() {
    const TEST: &str = "faults_neither_run_a_vm_twice_nor_lose_a_write";
    const PROGRAMS: [&str; 9] =
        ["ip", "bridge", "nft", "dnsmasq", "busybox", "unshare", "setpriv", "faketime", "qemu-system-x86_64"];
    let image = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/image/tiny.qcow2");
    if !image.exists() {
        return muster_testing::skipped("target/image/tiny.qcow2 (make image)");
    }
    if !muster_testing::enter_namespaces(TEST, &PROGRAMS) {
        return;
    }
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let rounds = number("MUSTER_FAULT_ROUNDS").map_or(SHORT_RUN, |rounds| usize::try_from(rounds).unwrap());
    let seed = number("MUSTER_FAULT_SEED").unwrap_or_else(|| fastrand::u64(..));
    let is_galera = std::env::var("MUSTER_FAULT_DATABASE").is_ok_and(|name| name == "galera");
    rounds::run(rounds, seed, is_galera, image.to_str().unwrap());
}
