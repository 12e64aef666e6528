//! Whether this process can run others as other users. Root of a user namespace cannot, if only its own id is mapped there.

use std::fs;

/// The first user id of VMs; the console port is added. See docs/decisions/0020.
pub(crate) const FIRST_VM_UID: u32 = 1_900_000_000;

const UID_MAP: &str = "/proc/self/uid_map";

/// Returns whether this process can run others as other users.
pub(crate) fn can_switch() -> bool {
    nix::unistd::geteuid().is_root() && maps(&fs::read_to_string(UID_MAP).unwrap_or_default(), FIRST_VM_UID)
}

/// Returns whether a map of user ids contains an id.
fn maps(map: &str, uid: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        matches!(numbers[..], [first, _, count] if uid >= first && uid - first < count)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_ids_in_a_map() {
        let host = "         0          0 4294967295\n";
        assert!(maps(host, 0) && maps(host, FIRST_VM_UID));
        let user = "0 1000 1\n";
        assert!(maps(user, 0) && !maps(user, 1) && !maps(user, FIRST_VM_UID));
        let container = "0 1000 1\n1 100000 65536\n";
        assert!(maps(container, 65_536) && !maps(container, 65_537) && !maps("", 0));
    }
}
