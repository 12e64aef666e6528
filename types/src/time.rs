//! Unix time in the representation of the API and the database: seconds as a float.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// The last second of the year 9999: RFC 3339 has four-digit years.
pub const MAX_TIME: f64 = 253_402_300_799.0;

/// Returns the current Unix time in seconds.
#[must_use]
pub fn now() -> f64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.expect("Linux refuses to set the clock before 1970").as_secs_f64()
}

/// A time of the clock that counts from the boot of the host. Unlike [`std::time::Instant`] it also advances while the host is
/// suspended, and all processes of the host share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    #[must_use]
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every Linux has this clock");
        Self(time.into())
    }

    /// Returns the time since the boot of the host.
    #[must_use]
    pub fn since_boot(self) -> Duration {
        self.0
    }

    /// Returns an earlier time, at most the boot of the host.
    #[must_use]
    pub fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

/// Formats a Unix time as RFC 3339 in UTC with milliseconds.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is within the range of years that RFC 3339 supports"
)]
pub fn format_utc(time: f64) -> String {
    if !(0.0..=MAX_TIME).contains(&time) {
        return time.to_string();
    }
    let time = Duration::from_millis((time * 1000.0).round() as u64);
    humantime::format_rfc3339_millis(UNIX_EPOCH + time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_unix_times_in_utc() {
        for (time, expected) in [
            (0.0, "1970-01-01T00:00:00.000Z"),
            (951_782_399.0, "2000-02-28T23:59:59.000Z"),
            (951_782_400.0, "2000-02-29T00:00:00.000Z"),
            (951_868_800.5, "2000-03-01T00:00:00.500Z"),
            (1_767_225_599.999, "2025-12-31T23:59:59.999Z"),
            (1_767_225_599.999_9, "2026-01-01T00:00:00.000Z"),
            (4_107_542_400.0, "2100-03-01T00:00:00.000Z"),
            (MAX_TIME, "9999-12-31T23:59:59.000Z"),
        ] {
            assert_eq!(format_utc(time), expected);
        }
    }

    #[test]
    fn boot_time_is_that_of_the_kernel() {
        let text = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = text.split_whitespace().next().unwrap().parse().unwrap();
        let now = BootTime::now();
        assert!((now.since_boot().as_secs_f64() - uptime).abs() < 60.0);
        assert_eq!(
            now.since_boot() - now.before(Duration::from_secs(1)).since_boot(),
            Duration::from_secs(1)
        );
    }

    #[test]
    fn formats_times_without_a_date_as_numbers() {
        assert_eq!(format_utc(-1.0), "-1");
        assert_eq!(format_utc(f64::NAN), "NaN");
    }
}
