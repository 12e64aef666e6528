//! Output: tables without borders, readable and easy to `grep`. Data goes to standard output, everything else to
//! standard error. There are no colours.

mod format;
mod yaml;

use std::io::{self, Write as _};

use anyhow::anyhow;
use comfy_table::{ColumnConstraint, ContentArrangement, presets};
use serde_json::Value;

pub use self::format::{Format, set_quiet};
pub(crate) use self::format::{is_quiet, names, print_value, status};
use crate::error_text::io_error_text;

/// The number of spaces between columns.
const COLUMN_GAP: u16 = 2;
/// The minimum width of a wrapped column that is still readable.
const MIN_WRAPPED_WIDTH: u16 = 8;

/// Rows under a header, or key-value pairs without one.
#[derive(Debug)]
pub(crate) struct Table {
    header: Vec<String>,
    /// The number of columns, from the left, that are never wrapped.
    fixed_columns: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table. Columns in `wrapped` may be wrapped on a narrow terminal.
    pub(crate) fn new(fixed: &[&str], wrapped: &[&str]) -> Self {
        let header = fixed.iter().chain(wrapped).map(|name| (*name).to_owned()).collect();
        Self { header, fixed_columns: fixed.len(), rows: vec![] }
    }

    /// Creates a table of keys and values.
    pub(crate) fn key_values(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        let rows = pairs.into_iter().map(|(name, value)| vec![name, value]).collect();
        Self { header: vec![], fixed_columns: 1, rows }
    }

    /// Adds rows.
    pub(crate) fn rows<const N: usize>(mut self, rows: impl IntoIterator<Item = [String; N]>) -> Self {
        self.rows.extend(rows.into_iter().map(Vec::from));
        self
    }

    /// Returns the names of the columns.
    pub(crate) fn header(&self) -> &[String] {
        &self.header
    }

    /// Adds columns at the end.
    pub(crate) fn add_columns(&mut self, names: &[&str], mut cells: impl FnMut(usize) -> Vec<String>) {
        self.header.extend(names.iter().map(|name| (*name).to_owned()));
        for (at, row) in self.rows.iter_mut().enumerate() {
            row.extend(cells(at));
        }
    }

    /// Selects columns by their numbers.
    pub(crate) fn select_columns(&mut self, columns: &[usize]) {
        self.fixed_columns = columns.iter().take_while(|column| **column < self.fixed_columns).count();
        for cells in self.rows.iter_mut().chain([&mut self.header]) {
            *cells = columns.iter().map(|column| cells[*column].clone()).collect();
        }
    }

    /// Moves the rows of another table with the same columns to this one.
    pub(crate) fn append(&mut self, other: Self) {
        self.rows.extend(other.rows);
    }

    /// Returns the cells of each row.
    pub(crate) fn cells(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Renders the table, no wider than `width` where possible.
    pub(crate) fn render(&self, width: Option<u16>) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        if !self.header.is_empty() {
            table.set_header(&self.header);
        }
        table.add_rows(
            self.rows.iter().map(|row| row.iter().map(|cell| escape_control(cell)).collect::<Vec<_>>()),
        );
        let widths = table.column_max_content_widths();
        // A terminal too narrow for readable columns wraps whole lines instead.
        let width = width.filter(|width| self.min_width(&widths) <= usize::from(*width));
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        }
        for (at, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, if at + 1 == widths.len() { 0 } else { COLUMN_GAP }));
            if at < self.fixed_columns && width.is_some() {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        let mut text = table.trim_fmt();
        if !text.is_empty() {
            text.push('\n');
        }
        text
    }

    /// Returns the width below which wrapped columns become unreadable.
    fn min_width(&self, widths: &[u16]) -> usize {
        let columns = widths.iter().enumerate().map(|(at, width)| {
            usize::from(if at < self.fixed_columns { *width } else { (*width).min(MIN_WRAPPED_WIDTH) })
        });
        columns.sum::<usize>() + widths.len().saturating_sub(1) * usize::from(COLUMN_GAP)
    }
}

/// Returns the width of the terminal, if standard output is one.
fn terminal_width() -> Option<u16> {
    terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| width.0).filter(|width| *width > 0)
}

/// Prints a table that fits the terminal.
pub(crate) fn print_table(table: &Table) -> anyhow::Result<()> {
    print(&table.render(terminal_width()))
}

/// Writes data to standard output. A closed pipe is not an error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow!("cannot write the output: {}", io_error_text(&error)))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a line to standard error, as `message!` does. A closed pipe is not an error.
pub fn write_message(text: std::fmt::Arguments<'_>) {
    // If standard error cannot be written, there is nowhere to report that.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Writes a formatted line to standard error. Unlike `eprintln!`, it does not panic if the reader has closed the pipe.
#[macro_export]
macro_rules! message {
    ($($text:tt)*) => { $crate::write_message(format_args!($($text)*)) };
}

/// Escapes control characters of foreign text, so that it cannot control the terminal or break a line.
pub(crate) fn escape_control(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    escaped
}

/// Formats a JSON value in one line, a string without its quotes.
pub(crate) fn compact(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Formats a number of bytes with a binary unit.
pub(crate) fn format_bytes(count: u64) -> String {
    if count < 1024 {
        return format!("{count} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "only one decimal digit is shown")]
    let mut size = count as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        // A value that would be rounded to 1024.0 uses the next unit.
        if size < 1023.95 {
            break;
        }
        (size, unit) = (size / 1024.0, next);
    }
    format!("{size:.1} {unit}")
}

/// Formats a size from the API with a binary unit.
pub(crate) fn format_size(count: i64) -> String {
    u64::try_from(count).map_or_else(|_| count.to_string(), format_bytes)
}

/// Replaces an empty cell with `-`, so that every row has the same number of columns.
pub(crate) fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

#[cfg(test)]
mod tests;
