//! Identification of guest boots.

/// How far the reported boot time of one boot may drift, in seconds: guests adjust their clocks while they run.
const BOOT_TIME_TOLERANCE: f64 = 60.0;

/// Tracks the boots of a guest by the boot ID that its agent reports, or else by its boot time.
#[derive(Debug, Default)]
pub(super) struct BootTracker {
    boot_id: Option<String>,
    /// The boot time that `boot_id` is derived from, unless the agent reported a boot ID.
    boot_time: Option<f64>,
    /// The number of boots whose time equalled the previous boot's.
    duplicates: u64,
    ended: bool,
}

impl BootTracker {
    /// Records that the current boot ended: the next observation belongs to a new one.
    pub(super) fn end_boot(&mut self) {
        self.ended = true;
    }

    /// Records the report of an agent and returns the boot ID. `agent_started` means that the agent has just started.
    pub(super) fn observe(
        &mut self,
        reported_id: Option<String>,
        boot_time: Option<f64>,
        agent_started: bool,
    ) -> Option<String> {
        if let Some(id) = reported_id {
            (self.boot_id, self.boot_time, self.ended) = (Some(id), None, false);
            return self.boot_id.clone();
        }
        let Some(time) = boot_time else { return self.boot_id.clone() };
        let is_close = |before: f64| (time - before).abs() <= BOOT_TIME_TOLERANCE;
        let same_boot = self.boot_time.is_some_and(is_close) && !agent_started && !self.ended;
        if !same_boot {
            let id = format!("{time:.0}");
            let duplicate =
                self.boot_id.as_ref().is_some_and(|previous| previous.split('+').next() == Some(id.as_str()));
            if duplicate {
                self.duplicates += 1;
            }
            self.boot_id = Some(if duplicate { format!("{id}+{}", self.duplicates) } else { id });
            (self.boot_time, self.ended) = (Some(time), false);
        }
        self.boot_id.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_reported_boot_ids() {
        let mut boot = BootTracker::default();
        let mut observe = |id: &str, started| boot.observe(Some(id.into()), Some(1.0), started).unwrap();
        assert_eq!(
            (observe("a", true), observe("a", false), observe("a", true)),
            ("a".into(), "a".into(), "a".into())
        );
        assert_eq!(observe("b", false), "b");
    }

    #[test]
    fn derives_boot_ids_from_boot_times() {
        let mut boot = BootTracker::default();
        assert_eq!(boot.observe(None, None, false), None);
        let first = boot.observe(None, Some(1000.0), true).unwrap();
        assert_eq!(first, "1000");
        // The guest adjusted its clock.
        assert_eq!(boot.observe(None, Some(1050.0), false).unwrap(), first);
        assert_eq!(boot.observe(None, None, false).unwrap(), first);
        assert_eq!(boot.observe(None, Some(1061.0), false).unwrap(), "1061");
        // A restarted agent has lost the commands of the previous one.
        let second = boot.observe(None, Some(1061.0), true).unwrap();
        assert_eq!(second, "1061+1");
        assert_eq!(boot.observe(None, Some(1061.0), false).unwrap(), second);
        boot.end_boot();
        let third = boot.observe(None, Some(1061.0), false).unwrap();
        assert_eq!(third, "1061+2");
        assert_eq!(boot.observe(None, Some(1061.0), false).unwrap(), third);
    }
}
