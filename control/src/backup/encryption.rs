//! The encrypted container of a backup: a header, then chunks that are encrypted and authenticated one by one.
//!
//! ```text
//! magic │ length │ header (JSON): the file key, sealed for each recipient or with a passphrase │ SHA-256 of all that
//! chunks of 64 KiB and a last one, each AES-256-GCM with a counter and a flag for the last one as its nonce (STREAM)
//! ```
//!
//! The key of the chunks depends on the header, so that a changed header is noticed, too. The file key is sealed with HPKE (RFC
//! 9180) for recipients, and with a key of argon2id for a passphrase. See docs/decisions/0097.

#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Read, Write};

use argon2::{Algorithm, Argon2, Params, Version};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{digest, hmac, rand};
use muster_types::backup::{BackupPrivateKey, BackupRecipient, KEY_BYTES};
use muster_types::key::Secret;
use rustls::crypto::aws_lc_rs::hpke::DH_KEM_X25519_HKDF_SHA256_AES_256;
use rustls::crypto::hpke::{EncapsulatedSecret, Hpke, HpkePrivateKey, HpkePublicKey};
use serde::{Deserialize, Serialize};

use super::BackupError;

const MAGIC: &[u8; 16] = b"muster backup 1\n";
/// The purpose of sealed file keys.
const SEAL_INFO: &[u8] = b"muster backup file key 1";
const PAYLOAD_LABEL: &[u8] = b"muster backup payload 1";

const CHUNK_BYTES: usize = 64 << 10;
const TAG_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 32;
const MAX_HEADER_BYTES: usize = 64 << 10;
const MAX_RECIPIENTS: usize = 100;

/// The cost of a passphrase: memory in KiB, and rounds.
const COST: (u32, u32) = (64 << 10, 3);
/// The maximum cost that a header can request.
const MAX_COST: (u32, u32) = (256 << 10, 16);

static HPKE: &dyn Hpke = DH_KEM_X25519_HKDF_SHA256_AES_256;

/// Who can decrypt a new backup.
#[derive(Debug, Clone)]
pub enum Protection {
    Recipients(Vec<BackupRecipient>),
    Passphrase(Secret),
}

/// What decrypts a backup.
#[derive(Debug, Clone)]
pub enum DecryptionKey {
    PrivateKey(BackupPrivateKey),
    Passphrase(Secret),
    /// The key of one file, which its creator has.
    FileKey(FileKey),
}

/// The key of one file.
#[derive(Clone)]
pub struct FileKey([u8; KEY_BYTES]);

impl fmt::Debug for FileKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileKey(…)")
    }
}

/// Creates a private key and its recipient.
pub fn generate_key() -> Result<(BackupRecipient, BackupPrivateKey), BackupError> {
    let failed = || BackupError::Failed("failed to generate a key".into());
    let (public, private) = HPKE.generate_key_pair().map_err(|_| failed())?;
    let public = public.0.try_into().map_err(|_| failed())?;
    let private = private.secret_bytes().try_into().map_err(|_| failed())?;
    Ok((BackupRecipient(public), BackupPrivateKey(private)))
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    keys: Vec<SealedKey>,
}

/// The key of the file, encrypted.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum SealedKey {
    Hpke { encapsulated: Bytes, sealed: Bytes },
    Argon2id { salt: Bytes, memory_kib: u32, rounds: u32, sealed: Bytes },
}

/// Bytes that are hexadecimal in JSON.
#[derive(Debug)]
struct Bytes(Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        hex::decode(text).map(Self).map_err(serde::de::Error::custom)
    }
}

fn random<const N: usize>() -> Result<[u8; N], BackupError> {
    let mut bytes = [0; N];
    rand::fill(&mut bytes).map_err(|_| BackupError::Failed("no random numbers".into()))?;
    Ok(bytes)
}

fn cipher(key: &[u8]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("keys have 32 bytes"))
}

