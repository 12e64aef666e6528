//! Several selects that are run as one statement, because each statement is a round trip to MariaDB.

#[cfg(test)]
mod tests;

use crate::error::StoreError;
use crate::row::{FromRow, Read, Row};
use crate::value::{FromValue as _, Value};

/// Selects whose rows one statement returns, in no particular order.
#[derive(Debug, Default)]
pub(crate) struct Union {
    parts: Vec<UnionPart>,
}

#[derive(Debug)]
struct UnionPart {
    columns: String,
    width: usize,
    tail: String,
    values: Vec<Value>,
}

impl Union {
    /// Adds `SELECT columns tail`, where `tail` begins with `FROM`. Returns the number of the part.
    pub(crate) fn add(&mut self, columns: &str, tail: String, values: &[Value]) -> usize {
        let part = UnionPart { columns: columns.into(), width: width(columns), tail, values: values.into() };
        self.parts.push(part);
        self.parts.len() - 1
    }

    /// Runs the statement.
    pub(crate) async fn fetch(self, mut db: impl Read) -> Result<UnionRows, StoreError> {
        let widest = self.parts.iter().map(|part| part.width).max().unwrap_or_default();
        // Makes MariaDB return every column as text, instead of a type that depends on the other parts.
        let mut sql = format!("SELECT -1{} WHERE 1 = 0", ", ''".repeat(widest));
        let mut values = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            let padding = ", NULL".repeat(widest - part.width);
            sql.push_str(&format!(" UNION ALL SELECT {number}, {}{padding} {}", part.columns, part.tail));
            values.extend_from_slice(&part.values);
        }
        let mut parts: Vec<Vec<Row>> = self.parts.iter().map(|_| Vec::new()).collect();
        for row in db.rows(&sql, &values).await? {
            let Row(mut columns) = row;
            let number = columns.first().cloned().map_or(Err(Value::Null), usize::from_value);
            let number = number.ok().filter(|number| *number < parts.len());
            let number = number.ok_or_else(|| StoreError::Internal("a row of no part of a union".into()))?;
            columns.truncate(self.parts[number].width + 1);
            columns.remove(0);
            parts[number].push(Row(columns));
        }
        Ok(UnionRows { parts })
    }
}

/// The rows of a [`Union`].
#[derive(Debug)]
pub(crate) struct UnionRows {
    parts: Vec<Vec<Row>>,
}

impl UnionRows {
    /// Removes and reads the rows of a part.
    pub(crate) fn take<T: FromRow>(&mut self, part: usize) -> Result<Vec<T>, StoreError> {
        std::mem::take(&mut self.parts[part]).into_iter().map(Row::read).collect()
    }
}

/// Returns the number of columns of a list.
fn width(columns: &str) -> usize {
    let mut depth = 0;
    let mut count = 1;
    for character in columns.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => count += 1,
            _ => {}
        }
    }
    count
}
