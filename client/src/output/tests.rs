use serde_json::json;

use super::*;

fn row(cells: [&str; 3]) -> [String; 3] {
    cells.map(str::to_owned)
}

#[test]
fn table_has_a_header_and_no_borders() {
    let table = Table::new(&["NAME", "STATE"], &["KEYS"])
        .rows([row(["ci", "created", "deploy, test"]), row(["production", "created", "-"])]);
    let expected = "\
NAME        STATE    KEYS
ci          created  deploy, test
production  created  -
";
    assert_eq!(table.render(None), expected);
    assert_eq!(table.render(Some(80)), expected);
}

#[test]
fn narrow_terminal_wraps_only_wrappable_columns() {
    let table = Table::new(&["UUID"], &["MESSAGE"])
        .rows([["0123-4567-89".to_owned(), "one two three four".to_owned()]]);
    let text = table.render(Some(24));
    assert!(text.lines().all(|line| line.chars().count() <= 24), "{text}");
    assert!(text.contains("0123-4567-89  one two"), "{text}");
    assert!(text.lines().count() > 2, "{text}");
}

#[test]
fn very_narrow_terminal_gets_unwrapped_lines() {
    let table =
        Table::new(&["UUID"], &["MESSAGE"]).rows([["0123-4567-89".to_owned(), "one two three".to_owned()]]);
    assert_eq!(table.render(Some(21)), table.render(None));
    assert_ne!(table.render(Some(22)), table.render(None));
}

#[test]
fn key_values_have_no_header_and_empty_table_only_a_header() {
    let pairs = [("name", "ci"), ("version", "7")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(Table::key_values(pairs).render(None), "name     ci\nversion  7\n");
    assert_eq!(Table::key_values([]).render(None), "");
    assert_eq!(Table::new(&["NAME"], &[]).render(None), "NAME\n");
}

#[test]
fn foreign_text_cannot_control_the_terminal() {
    assert_eq!(escape_control("red \u{1b}[31m\nnext\u{9b}é"), r"red \u{1b}[31m\nnext\u{9b}é");
    let table = Table::new(&["NAME"], &[]).rows([["a\u{1b}]0;b\u{7}".to_owned()]]);
    assert!(!table.render(None).contains('\u{1b}'));
}

#[test]
fn formats_sizes_with_binary_units() {
    let formatted = [0, 1023, 1024, 1536, 1_048_575, 1 << 20, 5 << 30, u64::MAX].map(format_bytes);
    let expected = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "5.0 GiB", "16.0 EiB"];
    assert_eq!(formatted, expected);
    assert_eq!((format_size(2048), format_size(-1)), ("2.0 KiB".into(), "-1".into()));
}

#[test]
fn formats_json_in_one_line() {
    assert_eq!(compact(&json!("a b")), "a b");
    assert_eq!(compact(&json!({ "a": [1, null] })), r#"{"a":[1,null]}"#);
    assert_eq!((or_dash(String::new()), or_dash("x".into())), ("-".into(), "x".into()));
}