/// Derives the key that a passphrase seals with. It is used once, because the salt is random.
fn passphrase_key(passphrase: &Secret, salt: &[u8], cost: (u32, u32)) -> Result<LessSafeKey, BackupError> {
    let (memory, rounds) = cost;
    let params = Params::new(memory, rounds, 1, Some(KEY_BYTES));
    let params = params.map_err(|error| BackupError::Damaged(format!("header: {error}")))?;
    let mut key = [0; KEY_BYTES];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(passphrase.expose().as_bytes(), salt, &mut key)
        .map_err(|error| BackupError::Damaged(format!("header: {error}")))?;
    Ok(cipher(&key))
}

fn zero_nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

fn seal(file_key: &[u8; KEY_BYTES], protection: &Protection) -> Result<Vec<SealedKey>, BackupError> {
    let failed = |_| BackupError::Failed("failed to encrypt the key of the file".into());
    match protection {
        Protection::Passphrase(passphrase) => {
            let salt: [u8; 16] = random()?;
            let mut sealed = file_key.to_vec();
            passphrase_key(passphrase, &salt, COST)?
                .seal_in_place_append_tag(zero_nonce(), Aad::from(SEAL_INFO), &mut sealed)
                .map_err(|_| BackupError::Failed("failed to encrypt the key of the file".into()))?;
            let (memory_kib, rounds) = COST;
            let salt = Bytes(salt.to_vec());
            Ok(vec![SealedKey::Argon2id { salt, memory_kib, rounds, sealed: Bytes(sealed) }])
        }
        Protection::Recipients(recipients) => recipients
            .iter()
            .map(|recipient| {
                let public = HpkePublicKey(recipient.0.to_vec());
                let (encapsulated, sealed) = HPKE.seal(SEAL_INFO, &[], file_key, &public).map_err(failed)?;
                Ok(SealedKey::Hpke { encapsulated: Bytes(encapsulated.0), sealed: Bytes(sealed) })
            })
            .collect(),
    }
}

/// Decrypts the key of the file. Returns `None` if the key is not for it.
fn open(sealed: &SealedKey, key: &DecryptionKey) -> Result<Option<Vec<u8>>, BackupError> {
    match (sealed, key) {
        (SealedKey::Hpke { encapsulated, sealed }, DecryptionKey::PrivateKey(private)) => {
            let private = HpkePrivateKey::from(private.0.to_vec());
            let encapsulated = EncapsulatedSecret(encapsulated.0.clone());
            Ok(HPKE.open(&encapsulated, SEAL_INFO, &[], &sealed.0, &private).ok())
        }
        (SealedKey::Argon2id { salt, memory_kib, rounds, sealed }, DecryptionKey::Passphrase(passphrase)) => {
            if *memory_kib > MAX_COST.0 || *rounds > MAX_COST.1 || salt.0.len() > 64 {
                return Err(BackupError::Damaged("header: the cost of the passphrase is too high".into()));
            }
            let mut sealed = sealed.0.clone();
            let key = passphrase_key(passphrase, &salt.0, (*memory_kib, *rounds))?;
            let opened = key.open_in_place(zero_nonce(), Aad::from(SEAL_INFO), &mut sealed).ok();
            Ok(opened.map(|opened| opened.to_vec()))
        }
        _ => Ok(None),
    }
}

fn payload_key(file_key: &[u8], header: &[u8]) -> LessSafeKey {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, file_key));
    context.update(PAYLOAD_LABEL);
    context.update(digest::digest(&digest::SHA256, header).as_ref());
    cipher(context.sign().as_ref())
}

/// The position of a chunk, which is its nonce.
#[derive(Debug, Default)]
struct ChunkCounter(u64);

