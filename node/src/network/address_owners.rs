//! The guests that hold the addresses of a network.
//!
//! When an address is taken from a guest, the router forgets the guest: dnsmasq keeps a lease for an hour and offers the
//! address to no other guest meanwhile, the ARP entry leads to the old MAC address, and connections of the old guest
//! would reach the new one. The holders are in a file, so that a restarted daemon knows the ones before.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;

use muster_types::Result;
use muster_types::address::MacAddress;
use muster_types::network::RouterPlan;
use nix::sys::socket::{setsockopt, sockopt};

use super::conntrack::Flow;
use super::dnsmasq_process;

/// The file with the holders, in the network's directory.
const HOLDERS_FILE: &str = "holders";
const DHCP_SERVER_PORT: u16 = 67;
/// The size of a DHCP message without options; some servers ignore messages that are shorter than BOOTP's 300 bytes.
const DHCP_HEADER_LEN: usize = 236;
const BOOTP_LEN: usize = 300;

/// The addresses of guests, each with the MAC address of the guest that holds it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct AddressOwners(BTreeMap<Ipv4Addr, MacAddress>);

impl AddressOwners {
    /// Returns the holders that a plan wants. Of several guests with one address only the first has a lease.
    pub(crate) fn of_plan(router: &RouterPlan) -> Self {
        let mut holders = BTreeMap::new();
        for lease in &router.leases {
            holders.entry(lease.address).or_insert(lease.mac);
        }
        Self(holders)
    }

    /// Loads the holders; `None` if they are unknown.
    pub(crate) fn load(dir: &Path) -> Option<Self> {
        let text = fs::read_to_string(dir.join(HOLDERS_FILE)).ok()?;
        let parse = |line: &str| {
            let (address, mac) = line.split_once(' ')?;
            Some((address.parse().ok()?, mac.parse().ok()?))
        };
        text.lines().map(parse).collect::<Option<_>>().map(Self)
    }

    pub(crate) fn save(&self, dir: &Path) -> Result<()> {
        let mut text = String::new();
        for (address, mac) in &self.0 {
            let _ = writeln!(text, "{address} {mac}");
        }
        dnsmasq_process::write(dir, HOLDERS_FILE, &text)
    }

    /// Removes the file of a network without a router.
    pub(crate) fn remove_file(dir: &Path) {
        let _ = fs::remove_file(dir.join(HOLDERS_FILE));
    }

    /// Returns the holders that are not in `wanted`.
    pub(crate) fn released(&self, wanted: &Self) -> Self {
        let released = self.0.iter().filter(|(address, mac)| wanted.0.get(address) != Some(mac));
        Self(released.map(|(address, mac)| (*address, *mac)).collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a connection is one of these guests'.
    pub(crate) fn has_flow(&self, flow: &Flow) -> bool {
        [flow.from, flow.to, flow.reply_from, flow.reply_to].iter().any(|end| self.0.contains_key(end))
    }

    /// Returns the commands for `ip` that delete the ARP entries of these guests.
    pub(crate) fn flush_arp_entries(&self, device: &str) -> Vec<String> {
        self.0.keys().map(|address| format!("neigh flush to {address} dev {device}")).collect()
    }

    /// Releases the leases of these guests at the DHCP server of the router, in whose namespace this thread is.
    pub(crate) fn release_leases(&self, router: Ipv4Addr, device: &str) -> io::Result<()> {
        let socket = UdpSocket::bind((router, 0))?;
        // The server must receive the messages on the device that it serves, not on the loopback device.
        setsockopt(&socket, sockopt::BindToDevice, &OsString::from(device))?;
        for (address, mac) in &self.0 {
            socket.send_to(&dhcp_release(*address, *mac, router), (router, DHCP_SERVER_PORT))?;
        }
        Ok(())
    }
}

/// Returns the message with which a guest gives up its lease (RFC 2131).
fn dhcp_release(address: Ipv4Addr, mac: MacAddress, server: Ipv4Addr) -> Vec<u8> {
    const BOOTREQUEST: u8 = 1;
    const ETHERNET: [u8; 2] = [1, 6];
    const MESSAGE_TYPE_RELEASE: [u8; 3] = [53, 1, 7];
    const SERVER_IDENTIFIER: [u8; 2] = [54, 4];
    const END: u8 = 255;
    let mut message = vec![0; DHCP_HEADER_LEN];
    message[0] = BOOTREQUEST;
    message[1..3].copy_from_slice(&ETHERNET);
    message[12..16].copy_from_slice(&address.octets());
    message[28..34].copy_from_slice(&mac.0);
    message.extend([99, 130, 83, 99]);
    message.extend(MESSAGE_TYPE_RELEASE);
    message.extend(SERVER_IDENTIFIER);
    message.extend(server.octets());
    message.push(END);
    message.resize(BOOTP_LEN, 0);
    message
}

#[cfg(test)]
mod tests {
    use super::super::fixtures;
    use super::*;

    #[test]
    fn guest_releases_its_address_when_another_guest_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut router = fixtures::router();
        let before = AddressOwners::of_plan(&router);
        assert_eq!(AddressOwners::load(dir.path()), None);
        before.save(dir.path()).unwrap();
        assert_eq!(AddressOwners::load(dir.path()), Some(before.clone()));

        router.leases[0].name = "renamed".into();
        assert!(before.released(&AddressOwners::of_plan(&router)).is_empty());
        router.leases[0].mac = "02:00:00:00:00:77".parse().unwrap();
        assert_eq!(before.released(&AddressOwners::of_plan(&router)), before);
        router.leases.clear();
        assert_eq!(before.released(&AddressOwners::of_plan(&router)), before);
    }
}
