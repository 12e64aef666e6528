//! The replica that the record of an instance shows.

use muster_store::instance_replicas::ReplicaRow;
use muster_types::replica::{ReplicaRecord, ReplicaState};

use crate::app::App;

/// Returns the replica that the record of an instance shows.
pub(super) fn to_record(app: &App, mut rows: Vec<(ReplicaRow, Option<String>)>) -> Option<ReplicaRecord> {
    rows.retain(|(row, _)| row.state != ReplicaState::Deleting);
    let rank = |row: &ReplicaRow| (row.state == ReplicaState::Restoring, row.last_complete.unwrap_or(-1.0));
    rows.sort_by(|(a, _), (b, _)| rank(a).partial_cmp(&rank(b)).unwrap_or(std::cmp::Ordering::Equal));
    let (row, node) = rows.pop()?;
    let now = app.store.membership.database_time();
    #[expect(clippy::cast_possible_truncation, reason = "a number of seconds")]
    let seconds_behind = row.last_complete.map(|time| (now - time).max(0.0) as i64);
    let ReplicaRow { state, last_complete, bytes_behind, error, .. } = row;
    Some(ReplicaRecord { node, state, last_complete, seconds_behind, bytes_behind, error })
}