impl ChunkCounter {
    fn nonce(&mut self, is_last: bool) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[3..11].copy_from_slice(&self.0.to_be_bytes());
        nonce[11] = u8::from(is_last);
        self.0 += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Encrypts what is written to it.
pub struct EncryptedWriter<W: Write> {
    output: W,
    file_key: FileKey,
    key: LessSafeKey,
    counter: ChunkCounter,
    chunk: Vec<u8>,
}

impl<W: Write> fmt::Debug for EncryptedWriter<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EncryptedWriter")
    }
}

impl<W: Write> EncryptedWriter<W> {
    /// Writes the header.
    pub fn new(mut output: W, protection: &Protection) -> Result<Self, BackupError> {
        match protection {
            Protection::Passphrase(passphrase) if passphrase.expose().is_empty() => {
                return Err(BackupError::Failed("the passphrase is empty".into()));
            }
            Protection::Recipients(recipients) if !(1..=MAX_RECIPIENTS).contains(&recipients.len()) => {
                return Err(BackupError::Failed(format!("a backup has 1 to {MAX_RECIPIENTS} recipients")));
            }
            _ => {}
        }
        let file_key: [u8; KEY_BYTES] = random()?;
        let header = serde_json::to_vec(&Header { keys: seal(&file_key, protection)? });
        let header = header.map_err(|error| BackupError::Failed(error.to_string()))?;
        let length =
            u32::try_from(header.len()).map_err(|_| BackupError::Failed("too many recipients".into()))?;
        let start = [&MAGIC[..], &length.to_be_bytes(), &header].concat();
        output.write_all(&start)?;
        output.write_all(digest::digest(&digest::SHA256, &start).as_ref())?;
        let key = payload_key(&file_key, &start);
        let chunk = Vec::with_capacity(CHUNK_BYTES + TAG_BYTES);
        Ok(Self { output, file_key: FileKey(file_key), key, counter: ChunkCounter::default(), chunk })
    }

    /// Returns the key of the file, to verify it.
    pub fn file_key(&self) -> FileKey {
        self.file_key.clone()
    }

    fn write_chunk(&mut self, is_last: bool) -> io::Result<()> {
        let nonce = self.counter.nonce(is_last);
        self.key
            .seal_in_place_append_tag(nonce, Aad::empty(), &mut self.chunk)
            .map_err(|_| io::Error::other("failed to encrypt"))?;
        self.output.write_all(&self.chunk)?;
        self.chunk.clear();
        Ok(())
    }

    /// Writes the last chunk, and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.write_chunk(true)?;
        self.output.flush()?;
        Ok(self.output)
    }
}

impl<W: Write> Write for EncryptedWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // Only if more data follows, because the last chunk is marked.
        if self.chunk.len() == CHUNK_BYTES {
            self.write_chunk(false)?;
        }
        let count = data.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&data[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Decrypts what is read from it. Returns nothing that was not authenticated.
pub(super) struct EncryptedReader<R: Read> {
    input: R,
    key: LessSafeKey,
    counter: ChunkCounter,
    /// The chunk that is being read, decrypted, and the position in it.
    chunk: Vec<u8>,
    position: usize,
    /// The first byte of the next chunk, if there is one.
    next: Option<u8>,
    is_last: bool,
}

impl<R: Read> fmt::Debug for EncryptedReader<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EncryptedReader")
    }
}

