//! Shared helpers: nodes with a storage, test data, and streams.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_core::Stream;
use muster_node::{LocalNode, SimulatedNode};
use muster_types::Result;
use muster_types::blob::Checksums;
use muster_types::ids::{BlobId, NodeId, UploadId};
use muster_types::node::{HostFeature, NodeApi};
use muster_types::settings::Settings;
use muster_types::storage::{ByteStream, Draft, StorageApi};

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const NO_LIMIT: u64 = u64::MAX;

/// A node and the directory of its storage.
pub(crate) struct TestNode {
    node: Box<dyn NodeApi>,
    pub(crate) directory: PathBuf,
    _owned: Option<tempfile::TempDir>,
}

impl TestNode {
    /// Creates a node without image tools.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let node = Self::at(directory.path());
        Self { _owned: Some(directory), ..node }
    }

    /// Creates a node with the storage in a directory, as after a restart.
    pub(crate) fn at(directory: &Path) -> Self {
        let node = Box::new(SimulatedNode::new(1, NodeId::new(), directory));
        Self { node, directory: directory.to_owned(), _owned: None }
    }

    /// Creates a node with the image tools of this host, if it has them.
    pub(crate) async fn real(settings: &[(&str, &str)]) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let node = Self::real_at(directory.path(), settings);
        let limits = node.node.report().await.unwrap().limits;
        if let Some(why) = limits.get(&HostFeature::Images) {
            muster_testing::skipped(why);
            return None;
        }
        Some(Self { _owned: Some(directory), ..node })
    }

    pub(crate) fn real_at(directory: &Path, settings: &[(&str, &str)]) -> Self {
        let settings = Settings::from_pairs(settings).unwrap();
        let node = Box::new(LocalNode::new(NodeId::new(), &settings, directory, Ipv4Addr::LOCALHOST.into()));
        Self { node, directory: directory.to_owned(), _owned: None }
    }

    pub(crate) fn storage(&self) -> &dyn StorageApi {
        self.node.storage()
    }

    /// Creates a draft with these bytes.
    pub(crate) async fn draft(&self, data: &[u8]) -> Draft {
        let draft = Draft::Upload(UploadId::new());
        let size = self.storage().append(draft, Some(0), NO_LIMIT, parts(data, 300_000)).await.unwrap();
        assert_eq!(size, data.len() as u64);
        draft
    }

    /// Creates a blob with these bytes.
    pub(crate) async fn blob(&self, data: &[u8]) -> BlobId {
        let (draft, blob) = (self.draft(data).await, BlobId::new());
        self.storage().commit(draft, blob).await.unwrap();
        self.storage().remove_draft(draft).await.unwrap();
        blob
    }

    pub(crate) async fn bytes(&self, blob: BlobId) -> Result<Vec<u8>> {
        let size = self.blob_path(blob).metadata().unwrap().len();
        collect(self.storage().read(blob, 0..size).await?).await
    }

    pub(crate) fn draft_path(&self, draft: Draft) -> PathBuf {
        let Draft::Upload(id) = draft else { panic!("{draft:?}") };
        self.directory.join(format!("drafts/upload-{id}"))
    }

    pub(crate) fn blob_path(&self, blob: BlobId) -> PathBuf {
        let name = blob.to_string();
        self.directory.join("blobs").join(&name[..2]).join(name)
    }

    pub(crate) fn conversion_path(&self, blob: BlobId, kind: &str) -> PathBuf {
        self.directory.join(format!("conversions/{blob}.{kind}"))
    }

    /// Returns every file of the storage.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut directories: Vec<PathBuf> =
            ["drafts", "blobs", "conversions", "work"].map(|name| self.directory.join(name)).into();
        // The other directories belong to VMs.
        directories.retain(|directory| directory.exists());
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() { directories.push(path) } else { files.push(path) }
            }
        }
        files
    }
}

/// Returns incompressible bytes of which no two mebibytes are equal.
pub(crate) fn bytes(size: usize, seed: u64) -> Vec<u8> {
    static RANDOM: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        (0..MIB / 8).flat_map(|_| next()).collect()
    });
    let rotation = usize::try_from(seed * 7919).unwrap() % MIB;
    let mut data = Vec::with_capacity(size + MIB);
    for number in 0u64.. {
        if data.len() >= size {
            break;
        }
        let start = data.len();
        data.extend_from_slice(&RANDOM[rotation..]);
        data.extend_from_slice(&RANDOM[..rotation]);
        data[start..start + 16].copy_from_slice(&[seed.to_le_bytes(), number.to_le_bytes()].concat());
    }
    data.truncate(size);
    data
}

struct PartStream(VecDeque<Result<Bytes>>);

impl Stream for PartStream {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.pop_front())
    }
}

/// Returns a stream of the bytes in parts of a size.
pub(crate) fn parts(data: &[u8], size: usize) -> ByteStream {
    Box::pin(PartStream(data.chunks(size).map(|part| Ok(Bytes::copy_from_slice(part))).collect()))
}

pub(crate) fn results(parts: Vec<Result<Bytes>>) -> ByteStream {
    Box::pin(PartStream(parts.into()))
}

struct ManualStream(tokio::sync::mpsc::Receiver<Result<Bytes>>);

impl Stream for ManualStream {
    type Item = Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}

/// Returns a stream that the test feeds.
pub(crate) fn manual_stream() -> (tokio::sync::mpsc::Sender<Result<Bytes>>, ByteStream) {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    (sender, Box::pin(ManualStream(receiver)))
}

pub(crate) async fn next(stream: &mut ByteStream) -> Option<Result<Bytes>> {
    std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await
}

pub(crate) async fn collect(mut stream: ByteStream) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    while let Some(part) = next(&mut stream).await {
        data.extend_from_slice(&part?);
    }
    Ok(data)
}

/// Returns checksums computed by other programs.
pub(crate) fn checksums(data: &[u8]) -> Checksums {
    let sum = |program: &str| {
        let words = pipe(Command::new(program), data);
        String::from_utf8(words).unwrap().split(' ').next().unwrap().to_owned()
    };
    Checksums {
        sha1: sum("sha1sum"),
        sha256: sum("sha256sum"),
        sha512: sum("sha512sum"),
        xxh128: format!("{:032x}", xxhash_rust::xxh3::xxh3_128(data)),
    }
}

/// Runs a program with this input and returns its output.
pub(crate) fn pipe(mut command: Command, data: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(data));
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{command:?}");
        output.stdout
    })
}

pub(crate) fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{script}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}
