//! Formats and parses points in time. The API uses Unix time.

pub(crate) use muster_types::time::format_utc;
use muster_types::time::{MAX_TIME, now};

/// Formats how long ago `then` was, in at most two units.
pub(crate) fn format_age(now: f64, then: f64) -> String {
    let seconds = (now - then).max(0.0) as u64;
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let Some(first) = units.iter().position(|(length, _)| seconds >= *length) else {
        return "just now".into();
    };
    let mut remaining = seconds;
    let mut parts = vec![];
    for (length, unit) in units.iter().skip(first).take(2) {
        if remaining >= *length {
            parts.push(format!("{} {unit}", remaining / length));
        }
        remaining %= length;
    }
    format!("{} ago", parts.join(" "))
}

/// Parses a duration from now, such as `2h` or `30d`, or a Unix time.
pub(crate) fn parse_expiry(text: &str) -> Result<f64, String> {
    parse_expiry_after(now(), text)
}

fn parse_expiry_after(now: f64, text: &str) -> Result<f64, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().map_err(|_| "must be a Unix time".to_owned());
    }
    let duration = humantime::parse_duration(text).map_err(|_| {
        "must be a duration from now such as 2h or 30d (s, m, h, d, w), or a Unix time".to_owned()
    })?;
    let time = now + duration.as_secs_f64();
    if time > MAX_TIME { Err("must be before the year 10000".into()) } else { Ok(time) }
}

#[cfg(test)]
mod tests;
