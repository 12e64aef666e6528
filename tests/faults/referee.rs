//! Observes all hosts from outside, and notes every violation of what Muster promises.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the processes of all hosts are listed.
const INTERVAL: Duration = Duration::from_millis(50);

/// A thread that watches the VMs of all hosts.
#[derive(Debug)]
pub(crate) struct Referee {
    stop: Arc<AtomicBool>,
    violations: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<u64>>,
}

impl Referee {
    pub(crate) fn start() -> Self {
        let (stop, violations) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<String>>>::default());
        let thread = std::thread::spawn({
            let (stop, violations) = (Arc::clone(&stop), Arc::clone(&violations));
            move || watch(&stop, &violations)
        });
        Self { stop, violations, thread: Some(thread) }
    }

    /// Returns the violations so far.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.violations.lock().unwrap().clone()
    }

    /// Stops watching, and returns how often the hosts were observed.
    pub(crate) fn finish(&mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0, |thread| thread.join().unwrap())
    }
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
