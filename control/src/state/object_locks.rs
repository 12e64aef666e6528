//! Locks of objects, which serialize work on the VM of an instance, on the file of an upload, or on a record.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use muster_types::ids::{InstanceId, UploadId};
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// The number of locks above which unused ones are removed.
const MAX_UNUSED: usize = 64;

/// One lock for each instance on the nodes of this daemon. No other daemon touches their VMs. See docs/decisions/0018.
pub type InstanceLocks = ObjectLocks<InstanceId>;
/// One lock for each upload that nodes of this daemon store.
pub type UploadLocks = ObjectLocks<UploadId>;

/// One lock for each object.
#[derive(Debug)]
pub struct ObjectLocks<I>(Mutex<HashMap<I, Arc<tokio::sync::Mutex<()>>>>);

impl<I> Default for ObjectLocks<I> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<I: Eq + Hash> ObjectLocks<I> {
    /// Returns whether a task waits for the lock of an object that another one holds, for tests.
    #[must_use]
    pub fn is_awaited(&self, id: &I) -> bool {
        // One reference is that of the map, one that of the holder.
        self.0.lock().get(id).is_some_and(|lock| Arc::strong_count(lock) > 2)
    }

    /// Waits for the lock of an object and holds it until the guard is dropped.
    pub async fn lock(&self, id: I) -> OwnedMutexGuard<()> {
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
