//! What callers may ask an instance to be made of: disks, networks, a screen, neighbours. How such wishes are
//! read from JSON, and with which sentence what cannot be meant is refused.
//!
//! Nothing is looked up here: whether a network or an image exists is found out later.

mod affinity;
mod disk;
mod fields;
mod name;
mod network;
mod video;

#[cfg(test)]
mod tests;

pub use affinity::{Affinity, affinity, tags};
pub use disk::{Device, DiskBus, DiskSpec, DiskType, MAX_DISK_GB, Which, disks, layout};
pub use fields::Findings;
pub use name::name;
pub use network::{AddressSpec, NetworkSpec, network, networks};
pub use video::{MAX_VIDEO_MEMORY_KB, Vdi, VideoSpec, video};
