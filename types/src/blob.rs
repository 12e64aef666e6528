//! Blobs: pieces of content, each stored once, known by what they hold.
//!
//! ```text
//! initial ──every byte is on disk──▶ created ──nothing uses it any more──▶ deleted ──cleaner──▶ (row gone)
//!    └──────────────── its making was given up ───────────────────────────────────────────────▶ (row gone)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{BlobId, InstanceId};
use crate::object::{Reference, words};

words! {
    /// The life of a blob.
    BlobState {
        Initial = "initial",
        Created = "created",
        Deleted = "deleted",
    }
}

words! {
    /// How a node's copy of a blob is.
    CopyState {
        /// It is being made.
        Coming = "coming",
        Whole = "whole",
        /// It is not what it was, and is not served.
        Damaged = "damaged",
    }
}

words! {
    /// The ways to sum up a content.
    HashAlgorithm {
        Sha1 = "sha1",
        Sha256 = "sha256",
        Sha512 = "sha512",
        Xxh128 = "xxh128",
    }
}

/// The checksums of a content, as lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Checksums {
    pub sha1: String,
    pub sha256: String,
    pub sha512: String,
    pub xxh128: String,
}

impl Checksums {
    #[must_use]
    pub fn get(&self, algorithm: HashAlgorithm) -> &str {
        match algorithm {
            HashAlgorithm::Sha1 => &self.sha1,
            HashAlgorithm::Sha256 => &self.sha256,
            HashAlgorithm::Sha512 => &self.sha512,
            HashAlgorithm::Xxh128 => &self.xxh128,
        }
    }
}

/// What a content is: how long, and its checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    pub size: u64,
    pub checksums: Checksums,
}

words! {
    /// Formats of disk images that are taken in.
    ImageFormat {
        /// The bytes of the disk, as they are. What is nothing else is this.
        Raw = "raw",
        Qcow2 = "qcow2",
        /// The bytes of an optical disc.
        Iso = "iso",
    }
}

words! {
    /// How a content is packed.
    Compression {
        Gzip = "gzip",
        Xz = "xz",
    }
}

/// What was found out about a disk image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFacts {
    pub format: ImageFormat,
    /// How the image was packed; nothing if it was not.
    #[serde(default)]
    pub packing: Option<Compression>,
    /// Size of the disk that a guest sees, in bytes.
    pub virtual_size: u64,
    /// Further facts of a qcow2 image: `cluster_size`, `compat`, `compression type`, `extended l2`.
    #[serde(default)]
    pub further: Map<String, Value>,
}

impl ImageFacts {
    /// The media type of the content.
    #[must_use]
    pub fn mime_type(&self) -> &'static str {
        match (self.packing, self.format) {
            (Some(Compression::Gzip), _) => "application/gzip",
            (Some(Compression::Xz), _) => "application/x-xz",
            (None, ImageFormat::Raw) => "application/octet-stream",
            (None, ImageFormat::Qcow2) => "application/x-qemu-disk",
            (None, ImageFormat::Iso) => "application/x-iso9660-image",
        }
    }
}

/// A blob as the API answers it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BlobRecord {
    pub uuid: BlobId,
    pub state: BlobState,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub version: i64,
    /// In bytes.
    pub size: i64,
    /// When the source says that it last changed, in its words.
    pub modified: Option<String>,
    /// Unix time when it came in.
    pub fetched_at: f64,
    /// The blob that this one is only complete with.
    pub depends_on: Option<BlobId>,
    #[schema(value_type = Object)]
    pub transcodes: BTreeMap<String, BlobId>,
    /// Names of the nodes that have it whole.
    pub locations: Vec<String>,
    /// How many objects use it.
    pub reference_count: i64,
    pub sha512: Option<String>,
    #[schema(value_type = Object)]
    pub checksums: BTreeMap<HashAlgorithm, String>,
    /// Unix time when it was last read or used.
    pub last_used: Option<f64>,
    /// The instances that use it; only when one blob is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instances: Option<Vec<InstanceId>>,
    /// Those uses that the caller may see.
    #[schema(value_type = Object)]
    pub references_to: BTreeMap<String, Vec<Reference>>,
    #[schema(value_type = Object)]
    pub references_from: BTreeMap<String, Vec<Reference>>,
    /// Of a disk image: `file format`, `virtual size`, `disk size`, `mime-type` and more.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub image: Map<String, Value>,
}
