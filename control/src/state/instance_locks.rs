//! Locks that serialize work on the VM of an instance.

use std::collections::HashMap;
use std::sync::Arc;

use muster_types::ids::InstanceId;
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// The number of locks above which unused ones are removed.
const MAX_UNUSED: usize = 64;

/// One lock for each instance on the nodes of this daemon. No other daemon touches their VMs. See docs/decisions/0018.
#[derive(Debug, Default)]
pub struct InstanceLocks(Mutex<HashMap<InstanceId, Arc<tokio::sync::Mutex<()>>>>);

impl InstanceLocks {
    /// Waits for the lock of an instance and holds it until the guard is dropped.
    pub async fn lock(&self, id: InstanceId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock();
            if locks.len() > MAX_UNUSED {
                locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            }
            locks.entry(id).or_default().clone()
        };
        lock.lock_owned().await
    }
}
