//! What this machine is and how it is doing, read from the kernel.

use std::fs;
use std::path::Path;
use std::time::Duration;

/// Memory of the machine, in megabytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) available: u64,
}

/// Space on a file system, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) total: u64,
    pub(crate) free: u64,
}

/// What the processes of this program have used.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Process {
    pub(crate) cpu_seconds: f64,
    pub(crate) age_seconds: f64,
}

pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Load averages over 1, 5 and 15 minutes.
pub(crate) fn load() -> [f64; 3] {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut words = text.split_whitespace().map(|word| word.parse().unwrap_or(0.0));
    std::array::from_fn(|_| words.next().unwrap_or(0.0))
}

pub(crate) fn memory() -> Memory {
    parse_memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse_memory(text: &str) -> Memory {
    let megabytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
    };
    Memory { total: megabytes("MemTotal").unwrap_or(0), available: megabytes("MemAvailable").unwrap_or(0) }
}

pub(crate) fn disk(path: &Path) -> Disk {
    nix::sys::statvfs::statvfs(path).map_or_else(
        |_| Disk::default(),
        |fs| Disk {
            total: fs.blocks() * fs.fragment_size(),
            free: fs.blocks_available() * fs.fragment_size(),
        },
    )
}

/// Bytes received and sent on all interfaces but the loopback.
pub(crate) fn network() -> (u64, u64) {
    parse_network(&fs::read_to_string("/proc/net/dev").unwrap_or_default())
}

fn parse_network(text: &str) -> (u64, u64) {
    text.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| name.trim() != "lo").fold(
        (0, 0),
        |(received, sent), (_, numbers)| {
            let numbers: Vec<u64> = numbers.split_whitespace().map(|n| n.parse().unwrap_or(0)).collect();
            (received + numbers.first().unwrap_or(&0), sent + numbers.get(8).unwrap_or(&0))
        },
    )
}

/// Processor time of this process, and how long it has lived.
pub(crate) fn process() -> Process {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime: f64 = uptime.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
    parse_process(&stat, uptime)
}

fn parse_process(stat: &str, uptime: f64) -> Process {
    // The kernel counts in hundredths of a second for user space, whatever its own tick is.
    const TICKS: f64 = 100.0;
    // The name in brackets may hold anything, so fields count from behind it.
    let fields: Vec<f64> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().map(|word| word.parse().unwrap_or(0.0)).collect())
        .unwrap_or_default();
    let field = |at: usize| fields.get(at).copied().unwrap_or(0.0) / TICKS;
    Process { cpu_seconds: field(11) + field(12), age_seconds: (uptime - field(19)).max(0.0) }
}

/// The machine's name, whole if it has a domain.
pub(crate) fn name() -> String {
    nix::unistd::gethostname()
        .ok()
        .and_then(|name| name.into_string().ok())
        .unwrap_or_else(|| "localhost".into())
}

/// The address that other machines most likely reach this one by.
pub(crate) fn address() -> String {
    // Connecting a datagram socket sends nothing; it only asks the kernel for a route.
    let routed = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    routed.map_or_else(|_| "127.0.0.1".into(), |address| address.ip().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_megabytes() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\n";
        assert_eq!(parse_memory(text), Memory { total: 23437, available: 11718 });
        assert_eq!(parse_memory("nonsense"), Memory::default());
    }

    #[test]
    fn network_counts_leave_the_loopback_out() {
        let text =
            "Inter-| Receive\n face |bytes\n    lo: 7 0 0 0 0 0 0 0 7 0\n  eth0: 100 1 0 0 0 0 0 0 200 2 0\n";
        assert_eq!(parse_network(text), (100, 200));
    }

    #[test]
    fn a_process_whose_name_holds_brackets_is_still_counted() {
        let stat = "7 (a) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 4 0 1000 0 0";
        assert_eq!(parse_process(stat, 70.0), Process { cpu_seconds: 2.0, age_seconds: 60.0 });
    }

    #[test]
    fn this_machine_has_a_processor_memory_and_a_disk() {
        assert!(cpus() > 0 && memory().total > 0 && disk(Path::new("/")).total > 0);
        assert!(!name().is_empty() && !address().is_empty());
    }
}
