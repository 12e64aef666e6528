//! Lists: their options, columns, order and changes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::Ipv4Addr;

use clap::Args;
use muster_types::object::ObjectType;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::event_follower::EventFollower;
use super::session::Session;
use crate::api::{self, ApiResponse, Error, ListQuery, StreamQuery};
use crate::output::{self, Format, Table, compact, or_dash};
use crate::terminal::write_output;

/// Options of commands that list records.
#[derive(Debug, Clone, Default, Args)]
pub struct ListOptions {
    /// Maximum number of records
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "List")]
    pub(super) limit: Option<u32>,
    /// Sort by a field of the records; -FIELD for descending order
    #[arg(long, value_name = "FIELD", allow_hyphen_values = true, help_heading = "List")]
    pub(super) sort: Option<String>,
    /// Only records with this value; FIELD:PREFIX* for a prefix, FIELD:null for none; may be repeated
    #[arg(long, value_name = "FIELD:VALUE", value_parser = parse_condition, help_heading = "List")]
    pub(super) filter: Vec<String>,
    /// Columns to show: those of the table, or fields of the records
    #[arg(long, value_name = "COLUMN,...", value_delimiter = ',', help_heading = "List")]
    pub(super) columns: Vec<String>,
    /// Print changed records as they change, until interrupted
    #[arg(short, long, help_heading = "List")]
    pub(super) watch: bool,
}

/// Checks that a condition has a field and a value.
pub(super) fn parse_condition(text: &str) -> Result<String, String> {
    match text.split_once(':') {
        Some((field, _)) if !field.is_empty() => Ok(text.to_owned()),
        _ => Err("expected FIELD:VALUE".to_owned()),
    }
}

impl ListOptions {
    /// Returns which records are requested from the server.
    pub(super) fn query(&self) -> ListQuery {
        ListQuery { limit: self.limit, sort: self.sort.clone(), filter: self.filter.clone() }
    }
}

/// How a type of records is listed.
pub(super) struct ListView<T> {
    pub(super) table: fn(Vec<T>) -> Table,
    /// The fields of the records that the format `wide` adds.
    pub(super) wide: &'static [&'static str],
    /// The fields that tables are sorted by; empty for the order of the server.
    pub(super) order: &'static [&'static str],
    /// The types of the objects whose changes change the list; empty for all.
    pub(super) watched: &'static [ObjectType],
}

impl Session {
    /// Lists records, and with `--watch` their changes.
    pub(super) async fn list<T, F>(
        &self,
        options: &ListOptions,
        view: &ListView<T>,
        fetch: impl Fn() -> F,
    ) -> anyhow::Result<()>
    where
        T: DeserializeOwned,
        F: Future<Output = api::Result<ApiResponse<Vec<T>>>>,
    {
        if options.watch {
            return self.watch(options, view, fetch).await;
        }
        let response = fetch().await?;
        match self.format {
            Format::Json | Format::Yaml => self.print_value(response.json()),
            Format::Name => self.print_value(&sorted(response.json(), options, view).into()),
            Format::Table | Format::Wide => {
                let records = sorted(response.json(), options, view);
                output::print_table(&table(&records, options, view, self.format)?)
            }
        }
    }

    /// Prints the records, and later those that have changed.
    async fn watch<T, F>(
        &self,
        options: &ListOptions,
        view: &ListView<T>,
        fetch: impl Fn() -> F,
    ) -> anyhow::Result<()>
    where
        T: DeserializeOwned,
        F: Future<Output = api::Result<ApiResponse<Vec<T>>>>,
    {
        // Opened first, so that no change is missed.
        let mut follower = EventFollower::open(&self.client, StreamQuery::default()).await?;
        let mut shown: Option<BTreeMap<String, ShownRecord>> = None;
        loop {
            let records = sorted(fetch().await?.json(), options, view);
            let (header, current) = self.render(&records, options, view)?;
            let text = match &shown {
                None => {
                    header + &current.iter().map(|(_, shown)| self.line(shown, "added")).collect::<String>()
                }
                Some(previous) => self.changes(previous, &current),
            };
            if !write_output(&mut io::stdout(), text.as_bytes())? {
                return Ok(());
            }
            shown = Some(current.into_iter().collect());
            follower.wait_for_change(view.watched).await?;
        }
    }

    /// Returns the header of the list, and what is shown of each record by its identity.
    fn render<T: DeserializeOwned>(
        &self,
        records: &[Value],
        options: &ListOptions,
        view: &ListView<T>,
    ) -> anyhow::Result<(String, Vec<(String, ShownRecord)>)> {
        let identities = records.iter().map(identity);
        let name = |record: &Value| output::names(record).pop().unwrap_or_default();
        if self.is_structured() {
            let shown = records.iter().map(|record| ShownRecord {
                record: record.clone(),
                line: String::new(),
                name: name(record),
            });
            return Ok((String::new(), identities.zip(shown).collect()));
        }
        let table = table(records, options, view, self.format)?;
        // Each row is one line, because the width is not limited.
        let text = table.render(None);
        let mut lines = text.lines().map(|line| format!("{line}\n"));
        let header = lines.next().unwrap_or_default();
        let cells = table.cells().iter().map(|cells| json!(cells));
        let shown = cells.zip(lines).zip(records.iter().map(name));
        let shown = shown.map(|((record, line), name)| ShownRecord { record, line, name });
        Ok((header, identities.zip(shown).collect()))
    }

