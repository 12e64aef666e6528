//! The slots of a lane, each of which runs one operation at a time.

use std::sync::Arc;

use muster_types::fair_share::FairShare;
use parking_lot::Mutex;

use crate::queue::Lane;

/// The slots of a lane in this daemon. Operations without a namespace share as if they had one of their own.
#[derive(Debug)]
pub(super) struct LaneSlots(Mutex<FairShare>);

/// An occupied slot, which is free once this is dropped.
#[derive(Debug)]
pub(super) struct LaneSlot {
    slots: Arc<LaneSlots>,
    namespace: String,
}

impl LaneSlots {
    pub(super) fn new(lane: Lane) -> Arc<Self> {
        Arc::new(Self(Mutex::new(FairShare::new(lane.workers().into()))))
    }

    pub(super) fn admits(&self, namespace: Option<&str>) -> bool {
        self.0.lock().admits(namespace.unwrap_or_default())
    }

    pub(super) fn occupied_by(&self, namespace: Option<&str>) -> usize {
        self.0.lock().occupied_by(namespace.unwrap_or_default())
    }

    pub(super) fn occupy(self: &Arc<Self>, namespace: Option<&str>) -> Option<LaneSlot> {
        let namespace = namespace.unwrap_or_default().to_owned();
        let occupied = self.0.lock().occupy(&namespace);
        occupied.then(|| LaneSlot { slots: Arc::clone(self), namespace })
    }
}

impl Drop for LaneSlot {
    fn drop(&mut self) {
        self.slots.0.lock().free(&self.namespace);
    }
}
