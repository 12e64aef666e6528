//! Fuzzes frames and packets of the agent protocol: no input panics, and valid frames are decoded regardless of how
//! they are split and of other bytes between them.

#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use muster_agent::frame::{FrameDecoder, encode};
use muster_agent::mode::{FileMode, PERMISSION_BITS, Radix};
use muster_agent::packet::{self, Chunk, MAX_CHUNK_SIZE, Request};

/// The maximum frame length.
const MAX_LENGTH: usize = 1 << 10;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    /// Arbitrary bytes.
    Bytes {
        bytes: &'a [u8],
        chunk_size: u8,
    },
    /// Frames, with text between them that cannot start a frame.
    Framed {
        parts: Vec<(&'a [u8], &'a str)>,
        chunk_size: u8,
    },
    /// An arbitrary packet.
    Packet(&'a [u8]),
    /// A packet with plausible fields.
    Fields(Vec<(Word<'a>, Word<'a>)>),
    Mode {
        text: &'a str,
        mode: u32,
        is_directory: bool,
        is_octal: bool,
    },
}

#[derive(Debug, Arbitrary)]
enum Word<'a> {
    Known(u8),
    Text(&'a str),
    Number(i64),
    Null,
}

const WORDS: &[&str] = &[
    "command",
    "unique",
    "path",
    "key",
    "again",
    "name",
    "offset",
    "length",
    "window",
    "chunk",
    "encoding",
    "pieces",
    "stat_result",
    "mode",
    "user",
    "group",
    "command-line",
    "block-for-result",
    "execute",
    "put-file",
    "get-file",
    "get-file-more",
    "read-output",
    "cancel",
    "forget",
    "abandon",
    "chmod",
    "chown",
    "ping",
    "stdout",
    "base64",
    "aGk=",
];

impl Word<'_> {
    fn value(&self) -> serde_json::Value {
        match self {
            Self::Known(number) => WORDS[usize::from(*number) % WORDS.len()].into(),
            Self::Text(text) => (*text).into(),
            Self::Number(number) => (*number).into(),
            Self::Null => serde_json::Value::Null,
        }
    }
}

fuzz_target!(|input: Input| {
    match input {
        Input::Bytes { bytes, chunk_size } => {
            for body in decode(bytes, chunk_size) {
                assert!(body.len() <= MAX_LENGTH, "a frame exceeds the maximum length");
                parse(&body);
            }
        }
        Input::Framed { parts, chunk_size } => {
            let mut bytes = Vec::new();
            let mut bodies = Vec::new();
            for (body, between) in parts {
                let body = &body[..body.len().min(MAX_LENGTH)];
                bytes.extend(between.replace('*', " ").into_bytes());
                bytes.extend(encode(body));
                bodies.push(body.to_vec());
            }
            assert_eq!(decode(&bytes, chunk_size), bodies, "frames were not decoded");
        }
        Input::Packet(bytes) => parse(bytes),
        Input::Fields(fields) => {
            let name = |word: &Word| word.value().as_str().unwrap_or("command").to_owned();
            let fields = fields.iter().map(|(word, value)| (name(word), value.value())).collect();
            parse(serde_json::Value::Object(fields).to_string().as_bytes());
        }
        Input::Mode { text, mode, is_directory, is_octal } => {
            let radix = if is_octal { Radix::Octal } else { Radix::Decimal };
            if let Some(change) = FileMode::parse(text, radix) {
                let mode = change.apply(mode, is_directory);
                assert_eq!(mode & !PERMISSION_BITS, 0, "bits other than permissions");
            }
        }
    }
});

fn decode(bytes: &[u8], chunk_size: u8) -> Vec<Vec<u8>> {
    let mut decoder = FrameDecoder::new(MAX_LENGTH);
    let mut bodies = Vec::new();
    for chunk in bytes.chunks(usize::from(chunk_size).max(1)) {
        decoder.feed(chunk);
        bodies.extend(std::iter::from_fn(|| decoder.next_frame()));
    }
    let decoded: usize = bodies.iter().map(Vec::len).sum();
    assert!(decoded as u64 + decoder.skipped() <= bytes.len() as u64, "more bytes decoded than fed");
    bodies
}

/// Parses a packet and checks the limits of valid requests and the replies to invalid ones.
fn parse(body: &[u8]) {
    let (unique, request) = packet::parse(body);
    assert!(unique.is_null() || unique.is_number() || unique.as_str().is_some_and(|text| text.len() <= 256));
    match request {
        Ok(Request::Execute(execute)) => {
            assert!(
                execute.command_line.len() < packet::MAX_COMMAND_LINE && !execute.command_line.contains('\0')
            );
            assert!(execute.key.is_none_or(|key| is_directory_name(&key)));
        }
        Ok(Request::ReadOutput { key, length, .. }) => {
            assert!(is_directory_name(&key) && length <= MAX_CHUNK_SIZE)
        }
        Ok(Request::Cancel { key } | Request::Forget { key }) => assert!(is_directory_name(&key)),
        Ok(Request::PutFile(put)) => {
            assert!(!put.path.is_empty() && !put.path.contains('\0'));
            assert!(!matches!(put.chunk, Some(Chunk::Bytes(bytes)) if bytes.len() > MAX_CHUNK_SIZE));
        }
        Ok(_) | Err(None) => {}
        Err(Some(error)) => assert_eq!(error.to_reply(&unique)["unique"], unique),
    }
}

/// Returns whether a key is safe as a directory name.
fn is_directory_name(key: &str) -> bool {
    !key.is_empty() && key.len() <= 100 && !key.starts_with('.') && !key.contains('/')
}
