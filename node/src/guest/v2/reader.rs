//! Splits the byte stream from a guest into replies. Lengths and contents are untrusted.

use std::{fmt, io};

use bytes::{Buf, BytesMut};
use prost::Message;

use super::message::Reply;

/// The field number of the envelope's list.
const ITEMS_FIELD: u64 = 1;

/// The maximum length of an encoded integer.
const MAX_VARINT_LEN: usize = 10;

/// The maximum number of bytes of unknown fields.
const MAX_UNKNOWN_BYTES: usize = 1 << 20;

/// The wire types of protocol buffers.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH_DELIMITED: u64 = 2;
const FIXED32: u64 = 5;

#[derive(Debug)]
pub(super) struct ReplyReader {
    bytes: BytesMut,
    max_reply: usize,
    /// The number of bytes to skip next.
    skip: usize,
    unknown_bytes: usize,
}

/// Why nothing more can be received over a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ConnectionError {
    /// The agent closed the connection.
    Closed,
    Io(String),
    /// A reply exceeds the given maximum size.
    ReplyTooLong(usize),
    /// The agent violated the protocol.
    InvalidData,
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the guest's agent closed the connection"),
            Self::Io(error) => write!(f, "the connection to the guest's agent broke: {error}"),
            Self::ReplyTooLong(max) => write!(f, "the guest's agent sent a reply of more than {max} bytes"),
            Self::InvalidData => f.write_str("the guest's agent sent invalid data"),
        }
    }
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Io(error.to_string())
    }
}

impl ReplyReader {
    pub(super) fn new(max_reply: usize) -> Self {
        Self { bytes: BytesMut::new(), max_reply, skip: 0, unknown_bytes: 0 }
    }

    /// Returns the buffer to read into. It stays small if all complete replies are taken before more is read.
    pub(super) fn buffer(&mut self, size: usize) -> &mut BytesMut {
        self.bytes.reserve(size);
        &mut self.bytes
    }

    /// Takes the next reply, or returns `None` if it is incomplete.
    pub(super) fn next(&mut self) -> Result<Option<Reply>, ConnectionError> {
        loop {
            let skipped = self.skip.min(self.bytes.len());
            self.bytes.advance(skipped);
            self.skip -= skipped;
            if self.skip > 0 {
                return Ok(None);
            }
            let Some((key, key_len)) = varint(&self.bytes)? else { return Ok(None) };
            let rest = &self.bytes[key_len..];
            let (field, wire_type) = (key >> 3, key & 7);
            // The size of the value, and the size of its length prefix.
            let (size, prefix_len) = match wire_type {
                VARINT => match varint(rest)? {
                    Some((_, len)) => (len as u64, 0),
                    None => return Ok(None),
                },
                FIXED64 => (8, 0),
                LENGTH_DELIMITED => match varint(rest)? {
                    Some(prefix) => prefix,
                    None => return Ok(None),
                },
                FIXED32 => (4, 0),
                _ => return Err(ConnectionError::InvalidData),
            };
            let size = usize::try_from(size).ok().filter(|size| *size <= self.max_reply);
            let size = size.ok_or(ConnectionError::ReplyTooLong(self.max_reply))?;
            if (field, wire_type) != (ITEMS_FIELD, LENGTH_DELIMITED) {
                // A newer version of the protocol may have more fields.
                self.skip = key_len + prefix_len + size;
                self.unknown_bytes += self.skip;
                if field == 0 || self.unknown_bytes > MAX_UNKNOWN_BYTES {
                    return Err(ConnectionError::InvalidData);
                }
                continue;
            }
            if rest.len() < prefix_len + size {
                return Ok(None);
            }
            self.bytes.advance(key_len + prefix_len);
            let item = self.bytes.split_to(size).freeze();
            return Reply::decode(item).map(Some).map_err(|_| ConnectionError::InvalidData);
        }
    }
}

