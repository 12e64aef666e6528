//! Makes the devices that connect guests to networks. Each goes with the machine that holds it open.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use muster_types::vm::NicPlan;
use muster_types::{Error, Result};
use nix::libc;

use crate::command::{Commands, QUICK, Tool};
use crate::network::names::NetworkNames;

const TUN: &str = "/dev/net/tun";
const VHOST: &str = "/dev/vhost-net";

/// An interface's open files.
#[derive(Debug)]
pub(super) struct Tap {
    pub(super) tap: File,
    /// The kernel's own end of virtio, where it has one.
    pub(super) vhost: Option<File>,
}

impl Tap {
    /// Makes the device of an interface and connects it to its network. One that somebody made before is taken as it
    /// is.
    pub(super) fn open(nic: &NicPlan, commands: &Commands) -> Result<Self> {
        let (interface, name) = (nic.interface, nic.interface.device());
        let is_new = nix::net::if_::if_nametoindex(name.as_str()).is_err();
        let failed = |error: io::Error| {
            Error::Unavailable(format!(
                "the device {name} of interface {interface} cannot be opened: {error}"
            ))
        };
        let tap = read_and_write(TUN).and_then(|file| attach(&file, &name).map(|()| file)).map_err(failed)?;
        if is_new {
            let bridge = NetworkNames::new(nic.vxid).bridge;
            // What is said to the guest is said by others; the device itself has nothing to say.
            let quiet = if Path::new("/proc/sys/net/ipv6").exists() { " addrgenmode none" } else { "" };
            let line = format!("link set dev {name} mtu {} master {bridge}{quiet} up\n", nic.mtu);
            commands.run(Tool::Ip, &["-batch", "-"], &line, QUICK)?;
        }
        Ok(Self { tap, vhost: read_and_write(VHOST).ok() })
    }
}

fn read_and_write(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Makes an open file the other end of a device.
fn attach(file: &File, name: &str) -> io::Result<()> {
    // Packets come with what the kernel knows of them, so that the guest need not find it out again.
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // The request as the kernel knows it: a name of up to 15 bytes, then flags.
    let mut request = [0_u8; size_of::<libc::ifreq>()];
    let longest = libc::IFNAMSIZ - 1;
    if name.len() > longest {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = u16::try_from(flags).map_err(|_| io::ErrorKind::InvalidInput)?;
    request[libc::IFNAMSIZ..][..2].copy_from_slice(&flags.to_ne_bytes());
    #[expect(unsafe_code, reason = "there is no other way to open a tap device")]
    // SAFETY: the request is as long as the kernel's own structure.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, request.as_mut_ptr()) };
    nix::errno::Errno::result(result)?;
    Ok(())
}
