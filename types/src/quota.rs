//! Quotas: how much each namespace may use. See docs/decisions/0041.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::object::string_enum;

string_enum! {
    /// What a quota limits.
    QuotaName {
        /// Networks.
        Networks = "networks",
        /// Addresses of the floating network: of interfaces, of networks with NAT, and routed ones.
        FloatingAddresses = "floating_addresses",
        /// Addresses that are routed to networks.
        RoutedAddresses = "routed_addresses",
        /// Instances that are neither deleted nor in error.
        Instances = "instances",
        /// Virtual CPUs of instances.
        Cpus = "cpus",
        /// Memory of instances in MB.
        MemoryMb = "memory_mb",
        /// Disk space of instances in GB.
        DiskGb = "disk_gb",
        /// Keys that have not expired.
        Keys = "keys",
        /// Uploads that have not become artifacts.
        Uploads = "uploads",
        /// Bytes of these uploads.
        UploadBytes = "upload_bytes",
        /// Bytes of all versions of artifacts.
        ArtifactBytes = "artifact_bytes",
        /// Webhooks.
        Webhooks = "webhooks",
    }
}

/// The limit and the usage of one quota of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QuotaRecord {
    /// What is limited.
    pub name: QuotaName,
    /// The maximum usage; null if it is unlimited.
    pub limit: Option<i64>,
    /// The current usage. It may exceed a limit that was lowered.
    pub used: i64,
    /// Whether the limit is the default of the cluster, not one of this namespace.
    pub is_default: bool,
}

/// A limit as a number, or as a part of what the cluster has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberOrPercent {
    Number(u64),
    /// At most 100.
    Percent(u8),
}

impl NumberOrPercent {
    /// Returns the limit for a cluster that has `total`.
    #[must_use]
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Number(number) => number,
            // A part of something is never unlimited.
            Self::Percent(percent) => (total.saturating_mul(percent.into()) / 100).max(1),
        }
    }
}

impl FromStr for NumberOrPercent {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text.strip_suffix('%') {
            Some(percent) => {
                let percent = percent.parse().ok().filter(|percent| (1..=100).contains(percent));
                percent.map(Self::Percent).ok_or(())
            }
            None => text.parse().map(Self::Number).map_err(|_| ()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_numbers_and_percentages() {
        assert_eq!("50%".parse(), Ok(NumberOrPercent::Percent(50)));
        assert_eq!("0".parse(), Ok(NumberOrPercent::Number(0)));
        for text in ["", "%", "0%", "101%", "-1", "1.5", "5 %"] {
            assert_eq!(text.parse::<NumberOrPercent>(), Err(()), "{text}");
        }
    }

    #[test]
    fn percentage_is_never_unlimited() {
        assert_eq!(NumberOrPercent::Percent(50).of(253), 126);
        assert_eq!(NumberOrPercent::Percent(10).of(5), 1);
        assert_eq!(NumberOrPercent::Number(7).of(5), 7);
    }
}
