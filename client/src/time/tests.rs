use super::*;

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
