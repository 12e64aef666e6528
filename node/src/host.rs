//! The host: CPUs, memory, disk space and load, read from the kernel.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

/// The host's memory, in megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostMemory {
    pub(crate) total: u64,
    pub(crate) available: u64,
}

/// Space on a file system, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    pub(crate) total: u64,
    pub(crate) free: u64,
}

/// CPU usage of this process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ProcessUsage {
    pub(crate) cpu_seconds: f64,
    pub(crate) age_seconds: f64,
}

/// Returns the number of CPUs that this process may use.
pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or_else(
        |error| {
            tracing::warn!(%error, "failed to determine the number of CPUs, assuming 1");
            1
        },
        std::num::NonZero::get,
    )
}

/// Returns the load averages over 1, 5 and 15 minutes.
pub(crate) fn load() -> io::Result<[f64; 3]> {
    read("/proc/loadavg", |text| {
        let mut words = text.split_whitespace().map_while(|word| word.parse().ok());
        Some([words.next()?, words.next()?, words.next()?])
    })
}

pub(crate) fn memory() -> io::Result<HostMemory> {
    read("/proc/meminfo", parse_memory)
}

/// Reads a file of the kernel; text that cannot be parsed is [`io::ErrorKind::InvalidData`].
fn read<T>(path: &str, parse: impl FnOnce(&str) -> Option<T>) -> io::Result<T> {
    let text =
        fs::read_to_string(path).map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?;
    parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{path}: unknown format")))
}

fn parse_memory(text: &str) -> Option<HostMemory> {
    let megabytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
    };
    Some(HostMemory { total: megabytes("MemTotal")?, available: megabytes("MemAvailable")? })
}

/// Returns the space on the file system of `path`; zero if it cannot be determined.
pub(crate) fn disk_space(path: &Path) -> DiskSpace {
    nix::sys::statvfs::statvfs(path).map_or_else(
        |error| {
            tracing::warn!(%error, path = %path.display(), "failed to determine disk space");
            DiskSpace::default()
        },
        |fs| DiskSpace {
            total: fs.blocks() * fs.fragment_size(),
            free: fs.blocks_available() * fs.fragment_size(),
        },
    )
}

/// Returns the bytes received and sent on all interfaces except the loopback.
pub(crate) fn network_bytes() -> io::Result<(u64, u64)> {
    read("/proc/net/dev", parse_network)
}

fn parse_network(text: &str) -> Option<(u64, u64)> {
    let interfaces =
        text.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| name.trim() != "lo");
    let mut counters = interfaces.map(|(_, counters)| {
        let mut words = counters.split_whitespace();
        Some((words.next()?.parse().ok()?, words.nth(7)?.parse().ok()?))
    });
    counters.try_fold((0, 0), |(received, sent), counters: Option<(u64, u64)>| {
        let (more_received, more_sent) = counters?;
        Some((received + more_received, sent + more_sent))
    })
}

/// Returns the CPU time and the age of this process.
pub(crate) fn process_usage() -> io::Result<ProcessUsage> {
    let uptime = read("/proc/uptime", |text| text.split_whitespace().next()?.parse().ok())?;
    read("/proc/self/stat", |stat| parse_process(stat, uptime))
}

fn parse_process(stat: &str, uptime: f64) -> Option<ProcessUsage> {
    // USER_HZ is 100 on all platforms that we support.
    const TICKS_PER_SECOND: f64 = 100.0;
    // The process name in parentheses may contain anything, so fields are counted after it.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let seconds = |index: usize| Some(fields.get(index)?.parse::<f64>().ok()? / TICKS_PER_SECOND);
    Some(ProcessUsage {
        cpu_seconds: seconds(11)? + seconds(12)?,
        age_seconds: (uptime - seconds(19)?).max(0.0),
    })
}

/// Returns the host name, fully qualified if the host has a domain; `localhost` if it cannot be determined.
pub(crate) fn hostname() -> String {
    nix::unistd::gethostname()
        .ok()
        .and_then(|name| name.into_string().ok())
        .unwrap_or_else(|| "localhost".into())
}

/// Returns the address by which other hosts most likely reach this one; the loopback address without a route.
pub(crate) fn primary_address() -> Ipv4Addr {
    // Connecting a datagram socket sends nothing; it only looks up a route.
    let routed = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    match routed {
        Ok(SocketAddr::V4(address)) => *address.ip(),
        _ => Ipv4Addr::LOCALHOST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_memory_in_megabytes() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\n";
        assert_eq!(parse_memory(text), Some(HostMemory { total: 23437, available: 11718 }));
        assert_eq!(parse_memory("nonsense"), None);
    }

    #[test]
    fn network_counters_exclude_the_loopback() {
        let text =
            "Inter-| Receive\n face |bytes\n    lo: 7 0 0 0 0 0 0 0 7 0\n  eth0: 100 1 0 0 0 0 0 0 200 2 0\n";
        assert_eq!(parse_network(text), Some((100, 200)));
        assert_eq!(parse_network("eth0: 1 2\n"), None);
    }

    #[test]
    fn parses_process_name_with_parentheses() {
        let stat = "7 (a) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 4 0 1000 0 0";
        assert_eq!(parse_process(stat, 70.0), Some(ProcessUsage { cpu_seconds: 2.0, age_seconds: 60.0 }));
        assert_eq!(parse_process("nonsense", 70.0), None);
    }

    #[test]
    fn reads_the_facts_of_this_host() {
        assert!(cpus() > 0 && memory().unwrap().total > 0 && disk_space(Path::new("/")).total > 0);
        assert!(load().is_ok() && network_bytes().is_ok() && process_usage().unwrap().age_seconds >= 0.0);
        assert!(!hostname().is_empty() && !primary_address().is_unspecified());
    }
}
