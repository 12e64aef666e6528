//! The addresses of networks: which can be allocated, and when released ones can be allocated again. See
//! docs/decisions/0012.

use std::net::Ipv4Addr;

use muster_store::addresses::AddressPool;
use muster_store::networks::{self, NetworkRow};
use muster_store::{Read, StoreError};
use muster_types::network::FLOATING_NETWORK_ID;
use muster_types::{Error, Result};

use crate::app::App;

/// The error text when no address is free.
pub(crate) const NO_FREE_ADDRESSES: &str = "No free addresses on network";
/// The number of seconds after which a quarantined address can be reclaimed if no other address is free.
const MIN_QUARANTINE: f64 = 30.0;

/// How long released addresses stay in quarantine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AddressQuarantine {
    /// Whether released addresses are quarantined at all.
    pub(crate) enabled: bool,
    /// The number of seconds after which an address can be reclaimed if no other address is free.
    pub(crate) reclaim_after: f64,
}

pub(crate) fn quarantine(app: &App) -> AddressQuarantine {
    #[expect(clippy::cast_precision_loss, reason = "the halo is seconds")]
    let halo = app.settings.ip_deletion_halo_duration as f64;
    AddressQuarantine { enabled: halo > 0.0, reclaim_after: halo.min(MIN_QUARANTINE) }
}

/// Returns the pool of floating addresses.
pub(crate) async fn floating_pool(db: impl Read) -> Result<AddressPool, StoreError> {
    let row = networks::get(db, FLOATING_NETWORK_ID).await?;
    row.map(|row| row.pool()).ok_or_else(|| StoreError::Internal("there is no floating network".into()))
}

/// Rejects an address outside the network's block.
pub(crate) fn require_within(network: &NetworkRow, address: Ipv4Addr) -> Result<()> {
    if network.netblock.contains(address) {
        return Ok(());
    }
    Err(Error::Invalid(format!("address: {address} is outside the netblock {}", network.netblock)))
}
