//! Frames: separate packets on a port that may also carry other data.
//!
//! A frame is `*SFv001[00000042]` followed by 42 bytes of JSON. Agents of 2023 put another asterisk before the bracket.
//! Bytes outside frames are skipped, and so are the headers of frames that exceed the maximum length.

/// The start of a frame.
const PREAMBLE: &[u8] = b"*SFv001";
/// The number of digits of the length.
const LENGTH_DIGITS: usize = 8;
/// The maximum size of a header: preamble, asterisk, brackets and digits.
const MAX_HEADER_SIZE: usize = PREAMBLE.len() + 1 + 2 + LENGTH_DIGITS;
/// The maximum length of a frame's body, unless both sides have agreed on another one.
pub const DEFAULT_MAX_LENGTH: usize = 256 << 10;

/// Returns a frame with this body, which must be shorter than 100 million bytes.
#[must_use]
pub fn encode(body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(MAX_HEADER_SIZE + body.len());
    frame.extend_from_slice(PREAMBLE);
    frame.extend_from_slice(format!("[{:0LENGTH_DIGITS$}]", body.len()).as_bytes());
    frame.extend_from_slice(body);
    frame
}

/// Extracts frames from a stream of bytes. It buffers at most one frame and the bytes that were fed last.
#[derive(Debug)]
pub struct FrameDecoder {
    max_length: usize,
    buffer: Vec<u8>,
    /// The offset of the first byte in the buffer that is not consumed yet.
    start: usize,
    skipped: u64,
}

enum Header {
    /// The bytes are the beginning of a header.
    Incomplete,
    Invalid,
    Complete {
        header_size: usize,
        body_length: usize,
    },
}

impl FrameDecoder {
    /// Creates a decoder that skips frames with a body of more than `max_length` bytes.
    #[must_use]
    pub fn new(max_length: usize) -> Self {
        Self { max_length, buffer: Vec::new(), start: 0, skipped: 0 }
    }

    /// Sets the maximum length for all frames that are not decoded yet.
    pub fn set_max_length(&mut self, max_length: usize) {
        self.max_length = max_length;
    }

    /// Returns how many bytes outside frames were skipped so far.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Adds received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the body of the next complete frame.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        loop {
            let remaining = &self.buffer[self.start..];
            let Some(at) = remaining.iter().position(|byte| *byte == PREAMBLE[0]) else {
                let all = remaining.len();
                self.skip(all);
                return None;
            };
            self.skip(at);
            let remaining = &self.buffer[self.start..];
            match parse_header(remaining) {
                Header::Incomplete => return None,
                Header::Complete { header_size, body_length } if body_length <= self.max_length => {
                    let end = header_size + body_length;
                    let body = remaining.get(header_size..end)?.to_vec();
                    self.start += end;
                    if self.start == self.buffer.len() && self.buffer.capacity() > DEFAULT_MAX_LENGTH {
                        // Release the memory of an exceptionally long frame.
                        (self.buffer, self.start) = (Vec::new(), 0);
                    }
                    return Some(body);
                }
                // A frame may begin at any later byte.
                Header::Complete { .. } | Header::Invalid => self.skip(1),
            }
        }
    }

    fn skip(&mut self, count: usize) {
        self.start += count;
        self.skipped += count as u64;
    }
}

/// Parses the header at the start of `bytes`, whose first byte is an asterisk.
fn parse_header(bytes: &[u8]) -> Header {
    let common = bytes.len().min(PREAMBLE.len());
    if bytes[..common] != PREAMBLE[..common] {
        return Header::Invalid;
    }
    let Some(mut rest) = bytes.get(PREAMBLE.len()..) else { return Header::Incomplete };
    if let Some((b'*', after)) = rest.split_first() {
        rest = after;
    }
    let before = bytes.len() - rest.len();
    let mut body_length = 0;
    for index in 0..LENGTH_DIGITS + 2 {
        let Some(byte) = rest.get(index) else { return Header::Incomplete };
        match (index, byte) {
            (0, b'[') => {}
            (index, b']') if index == LENGTH_DIGITS + 1 => {}
            (index, digit @ b'0'..=b'9') if (1..=LENGTH_DIGITS).contains(&index) => {
                body_length = body_length * 10 + usize::from(digit - b'0');
            }
            _ => return Header::Invalid,
        }
    }
    Header::Complete { header_size: before + LENGTH_DIGITS + 2, body_length }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_all(decoder: &mut FrameDecoder) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| decoder.next_frame()).collect()
    }

    #[test]
    fn accepts_both_preambles_and_skips_garbage() {
        let mut decoder = FrameDecoder::new(100);
        decoder.feed(b"login: *SFv0*SFv001[00000002]{}*SFv001*[00000003]{ }*SFv001[0000000x]");
        assert_eq!(decode_all(&mut decoder), [b"{}".to_vec(), b"{ }".to_vec()]);
        decoder.feed(b"*SFv001[99999999]*SFv001[00000001]7");
        assert_eq!(decode_all(&mut decoder), [b"7".to_vec()]);
        assert!(decoder.skipped() > 0);
    }

    proptest! {
        #[test]
        fn decodes_frames_regardless_of_how_they_are_split(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            noise in "[a-z\\[\\]0-9]{0,20}",
            chunk_size in 1usize..40,
        ) {
            let mut bytes = Vec::new();
            for body in &bodies {
                bytes.extend_from_slice(noise.as_bytes());
                bytes.extend(encode(body));
            }
            let mut decoder = FrameDecoder::new(200);
            let mut decoded = Vec::new();
            for chunk in bytes.chunks(chunk_size) {
                decoder.feed(chunk);
                decoded.extend(decode_all(&mut decoder));
            }
            prop_assert_eq!(decoded, bodies);
        }

        #[test]
        fn buffers_at_most_one_frame_of_arbitrary_input(bytes in prop::collection::vec(any::<u8>(), 0..2000), chunk_size in 1usize..100) {
            let mut decoder = FrameDecoder::new(64);
            for chunk in bytes.chunks(chunk_size) {
                decoder.feed(chunk);
                while decoder.next_frame().is_some() {}
                prop_assert!(decoder.buffer.len() - decoder.start <= MAX_HEADER_SIZE + 64);
            }
        }
    }
}