/// Decodes the integer at the start of `bytes`. Returns it with its encoded length, or `None` if it is incomplete.
fn varint(bytes: &[u8]) -> Result<Option<(u64, usize)>, ConnectionError> {
    let mut value = 0u64;
    for (index, byte) in bytes.iter().enumerate().take(MAX_VARINT_LEN) {
        let part = u64::from(byte & 0x7f);
        value |= part << (7 * index);
        if byte & 0x80 == 0 {
            let fits = index < MAX_VARINT_LEN - 1 || part < 2;
            return if fits { Ok(Some((value, index + 1))) } else { Err(ConnectionError::InvalidData) };
        }
    }
    if bytes.len() < MAX_VARINT_LEN { Ok(None) } else { Err(ConnectionError::InvalidData) }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::message::{self, ReplyBody};
    use super::*;

    const MAX_REPLY: usize = 1000;

    fn reply(id: &str, body: ReplyBody) -> Reply {
        Reply { id: id.to_owned().into(), body: Some(body) }
    }

    /// Reads bytes that arrive in chunks of the given size.
    fn read(bytes: &[u8], size: usize) -> (Vec<Reply>, Option<ConnectionError>) {
        let (mut reader, mut replies) = (ReplyReader::new(MAX_REPLY), Vec::new());
        for chunk in bytes.chunks(size) {
            reader.buffer(size).extend_from_slice(chunk);
            loop {
                match reader.next() {
                    Ok(Some(reply)) => replies.push(reply),
                    Ok(None) => break,
                    Err(error) => return (replies, Some(error)),
                }
            }
            assert!(
                reader.bytes.len() <= MAX_REPLY + 2 * MAX_VARINT_LEN,
                "{} bytes are buffered",
                reader.bytes.len()
            );
        }
        (replies, None)
    }

    #[test]
    fn reads_replies_from_chunks_of_any_size() {
        let sent = [
            reply("1", ReplyBody::Ping("".into())),
            reply("2", ReplyBody::Execute(vec![7; 900].into())),
            Reply::default(),
            reply("3", ReplyBody::Stat("x".into())),
        ];
        let mut bytes = BytesMut::new();
        for (number, reply) in sent.iter().enumerate() {
            message::write(reply, &mut bytes).unwrap();
            if number == 1 {
                // Unknown fields: a varint, 8 bytes, 5 bytes with a length, 4 bytes.
                bytes.extend_from_slice(&[0x10, 0xff, 0x01, 0x19, 1, 2, 3, 4, 5, 6, 7, 8]);
                bytes.extend_from_slice(&[0x22, 5, 1, 2, 3, 4, 5, 0x2d, 1, 2, 3, 4]);
            }
        }
        for size in [1, 2, 3, 7, 100, 10_000] {
            assert_eq!(read(&bytes, size), (sent.to_vec(), None), "in chunks of {size}");
        }
    }

    #[test]
    fn rejects_invalid_data() {
        for (bytes, expected) in [
            (vec![0x0a, 0xe9, 0x07], ConnectionError::ReplyTooLong(MAX_REPLY)),
            (
                vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
                ConnectionError::ReplyTooLong(MAX_REPLY),
            ),
            (
                vec![0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
                ConnectionError::ReplyTooLong(MAX_REPLY),
            ),
            (
                vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
                ConnectionError::InvalidData,
            ),
            (vec![0xff; 10], ConnectionError::InvalidData),
            (vec![0x0b], ConnectionError::InvalidData),
            (vec![0x02, 0x00], ConnectionError::InvalidData),
            (vec![0x0a, 0x01, 0xff], ConnectionError::InvalidData),
        ] {
            assert_eq!(read(&bytes, 1).1, Some(expected.clone()), "{bytes:?}");
            assert_eq!(read(&bytes, 100).1, Some(expected), "{bytes:?}");
        }
        // Unknown fields are limited.
        let unknown: Vec<u8> = [0x15, 0, 0, 0, 0].repeat(MAX_UNKNOWN_BYTES / 5 + 1);
        assert_eq!(read(&unknown, 1000).1, Some(ConnectionError::InvalidData));
    }

    proptest! {
        #[test]
        fn result_does_not_depend_on_chunk_size(
            bytes in prop_oneof![
                vec(any::<u8>(), 0..400),
                // Mostly items.
                vec(prop_oneof![Just(0x0au8), Just(2), Just(0x52), Just(0), any::<u8>()], 0..400),
            ],
            size in 1usize..300,
        ) {
            let whole = read(&bytes, bytes.len().max(1));
            prop_assert_eq!(read(&bytes, size), whole);
        }

        #[test]
        fn reads_what_was_written(ids in vec("[a-z0-9]{0,20}", 0..20), size in 1usize..300) {
            let sent: Vec<Reply> = ids.iter().map(|id| reply(id, ReplyBody::FileChunk(id.clone().into()))).collect();
            let mut bytes = BytesMut::new();
            for reply in &sent {
                message::write(reply, &mut bytes).unwrap();
            }
            prop_assert_eq!(read(&bytes, size), (sent, None));
        }
    }
}
