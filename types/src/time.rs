//! Unix time as the API and the database write it: seconds as a float.

use std::time::{SystemTime, UNIX_EPOCH};

/// The current Unix time in seconds.
#[must_use]
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
