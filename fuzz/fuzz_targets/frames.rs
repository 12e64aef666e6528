//! Frames and packets: whatever a host or a guest sends is skipped, refused or understood, and never panics. What was
//! framed arrives, however it is cut and whatever is between.

#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use muster_agent::frame::{Frames, encode};
use muster_agent::packet::{self, Chunk, Request};
use muster_agent::{PIECE, mode};

/// The longest frame that is read here.
const MOST: usize = 1 << 10;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    /// Anything, in parts.
    Bytes {
        bytes: &'a [u8],
        cut: u8,
    },
    /// Frames with something between that begins none.
    Framed {
        parts: Vec<(&'a [u8], &'a str)>,
        cut: u8,
    },
    /// One packet.
    Packet(&'a [u8]),
    /// A packet that is nearly right.
    Members(Vec<(Word<'a>, Word<'a>)>),
    Mode {
        words: &'a str,
        mode: u32,
        is_folder: bool,
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
        Input::Bytes { bytes, cut } => {
            for body in parsed(bytes, cut) {
                assert!(body.len() <= MOST, "a frame that is too long");
                read(&body);
            }
        }
        Input::Framed { parts, cut } => {
            let mut bytes = Vec::new();
            let mut bodies = Vec::new();
            for (body, between) in parts {
                let body = &body[..body.len().min(MOST)];
                bytes.extend(between.replace('*', " ").into_bytes());
                bytes.extend(encode(body));
                bodies.push(body.to_vec());
            }
            assert_eq!(parsed(&bytes, cut), bodies, "what was framed does not arrive");
        }
        Input::Packet(bytes) => read(bytes),
        Input::Members(members) => {
            let name = |word: &Word| word.value().as_str().unwrap_or("command").to_owned();
            let members = members.iter().map(|(word, value)| (name(word), value.value())).collect();
            read(serde_json::Value::Object(members).to_string().as_bytes());
        }
        Input::Mode { words, mode, is_folder } => {
            if let Some(mode) = mode::changed(words, mode, is_folder) {
                assert_eq!(mode & !mode::BITS, 0, "bits that are no permissions");
            }
        }
    }
});

fn parsed(bytes: &[u8], cut: u8) -> Vec<Vec<u8>> {
    let mut frames = Frames::new(MOST);
    let mut bodies = Vec::new();
    for part in bytes.chunks(usize::from(cut).max(1)) {
        frames.feed(part);
        bodies.extend(std::iter::from_fn(|| frames.next_frame()));
    }
    let whole: usize = bodies.iter().map(Vec::len).sum();
    assert!(whole as u64 + frames.skipped() <= bytes.len() as u64, "bytes out of thin air");
    bodies
}

/// What is understood is within its bounds, and what is refused can be answered.
fn read(body: &[u8]) {
    let (unique, request) = packet::read(body);
    assert!(unique.is_null() || unique.is_number() || unique.as_str().is_some_and(|text| text.len() <= 256));
    match request {
        Ok(Request::Execute(execute)) => {
            assert!(execute.line.len() < packet::LINE && !execute.line.contains('\0'));
            assert!(execute.key.is_none_or(|key| is_name(&key)));
        }
        Ok(Request::ReadOutput { key, length, .. }) => assert!(is_name(&key) && length <= PIECE),
        Ok(Request::Cancel { key } | Request::Forget { key }) => assert!(is_name(&key)),
        Ok(Request::PutFile(put)) => {
            assert!(!put.path.is_empty() && !put.path.contains('\0'));
            assert!(!matches!(put.chunk, Some(Chunk::Bytes(bytes)) if bytes.len() > PIECE));
        }
        Ok(_) | Err(None) => {}
        Err(Some(fault)) => assert_eq!(fault.reply(&unique)["unique"], unique),
    }
}

/// A key is the name of a folder beside others.
fn is_name(key: &str) -> bool {
    !key.is_empty() && key.len() <= 100 && !key.starts_with('.') && !key.contains('/')
}
