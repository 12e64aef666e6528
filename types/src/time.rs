//! Unix time in the representation of the API and the database: seconds as a float.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the current Unix time in seconds.
#[must_use]
pub fn now() -> f64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.expect("Linux refuses to set the clock before 1970").as_secs_f64()
}
