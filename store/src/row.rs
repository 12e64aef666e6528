//! Rows of results, and how they are read into structs.

use std::fmt::Display;

use crate::error::StoreError;
use crate::value::{FromValue, Value};

/// A row of a result.
#[derive(Debug, Clone, PartialEq)]
pub struct Row(pub Vec<Value>);

impl Row {
    /// Reads all columns of the row.
    pub fn read<T: FromRow>(self) -> Result<T, StoreError> {
        let mut columns = Columns { width: self.0.len(), values: self.0.into_iter() };
        let read = T::from_columns(&mut columns)?;
        match columns.values.len() {
            0 => Ok(read),
            unread => Err(StoreError::Internal(format!("{unread} columns of a row were not read"))),
        }
    }

    /// Reads the only column of the row.
    pub fn scalar<T: FromValue>(&self) -> Result<T, StoreError> {
        self.clone().read()
    }
}

/// The columns of one row, read from left to right.
#[derive(Debug)]
pub struct Columns {
    width: usize,
    values: std::vec::IntoIter<Value>,
}

impl Columns {
    /// Reads the next column, which is called `name` in errors.
    pub fn next<T: FromValue>(&mut self, name: &dyn Display) -> Result<T, StoreError> {
        let Some(value) = self.values.next() else {
            return Err(StoreError::Internal(format!("a row of {} columns lacks column {name}", self.width)));
        };
        T::from_value(value).map_err(|value| {
            let expected = std::any::type_name::<T>();
            StoreError::Internal(match value {
                Value::Text(text) => format!("column {name}: {text:?} is not a {expected}"),
                _ => format!("column {name} is not a {expected}"),
            })
        })
    }
}

/// A type that can be read from consecutive columns: a single value, a tuple, or a struct with [`columns!`].
pub trait FromRow: Sized {
    fn from_columns(columns: &mut Columns) -> Result<Self, StoreError>;
}

impl<T: FromValue> FromRow for T {
    fn from_columns(columns: &mut Columns) -> Result<Self, StoreError> {
        let number = columns.width - columns.values.len() + 1;
        columns.next(&number)
    }
}

macro_rules! impl_from_row_for_tuple {
    ($(($($item:ident),+))+) => {$(
        impl<$($item: FromRow),+> FromRow for ($($item,)+) {
            fn from_columns(columns: &mut Columns) -> Result<Self, StoreError> {
                Ok(($($item::from_columns(columns)?,)+))
            }
        }
    )+};
}
impl_from_row_for_tuple! { (A, B) (A, B, C) (A, B, C, D) }

/// The rest of a row that may be damaged.
impl<T: FromRow> FromRow for Result<T, StoreError> {
    fn from_columns(columns: &mut Columns) -> Result<Self, StoreError> {
        let read = T::from_columns(columns);
        if read.is_err() {
            columns.values.by_ref().for_each(drop);
        }
        Ok(read)
    }
}

/// A struct that is read from the columns that [`columns!`] lists.
pub trait Select: FromRow {
    /// The column names, separated by `", "`, in the order in which they are read.
    const COLUMNS: &'static str;

    /// Returns the columns, qualified with the alias of their table.
    fn columns_of(alias: &str) -> String {
        format!("{alias}.{}", Self::COLUMNS.replace(", ", &format!(", {alias}.")))
    }
}

