//! The clock of the database, which all daemons share. Leases and check-ins use it, because the clocks of hosts differ.

use crate::error::StoreError;
use crate::row::Read;

/// The SQL expression of the current Unix time. SQLite has it from `sqlite.rs`, where it is the clock of the host.
pub(crate) const NOW: &str = "UNIX_TIMESTAMP(NOW(6))";

/// Returns the current Unix time of the database.
pub async fn database_time(mut db: impl Read) -> Result<f64, StoreError> {
    db.fetch_one(&format!("SELECT CAST({NOW} AS DOUBLE)"), &[]).await
}
