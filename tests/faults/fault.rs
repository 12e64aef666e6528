//! What can fail.

use std::time::{Duration, Instant};

use fastrand::Rng;
use muster_testing::wait;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cluster::{Direction, FaultCluster, Link, SYSTEM_KEY};
use crate::guests::Guests;
use crate::referee::running_vms;

/// The clock skew in seconds above which a daemon acquires no leases and creates no tokens.
const MAX_CLOCK_SKEW: i32 = 5;

/// What fails in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    KillDaemon,
    FreezeDaemon,
    FreezeHost,
    /// As [`FreezeHost`](Self::FreezeHost), for two minutes.
    FreezeHostLong,
    FreezeVm,
    PowerFailure,
    /// As [`PowerFailure`](Self::PowerFailure), until guests have restarted elsewhere.
    PowerFailureLong,
    CutDatabase(Direction),
    /// As [`CutDatabase`](Self::CutDatabase) in both directions, until guests have restarted elsewhere.
    CutDatabaseLong,
    CutMesh(Direction),
    /// The clock of a host is wrong by some seconds.
    SkewClock(i32),
    FillDisk,
    /// A database server is killed; with Galera one of three.
    KillDatabase,
    FreezeDatabase,
    FillDatabase,
}

/// One of each kind that lasts for some seconds.
const FAULTS: [Fault; 19] = [
    Fault::KillDaemon,
    Fault::FreezeDaemon,
    Fault::FreezeHost,
    Fault::FreezeVm,
    Fault::PowerFailure,
    Fault::CutDatabase(Direction::Both),
    Fault::CutDatabase(Direction::ToHost),
    Fault::CutDatabase(Direction::FromHost),
    Fault::CutMesh(Direction::Both),
    Fault::CutMesh(Direction::ToHost),
    Fault::CutMesh(Direction::FromHost),
    Fault::SkewClock(2),
    Fault::SkewClock(-2),
    Fault::SkewClock(300),
    Fault::SkewClock(-300),
    Fault::FillDisk,
    Fault::KillDatabase,
    Fault::FreezeDatabase,
    Fault::FillDatabase,
];

/// Those that last until a guest has restarted elsewhere.
const LONG_FAULTS: [Fault; 3] = [Fault::FreezeHostLong, Fault::PowerFailureLong, Fault::CutDatabaseLong];

impl Fault {
    /// Returns how long it lasts, if it is a long one.
    pub(crate) fn long_pause(self) -> Option<Duration> {
        let seconds = if self == Self::FreezeHostLong { 120 } else { 20 };
        LONG_FAULTS.contains(&self).then(|| Duration::from_secs(seconds))
    }
}

/// Deals every kind in random order before it deals one again.
#[derive(Debug)]
pub(crate) struct Deck {
    kinds: Vec<Fault>,
    /// Whether to deal the [`LONG_FAULTS`], in every third pass.
    is_long_run: bool,
    passes: usize,
    remaining: Vec<Fault>,
}

impl Deck {
    /// With `only`, all faults are of this kind, which may be one of the [`LONG_FAULTS`].
    pub(crate) fn new(is_galera: bool, is_long_run: bool, only: Option<&str>) -> Self {
        if let Some(only) = only {
            let kinds = FAULTS.into_iter().chain(LONG_FAULTS);
            let kinds: Vec<Fault> = kinds.filter(|fault| format!("{fault:?}").starts_with(only)).collect();
            assert!(!kinds.is_empty(), "MUSTER_FAULT_KIND: {only} is not a kind of fault");
            return Self { kinds, is_long_run: false, passes: 0, remaining: vec![] };
        }
        // The servers of Galera do not have small disks.
        let kinds = FAULTS.into_iter().filter(|fault| !is_galera || *fault != Fault::FillDatabase).collect();
        Self { kinds, is_long_run, passes: 0, remaining: vec![] }
    }

    pub(crate) fn deal(&mut self, random: &mut Rng) -> Fault {
        if self.remaining.is_empty() {
            self.remaining = self.kinds.clone();
            if self.is_long_run && self.passes.is_multiple_of(3) {
                self.remaining.extend(LONG_FAULTS);
            }
            random.shuffle(&mut self.remaining);
            self.passes += 1;
        }
        self.remaining.pop().unwrap()
    }
}