/// Lists the columns of a struct once, for both the statement and the reading of its rows.
///
/// Each field is followed by its column, which may be omitted if it has the same name. A field may also be a JSON
/// document (`field: json(column)`), the result of a function of several columns (`field: function(column, …)`), or a
/// struct (`field: Type { … }`). Each ends with a comma.
macro_rules! columns {
    ($type:ident { $($fields:tt)+ }) => {
        impl $crate::row::Select for $type {
            const COLUMNS: &'static str = $crate::row::columns!(@names [] $($fields)+);
        }

        impl $crate::row::FromRow for $type {
            fn from_columns(columns: &mut $crate::row::Columns) -> Result<Self, $crate::StoreError> {
                Ok($crate::row::columns!(@read columns $type [] $($fields)+))
            }
        }
    };

    (@names [$first:ident $($name:ident)*]) => { concat!(stringify!($first) $(, ", ", stringify!($name))*) };
    (@names [$($done:ident)*] $field:ident : $type:ident { $($inner:tt)* }, $($rest:tt)*) => {
        $crate::row::columns!(@names [$($done)*] $($inner)* $($rest)*)
    };
    (@names [$($done:ident)*] $field:ident : $function:ident($($column:ident),+), $($rest:tt)*) => {
        $crate::row::columns!(@names [$($done)* $($column)+] $($rest)*)
    };
    (@names [$($done:ident)*] $field:ident : $column:ident, $($rest:tt)*) => {
        $crate::row::columns!(@names [$($done)* $column] $($rest)*)
    };
    (@names [$($done:ident)*] $field:ident, $($rest:tt)*) => {
        $crate::row::columns!(@names [$($done)* $field] $($rest)*)
    };

    (@read $from:ident $type:ident [$($done:tt)*]) => { $type { $($done)* } };
    (@read $from:ident $type:ident [$($done:tt)*] $field:ident : $inner_type:ident { $($inner:tt)* }, $($rest:tt)*) => {
        $crate::row::columns!(@read $from $type
            [$($done)* $field: $crate::row::columns!(@read $from $inner_type [] $($inner)*),] $($rest)*)
    };
    (@read $from:ident $type:ident [$($done:tt)*] $field:ident : json($column:ident), $($rest:tt)*) => {
        $crate::row::columns!(@read $from $type
            [$($done)* $field: $from.next::<$crate::Json<_>>(&stringify!($column))?.0,] $($rest)*)
    };
    (@read $from:ident $type:ident [$($done:tt)*] $field:ident : $function:ident($($column:ident),+), $($rest:tt)*) => {
        $crate::row::columns!(@read $from $type
            [$($done)* $field: $function($($from.next(&stringify!($column))?),+),] $($rest)*)
    };
    (@read $from:ident $type:ident [$($done:tt)*] $field:ident : $column:ident, $($rest:tt)*) => {
        $crate::row::columns!(@read $from $type
            [$($done)* $field: $from.next(&stringify!($column))?,] $($rest)*)
    };
    (@read $from:ident $type:ident [$($done:tt)*] $field:ident, $($rest:tt)*) => {
        $crate::row::columns!(@read $from $type [$($done)* $field: $from.next(&stringify!($field))?,] $($rest)*)
    };
}
pub(crate) use columns;

/// Reads a row of a statement. An error names its table and its first column, which is the key of most tables.
fn read_of<T: FromRow>(row: Row, sql: &str) -> Result<T, StoreError> {
    let key = row.0.first().cloned();
    row.read().map_err(|error| match error {
        StoreError::Internal(text) => StoreError::Internal(unreadable(sql, key.as_ref(), &text)),
        error => error,
    })
}

fn unreadable(sql: &str, key: Option<&Value>, text: &str) -> String {
    let table =
        sql.split(" FROM ").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap_or("unknown");
    let key = match key {
        Some(Value::Text(key)) => format!("{key:?}"),
        Some(Value::Int(key)) => key.to_string(),
        _ => "of another type".to_owned(),
    };
    format!("table {table}, key {key}: {text}")
}

