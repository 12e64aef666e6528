//! Returns freed memory to the operating system.
//!
//! The allocator keeps the memory that threads have freed, for example after a flood of requests: one long-lived block at
//! the end of an arena is enough to keep all of it. So freed pages are released explicitly while the daemon uses more
//! memory than at first.

use std::time::Duration;

/// The interval between checks. Releasing pages takes some milliseconds.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The growth of the memory above which freed pages are released, in bytes. Less is reused soon.
const MIN_GROWTH: u64 = 8 << 20;

/// The maximum number of checks between two releases that have freed little.
const MAX_CHECKS: u32 = 32;

/// Decides when to release freed pages: at once after new growth, and ever less often while the memory is in use.
#[derive(Debug)]
struct ReleaseSchedule {
    /// The smallest memory so far, in bytes.
    smallest: u64,
    /// The memory after the last release, in bytes.
    last: u64,
    /// The number of checks from one release to the next.
    interval: u32,
    /// The number of checks since the last release.
    checks: u32,
}

impl ReleaseSchedule {
    fn new() -> Self {
        Self { smallest: u64::MAX, last: 0, interval: 1, checks: 0 }
    }

    /// Returns whether to release freed pages while the memory has this size.
    fn is_due(&mut self, bytes: u64) -> bool {
        self.smallest = self.smallest.min(bytes);
        if bytes - self.smallest < MIN_GROWTH || bytes >= self.last + MIN_GROWTH {
            self.interval = 1;
        }
        self.checks += 1;
        bytes - self.smallest >= MIN_GROWTH && self.checks >= self.interval
    }

    /// Notes the memory before and after a release.
    fn released(&mut self, before: u64, after: u64) {
        let is_useful = before.saturating_sub(after) >= MIN_GROWTH / 8;
        self.interval = if is_useful { 1 } else { (2 * self.interval).min(MAX_CHECKS) };
        self.last = after;
        self.checks = 0;
    }
}

/// Releases freed memory until the daemon exits.
pub(crate) async fn release_freed() {
    let mut schedule = ReleaseSchedule::new();
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let Some(before) = anonymous_bytes() else { return };
        if !schedule.is_due(before) {
            continue;
        }
        if tokio::task::spawn_blocking(release).await.is_err() {
            return;
        }
        let Some(after) = anonymous_bytes() else { return };
        schedule.released(before, after);
        tracing::debug!(before, after, "released freed memory");
    }
}

/// Returns the size of the resident memory that is not a part of files, in bytes. `None` if it is not known.
fn anonymous_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the standard library has no function for it")]
fn release() {
    // SAFETY: The function has no preconditions, and may be called from any thread.
    unsafe { nix::libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn release() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_memory_in_use_ever_less_often() {
        let mut schedule = ReleaseSchedule::new();
        let mut releases = vec![];
        for (check, megabytes) in [40; 3].into_iter().chain([60; 200]).chain([90; 2]).enumerate() {
            let bytes = megabytes << 20;
            if schedule.is_due(bytes) {
                schedule.released(bytes, bytes);
                releases.push(check);
            }
        }
        assert_eq!(releases, [3, 5, 9, 17, 33, 65, 97, 129, 161, 193, 203], "at once after new growth");
    }

    #[test]
    fn releases_pages_between_blocks_that_are_in_use() {
        let mut blocks: Vec<Vec<u8>> = (0..64 << 10).map(|_| vec![1; 1000]).collect();
        let full = anonymous_bytes().unwrap();
        // Every 64th block stays, so that the end of the heap never becomes free.
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 64 == 0
        });
        release();
        let after = anonymous_bytes().unwrap();
        assert!(after + (32 << 20) < full, "{full} became {after}");
        assert_eq!(blocks.len(), 1 << 10);
    }
}