    /// Returns the lines for the differences of two states of a list.
    fn changes(&self, previous: &BTreeMap<String, ShownRecord>, current: &[(String, ShownRecord)]) -> String {
        let mut text = String::new();
        for (id, shown) in current {
            match previous.get(id) {
                None => text.push_str(&self.line(shown, "added")),
                Some(before) if before.record != shown.record => text.push_str(&self.line(shown, "changed")),
                Some(_) => {}
            }
        }
        for (id, shown) in previous.iter().filter(|(id, _)| current.iter().all(|(other, _)| other != *id)) {
            if self.is_structured() {
                text.push_str(&self.line(shown, "deleted"));
            } else {
                output::status(&format!("{} ({id}) was removed from the list", shown.name));
            }
        }
        text
    }

    fn line(&self, shown: &ShownRecord, change: &str) -> String {
        match self.format {
            Format::Table | Format::Wide => shown.line.clone(),
            Format::Name => self.format.render(&shown.record),
            Format::Json | Format::Yaml => {
                self.format.render_document(&json!({ "change": change, "record": shown.record }))
            }
        }
    }
}

/// A record of a list, with the line and the name that are printed of it.
struct ShownRecord {
    record: Value,
    line: String,
    name: String,
}

/// Returns what identifies a record across changes.
fn identity(record: &Value) -> String {
    let id = ["uuid", "name", "key_name", "address", "blob_uuid", "index"]
        .iter()
        .find_map(|name| record.get(*name));
    compact(id.unwrap_or(record))
}

/// Returns the records in the order in which tables show them.
fn sorted<T>(response: &Value, options: &ListOptions, view: &ListView<T>) -> Vec<Value> {
    let mut records = response.as_array().cloned().unwrap_or_default();
    if options.sort.is_none() {
        records.sort_by(|a, b| {
            let fields = view.order.iter().map(|name| compare(&a[*name], &b[*name]));
            fields.fold(Ordering::Equal, Ordering::then)
        });
    }
    records
}

/// Compares two values. Addresses are numbers, and missing values come last.
fn compare(a: &Value, b: &Value) -> Ordering {
    match (a, b) {
        (Value::Null, Value::Null) => Ordering::Equal,
        (Value::Null, _) => Ordering::Greater,
        (_, Value::Null) => Ordering::Less,
        (Value::Number(a), Value::Number(b)) => {
            a.as_f64().partial_cmp(&b.as_f64()).unwrap_or(Ordering::Equal)
        }
        (Value::String(a), Value::String(b)) => match (a.parse::<Ipv4Addr>(), b.parse::<Ipv4Addr>()) {
            (Ok(a), Ok(b)) => a.cmp(&b),
            _ => a.cmp(b),
        },
        (a, b) => a.to_string().cmp(&b.to_string()),
    }
}

/// Returns the table of some records with the requested columns.
fn table<T: DeserializeOwned>(
    records: &[Value],
    options: &ListOptions,
    view: &ListView<T>,
    format: Format,
) -> anyhow::Result<Table> {
    let mut table = (view.table)(vec![]);
    for record in records {
        let typed = ApiResponse::<T>::from_json(record.clone()).value()?;
        table.append((view.table)(vec![typed]));
    }
    let add_fields = |table: &mut Table, fields: &[&str]| {
        let header: Vec<String> = fields.iter().map(|name| name.replace('_', " ").to_uppercase()).collect();
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        table.add_columns(&header, |row| fields.iter().map(|name| cell(&records[row], name)).collect());
    };
    if options.columns.is_empty() {
        if format == Format::Wide {
            add_fields(&mut table, view.wide);
        }
        return Ok(table);
    }
    let mut selected = vec![];
    for column in &options.columns {
        let own = table.header().iter().position(|name| is_same_column(name, column));
        selected.push(match own {
            Some(own) => own,
            None if records.is_empty() || records.iter().any(|record| field(record, column).is_some()) => {
                add_fields(&mut table, &[column]);
                table.header().len() - 1
            }
            None => return Err(unknown_column(column, table.header(), &records[0]).into()),
        });
    }
    table.select_columns(&selected);
    Ok(table)
}

/// Returns whether a name means a column of a table, whose header is in upper case and may contain spaces.
fn is_same_column(header: &str, name: &str) -> bool {
    let normalize = |text: &str| text.to_ascii_lowercase().replace([' ', '-'], "_");
    normalize(header) == normalize(name)
}

/// Returns a field of a record, or with dots a field of a field.
fn field<'a>(record: &'a Value, name: &str) -> Option<&'a Value> {
    name.split('.').try_fold(record, |value, part| match value {
        Value::Array(items) => items.get(part.parse::<usize>().ok()?),
        value => value.get(part),
    })
}

fn cell(record: &Value, name: &str) -> String {
    or_dash(field(record, name).filter(|value| !value.is_null()).map(compact).unwrap_or_default())
}

fn unknown_column(column: &str, header: &[String], record: &Value) -> Error {
    let columns: Vec<String> = header.iter().map(|name| name.to_lowercase().replace(' ', "_")).collect();
    let fields: Vec<&str> = record.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    Error::InvalidInput(format!(
        "unknown column {column:?}: the columns are {}, and the fields {}",
        columns.join(", "),
        fields.join(", ")
    ))
}

#[cfg(test)]
mod tests;
