//! The specification of a new instance: its name, disks, network interfaces, display and affinity, parsed from JSON.
//!
//! Parsing does not check whether networks and images exist.

mod affinity;
mod disk;
mod fields;
mod name;
mod network;
mod video;

#[cfg(test)]
mod tests;

pub use affinity::{Affinity, parse_affinity, parse_tags};
pub use disk::{DiskBus, DiskDevice, DiskRole, DiskSpec, DiskType, MAX_DISK_GB, layout_disks, parse_disks};
pub use fields::{ValidationFindings, ValidationMode};
pub use name::check_instance_name;
pub use network::{AddressSpec, NetworkSpec, parse_network, parse_networks};
pub use video::{MAX_VIDEO_MEMORY_KB, Vdi, VideoSpec, parse_video};
