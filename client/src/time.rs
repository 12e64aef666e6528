//! Times as people write and read them. The API speaks Unix time.

use muster_types::time::now;

/// The last second of the year 9999: what is later has no customary form.
const LATEST: f64 = 253_402_300_799.0;

/// A Unix time in UTC, as ISO 8601 with milliseconds.
pub(crate) fn iso(time: f64) -> String {
    if !(0.0..=LATEST).contains(&time) {
        return time.to_string();
    }
    let millis = (time * 1000.0).round() as i64;
    let (days, rest) = (millis / 86_400_000, millis % 86_400_000);
    let (year, month, day) = date(days);
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, milli) = (rest / 1000 % 60, rest % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// The date that is some days after the first of January 1970.
fn date(days: i64) -> (i64, i64, i64) {
    // Years begin in March here, so that the leap day is the last of its year; an era is 400 of them.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

/// How long ago something was, in at most two units.
pub(crate) fn ago(now: f64, then: f64) -> String {
    let seconds = (now - then).max(0.0) as u64;
    if seconds == 0 {
        return "just now".into();
    }
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let first = units.iter().position(|(length, _)| seconds >= *length).unwrap_or(units.len() - 1);
    let mut rest = seconds;
    let mut parts = vec![];
    for (length, unit) in units.iter().skip(first).take(2) {
        if rest >= *length {
            parts.push(format!("{} {unit}", rest / length));
        }
        rest %= length;
    }
    format!("{} ago", parts.join(" "))
}

/// A moment from now, such as `2h` or `30d`, or a Unix time.
pub(crate) fn expiry(text: &str) -> Result<f64, String> {
    expiry_after(now(), text)
}

fn expiry_after(now: f64, text: &str) -> Result<f64, String> {
    let refused = || "must be a time from now such as 2h or 30d (s, m, h, d, w), or a Unix time".to_owned();
    let (digits, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    // Without a digit this fails too.
    let number: f64 = digits.parse().map_err(|_| refused())?;
    let unit = match unit {
        "" => return Ok(number),
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "w" => 604_800.0,
        _ => return Err(refused()),
    };
    let time = now + number * unit;
    if time > LATEST { Err("must be before the year 10000".into()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_are_shown_in_utc() {
        for (time, shown) in [
            (0.0, "1970-01-01T00:00:00.000Z"),
            (951_782_399.0, "2000-02-28T23:59:59.000Z"),
            (951_782_400.0, "2000-02-29T00:00:00.000Z"),
            (951_868_800.5, "2000-03-01T00:00:00.500Z"),
            (1_767_225_599.999, "2025-12-31T23:59:59.999Z"),
            (1_767_225_599.999_9, "2026-01-01T00:00:00.000Z"),
            (4_107_542_400.0, "2100-03-01T00:00:00.000Z"),
            (LATEST, "9999-12-31T23:59:59.000Z"),
        ] {
            assert_eq!(iso(time), shown);
        }
    }

    #[test]
    fn a_time_without_a_date_is_shown_as_it_is() {
        assert_eq!(iso(-1.0), "-1");
        assert_eq!(iso(f64::NAN), "NaN");
    }

    #[test]
    fn an_age_has_at_most_two_units() {
        for (seconds, shown) in [
            (-5.0, "just now"),
            (0.9, "just now"),
            (59.9, "59 s ago"),
            (60.0, "1 min ago"),
            (192.0, "3 min 12 s ago"),
            (3600.0, "1 h ago"),
            (3605.0, "1 h ago"),
            (7500.0, "2 h 5 min ago"),
            (356_400.0, "4 d 3 h ago"),
        ] {
            assert_eq!(ago(10_000_000.0, 10_000_000.0 - seconds), shown);
        }
    }

    #[test]
    fn an_expiry_is_a_length_from_now_or_a_unix_time() {
        for (text, time) in [
            ("90s", 1090.0),
            ("5m", 1300.0),
            ("2h", 8200.0),
            ("30d", 2_593_000.0),
            ("1w", 605_800.0),
            ("1767225600", 1_767_225_600.0),
        ] {
            assert_eq!(expiry_after(1000.0, text), Ok(time), "{text}");
        }
    }

    #[test]
    fn an_expiry_that_is_neither_is_refused() {
        for text in [
            "",
            "soon",
            "h",
            "-2h",
            "2x",
            "2hh",
            "1.5h",
            "2 h",
            "inf",
            "NaN",
            "1e3",
            "2h30m",
            "9999999999999d",
        ] {
            assert!(expiry_after(1000.0, text).is_err(), "{text}");
        }
    }
}
