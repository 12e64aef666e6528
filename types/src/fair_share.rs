//! Shares of a limited number of slots, so that the slow work of one namespace delays only itself.
//! See docs/decisions/0042.

use std::collections::HashMap;

/// Counts the slots that each namespace occupies, and decides who may have another one.
///
/// The slots are available to everyone. While all are occupied, a namespace that has none still gets one, up to as many
/// again. So one namespace alone can use all slots, but it never keeps another one from working.
#[derive(Debug)]
pub struct FairShare {
    slots: usize,
    occupied: HashMap<String, usize>,
}

impl FairShare {
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self { slots, occupied: HashMap::new() }
    }

    /// Returns the number of slots that a namespace occupies.
    #[must_use]
    pub fn occupied_by(&self, namespace: &str) -> usize {
        self.occupied.get(namespace).copied().unwrap_or(0)
    }

    /// Returns whether a namespace may occupy another slot.
    #[must_use]
    pub fn admits(&self, namespace: &str) -> bool {
        let total: usize = self.occupied.values().sum();
        total < self.slots || (self.occupied_by(namespace) == 0 && total < 2 * self.slots)
    }

    /// Occupies a slot if the namespace may. Returns whether it did.
    pub fn occupy(&mut self, namespace: &str) -> bool {
        if !self.admits(namespace) {
            return false;
        }
        *self.occupied.entry(namespace.to_owned()).or_default() += 1;
        true
    }

    /// Frees a slot of a namespace.
    pub fn free(&mut self, namespace: &str) {
        if let Some(count) = self.occupied.get_mut(namespace) {
            *count -= 1;
            if *count == 0 {
                self.occupied.remove(namespace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_namespace_uses_all_slots_and_others_still_get_one() {
        let mut share = FairShare::new(2);
        assert!(share.occupy("slow") && share.occupy("slow"));
        assert!(!share.occupy("slow"));
        assert!(share.occupy("a"));
        assert!(!share.occupy("a"), "only one while all slots are occupied");
        assert!(share.occupy("b"));
        assert!(!share.occupy("c"), "the number of additional slots is limited");
        share.free("slow");
        assert!(!share.occupy("slow"), "others occupy its slot");
        assert!(share.occupy("c"));
        for namespace in ["slow", "a", "b", "c"] {
            share.free(namespace);
        }
        assert!(share.occupied.is_empty());
    }
}
