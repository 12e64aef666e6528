//! Observes all hosts from outside, and notes every violation of what Muster promises.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_testing::{ArpAnswer, ArpObserver};

use crate::cluster::{FaultCluster, OBSERVER_ADDRESS, VIRTUAL_ADDRESS};

/// How often the processes of all hosts are listed.
const INTERVAL: Duration = Duration::from_millis(50);

/// The time in which an address cannot move to another host and back, because leases are longer.
const MIN_MOVE_TIME: Duration = Duration::from_secs(1);

/// A thread that watches the VMs of all hosts, and one that asks for addresses outside.
#[derive(Debug)]
pub(crate) struct Referee {
    stop: Arc<AtomicBool>,
    violations: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<u64>>,
    observer: ArpObserver,
    /// The latest answers for each address.
    answers: BTreeMap<Ipv4Addr, Vec<ArpAnswer>>,
    /// The number of answers.
    answered: usize,
}

impl Referee {
    pub(crate) fn start(cluster: &FaultCluster, floating: Ipv4Addr) -> Self {
        let (stop, violations) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<String>>>::default());
        let thread = std::thread::spawn({
            let (stop, violations) = (Arc::clone(&stop), Arc::clone(&violations));
            move || watch(&stop, &violations)
        });
        let addresses = vec![VIRTUAL_ADDRESS.parse().unwrap(), floating];
        let observer = ArpObserver::start(&cluster.observer, OBSERVER_ADDRESS.parse().unwrap(), addresses);
        let answers = BTreeMap::new();
        Self { stop, violations, thread: Some(thread), observer, answers, answered: 0 }
    }

    /// Returns the violations so far.
    pub(crate) fn violations(&mut self) -> Vec<String> {
        let mut violations = self.violations.lock().unwrap().clone();
        for answer in self.observer.take() {
            self.answered += 1;
            let recent = self.answers.entry(answer.address).or_default();
            violations.extend(duplicate_owner(recent, answer));
        }
        violations
    }

    /// The number of answers to requests for addresses.
    pub(crate) fn answered(&self) -> usize {
        self.answered
    }

    /// Stops watching, and returns how often the hosts were observed.
    pub(crate) fn finish(&mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0, |thread| thread.join().unwrap())
    }
}

/// Adds an answer to the recent ones for its address. Two hosts have the address if one of them answers again after the
/// other.
fn duplicate_owner(recent: &mut Vec<ArpAnswer>, answer: ArpAnswer) -> Option<String> {
    recent.retain(|other| answer.at - other.at < MIN_MOVE_TIME);
    let other = recent.iter().rposition(|other| other.mac != answer.mac);
    let is_duplicate =
        other.is_some_and(|other| recent[..other].iter().any(|earlier| earlier.mac == answer.mac));
    recent.push(answer);
    is_duplicate.then(|| format!("{} is answered by two hosts: {recent:x?}", answer.address))
}

impl Drop for Referee {
    fn drop(&mut self) {
        self.finish();
    }
}

fn watch(stop: &AtomicBool, violations: &Mutex<Vec<String>>) -> u64 {
    let (started, mut observations) = (Instant::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        for (vm, processes) in running_vms() {
            if processes.len() > 1 {
                let seconds = started.elapsed().as_secs_f64();
                let violation = format!("after {seconds:.1} s: VM {vm} runs twice: processes {processes:?}");
                let mut violations = violations.lock().unwrap();
                if !violations.iter().any(|known| known.contains(&vm)) {
                    violations.push(violation);
                }
            }
        }
        observations += 1;
        muster_testing::wait(INTERVAL);
    }
    observations
}

/// Returns the QEMU processes that can execute guest code, by instance.
pub(crate) fn running_vms() -> BTreeMap<String, Vec<u32>> {
    let mut found: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(vm) = vm_of(pid) {
            found.entry(vm).or_default().push(pid);
        }
    }
    found
}

/// Returns the instance of a QEMU process, unless it is stopped or has exited.
fn vm_of(pid: u32) -> Option<String> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = line.split('\0');
    if !words.next()?.contains("qemu-system") {
        return None;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit_once(')')?.1.trim_start().chars().next()?;
    if matches!(state, 'T' | 'Z' | 'X') {
        return None;
    }
    words.by_ref().find(|word| *word == "-uuid")?;
    words.next().map(str::to_owned)
}

#[test]
fn notices_when_two_hosts_answer_for_an_address() {
    let (began, mut recent) = (Instant::now(), Vec::new());
    let mut answer = |milliseconds, mac| {
        let at = began + Duration::from_millis(milliseconds);
        duplicate_owner(&mut recent, ArpAnswer { at, address: Ipv4Addr::LOCALHOST, mac: [mac; 6] }).is_some()
    };
    assert!(!answer(0, 1) && !answer(10, 1));
    // It moves, and later returns.
    assert!(!answer(3_000, 2) && !answer(6_000, 1));
    assert!(!answer(6_010, 2));
    assert!(answer(6_020, 1));
}
