//! The states of a network that operations require.

use muster_store::networks::{self, NetworkRow};
use muster_store::{Tx, TxError};
use muster_types::ids::NetworkId;
use muster_types::network::NetworkState;
use muster_types::{Error, Result};

/// The states of a network that is in use.
pub(crate) const USABLE: &[NetworkState] = &[NetworkState::Initial, NetworkState::Created];
/// The states of a network to which objects may still be attached.
pub(crate) const PRESENT: &[NetworkState] =
    &[NetworkState::Initial, NetworkState::Created, NetworkState::Error, NetworkState::DeleteWait];

/// Rejects a network that is not in one of the given states. Waiting may help.
pub(crate) fn require_state(row: &NetworkRow, states: &[NetworkState]) -> Result<()> {
    if states.contains(&row.state) { Ok(()) } else { Err(not_ready(row.id, row.state)) }
}

pub(crate) fn not_ready(id: NetworkId, state: NetworkState) -> Error {
    Error::NotReady(format!("network {id} is not ready ({state})"))
}

/// Returns the error for a network that changed since it was read.
pub(crate) async fn changed(tx: &mut Tx, id: NetworkId) -> TxError {
    match networks::get(tx, id).await {
        Ok(Some(row)) => not_ready(id, row.state).into(),
        Ok(None) => Error::not_found("network").into(),
        Err(error) => error.into(),
    }
}
