//! A minimal netlink client: sockets, requests, dumps and attributes. See docs/decisions/0027.
//!
//! A socket belongs to the network namespace of the thread that opened it.

use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};

use linux_raw_sys::netlink as nl;
use muster_types::{Error, Result};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

const HEADER_LEN: usize = size_of::<nl::nlmsghdr>();
const ATTRIBUTE_HEADER_LEN: usize = size_of::<nl::nlattr>();
const REQUEST: u16 = nl::NLM_F_REQUEST as u16;
const ACK: u16 = nl::NLM_F_ACK as u16;
const DUMP: u16 = nl::NLM_F_DUMP as u16;
const DUMP_INTERRUPTED: u16 = nl::NLM_F_DUMP_INTR as u16;
const CREATE_NEW: u16 = (nl::NLM_F_CREATE | nl::NLM_F_EXCL) as u16;
const ERROR: u16 = nl::NLMSG_ERROR as u16;
const DONE: u16 = nl::NLMSG_DONE as u16;
pub(crate) const NESTED: u16 = nl::NLA_F_NESTED as u16;
/// The flag bits of an attribute type, which say how the value is encoded.
const TYPE_FLAGS: u16 = NESTED | nl::NLA_F_NET_BYTEORDER as u16;
/// The kernel never puts more than this into one datagram.
const BUFFER_SIZE: usize = 64 * 1024;
/// The maximum number of attempts at a dump that the kernel reports as interrupted by a change.
const MAX_DUMP_ATTEMPTS: usize = 4;
/// The kernel answers immediately; the timeout only prevents a bug from blocking a thread indefinitely.
const RECEIVE_TIMEOUT_SECONDS: i64 = 10;

/// `struct nfgenmsg`, the fixed part of netfilter messages: family, version and resource id.
pub(crate) type NfGenMsg = [u8; 4];

/// A netlink socket.
#[derive(Debug)]
pub(crate) struct NetlinkSocket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl NetlinkSocket {
    /// Opens a socket for devices, addresses, routes and neighbours.
    pub(crate) fn route() -> Result<Self> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket for rule sets and connection tracking.
    pub(crate) fn netfilter() -> Result<Self> {
        Self::open(SockProtocol::NetlinkNetFilter)
    }

    fn open(protocol: SockProtocol) -> Result<Self> {
        let open = || -> nix::Result<OwnedFd> {
            let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
            bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
            setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(RECEIVE_TIMEOUT_SECONDS))?;
            Ok(fd)
        };
        Ok(Self { socket: open().map_err(request_failed)?, sequence: 0, buffer: vec![0; BUFFER_SIZE] })
    }

    /// Returns the payloads of all objects of a type. If every attempt was interrupted by a change, the last answer
    /// is returned: the next reconcile pass corrects what it got wrong.
    pub(crate) fn dump(&mut self, message_type: u16, request: &NetlinkRequest) -> Result<Vec<Vec<u8>>> {
        let mut payloads = Vec::new();
        for _ in 0..MAX_DUMP_ATTEMPTS {
            payloads.clear();
            self.send(message_type, REQUEST | DUMP, request).map_err(request_failed)?;
            let consistent =
                self.receive(|payload| payloads.push(payload.to_vec())).map_err(request_failed)?;
            if consistent {
                break;
            }
        }
        Ok(payloads)
    }

    /// Returns the payload of one object, or `None` if it does not exist.
    pub(crate) fn get(&mut self, message_type: u16, request: &NetlinkRequest) -> Result<Option<Vec<u8>>> {
        let mut object = None;
        let answer = self
            .send(message_type, REQUEST | ACK, request)
            .and_then(|()| self.receive(|payload| object = Some(payload.to_vec())));
        match answer {
            Ok(_) => Ok(object),
            Err(nix::Error::ENODEV | nix::Error::ENOENT) => Ok(None),
            Err(error) => Err(request_failed(error)),
        }
    }

    /// Changes an object and waits for the acknowledgement.
    pub(crate) fn change(&mut self, message_type: u16, request: &NetlinkRequest) -> Result<()> {
        let answer =
            self.send(message_type, REQUEST | ACK, request).and_then(|()| self.receive(|_| {}).map(|_| ()));
        answer.map_err(request_failed)
    }

    /// Creates an object; returns `false` if the kernel does not support it.
    pub(crate) fn create(&mut self, message_type: u16, request: &NetlinkRequest) -> Result<bool> {
        let answer = self
            .send(message_type, REQUEST | ACK | CREATE_NEW, request)
            .and_then(|()| self.receive(|_| {}).map(|_| ()));
        match answer {
            Ok(()) => Ok(true),
            Err(nix::Error::EOPNOTSUPP) => Ok(false),
            Err(error) => Err(request_failed(error)),
        }
    }

    fn send(&mut self, message_type: u16, flags: u16, request: &NetlinkRequest) -> nix::Result<()> {
        self.sequence += 1;
        let length = u32::try_from(HEADER_LEN + request.0.len()).expect("requests have a few attributes");
        let header = NetlinkRequest::new::<nl::nlmsghdr>()
            .set(offset_of!(nl::nlmsghdr, nlmsg_len), &length.to_ne_bytes())
            .set(offset_of!(nl::nlmsghdr, nlmsg_type), &message_type.to_ne_bytes())
            .set(offset_of!(nl::nlmsghdr, nlmsg_flags), &flags.to_ne_bytes())
            .set(offset_of!(nl::nlmsghdr, nlmsg_seq), &self.sequence.to_ne_bytes());
        let message = [header.0.as_slice(), &request.0].concat();
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty()).map(|_| ())
    }

    /// Receives until the answer is complete. Returns `false` if the kernel reports that the data changed meanwhile.
    fn receive(&mut self, mut each: impl FnMut(&[u8])) -> nix::Result<bool> {
        let mut consistent = true;
        loop {
            let length = match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::empty()) {
                Ok(length) => length,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error),
            };
            let mut rest = &self.buffer[..length];
            while rest.len() >= HEADER_LEN {
                let malformed = || nix::Error::EBADMSG;
                let u16_at = |offset: usize| read_u16(&rest[offset..]).ok_or_else(malformed);
                let u32_at = |offset: usize| read_u32(&rest[offset..]).ok_or_else(malformed);
                let size = u32_at(offset_of!(nl::nlmsghdr, nlmsg_len))? as usize;
                let message_type = u16_at(offset_of!(nl::nlmsghdr, nlmsg_type))?;
                let flags = u16_at(offset_of!(nl::nlmsghdr, nlmsg_flags))?;
                let sequence = u32_at(offset_of!(nl::nlmsghdr, nlmsg_seq))?;
                let payload = rest.get(HEADER_LEN..size).ok_or_else(malformed)?;
                rest = &rest[aligned(size).min(rest.len())..];
                if sequence != self.sequence {
                    continue;
                }
                consistent &= flags & DUMP_INTERRUPTED == 0;
                match message_type {
                    DONE => return Ok(consistent),
                    ERROR => match read_u32(payload).ok_or_else(malformed)?.cast_signed() {
                        0 => return Ok(consistent),
                        code => return Err(nix::Error::from_raw(-code)),
                    },
                    _ => each(payload),
                }
            }
        }
    }
}

