//! The vsock device of a VM, over which an agent that listens on vsock is reached.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Once;

use muster_types::instance::SideChannel;
use uuid::Uuid;

const VSOCK_DEVICE: &str = "/dev/vhost-vsock";

/// The CIDs of guests. Lower ones are reserved for hosts, and the highest is the wildcard.
const GUEST_CIDS: Range<u32> = 3..u32::MAX;

/// An open vhost-vsock device and the CID for the guest.
#[derive(Debug)]
pub(super) struct Vsock {
    pub(super) file: File,
    pub(super) cid: u32,
}

impl Vsock {
    /// Opens a device with a random CID that is not in `used`, or returns `None` if the host has no vsock. If another
    /// process on the host has the same CID, QEMU fails to start, and the next attempt chooses another one.
    pub(super) fn open(used: &BTreeSet<u32>) -> Option<Self> {
        static WARNED: Once = Once::new();
        match File::options().read(true).write(true).open(VSOCK_DEVICE) {
            Ok(file) => Some(Self { file, cid: choose_cid(used, random_cid) }),
            Err(error) => {
                WARNED.call_once(|| {
                    tracing::warn!(%error, device = VSOCK_DEVICE, "host has no vsock: VMs with side channel sf-agent2 get sf-agent instead");
                });
                None
            }
        }
    }
}

/// Returns the side channels that a VM gets: without vsock, a serial port replaces it.
pub(super) fn available_side_channels(requested: &[SideChannel], has_vsock: bool) -> Vec<SideChannel> {
    let available = |channel: &SideChannel| match channel {
        SideChannel::Agent2 if !has_vsock => SideChannel::Agent,
        channel => *channel,
    };
    let channels: BTreeSet<SideChannel> = requested.iter().map(available).collect();
    channels.into_iter().collect()
}

fn random_cid() -> u32 {
    Uuid::new_v4().as_fields().0
}

fn choose_cid(used: &BTreeSet<u32>, mut random: impl FnMut() -> u32) -> u32 {
    loop {
        let cid = random();
        if GUEST_CIDS.contains(&cid) && !used.contains(&cid) {
            return cid;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chooses_unused_guest_cid() {
        let mut cids = [0, 1, 2, u32::MAX, 7, 9, 3].into_iter();
        assert_eq!(choose_cid(&BTreeSet::from([7]), || cids.next().unwrap()), 9);
        assert_eq!(choose_cid(&BTreeSet::from([7]), || cids.next().unwrap()), 3);
    }

    #[test]
    fn serial_port_replaces_unavailable_vsock() {
        use SideChannel::{Agent, Agent2};
        assert_eq!(available_side_channels(&[Agent2], true), [Agent2]);
        assert_eq!(available_side_channels(&[Agent2, Agent], true), [Agent, Agent2]);
        assert_eq!(available_side_channels(&[Agent2], false), [Agent]);
        assert_eq!(available_side_channels(&[Agent, Agent2], false), [Agent]);
        assert_eq!(available_side_channels(&[], true), []);
    }

    #[test]
    fn cids_are_random() {
        let cids: BTreeSet<u32> = (0..10).map(|_| random_cid()).collect();
        assert!(cids.len() > 5, "{cids:?}");
    }
}
