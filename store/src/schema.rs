//! The schema versions of the database and of this program. See docs/decisions/0072.

use crate::error::StoreError;
use crate::migrate;
use crate::row::Read;
use crate::store::Store;

/// A number of a breaking migration that no release knows. A database that contains it is being restored, and no daemon starts
/// with it.
pub(crate) const RESTORE_MARK: i64 = 1_000_000_000;

/// The schema of a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schema {
    /// The number of the last migration.
    pub version: i64,
    /// The oldest schema version whose daemons can use the database: the number of the last migration that is not additive.
    pub minimum: i64,
}

/// Returns the schema of the database.
pub async fn get(mut db: impl Read) -> Result<Schema, StoreError> {
    let sql = "SELECT (SELECT COALESCE(MAX(number), 0) FROM migrations), \
               (SELECT COALESCE(MAX(number), 0) FROM additive_migrations)";
    let (minimum, additive): (i64, i64) = db.fetch_one(sql, &[]).await?;
    Ok(Schema { version: minimum.max(additive), minimum })
}

/// Returns why this program cannot use the database, and what to do, or `None` if it can.
pub async fn unsupported(store: &Store) -> Result<Option<String>, StoreError> {
    let (minimum, own) = (get(store).await?.minimum, store.schema_version());
    if minimum == RESTORE_MARK {
        return Ok(Some(unfinished_restore()));
    }
    Ok((minimum > own).then(|| {
        format!(
            "the database needs schema version {minimum} or newer, and muster {} has {own}: all nodes that were up have been \
             upgraded. Install the release that they run (`muster cluster upgrade status` on one of them shows it)",
            env!("CARGO_PKG_VERSION")
        )
    }))
}

/// Returns the migrations of this program that are held back, because a database with this schema lacks them.
#[must_use]
pub fn held_migrations(store: &Store, schema: Schema) -> Vec<i64> {
    let held = store.migrations.iter().filter(|migration| !migration.is_additive);
    held.map(|migration| migration.number).filter(|number| *number > schema.minimum).collect()
}

/// Applies migrations that are held back, if all nodes support them now.
pub async fn apply_held(store: &Store) -> Result<(), StoreError> {
    if store.has_held_migrations() { migrate::apply_missing(store).await } else { Ok(()) }
}

/// Returns why a database cannot be used that contains the mark of a restoration.
pub(crate) fn unfinished_restore() -> String {
    "a backup was being restored into this database, which is not complete: run `muster restore` again"
        .to_owned()
}
