//! The identity of the lock file of a data directory, by which the cluster tells a restarted daemon from a copy of its
//! directory. See docs/decisions/0050.

use std::fmt;

/// Identifies a lock file among all hosts and boots. Its text is stored in the row of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockFileId {
    /// The id of the host's current boot.
    pub boot: String,
    pub device: u64,
    pub inode: u64,
    /// The machine id of the host, if the directory must stay on it.
    pub host: Option<String>,
}

impl fmt::Display for LockFileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.boot, self.device, self.inode)?;
        self.host.as_ref().map_or(Ok(()), |host| write!(f, ":{host}"))
    }
}

impl LockFileId {
    /// Returns whether the stored text is that of a file in another directory or on another host. Numbers of devices change
    /// when a host boots.
    #[must_use]
    pub fn is_elsewhere(&self, stored: &str) -> bool {
        let Some(host) = &self.host else { return false };
        let parts: Vec<&str> = stored.split(':').collect();
        match parts[..] {
            [_, _, inode, other] => other != host || inode != self.inode.to_string(),
            // Without a host, nothing is known.
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_copies_from_restarts() {
        let file = |boot: &str, inode, host: Option<&str>| LockFileId {
            boot: boot.into(),
            device: 1,
            inode,
            host: host.map(str::to_owned),
        };
        let stored = file("one", 7, Some("h1")).to_string();
        assert_eq!(stored, "one:1:7:h1");
        for (other, is_elsewhere) in [
            (file("one", 7, Some("h1")), false),
            (file("rebooted", 7, Some("h1")), false),
            (file("one", 8, Some("h1")), true),
            (file("two", 7, Some("h2")), true),
            (file("moved", 8, None), false),
        ] {
            assert_eq!(other.is_elsewhere(&stored), is_elsewhere, "{other}");
        }
        assert!(!file("one", 7, Some("h1")).is_elsewhere("one:1:8"), "its host is unknown");
    }
}