#[test]
fn long_run_has_every_kind() {
    let (mut random, mut deck) = (Rng::with_seed(1), Deck::new(false, true, None));
    let dealt: Vec<Fault> = (0..200).map(|_| deck.deal(&mut random)).collect();
    let count = |kind: Fault| dealt.iter().filter(|fault| **fault == kind).count();
    assert!(FAULTS.into_iter().all(|kind| count(kind) >= 9), "{dealt:?}");
    assert!(LONG_FAULTS.into_iter().all(|kind| count(kind) >= 3), "{dealt:?}");
}

/// Causes a fault of a host or of the database, keeps it for a while, and repairs it. Returns violations meanwhile.
pub(crate) fn inject(
    cluster: &mut FaultCluster,
    guests: &Guests,
    fault: Fault,
    host: usize,
    pause: Duration,
) -> Vec<String> {
    let server = host % cluster.database.count();
    let (began, mut violations) = (Instant::now(), Vec::new());
    match fault {
        Fault::KillDaemon => {
            cluster.hosts[host].kill_daemon();
            wait(pause);
            cluster.hosts[host].start_daemon();
        }
        Fault::FreezeDaemon => {
            cluster.hosts[host].signal_daemon(Signal::SIGSTOP);
            wait(pause);
            cluster.hosts[host].signal_daemon(Signal::SIGCONT);
        }
        Fault::FreezeHost | Fault::FreezeHostLong => {
            cluster.hosts[host].signal_all(Signal::SIGSTOP);
            wait(pause);
            wait_for_restart(cluster, guests, fault, host, began);
            cluster.hosts[host].signal_all(Signal::SIGCONT);
        }
        Fault::FreezeVm => {
            let processes = running_vms().remove(guests.on(host)).unwrap_or_default();
            let signal = |signal| {
                for pid in &processes {
                    let _ = kill(Pid::from_raw(i32::try_from(*pid).unwrap()), signal);
                }
            };
            signal(Signal::SIGSTOP);
            wait(pause);
            signal(Signal::SIGCONT);
        }
        Fault::PowerFailure | Fault::PowerFailureLong => {
            cluster.hosts[host].power_off();
            wait(pause);
            wait_for_restart(cluster, guests, fault, host, began);
            cluster.power_on(host);
        }
        Fault::CutDatabase(direction) => {
            cluster.cut(host, Link::Database, direction);
            wait(pause);
            cluster.restore_links();
        }
        Fault::CutDatabaseLong => {
            cluster.cut(host, Link::Database, Direction::Both);
            wait(pause);
            wait_for_restart(cluster, guests, fault, host, began);
            cluster.restore_links();
        }
        Fault::CutMesh(direction) => {
            cluster.cut(host, Link::Mesh, direction);
            wait(pause);
            cluster.restore_links();
        }
        Fault::SkewClock(seconds) => {
            cluster.hosts[host].kill_daemon();
            cluster.hosts[host].start_daemon_with_clock_skew(seconds);
            wait(pause);
            violations.extend(skew_violation(cluster, host, seconds));
            cluster.hosts[host].kill_daemon();
            cluster.hosts[host].start_daemon();
        }
        Fault::FillDisk => {
            let full = cluster.hosts[host].fill_disk();
            wait(pause);
            drop(full);
        }
        Fault::KillDatabase => {
            cluster.database.kill(server);
            wait(pause);
            cluster.database.restart(server);
        }
        Fault::FreezeDatabase => {
            cluster.database.signal(server, Signal::SIGSTOP);
            wait(pause);
            cluster.database.signal(server, Signal::SIGCONT);
        }
        Fault::FillDatabase => {
            let full = cluster.database.fill();
            wait(pause);
            drop(full);
            cluster.database.wait_until_usable();
        }
    }
    violations
}

/// Waits for the restart of a guest elsewhere, if the fault is a long one, and prints how long it took.
fn wait_for_restart(cluster: &FaultCluster, guests: &Guests, fault: Fault, host: usize, began: Instant) {
    if fault.long_pause().is_some() {
        guests.wait_for_restart(cluster, host);
        println!("    a guest runs elsewhere at most {:.1?} after the fault", began.elapsed());
    }
}

/// A daemon creates tokens exactly if its clock is right enough.
fn skew_violation(cluster: &FaultCluster, host: usize, seconds: i32) -> Option<String> {
    let response = cluster.client.try_log_in(host, SYSTEM_KEY);
    let expected = if seconds.abs() > MAX_CLOCK_SKEW { 503 } else { 200 };
    let is_expected = matches!(&response, Ok((status, _)) if *status == expected);
    (!is_expected).then(|| format!("a login with a clock skew of {seconds} s: {response:?}"))
}
