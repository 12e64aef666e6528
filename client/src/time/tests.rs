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
fn formats_times_without_a_date_as_numbers() {
    assert_eq!(format_utc(-1.0), "-1");
    assert_eq!(format_utc(f64::NAN), "NaN");
}

#[test]
fn formats_ages_with_at_most_two_units() {
    for (seconds, expected) in [
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
        assert_eq!(format_age(10_000_000.0, 10_000_000.0 - seconds), expected);
    }
}

#[test]
fn parses_durations_and_unix_times() {
    for (text, time) in [
        ("90s", 1090.0),
        ("5m", 1300.0),
        ("2h", 8200.0),
        ("2h30m", 10_000.0),
        ("30d", 2_593_000.0),
        ("1w", 605_800.0),
        ("1767225600", 1_767_225_600.0),
    ] {
        assert_eq!(parse_expiry_after(1000.0, text), Ok(time), "{text}");
    }
}

#[test]
fn rejects_other_expiries() {
    for text in ["", "soon", "h", "-2h", "2x", "2hh", "inf", "NaN", "1e3", "9999999999999d", "10000000d"] {
        assert!(parse_expiry_after(1000.0, text).is_err(), "{text}");
    }
}
