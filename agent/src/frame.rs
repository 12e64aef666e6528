//! Frames: how packets are told apart on a port that may carry anything.
//!
//! `*SFv001[00000042]` and then 42 bytes of JSON. Agents of 2023 put one more asterisk before the bracket. Whatever is
//! not a frame is skipped, and a frame that announces more than is read here is skipped as well.

/// What begins a frame.
const PREAMBLE: &[u8] = b"*SFv001";
/// Digits of the length.
const DIGITS: usize = 8;
/// The longest header: preamble, an asterisk, brackets, digits.
const HEADER: usize = PREAMBLE.len() + 1 + 2 + DIGITS;
/// The longest frame that is sent by anybody who knows the other side.
pub const USUAL: usize = 256 << 10;

/// A frame of these bytes. They are fewer than 100 million.
#[must_use]
pub fn encode(body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER + body.len());
    frame.extend_from_slice(PREAMBLE);
    frame.extend_from_slice(format!("[{:0DIGITS$}]", body.len()).as_bytes());
    frame.extend_from_slice(body);
    frame
}

/// Takes bytes as they come and gives frames. It holds at most one frame of the longest kind and what was fed last.
#[derive(Debug)]
pub struct Frames {
    most: usize,
    buffer: Vec<u8>,
    /// Where in the buffer the rest begins.
    start: usize,
    /// Bytes that belonged to no frame.
    skipped: u64,
}

enum Header {
    /// There may be one once there is more.
    Unfinished,
    None,
    /// Its own length, and that of what follows.
    Found(usize, usize),
}

impl Frames {
    /// Frames of more than `most` bytes are skipped.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, buffer: Vec::new(), start: 0, skipped: 0 }
    }

    /// From now on frames of more than `most` bytes are skipped.
    pub fn set_most(&mut self, most: usize) {
        self.most = most;
    }

    /// How many bytes belonged to no frame so far.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        loop {
            let rest = &self.buffer[self.start..];
            let Some(at) = rest.iter().position(|byte| *byte == PREAMBLE[0]) else {
                let all = rest.len();
                self.skip(all);
                return None;
            };
            self.skip(at);
            let rest = &self.buffer[self.start..];
            match header(rest) {
                Header::Unfinished => return None,
                Header::Found(header, length) if length <= self.most => {
                    let body = rest.get(header..header + length)?.to_vec();
                    self.start += header + length;
                    if self.start == self.buffer.len() && self.buffer.capacity() > USUAL {
                        // One long frame does not cost memory for ever.
                        (self.buffer, self.start) = (Vec::new(), 0);
                    }
                    return Some(body);
                }
                // Not one that we read: what follows may be.
                Header::Found(..) | Header::None => self.skip(1),
            }
        }
    }

    fn skip(&mut self, count: usize) {
        self.start += count;
        self.skipped += count as u64;
    }
}

/// What the bytes begin with, of which the first is an asterisk.
fn header(bytes: &[u8]) -> Header {
    let common = bytes.len().min(PREAMBLE.len());
    if bytes[..common] != PREAMBLE[..common] {
        return Header::None;
    }
    let Some(mut rest) = bytes.get(PREAMBLE.len()..) else { return Header::Unfinished };
    if let Some((b'*', after)) = rest.split_first() {
        rest = after;
    }
    let before = bytes.len() - rest.len();
    let mut length = 0;
    for index in 0..DIGITS + 2 {
        let Some(byte) = rest.get(index) else { return Header::Unfinished };
        match (index, byte) {
            (0, b'[') => {}
            (index, b']') if index == DIGITS + 1 => {}
            (index, digit @ b'0'..=b'9') if (1..=DIGITS).contains(&index) => {
                length = length * 10 + usize::from(digit - b'0');
            }
            _ => return Header::None,
        }
    }
    Header::Found(before + DIGITS + 2, length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(frames: &mut Frames) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| frames.next_frame()).collect()
    }

    #[test]
    fn both_preambles_are_read_and_garbage_is_skipped() {
        let mut frames = Frames::new(100);
        frames.feed(b"login: *SFv0*SFv001[00000002]{}*SFv001*[00000003]{ }*SFv001[0000000x]");
        assert_eq!(all(&mut frames), [b"{}".to_vec(), b"{ }".to_vec()]);
        frames.feed(b"*SFv001[99999999]*SFv001[00000001]7");
        assert_eq!(all(&mut frames), [b"7".to_vec()]);
        assert!(frames.skipped() > 0);
    }

    proptest! {
        #[test]
        fn frames_arrive_whole_however_they_are_cut(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            noise in "[a-z\\[\\]0-9]{0,20}",
            cut in 1usize..40,
        ) {
            let mut bytes = Vec::new();
            for body in &bodies {
                bytes.extend_from_slice(noise.as_bytes());
                bytes.extend(encode(body));
            }
            let mut frames = Frames::new(200);
            let mut got = Vec::new();
            for piece in bytes.chunks(cut) {
                frames.feed(piece);
                got.extend(all(&mut frames));
            }
            prop_assert_eq!(got, bodies);
        }

        #[test]
        fn anything_can_be_fed_and_little_is_held(bytes in prop::collection::vec(any::<u8>(), 0..2000), cut in 1usize..100) {
            let mut frames = Frames::new(64);
            for piece in bytes.chunks(cut) {
                frames.feed(piece);
                while frames.next_frame().is_some() {}
                prop_assert!(frames.buffer.len() - frames.start <= HEADER + 64);
            }
        }
    }
}
