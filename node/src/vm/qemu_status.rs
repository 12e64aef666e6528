//! The meaning of the status that QEMU reports.

use muster_types::vm::VmPower;

#[derive(Debug, PartialEq)]
pub(super) enum QemuStatus {
    Power(VmPower),
    /// The guest powered off.
    PoweredOff,
    /// The guest cannot continue.
    Failed(&'static str),
    /// QEMU is exiting because of a signal; the exit of its process determines the outcome.
    Exiting,
}

pub(super) fn parse_status(status: &str) -> QemuStatus {
    match status {
        // A guest that is stopped because it arrives from another node, or leaves to one, is on.
        "running" | "suspended" | "inmigrate" | "finish-migrate" => QemuStatus::Power(VmPower::On),
        "shutdown" => QemuStatus::PoweredOff,
        "internal-error" => QemuStatus::Failed(
            "KVM failed to run an instruction of the guest: the host's virtualization is broken or nested",
        ),
        "guest-panicked" => QemuStatus::Failed("the guest's kernel panicked"),
        // Includes failed writes to a full disk.
        _ => QemuStatus::Power(VmPower::Paused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_qemu_status_to_power_state() {
        for on in ["running", "inmigrate", "finish-migrate"] {
            assert_eq!(parse_status(on), QemuStatus::Power(VmPower::On), "{on}");
        }
        for paused in ["paused", "prelaunch", "io-error", "postmigrate", "anything new"] {
            assert_eq!(parse_status(paused), QemuStatus::Power(VmPower::Paused), "{paused}");
        }
        assert_eq!(parse_status("shutdown"), QemuStatus::PoweredOff);
        assert!(
            matches!(parse_status("internal-error"), QemuStatus::Failed(reason) if reason.contains("KVM"))
        );
        assert!(
            matches!(parse_status("guest-panicked"), QemuStatus::Failed(reason) if reason.contains("panicked"))
        );
    }
}
