//! The number of objects in each state, for metrics.

use std::collections::HashMap;

use super::{Read, StoreError};
use crate::time::NOW;

/// The delay in seconds up to which a queued operation counts as waiting, not as scheduled.
const MAX_RETRY_DELAY: u32 = 120;

/// A table of objects that have a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CountedTable {
    AgentOperations,
    Artifacts,
    BlobLocations,
    Blobs,
    Instances,
    Namespaces,
    Networks,
    Nodes,
    Operations,
}

impl CountedTable {
    const ALL: &'static [Self] = &[
        Self::AgentOperations,
        Self::Artifacts,
        Self::BlobLocations,
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
            Self::BlobLocations => "blob_locations",
            Self::Blobs => "blobs",
            Self::Instances => "instances",
            Self::Namespaces => "namespaces",
            Self::Networks => "networks",
            Self::Nodes => "nodes",
            Self::Operations => "operations",
        }
    }
}

/// The number of rows in each state that occurs, by table.
pub type StateCounts = HashMap<CountedTable, Vec<(String, i64)>>;

/// Returns the number of rows in each state that occurs in each table, with one query.
pub async fn by_state(mut db: impl Read) -> Result<StateCounts, StoreError> {
    let count = |table: &CountedTable| {
        let name = table.name();
        format!("SELECT '{name}', state, COUNT(*) FROM {name} GROUP BY state")
    };
    let sql = CountedTable::ALL.iter().map(count).collect::<Vec<_>>().join(" UNION ALL ");
    let rows: Vec<(String, String, i64)> = db.fetch(&sql, &[]).await?;
    let mut counts = StateCounts::new();
    for (name, state, count) in rows {
        if let Some(table) = CountedTable::ALL.iter().find(|table| table.name() == name) {
            counts.entry(*table).or_default().push((state, count));
        }
    }
    Ok(counts)
}

/// Returns the age of the oldest operation in each state that is not final, in seconds. Operations that are scheduled for
/// later do not count.
pub async fn operation_ages(mut db: impl Read) -> Result<Vec<(String, f64)>, StoreError> {
    let sql = format!(
        "SELECT state, MAX({NOW} - created) FROM operations WHERE state = 'executing' \
         OR (state = 'queued' AND run_after <= {NOW} + {MAX_RETRY_DELAY}) GROUP BY state"
    );
    db.fetch(&sql, &[]).await
}

/// Returns the number of running instances by the state of their agent; empty for guests without one.
pub async fn agents_by_state(mut db: impl Read) -> Result<Vec<(String, i64)>, StoreError> {
    let sql = "SELECT COALESCE(agent_state, ''), COUNT(*) FROM instances WHERE state = 'created' GROUP BY agent_state";
    db.fetch(sql, &[]).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::{on_both_engines, operation};
    use crate::{Store, operations, transaction};

    on_both_engines! {
        async fn counts_rows_of_every_table_by_state(store: Arc<Store>) {
            let count = async |table: CountedTable| {
                let counts = by_state(&*store).await.unwrap();
                counts.get(&table).into_iter().flatten().map(|(_, count)| count).sum::<i64>()
            };
            let before = (count(CountedTable::Operations).await, count(CountedTable::Nodes).await);
            for _ in 0..2 {
                let new = operation("ci", vec![]);
                transaction!(store, |tx| { Ok(operations::insert(tx, &new).await?) }).unwrap();
            }
            let after = (count(CountedTable::Operations).await, count(CountedTable::Nodes).await);
            assert_eq!(after, (before.0 + 2, before.1));
            let ages = operation_ages(&*store).await.unwrap();
            let queued = ages.iter().find(|(state, _)| state == "queued").map(|(_, age)| *age);
            assert!(queued.is_some_and(|age| (-1.0..86_400.0).contains(&age)), "{ages:?}");
            agents_by_state(&*store).await.unwrap();
        }
    }
}
