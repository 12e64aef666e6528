//! Tap devices, which connect guests to networks. A device exists as long as its VM has it open.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use muster_types::vm::NicPlan;
use muster_types::{Error, Result};
use nix::libc;

use crate::command::{COMMAND_TIMEOUT, Commands, Tool};
use crate::network::names::NetworkNames;

const TUN_DEVICE: &str = "/dev/net/tun";
const VHOST_DEVICE: &str = "/dev/vhost-net";

/// The open files of an interface.
#[derive(Debug)]
pub(super) struct Tap {
    pub(super) tap: File,
    /// The in-kernel virtio backend, if the host has one.
    pub(super) vhost: Option<File>,
}

impl Tap {
    /// Creates the device of an interface and attaches it to the bridge of its network. An existing device is opened
    /// unchanged.
    pub(super) fn open(nic: &NicPlan, commands: &Commands) -> Result<Self> {
        let (interface, name) = (nic.interface, nic.interface.device());
        let is_new = nix::net::if_::if_nametoindex(name.as_str()).is_err();
        let failed = |error: io::Error| {
            Error::Unavailable(format!("failed to open tap device {name} of interface {interface}: {error}"))
        };
        let tap = open_read_write(TUN_DEVICE)
            .and_then(|file| attach(&file, &name).map(|()| file))
            .map_err(failed)?;
        if is_new {
            let bridge = NetworkNames::new(nic.vxid).bridge;
            // The host must not have an address on the device, from which it could talk to the guest.
            let no_address = if Path::new("/proc/sys/net/ipv6").exists() { " addrgenmode none" } else { "" };
            let line = format!("link set dev {name} mtu {} master {bridge}{no_address} up\n", nic.mtu);
            commands.run(Tool::Ip, &["-batch", "-"], &line, COMMAND_TIMEOUT)?;
        }
        Ok(Self { tap, vhost: open_read_write(VHOST_DEVICE).ok() })
    }
}

fn open_read_write(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Attaches an open tun file to a tap device, which is created if it does not exist.
fn attach(file: &File, name: &str) -> io::Result<()> {
    // The virtio header carries offload state, such as partial checksums.
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // `struct ifreq`: a name of up to 15 bytes, then flags.
    let mut request = [0_u8; size_of::<libc::ifreq>()];
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = u16::try_from(flags).map_err(|_| io::ErrorKind::InvalidInput)?;
    request[libc::IFNAMSIZ..][..2].copy_from_slice(&flags.to_ne_bytes());
    #[expect(unsafe_code, reason = "no safe wrapper exists for TUNSETIFF")]
    // SAFETY: the buffer has the size of `struct ifreq`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, request.as_mut_ptr()) };
    nix::errno::Errno::result(result)?;
    Ok(())
}
