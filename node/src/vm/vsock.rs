//! The virtual socket of a machine, over which an agent is reached that listens there.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Once;

use muster_types::instance::SideChannel;
use uuid::Uuid;

const DEVICE: &str = "/dev/vhost-vsock";

/// The numbers that guests may have. Those below are of hosts, and the last one means any.
const NUMBERS: Range<u32> = 3..u32::MAX;

/// What QEMU needs for it.
#[derive(Debug)]
pub(super) struct Vsock {
    pub(super) file: File,
    /// By which the guest is reached.
    pub(super) number: u32,
}

impl Vsock {
    /// One for a machine; nothing if this host has none. Should somebody else on this host have the same number, QEMU
    /// does not start, and the next attempt has another one.
    pub(super) fn open(taken: &BTreeSet<u32>) -> Option<Self> {
        static TOLD: Once = Once::new();
        match File::options().read(true).write(true).open(DEVICE) {
            Ok(file) => Some(Self { file, number: choose(taken, random) }),
            Err(error) => {
                TOLD.call_once(|| {
                    tracing::warn!(%error, device = DEVICE, "no virtual sockets here: machines with sf-agent2 get a port sf-agent");
                });
                None
            }
        }
    }
}

/// The ways for an agent that a machine gets: without a virtual socket, a port in its place.
pub(super) fn ways(wanted: &[SideChannel], has_vsock: bool) -> Vec<SideChannel> {
    let way = |channel: &SideChannel| match channel {
        SideChannel::Agent2 if !has_vsock => SideChannel::Agent,
        channel => *channel,
    };
    let ways: BTreeSet<SideChannel> = wanted.iter().map(way).collect();
    ways.into_iter().collect()
}

fn random() -> u32 {
    Uuid::new_v4().as_fields().0
}

fn choose(taken: &BTreeSet<u32>, mut random: impl FnMut() -> u32) -> u32 {
    loop {
        let number = random();
        if NUMBERS.contains(&number) && !taken.contains(&number) {
            return number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_that_a_guest_may_have_and_nobody_has() {
        let mut numbers = [0, 1, 2, u32::MAX, 7, 9, 3].into_iter();
        assert_eq!(choose(&BTreeSet::from([7]), || numbers.next().unwrap()), 9);
        assert_eq!(choose(&BTreeSet::from([7]), || numbers.next().unwrap()), 3);
    }

    #[test]
    fn a_machine_without_a_virtual_socket_gets_a_port() {
        use SideChannel::{Agent, Agent2};
        assert_eq!(ways(&[Agent2], true), [Agent2]);
        assert_eq!(ways(&[Agent2, Agent], true), [Agent, Agent2]);
        assert_eq!(ways(&[Agent2], false), [Agent]);
        assert_eq!(ways(&[Agent, Agent2], false), [Agent]);
        assert_eq!(ways(&[], true), []);
    }

    #[test]
    fn machines_have_different_numbers() {
        let numbers: BTreeSet<u32> = (0..10).map(|_| random()).collect();
        assert!(numbers.len() > 5, "{numbers:?}");
    }
}