/// A source of rows: the store, a snapshot or a transaction.
pub trait Read: Send {
    /// Runs a statement and returns its rows.
    fn rows(
        &mut self,
        sql: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<Vec<Row>, StoreError>> + Send;

    /// Runs a statement and reads each of its rows.
    fn fetch<T: FromRow>(
        &mut self,
        sql: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<Vec<T>, StoreError>> + Send {
        async move { self.rows(sql, params).await?.into_iter().map(|row| read_of(row, sql)).collect() }
    }

    /// Runs a statement and reads its first row, if there is one.
    fn fetch_optional<T: FromRow>(
        &mut self,
        sql: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<Option<T>, StoreError>> + Send {
        async move {
            let row = self.rows(sql, params).await?.into_iter().next();
            row.map(|row| read_of(row, sql)).transpose()
        }
    }

    /// Runs a statement that always returns a row, such as a count, and reads it.
    fn fetch_one<T: FromRow>(
        &mut self,
        sql: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<T, StoreError>> + Send {
        async move {
            let row = self.rows(sql, params).await?.into_iter().next();
            read_of(row.ok_or_else(|| StoreError::Internal(format!("no row was returned by {sql}")))?, sql)
        }
    }

    /// Runs `SELECT columns tail`, where `tail` begins with `FROM`, and reads each row.
    fn select<T: Select>(
        &mut self,
        tail: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<Vec<T>, StoreError>> + Send {
        async move { self.fetch(&format!("SELECT {} {tail}", T::COLUMNS), params).await }
    }

    /// Runs `SELECT columns tail`, where `tail` begins with `FROM`, and reads the first row, if there is one.
    fn select_optional<T: Select>(
        &mut self,
        tail: &str,
        params: &[Value],
    ) -> impl Future<Output = Result<Option<T>, StoreError>> + Send {
        async move { self.fetch_optional(&format!("SELECT {} {tail}", T::COLUMNS), params).await }
    }
}

impl<R: Read> Read for &mut R {
    async fn rows(&mut self, sql: &str, params: &[Value]) -> Result<Vec<Row>, StoreError> {
        (**self).rows(sql, params).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Outer {
        id: i64,
        inner: Inner,
        tags: Vec<String>,
        range: Option<(i64, i64)>,
        note: Option<String>,
    }

    #[derive(Debug, PartialEq)]
    struct Inner {
        name: String,
        enabled: bool,
    }

    columns! { Outer {
        id: uuid,
        inner: Inner { name, enabled: is_enabled, },
        tags: json(tags),
        range: range(first, last),
        note,
    } }

    fn range(first: Option<i64>, last: Option<i64>) -> Option<(i64, i64)> {
        first.zip(last)
    }

    fn row() -> Vec<Value> {
        crate::values![7i64, "a", true, "[\"x\"]", 1i64, 2i64, None::<String>].to_vec()
    }

    #[test]
    fn reads_columns_in_the_order_in_which_they_are_selected() {
        assert_eq!(Outer::COLUMNS, "uuid, name, is_enabled, tags, first, last, note");
        assert_eq!(Outer::columns_of("o"), "o.uuid, o.name, o.is_enabled, o.tags, o.first, o.last, o.note");
        let inner = Inner { name: "a".into(), enabled: true };
        let outer = Outer { id: 7, inner, tags: vec!["x".into()], range: Some((1, 2)), note: None };
        assert_eq!(Row(row()).read::<Outer>().unwrap(), outer);
    }

    #[test]
    fn names_the_column_that_cannot_be_read() {
        let mut values = row();
        values[3] = "{".into();
        let error = Row(values.clone()).read::<Outer>().unwrap_err().to_string();
        assert!(error.starts_with("column tags: \"{\" is not a"), "{error}");
        values.truncate(3);
        assert_eq!(
            Row(values).read::<Outer>().unwrap_err().to_string(),
            "a row of 3 columns lacks column tags"
        );
    }

    #[test]
    fn names_the_table_and_the_key_of_a_row_that_cannot_be_read() {
        let row = || Row(crate::values!["i1", "{"].to_vec());
        let error = read_of::<(String, i64)>(row(), "SELECT uuid, n FROM instances WHERE n > 0").unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("table instances, key \"i1\": column 2: \"{\" is not a"), "{error}");
    }

    #[test]
    fn rejects_rows_with_unread_columns() {
        assert_eq!(Row(row()[..2].to_vec()).read::<(i64, String)>().unwrap(), (7, "a".to_owned()));
        assert!(Row(row()).scalar::<i64>().is_err());
    }
}
