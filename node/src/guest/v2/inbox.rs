//! Takes what a guest sends apart. Nothing is trusted: neither lengths nor what they are lengths of.

use std::{fmt, io};

use bytes::{Buf, BytesMut};
use prost::Message;

use super::message::Reply;

/// The field of an envelope that everything is in.
const ITEMS: u64 = 1;

/// How many bytes a number takes up, at most.
const NUMBER: usize = 10;

/// How many bytes of fields that nobody knows are passed over.
const STRANGE: usize = 1 << 20;

/// What came and was not taken yet.
#[derive(Debug)]
pub(super) struct Inbox {
    bytes: BytesMut,
    /// The longest item.
    most: usize,
    /// How many bytes are still to be passed over.
    passing: usize,
    strange: usize,
}

/// Why nothing more can be read from a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// The agent closed the connection.
    Ended,
    Broken(String),
    /// It sent more at once than it may.
    TooLong(usize),
    /// It sent what is not of its protocol.
    Garbage,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("the guest's agent closed the connection"),
            Self::Broken(why) => write!(f, "the connection to the guest's agent broke: {why}"),
            Self::TooLong(most) => write!(f, "the guest's agent sent more than {most} bytes at once"),
            Self::Garbage => f.write_str("the guest's agent sent what is not of its protocol"),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

impl Inbox {
    pub(super) fn new(most: usize) -> Self {
        Self { bytes: BytesMut::new(), most, passing: 0, strange: 0 }
    }

    /// Where what comes is put. It stays small for as long as everything is taken that is there before more is read.
    pub(super) fn room(&mut self, size: usize) -> &mut BytesMut {
        self.bytes.reserve(size);
        &mut self.bytes
    }

    /// The next reply, if all of it is there.
    pub(super) fn next(&mut self) -> Result<Option<Reply>, Fault> {
        loop {
            let passed = self.passing.min(self.bytes.len());
            self.bytes.advance(passed);
            self.passing -= passed;
            if self.passing > 0 {
                return Ok(None);
            }
            let Some((key, key_size)) = number(&self.bytes)? else { return Ok(None) };
            let rest = &self.bytes[key_size..];
            let (field, kind) = (key >> 3, key & 7);
            // How many bytes it has after the key, and how many of them come first and tell that.
            let (size, head) = match kind {
                0 => match number(rest)? {
                    Some((_, size)) => (size, 0),
                    None => return Ok(None),
                },
                1 => (8, 0),
                2 => match number(rest)? {
                    Some((size, head)) => (usize::try_from(size).unwrap_or(usize::MAX), head),
                    None => return Ok(None),
                },
                5 => (4, 0),
                _ => return Err(Fault::Garbage),
            };
            if size > self.most {
                return Err(Fault::TooLong(self.most));
            }
            if (field, kind) != (ITEMS, 2) {
                // Another version may have more to say.
                self.passing = key_size + head + size;
                self.strange += self.passing;
                if field == 0 || self.strange > STRANGE {
                    return Err(Fault::Garbage);
                }
                continue;
            }
            if rest.len() < head + size {
                return Ok(None);
            }
            self.bytes.advance(key_size + head);
            let item = self.bytes.split_to(size).freeze();
            return Reply::decode(item).map(Some).map_err(|_| Fault::Garbage);
        }
    }
}

/// A number at the beginning of these bytes and how many of them it takes up, if all of it is there.
fn number(bytes: &[u8]) -> Result<Option<(u64, usize)>, Fault> {
    let mut value = 0u64;
    for (place, byte) in bytes.iter().enumerate().take(NUMBER) {
        let part = u64::from(byte & 0x7f);
        value |= part << (7 * place);
        if byte & 0x80 == 0 {
            let fits = place < NUMBER - 1 || part < 2;
            return if fits { Ok(Some((value, place + 1))) } else { Err(Fault::Garbage) };
        }
    }
    if bytes.len() < NUMBER { Ok(None) } else { Err(Fault::Garbage) }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::message::{self, Answer};
    use super::*;

    const MOST: usize = 1000;

    fn reply(id: &str, answer: Answer) -> Reply {
        Reply { id: id.to_owned().into(), answer: Some(answer) }
    }

    /// What is read from these bytes when they come in pieces of that size.
    fn read(bytes: &[u8], size: usize) -> (Vec<Reply>, Option<Fault>) {
        let (mut inbox, mut found) = (Inbox::new(MOST), Vec::new());
        for piece in bytes.chunks(size) {
            inbox.room(size).extend_from_slice(piece);
            loop {
                match inbox.next() {
                    Ok(Some(reply)) => found.push(reply),
                    Ok(None) => break,
                    Err(fault) => return (found, Some(fault)),
                }
            }
            assert!(inbox.bytes.len() <= MOST + 2 * NUMBER, "{} bytes are kept", inbox.bytes.len());
        }
        (found, None)
    }

    #[test]
    fn envelopes_are_told_apart_however_they_arrive() {
        let sent = [
            reply("1", Answer::Ping("".into())),
            reply("2", Answer::Executed(vec![7; 900].into())),
            Reply::default(),
            reply("3", Answer::Stat("x".into())),
        ];
        let mut bytes = BytesMut::new();
        for (number, reply) in sent.iter().enumerate() {
            message::write(reply, &mut bytes).unwrap();
            if number == 1 {
                // Fields of another version: a number, 8 bytes, 5 bytes with their length, 4 bytes.
                bytes.extend_from_slice(&[0x10, 0xff, 0x01, 0x19, 1, 2, 3, 4, 5, 6, 7, 8]);
                bytes.extend_from_slice(&[0x22, 5, 1, 2, 3, 4, 5, 0x2d, 1, 2, 3, 4]);
            }
        }
        for size in [1, 2, 3, 7, 100, 10_000] {
            assert_eq!(read(&bytes, size), (sent.to_vec(), None), "in pieces of {size}");
        }
    }

    #[test]
    fn what_cannot_be_is_noticed() {
        for (bytes, expected) in [
            (vec![0x0a, 0xe9, 0x07], Fault::TooLong(MOST)),
            (vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Fault::TooLong(MOST)),
            (vec![0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Fault::TooLong(MOST)),
            (vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02], Fault::Garbage),
            (vec![0xff; 10], Fault::Garbage),
            (vec![0x0b], Fault::Garbage),
            (vec![0x02, 0x00], Fault::Garbage),
            (vec![0x0a, 0x01, 0xff], Fault::Garbage),
        ] {
            assert_eq!(read(&bytes, 1).1, Some(expected.clone()), "{bytes:?}");
            assert_eq!(read(&bytes, 100).1, Some(expected), "{bytes:?}");
        }
        // What nobody knows may be there, but not without end.
        let strange: Vec<u8> = [0x15, 0, 0, 0, 0].repeat(STRANGE / 5 + 1);
        assert_eq!(read(&strange, 1000).1, Some(Fault::Garbage));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_in_the_same_way_however_they_arrive(
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
        fn what_was_written_is_read(ids in vec("[a-z0-9]{0,20}", 0..20), size in 1usize..300) {
            let sent: Vec<Reply> = ids.iter().map(|id| reply(id, Answer::FileChunk(id.clone().into()))).collect();
            let mut bytes = BytesMut::new();
            for reply in &sent {
                message::write(reply, &mut bytes).unwrap();
            }
            prop_assert_eq!(read(&bytes, size), (sent, None));
        }
    }
}
