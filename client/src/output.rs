//! What is printed: tables without lines, for people and for `grep` alike. Data goes to standard output,
//! everything else to standard error. There are no colours.

use std::io::{self, Write as _};

use anyhow::anyhow;
use comfy_table::{ColumnConstraint, ContentArrangement, presets};
use serde_json::Value;

use crate::api::io_text;

/// Spaces between columns.
const GAP: u16 = 2;
/// The narrowest column that is still read as words.
const NARROWEST: u16 = 8;

/// Rows under a header, or facts without one.
#[derive(Debug)]
pub(crate) struct Table {
    header: Vec<String>,
    /// How many columns, counted from the left, are never wrapped.
    whole: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table whose columns of the second list may be wrapped when the terminal is narrow.
    pub(crate) fn new(whole: &[&str], wrapping: &[&str]) -> Self {
        let header = whole.iter().chain(wrapping).map(|name| (*name).to_owned()).collect();
        Self { header, whole: whole.len(), rows: vec![] }
    }

    /// A table of names and values.
    pub(crate) fn facts(facts: impl IntoIterator<Item = (String, String)>) -> Self {
        let rows = facts.into_iter().map(|(name, value)| vec![name, value]).collect();
        Self { header: vec![], whole: 1, rows }
    }

    /// Adds rows.
    pub(crate) fn rows<const N: usize>(mut self, rows: impl IntoIterator<Item = [String; N]>) -> Self {
        self.rows.extend(rows.into_iter().map(Vec::from));
        self
    }

    /// The lines of the table, no wider than `width` where that is possible.
    pub(crate) fn render(&self, width: Option<u16>) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        if !self.header.is_empty() {
            table.set_header(&self.header);
        }
        table.add_rows(self.rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect::<Vec<_>>()));
        let widths = table.column_max_content_widths();
        // A terminal too narrow for columns of words wraps the lines itself: a column of letters helps nobody.
        let width = width.filter(|width| self.narrowest(&widths) <= usize::from(*width));
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        }
        for (at, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, if at + 1 == widths.len() { 0 } else { GAP }));
            if at < self.whole && width.is_some() {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        let mut text = table.trim_fmt();
        if !text.is_empty() {
            text.push('\n');
        }
        text
    }

    /// The width below which wrapping is no use.
    fn narrowest(&self, widths: &[u16]) -> usize {
        let columns = widths
            .iter()
            .enumerate()
            .map(|(at, width)| usize::from(if at < self.whole { *width } else { (*width).min(NARROWEST) }));
        columns.sum::<usize>() + widths.len().saturating_sub(1) * usize::from(GAP)
    }
}

/// The width of the terminal, if the output is one.
fn width() -> Option<u16> {
    terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| width.0).filter(|width| *width > 0)
}

/// Prints a table as wide as the terminal allows.
pub(crate) fn print_table(table: &Table) -> anyhow::Result<()> {
    print(&table.render(width()))
}

/// Prints JSON for people.
pub(crate) fn print_json(value: &Value) -> anyhow::Result<()> {
    print(&format!("{value:#}\n"))
}

/// Writes data to standard output. A reader that has seen enough is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow!("cannot write the output: {}", io_text(&error)))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Text of others with its control characters spelt out: it may not steer the terminal or break a line.
pub(crate) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// A JSON value in one line: a string without its quotes.
pub(crate) fn compact(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A number of bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    if count < 1024 {
        return format!("{count} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "one digit behind the point is shown")]
    let mut size = count as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        // What would be shown as 1024.0 is one of the next unit.
        if size < 1023.95 {
            break;
        }
        (size, unit) = (size / 1024.0, next);
    }
    format!("{size:.1} {unit}")
}

/// A size of the API's for people; exact in JSON.
pub(crate) fn size(count: i64) -> String {
    u64::try_from(count).map_or_else(|_| count.to_string(), bytes)
}

/// `-` for what is not there, so that columns can be counted.
pub(crate) fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(cells: [&str; 3]) -> [String; 3] {
        cells.map(str::to_owned)
    }

    #[test]
    fn a_table_has_a_header_and_no_lines() {
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
    fn a_narrow_terminal_wraps_only_the_columns_that_may_be() {
        let table = Table::new(&["UUID"], &["MESSAGE"])
            .rows([["0123-4567-89".to_owned(), "one two three four".to_owned()]]);
        let text = table.render(Some(24));
        assert!(text.lines().all(|line| line.chars().count() <= 24), "{text}");
        assert!(text.contains("0123-4567-89  one two"), "{text}");
        assert!(text.lines().count() > 2, "{text}");
    }

    #[test]
    fn a_terminal_too_narrow_for_words_gets_whole_lines() {
        let table = Table::new(&["UUID"], &["MESSAGE"])
            .rows([["0123-4567-89".to_owned(), "one two three".to_owned()]]);
        assert_eq!(table.render(Some(21)), table.render(None));
        assert_ne!(table.render(Some(22)), table.render(None));
    }

    #[test]
    fn facts_have_no_header_and_an_empty_table_only_that() {
        let facts =
            [("name", "ci"), ("version", "7")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(Table::facts(facts).render(None), "name     ci\nversion  7\n");
        assert_eq!(Table::facts([]).render(None), "");
        assert_eq!(Table::new(&["NAME"], &[]).render(None), "NAME\n");
    }

    #[test]
    fn foreign_text_cannot_steer_the_terminal() {
        assert_eq!(visible("red \u{1b}[31m\nnext\u{9b}é"), r"red \u{1b}[31m\nnext\u{9b}é");
        let table = Table::new(&["NAME"], &[]).rows([["a\u{1b}]0;b\u{7}".to_owned()]]);
        assert!(!table.render(None).contains('\u{1b}'));
    }

    #[test]
    fn sizes_are_for_people() {
        let shown = [0, 1023, 1024, 1536, 1_048_575, 1 << 20, 5 << 30, u64::MAX].map(bytes);
        let expected = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "5.0 GiB", "16.0 EiB"];
        assert_eq!(shown, expected);
        assert_eq!((size(2048), size(-1)), ("2.0 KiB".into(), "-1".into()));
    }

    #[test]
    fn values_are_shown_in_one_line() {
        assert_eq!(compact(&json!("a b")), "a b");
        assert_eq!(compact(&json!({ "a": [1, null] })), r#"{"a":[1,null]}"#);
        assert_eq!((or_dash(String::new()), or_dash("x".into())), ("-".into(), "x".into()));
    }
}
