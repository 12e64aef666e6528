//! The number of objects in each state, for metrics.

use super::{Read, StoreError};

/// A table of objects that have a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountedTable {
    AgentOperations,
    Artifacts,
    Blobs,
    Instances,
    Namespaces,
    Networks,
    Nodes,
    Operations,
}

impl CountedTable {
    /// All tables.
    pub const ALL: &'static [Self] = &[
        Self::AgentOperations,
        Self::Artifacts,
        Self::Blobs,
        Self::Instances,
        Self::Namespaces,
        Self::Networks,
        Self::Nodes,
        Self::Operations,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::AgentOperations => "agent_operations",
            Self::Artifacts => "artifacts",
            Self::Blobs => "blobs",
            Self::Instances => "instances",
            Self::Namespaces => "namespaces",
            Self::Networks => "networks",
            Self::Nodes => "nodes",
            Self::Operations => "operations",
        }
    }
}

/// Returns the number of rows in each state that occurs.
pub async fn by_state(mut db: impl Read, table: CountedTable) -> Result<Vec<(String, i64)>, StoreError> {
    let sql = format!("SELECT state, COUNT(*) FROM {} GROUP BY state ORDER BY state", table.name());
    db.fetch(&sql, &[]).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::{on_both_engines, operation};
    use crate::{Store, operations, transaction};

    on_both_engines! {
        async fn counts_rows_of_every_table_by_state(store: Arc<Store>) {
            for table in CountedTable::ALL {
                by_state(&*store, *table).await.unwrap();
            }
            let before = by_state(&*store, CountedTable::Operations).await.unwrap();
            for _ in 0..2 {
                let new = operation("ci", vec![]);
                transaction!(store, |tx| { Ok(operations::insert(tx, &new).await?) }).unwrap();
            }
            let after = by_state(&*store, CountedTable::Operations).await.unwrap();
            let count = |counts: &[(String, i64)]| counts.iter().map(|(_, count)| count).sum::<i64>();
            assert_eq!(count(&after), count(&before) + 2);
        }
    }
}