fn request_failed(error: nix::Error) -> Error {
    Error::Internal(format!("netlink request failed: {error}"))
}

/// Returns the error for an answer of the kernel without a mandatory attribute.
pub(crate) fn malformed(what: &str) -> Error {
    Error::Internal(format!("the kernel sent a malformed netlink message about {what}"))
}

/// The body of a message: a fixed part, then attributes.
#[derive(Debug, Default, Clone)]
pub(crate) struct NetlinkRequest(Vec<u8>);

impl NetlinkRequest {
    /// Creates a request whose fixed part is a zeroed `T`.
    pub(crate) fn new<T>() -> Self {
        Self(vec![0; size_of::<T>()])
    }

    /// Creates the value of a nested attribute, which has no fixed part.
    pub(crate) fn nested() -> Self {
        Self::default()
    }

    /// Overwrites bytes of the fixed part.
    pub(crate) fn set(mut self, offset: usize, value: &[u8]) -> Self {
        self.0[offset..offset + value.len()].copy_from_slice(value);
        self
    }

    /// Appends an attribute.
    pub(crate) fn with(mut self, attribute: u16, value: &[u8]) -> Self {
        let length = u16::try_from(ATTRIBUTE_HEADER_LEN + value.len())
            .expect("values are names or copied from the kernel's attributes");
        self.0.extend(length.to_ne_bytes());
        self.0.extend(attribute.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(aligned(self.0.len()), 0);
        self
    }

    /// Appends an attribute that consists of attributes.
    pub(crate) fn with_nested(self, attribute: u16, inner: &Self) -> Self {
        self.with(attribute | NESTED, &inner.0)
    }

    /// Appends a NUL-terminated string.
    pub(crate) fn with_string(self, attribute: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        self.with(attribute, &bytes)
    }
}

/// Returns the attributes behind a fixed part of type `T`.
pub(crate) fn attributes_after<T>(payload: &[u8]) -> Attributes<'_> {
    Attributes(payload.get(size_of::<T>()..).unwrap_or_default())
}

/// Returns the attributes of a nested attribute.
pub(crate) fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes(bytes)
}

/// An iterator over attributes as type and value. A truncated attribute ends it.
#[derive(Debug, Clone)]
pub(crate) struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    /// Returns the value of the first attribute of a type.
    pub(crate) fn value(mut self, attribute: u16) -> Option<&'a [u8]> {
        self.find(|(found, _)| *found == attribute).map(|(_, value)| value)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(read_u16(self.0)?);
        let attribute = read_u16(self.0.get(offset_of!(nl::nlattr, nla_type)..)?)?;
        let value = self.0.get(ATTRIBUTE_HEADER_LEN..length)?;
        self.0 = self.0.get(aligned(length)..).unwrap_or_default();
        Some((attribute & !TYPE_FLAGS, value))
    }
}

/// Returns a string attribute without its terminating NUL.
pub(crate) fn read_string(value: &[u8]) -> String {
    let value = value.strip_suffix(&[0]).unwrap_or(value);
    String::from_utf8_lossy(value).into_owned()
}

pub(crate) fn read_u64(value: &[u8]) -> Option<u64> {
    value.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
}

pub(crate) fn read_u32(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

pub(crate) fn read_u16(value: &[u8]) -> Option<u16> {
    value.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

/// Messages and attributes begin at multiples of four bytes.
fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_the_attributes_that_it_wrote() {
        let request =
            NetlinkRequest::nested().with_string(3, "eth0").with(4 | NESTED, &1500_u32.to_ne_bytes());
        let read: Vec<_> = attributes(&request.0).collect();
        assert_eq!(read_string(read[0].1), "eth0");
        assert_eq!((read[1].0, read_u32(read[1].1)), (4, Some(1500)));
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn truncated_attributes_end_the_list() {
        for bytes in [&[][..], &[1], &[3, 0, 0, 0], &[255, 0, 1, 0, 7]] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
        }
    }
}
