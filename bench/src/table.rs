//! The table of results.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table as TextTable};

/// A row of the table.
#[derive(Debug, Default)]
pub(crate) struct Row {
    label: String,
    measured: String,
    multiple: String,
    target: String,
    met: Option<bool>,
}

impl Row {
    pub(crate) fn new(label: impl Into<String>, measured: impl Into<String>) -> Self {
        Self { label: label.into(), measured: measured.into(), ..Self::default() }
    }

    /// Sets the multiple of the baseline.
    pub(crate) fn multiple(mut self, multiple: f64) -> Self {
        self.multiple = format!("{multiple:.1}");
        self
    }

    /// Sets the target and whether it is met.
    pub(crate) fn target(mut self, target: impl Into<String>, met: bool) -> Self {
        self.target = target.into();
        self.met = Some(met);
        self
    }

    /// Like [`Self::target`], if the condition is true.
    pub(crate) fn target_if(self, condition: bool, target: impl Into<String>, met: bool) -> Self {
        if condition { self.target(target, met) } else { self }
    }
}

/// The rows so far.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    pub(crate) fn add(&mut self, row: Row) {
        self.0.push(row);
    }

    /// Adds a heading for the following rows.
    pub(crate) fn section(&mut self, title: &str) {
        self.add(Row::new(title.to_uppercase(), ""));
    }

    /// Serializes the rows for another process.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let cells =
            |row: &Row| serde_json::json!([row.label, row.measured, row.multiple, row.target, row.met]);
        self.0.iter().map(cells).collect()
    }

    /// Adds the rows of another process.
    pub(crate) fn add_json(&mut self, text: &str) -> anyhow::Result<()> {
        let rows: Vec<(String, String, String, String, Option<bool>)> = serde_json::from_str(text.trim())?;
        let row = |(label, measured, multiple, target, met)| Row { label, measured, multiple, target, met };
        self.0.extend(rows.into_iter().map(row));
        Ok(())
    }

    /// Returns the number of missed targets.
    pub(crate) fn missed_targets(&self) -> usize {
        self.0.iter().filter(|row| row.met == Some(false)).count()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = TextTable::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["measurement", "result", "x baseline", "target", ""]);
        for row in &self.0 {
            let verdict = match row.met {
                None => "",
                Some(true) => "ok",
                Some(false) => "missed",
            };
            let right = |text: &str| Cell::new(text).set_alignment(CellAlignment::Right);
            let cells = [
                Cell::new(&row.label),
                right(&row.measured),
                right(&row.multiple),
                right(&row.target),
                Cell::new(verdict),
            ];
            table.add_row(cells);
        }
        write!(f, "{table}")
    }
}