impl<R: Read> EncryptedReader<R> {
    /// Reads the header and decrypts the key of the file.
    pub(super) fn new(mut input: R, key: &DecryptionKey) -> Result<Self, BackupError> {
        let mut start = read_at_most(&mut input, MAGIC.len() + 4)?;
        if !start.starts_with(MAGIC) {
            return Err(BackupError::Damaged(
                "this file is not a backup, or its first bytes are damaged".into(),
            ));
        }
        let truncated = || BackupError::Damaged("header: the file is truncated".into());
        let length: [u8; 4] = start[MAGIC.len()..].try_into().map_err(|_| truncated())?;
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > MAX_HEADER_BYTES {
            return Err(BackupError::Damaged("header: its length is damaged".into()));
        }
        let header = read_at_most(&mut input, length)?;
        let checksum = read_at_most(&mut input, CHECKSUM_BYTES)?;
        if header.len() < length || checksum.len() < CHECKSUM_BYTES {
            return Err(truncated());
        }
        start.extend_from_slice(&header);
        if digest::digest(&digest::SHA256, &start).as_ref() != checksum {
            return Err(BackupError::Damaged("header: its checksum differs".into()));
        }
        let header: Header = serde_json::from_slice(&header)
            .map_err(|error| BackupError::Damaged(format!("header: {error}")))?;
        let file_key = find_key(&header, key)?;
        let key = payload_key(&file_key, &start);
        let next = read_at_most(&mut input, 1)?.first().copied();
        let counter = ChunkCounter::default();
        Ok(Self { input, key, counter, chunk: Vec::new(), position: 0, next, is_last: false })
    }

    fn read_chunk(&mut self) -> io::Result<()> {
        let damaged = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let Some(first) = self.next else {
            return Err(damaged("the file is truncated: its last chunk is missing".into()));
        };
        self.chunk.clear();
        self.chunk.push(first);
        // With the first byte of the next chunk.
        let limit = (CHUNK_BYTES + TAG_BYTES) as u64;
        (&mut self.input).take(limit).read_to_end(&mut self.chunk)?;
        self.next = (self.chunk.len() > CHUNK_BYTES + TAG_BYTES).then(|| self.chunk.pop()).flatten();
        self.is_last = self.next.is_none();
        let number = self.counter.0;
        let nonce = self.counter.nonce(self.is_last);
        let opened = self.key.open_in_place(nonce, Aad::empty(), &mut self.chunk).map(|opened| opened.len());
        let length = opened.map_err(|_| {
            let end = if self.is_last { ", or the file is truncated" } else { "" };
            damaged(format!(
                "chunk {number} is damaged (64 KiB from byte {}){end}",
                number * CHUNK_BYTES as u64
            ))
        })?;
        self.chunk.truncate(length);
        self.position = 0;
        Ok(())
    }
}

impl<R: Read> Read for EncryptedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.position == self.chunk.len() {
            if self.is_last {
                return Ok(0);
            }
            self.read_chunk()?;
        }
        let count = buffer.len().min(self.chunk.len() - self.position);
        buffer[..count].copy_from_slice(&self.chunk[self.position..self.position + count]);
        self.position += count;
        Ok(count)
    }
}

fn find_key(header: &Header, key: &DecryptionKey) -> Result<Vec<u8>, BackupError> {
    if let DecryptionKey::FileKey(key) = key {
        return Ok(key.0.to_vec());
    }
    if header.keys.len() > MAX_RECIPIENTS {
        return Err(BackupError::Damaged("header: too many recipients".into()));
    }
    for sealed in &header.keys {
        if let Some(file_key) = open(sealed, key)? {
            return Ok(file_key);
        }
    }
    let has_passphrase = header.keys.iter().any(|sealed| matches!(sealed, SealedKey::Argon2id { .. }));
    Err(BackupError::WrongKey(
        match (key, has_passphrase) {
            (DecryptionKey::Passphrase(_), true) => "the passphrase is wrong",
            (DecryptionKey::Passphrase(_), false) => {
                "the backup is encrypted for a recipient, not with a passphrase: use --key-file"
            }
            (DecryptionKey::PrivateKey(_) | DecryptionKey::FileKey(_), true) => {
                "the backup is encrypted with a passphrase: use --passphrase-file"
            }
            (DecryptionKey::PrivateKey(_) | DecryptionKey::FileKey(_), false) => {
                "the backup is encrypted for another recipient than that of this key"
            }
        }
        .to_owned(),
    ))
}

/// Reads up to a number of bytes. Fewer are the end of the input.
fn read_at_most(input: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(count as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}
