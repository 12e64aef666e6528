//! Speaks netlink with the kernel: requests, dumps, attributes. Knows nothing of networks.
//!
//! A socket belongs to the network namespace of the thread that opened it.

use std::os::fd::{AsRawFd, OwnedFd};

use muster_types::{Error, Result};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

const HEADER: usize = 16;
const REQUEST: u16 = 0x01;
const ACKNOWLEDGE: u16 = 0x04;
const DUMP: u16 = 0x300;
/// Make it, and refuse if it exists.
const CREATE: u16 = 0x600;
const DUMP_INTERRUPTED: u16 = 0x10;
const MESSAGE_ERROR: u16 = 2;
const MESSAGE_DONE: u16 = 3;
const NESTED: u16 = 0x8000;
/// The kernel never puts more than this into one answer.
const BUFFER: usize = 64 * 1024;
/// How often a dump is begun again because the world changed under it.
const ATTEMPTS: usize = 4;

/// A conversation with the kernel.
#[derive(Debug)]
pub(crate) struct Socket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Devices, addresses, routes.
    pub(crate) fn route() -> Result<Self> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// Rule sets.
    pub(crate) fn netfilter() -> Result<Self> {
        Self::open(SockProtocol::NetlinkNetFilter)
    }

    fn open(protocol: SockProtocol) -> Result<Self> {
        let open = || -> nix::Result<OwnedFd> {
            let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
            bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
            // The kernel answers at once; this only keeps a bug from hanging a thread.
            setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(10))?;
            Ok(fd)
        };
        Ok(Self { socket: open().map_err(failed)?, sequence: 0, buffer: vec![0; BUFFER] })
    }

    /// Every object of a kind, as the payloads of its messages.
    pub(crate) fn dump(&mut self, kind: u16, request: &Request) -> Result<Vec<Vec<u8>>> {
        let mut found = Vec::new();
        for _ in 0..ATTEMPTS {
            found.clear();
            self.send(kind, REQUEST | DUMP, request).map_err(failed)?;
            let consistent = self.receive(|payload| found.push(payload.to_vec())).map_err(failed)?;
            if consistent {
                break;
            }
        }
        Ok(found)
    }

    /// One object, if it exists.
    pub(crate) fn get(&mut self, kind: u16, request: &Request) -> Result<Option<Vec<u8>>> {
        let mut found = None;
        let answer = self
            .send(kind, REQUEST | ACKNOWLEDGE, request)
            .and_then(|()| self.receive(|payload| found = Some(payload.to_vec())));
        match answer {
            Ok(_) => Ok(found),
            Err(nix::Error::ENODEV | nix::Error::ENOENT) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Changes something and waits for the word that it is done.
    pub(crate) fn change(&mut self, kind: u16, request: &Request) -> Result<()> {
        let answer =
            self.send(kind, REQUEST | ACKNOWLEDGE, request).and_then(|()| self.receive(|_| {}).map(|_| ()));
        answer.map_err(failed)
    }

    /// Makes something new; false if the kernel does not know how.
    pub(crate) fn create(&mut self, kind: u16, request: &Request) -> Result<bool> {
        let answer = self
            .send(kind, REQUEST | ACKNOWLEDGE | CREATE, request)
            .and_then(|()| self.receive(|_| {}).map(|_| ()));
        match answer {
            Ok(()) => Ok(true),
            Err(nix::Error::EOPNOTSUPP) => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    fn send(&mut self, kind: u16, flags: u16, request: &Request) -> nix::Result<()> {
        self.sequence += 1;
        let length = HEADER + request.0.len();
        let mut message = Vec::with_capacity(length);
        message.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        message.extend(&request.0);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty()).map(|_| ())
    }

    /// Reads until the answer is whole; false when the kernel says that it changed meanwhile.
    fn receive(&mut self, mut each: impl FnMut(&[u8])) -> nix::Result<bool> {
        let mut consistent = true;
        loop {
            let length = match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::empty()) {
                Ok(length) => length,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error),
            };
            let mut rest = &self.buffer[..length];
            while rest.len() >= HEADER {
                let size = number(&rest[0..4]) as usize;
                if size < HEADER || size > rest.len() {
                    return Err(nix::Error::EBADMSG);
                }
                let kind = short(&rest[4..6]);
                let flags = short(&rest[6..8]);
                let sequence = number(&rest[8..12]);
                let payload = &rest[HEADER..size];
                rest = &rest[aligned(size).min(rest.len())..];
                if sequence != self.sequence {
                    continue;
                }
                consistent &= flags & DUMP_INTERRUPTED == 0;
                match kind {
                    MESSAGE_DONE => return Ok(consistent),
                    MESSAGE_ERROR => {
                        let code = payload.get(..4).map_or(0, |code| number(code).cast_signed());
                        if code == 0 {
                            return Ok(consistent);
                        }
                        return Err(nix::Error::from_raw(-code));
                    }
                    _ => each(payload),
                }
            }
        }
    }
}

fn failed(error: nix::Error) -> Error {
    Error::Internal(format!("cannot speak with the kernel about networks: {error}"))
}

/// What follows a message's header: a fixed part, then attributes.
#[derive(Debug, Default, Clone)]
pub(crate) struct Request(Vec<u8>);

impl Request {
    pub(crate) fn new(fixed: &[u8]) -> Self {
        Self(fixed.to_vec())
    }

    pub(crate) fn with(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(aligned(self.0.len()), 0);
        self
    }

    /// Attributes within an attribute.
    pub(crate) fn with_inner(self, kind: u16, inner: &Self) -> Self {
        self.with(kind | NESTED, &inner.0)
    }

    pub(crate) fn with_text(self, kind: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        self.with(kind, &bytes)
    }
}

/// The attributes in a payload, as kind and value.
pub(crate) fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes(bytes)
}

#[derive(Debug, Clone)]
pub(crate) struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header = self.0.get(..4)?;
        let (length, kind) = (usize::from(short(&header[..2])), short(&header[2..]));
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(aligned(length)..).unwrap_or_default();
        // The two uppermost bits say how it is coded, not what it is.
        Some((kind & !(NESTED | 0x4000), value))
    }
}

/// A text attribute without its final zero.
pub(crate) fn text(value: &[u8]) -> String {
    let value = value.strip_suffix(&[0]).unwrap_or(value);
    String::from_utf8_lossy(value).into_owned()
}

pub(crate) fn number(value: &[u8]) -> u32 {
    value.get(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

pub(crate) fn short(value: &[u8]) -> u16 {
    value.get(..2).and_then(|bytes| bytes.try_into().ok()).map_or(0, u16::from_ne_bytes)
}

fn aligned(length: usize) -> usize {
    (length + 3) & !3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_back_as_they_were_written() {
        let request = Request::new(&[]).with_text(3, "eth0").with(4 | NESTED, &1500_u32.to_ne_bytes());
        let read: Vec<_> = attributes(&request.0).collect();
        assert_eq!(text(read[0].1), "eth0");
        assert_eq!((read[1].0, number(read[1].1)), (4, 1500));
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn broken_attributes_end_the_list() {
        for bytes in [&[][..], &[1], &[3, 0, 0, 0], &[255, 0, 1, 0, 7]] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
        }
    }
}
