//! Who changes the machine of an instance does so alone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use muster_types::ids::InstanceId;
use tokio::sync::OwnedMutexGuard;

/// The turns of the instances whose nodes this daemon speaks for: no other daemon touches their machines.
#[derive(Debug, Default)]
pub struct Turns(Mutex<HashMap<InstanceId, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for the turn of an instance, which ends when the guard is dropped.
    pub async fn take(&self, id: InstanceId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() > 64 {
                all.retain(|_, turn| Arc::strong_count(turn) > 1);
            }
            all.entry(id).or_default().clone()
        };
        turn.lock_owned().await
    }
}
