//! Interactive sessions with a pseudo-terminal in a guest, and the frames that carry one over an upgraded connection of
//! the API. See docs/decisions/0044.
//!
//! A frame is one byte for its type, the length of its payload as two bytes (big endian), and the payload:
//!
//! | type | sender | payload |
//! |---|---|---|
//! | 0 | both | bytes of the terminal; none is a keepalive |
//! | 1 | client | the new size: rows and columns, two bytes each (big endian) |
//! | 2 | server | the exit code of the command, four bytes (big endian, signed); the session has ended |
//! | 3 | server | why the session failed, as text; it has ended |

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// The protocol that a client requests with the header `Upgrade`.
pub const TERMINAL_PROTOCOL: &str = "muster-terminal";
/// The maximum size of a frame's payload.
pub const MAX_FRAME_PAYLOAD: usize = u16::MAX as usize;
/// How often each side sends a keepalive if it sends nothing else, in seconds.
pub const KEEPALIVE_INTERVAL: u64 = 20;
/// How long a side may send nothing before the other one ends the session, in seconds.
pub const SILENCE_TIMEOUT: u64 = 90;
/// The size of a terminal whose client has none.
pub const DEFAULT_TERMINAL_SIZE: TerminalSize = TerminalSize { rows: 24, columns: 80 };

const HEADER_SIZE: usize = 3;
const DATA: u8 = 0;
const RESIZE: u8 = 1;
const EXITED: u8 = 2;
const FAILED: u8 = 3;

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    pub rows: u16,
    pub columns: u16,
}

/// A command line for the shell of a guest, and the terminal that it runs in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalRequest {
    pub command_line: String,
    /// The terminal type, which programs in the guest find in `TERM`.
    pub term: String,
    pub size: TerminalSize,
}

/// One message of an interactive session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalFrame {
    Data(Bytes),
    Resize(TerminalSize),
    Exited(i32),
    Failed(String),
}

impl TerminalFrame {
    /// Returns a frame that only shows that its sender is alive.
    #[must_use]
    pub fn keepalive() -> Self {
        Self::Data(Bytes::new())
    }

    /// Appends the encoded frame to a buffer. Longer data becomes several frames, and a longer text is cut.
    pub fn encode(&self, buffer: &mut BytesMut) {
        match self {
            Self::Data(bytes) if bytes.is_empty() => put_frame(buffer, DATA, &[]),
            Self::Data(bytes) => {
                bytes.chunks(MAX_FRAME_PAYLOAD).for_each(|chunk| put_frame(buffer, DATA, chunk));
            }
            Self::Resize(size) => {
                let [a, b] = size.rows.to_be_bytes();
                let [c, d] = size.columns.to_be_bytes();
                put_frame(buffer, RESIZE, &[a, b, c, d]);
            }
            Self::Exited(code) => put_frame(buffer, EXITED, &code.to_be_bytes()),
            Self::Failed(text) => {
                put_frame(buffer, FAILED, &text.as_bytes()[..text.len().min(MAX_FRAME_PAYLOAD)]);
            }
        }
    }
}

fn put_frame(buffer: &mut BytesMut, frame_type: u8, payload: &[u8]) {
    let length = u16::try_from(payload.len()).expect("payloads are cut to MAX_FRAME_PAYLOAD");
    buffer.put_u8(frame_type);
    buffer.put_u16(length);
    buffer.put_slice(payload);
}

/// The peer sent bytes that are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent an invalid frame")]
pub struct InvalidFrame;

/// Removes the first frame from a buffer, or returns `None` if it is incomplete. A buffer whose frames are taken before more
/// is read holds at most one frame and the last read.
///
/// # Errors
/// Returns [`InvalidFrame`] if the buffer does not start with a frame.
pub fn take_frame(buffer: &mut BytesMut) -> Result<Option<TerminalFrame>, InvalidFrame> {
    let [frame_type, high, low, ..] = buffer[..] else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([high, low]));
    match frame_type {
        DATA | FAILED => {}
        RESIZE | EXITED if length == 4 => {}
        _ => return Err(InvalidFrame),
    }
    if buffer.len() < HEADER_SIZE + length {
        return Ok(None);
    }
    buffer.advance(HEADER_SIZE);
    let mut payload = buffer.split_to(length).freeze();
    Ok(Some(match frame_type {
        DATA => TerminalFrame::Data(payload),
        RESIZE => TerminalFrame::Resize(TerminalSize { rows: payload.get_u16(), columns: payload.get_u16() }),
        EXITED => TerminalFrame::Exited(payload.get_i32()),
        _ => TerminalFrame::Failed(String::from_utf8_lossy(&payload).into_owned()),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn frames(bytes: &[u8], chunk_size: usize) -> Result<Vec<TerminalFrame>, InvalidFrame> {
        let (mut buffer, mut frames) = (BytesMut::new(), vec![]);
        for chunk in bytes.chunks(chunk_size) {
            buffer.extend_from_slice(chunk);
            while let Some(frame) = take_frame(&mut buffer)? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    #[test]
    fn reads_frames_from_chunks_of_any_size() {
        let sent = [
            TerminalFrame::Data("ls\r".into()),
            TerminalFrame::keepalive(),
            TerminalFrame::Resize(TerminalSize { rows: 50, columns: 300 }),
            TerminalFrame::Exited(-1),
            TerminalFrame::Failed("the guest was reset".into()),
        ];
        let mut bytes = BytesMut::new();
        sent.iter().for_each(|frame| frame.encode(&mut bytes));
        for size in [1, 2, 5, 1000] {
            assert_eq!(frames(&bytes, size).unwrap(), sent, "{size}");
        }
        assert_eq!(&bytes[..6], b"\0\0\x03ls\r");
    }

    #[test]
    fn splits_long_data_and_rejects_unknown_frames() {
        let mut bytes = BytesMut::new();
        TerminalFrame::Data(vec![7; MAX_FRAME_PAYLOAD + 1].into()).encode(&mut bytes);
        let read = frames(&bytes, 1000).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[1], TerminalFrame::Data(vec![7].into()));
        assert_eq!(frames(&[4, 0, 0], 3), Err(InvalidFrame));
        assert_eq!(frames(&[RESIZE, 0, 3], 3), Err(InvalidFrame));
    }

    proptest! {
        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in vec(any::<u8>(), 0..300), size in 1usize..300) {
            prop_assert_eq!(frames(&bytes, size), frames(&bytes, bytes.len().max(1)));
        }
    }
}
