//! Gratuitous ARP: a broadcast that tells neighbours and switches where an address is now.

use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, SockaddrStorage, sendto, socket,
};

/// The length of an ARP packet for Ethernet and IPv4, with its Ethernet header.
const FRAME_LENGTH: usize = 42;

/// Announces the IPv4 addresses of devices in the network namespace of this thread. `is_announced` selects them by
/// device and address. A device that cannot send is skipped.
pub(crate) fn announce(is_announced: impl Fn(&str, Ipv4Addr) -> bool) -> nix::Result<()> {
    let entries: Vec<InterfaceAddress> = getifaddrs()?.collect();
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
    for entry in &entries {
        let device = &entry.interface_name;
        let Some(address) = entry.address.as_ref().and_then(SockaddrStorage::as_sockaddr_in) else {
            continue;
        };
        let address = address.ip();
        let link = entries
            .iter()
            .filter(|other| other.interface_name == *device)
            .find_map(|other| other.address.as_ref().and_then(SockaddrStorage::as_link_addr));
        if let Some((link, mac)) = link.and_then(|link| Some((link, LinkAddr::addr(link)?)))
            && is_announced(device, address)
            && let Err(error) = sendto(socket.as_raw_fd(), &frame(mac, address), link, MsgFlags::empty())
        {
            tracing::debug!(device, %address, %error, "failed to announce an address");
        }
    }
    Ok(())
}

/// Returns a broadcast ARP request of an address for itself.
fn frame(mac: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_LENGTH);
    frame.extend([0xff; 6]);
    frame.extend(mac);
    // The type of ARP, then Ethernet and IPv4 with the lengths of their addresses, and the operation "request".
    frame.extend([0x08, 0x06, 0x00, 0x01, 0x08, 0x00, 6, 4, 0x00, 0x01]);
    frame.extend(mac);
    frame.extend(address.octets());
    frame.extend([0; 6]);
    frame.extend(address.octets());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_asks_for_its_own_sender() {
        let frame = frame([2, 0, 0, 0, 0, 9], Ipv4Addr::new(192, 0, 2, 9));
        assert_eq!(frame.len(), FRAME_LENGTH);
        assert_eq!(frame[22..28], [2, 0, 0, 0, 0, 9]);
        assert_eq!(frame[28..32], [192, 0, 2, 9]);
        assert_eq!(frame[38..42], [192, 0, 2, 9]);
    }
}
