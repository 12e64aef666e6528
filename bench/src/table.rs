//! The one table that the measurements end in.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table as Printed};

/// A line of the table.
#[derive(Debug, Default)]
pub(crate) struct Row {
    what: String,
    measured: String,
    multiple: String,
    target: String,
    met: Option<bool>,
}

impl Row {
    pub(crate) fn new(what: impl Into<String>, measured: impl Into<String>) -> Self {
        Self { what: what.into(), measured: measured.into(), ..Self::default() }
    }

    /// As a multiple of the floor.
    pub(crate) fn times(mut self, multiple: f64) -> Self {
        self.multiple = format!("{multiple:.1}");
        self
    }

    /// What it should be, and whether it is.
    pub(crate) fn target(mut self, target: impl Into<String>, met: bool) -> Self {
        self.target = target.into();
        self.met = Some(met);
        self
    }

    /// The same, if there is a target at all.
    pub(crate) fn target_if(self, wanted: bool, target: impl Into<String>, met: bool) -> Self {
        if wanted { self.target(target, met) } else { self }
    }
}

/// All lines so far.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    pub(crate) fn add(&mut self, row: Row) {
        self.0.push(row);
    }

    /// A line that names what the following ones are about.
    pub(crate) fn section(&mut self, title: &str) {
        self.add(Row::new(title.to_uppercase(), ""));
    }

    /// The lines for another process.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let cells =
            |row: &Row| serde_json::json!([row.what, row.measured, row.multiple, row.target, row.met]);
        self.0.iter().map(cells).collect()
    }

    /// Adds lines of another process.
    pub(crate) fn add_json(&mut self, text: &str) -> anyhow::Result<()> {
        let rows: Vec<(String, String, String, String, Option<bool>)> = serde_json::from_str(text.trim())?;
        let row = |(what, measured, multiple, target, met)| Row { what, measured, multiple, target, met };
        self.0.extend(rows.into_iter().map(row));
        Ok(())
    }

    /// How many targets were missed.
    pub(crate) fn missed(&self) -> usize {
        self.0.iter().filter(|row| row.met == Some(false)).count()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Printed::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["what", "measured", "x floor", "target", ""]);
        for row in &self.0 {
            let verdict = match row.met {
                None => "",
                Some(true) => "ok",
                Some(false) => "missed",
            };
            let right = |text: &str| Cell::new(text).set_alignment(CellAlignment::Right);
            let line = [
                Cell::new(&row.what),
                right(&row.measured),
                right(&row.multiple),
                right(&row.target),
                Cell::new(verdict),
            ];
            table.add_row(line);
        }
        write!(f, "{table}")
    }
}
