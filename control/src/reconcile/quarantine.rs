//! Frees addresses that were quarantined for `IP_DELETION_HALO_DURATION` seconds. See docs/decisions/0012.

use std::collections::HashMap;

use muster_types::Result;
use muster_types::ids::NetworkId;
use muster_types::time::now;

use crate::app::App;
use muster_store::addresses::{self, AddressPool};
use muster_store::{networks, transaction};

/// The maximum number of addresses freed in one pass.
const BATCH: i64 = 500;

/// Runs one pass. Returns the number of freed addresses.
pub async fn run(app: &App) -> Result<usize> {
    #[expect(clippy::cast_precision_loss, reason = "the halo is seconds")]
    let before = now() - app.settings.ip_deletion_halo_duration as f64;
    let quarantined = addresses::quarantined_before(&*app.store, before, BATCH).await?;
    let mut pools: HashMap<NetworkId, Option<AddressPool>> = HashMap::new();
    let mut freed = 0;
    for (network, address) in quarantined {
        let pool = match pools.get(&network) {
            Some(pool) => *pool,
            None => {
                let pool = networks::get(&*app.store, network).await?.map(|row| row.pool());
                pools.insert(network, pool);
                pool
            }
        };
        // The network was removed, and its addresses with it.
        let Some(pool) = pool else { continue };
        let free = transaction!(app.store, |tx| {
            Ok(addresses::free_quarantined(tx, pool, address, before).await?)
        })?;
        freed += usize::from(free);
    }
    Ok(freed)
}
