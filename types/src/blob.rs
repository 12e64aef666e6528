//! Blobs: immutable contents, each stored once and identified by its checksum. See docs/decisions/0014.
//!
//! ```text
//! initial ──stored completely──▶ created ──no longer referenced──▶ deleted ──cleaner──▶ (row removed)
//!    └──────────────── abandoned ─────────────────────────────────────────────────────▶ (row removed)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::ids::{BlobId, InstanceId};
use crate::object::{Reference, string_enum};

string_enum! {
    /// The lifecycle of a blob.
    BlobState {
        Initial = "initial",
        Created = "created",
        Deleted = "deleted",
    }
}

string_enum! {
    /// The state of a node's copy of a blob.
    CopyState {
        /// It is being written.
        Copying = "coming",
        Complete = "whole",
        /// It failed verification and is not served.
        Damaged = "damaged",
    }
}

string_enum! {
    /// The checksum algorithms.
    HashAlgorithm {
        Sha1 = "sha1",
        Sha256 = "sha256",
        Sha512 = "sha512",
        Xxh128 = "xxh128",
    }
}

/// The checksums of a content, in lower-case hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Checksums {
    /// SHA-1, in hexadecimal.
    pub sha1: String,
    /// SHA-256, in hexadecimal.
    pub sha256: String,
    /// SHA-512, in hexadecimal.
    pub sha512: String,
    /// XXH3 with 128 bits, in hexadecimal.
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

/// The size and checksums of a content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentDigest {
    pub size: u64,
    pub checksums: Checksums,
}

string_enum! {
    /// The supported formats of disk images.
    ImageFormat {
        /// The plain bytes of the disk; any unrecognised content counts as this.
        Raw = "raw",
        Qcow2 = "qcow2",
        /// The bytes of an optical disc.
        Iso = "iso",
    }
}

string_enum! {
    /// The compression of a content.
    Compression {
        Gzip = "gzip",
        Xz = "xz",
    }
}

/// The facts about a disk image that inspecting it found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFacts {
    pub format: ImageFormat,
    /// The compression of the image; `None` if it was not compressed.
    #[serde(default, rename = "packing")]
    pub compression: Option<Compression>,
    /// The size of the disk that a guest sees, in bytes.
    pub virtual_size: u64,
    /// Properties of a qcow2 image: `cluster_size`, `compat`, `compression type`, `extended l2`.
    #[serde(default, rename = "further")]
    pub format_details: Map<String, Value>,
}

impl ImageFacts {
    /// Returns the media type of the content.
    #[must_use]
    pub fn mime_type(&self) -> &'static str {
        match (self.compression, self.format) {
            (Some(Compression::Gzip), _) => "application/gzip",
            (Some(Compression::Xz), _) => "application/x-xz",
            (None, ImageFormat::Raw) => "application/octet-stream",
            (None, ImageFormat::Qcow2) => "application/x-qemu-disk",
            (None, ImageFormat::Iso) => "application/x-iso9660-image",
        }
    }
}

/// A blob as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BlobRecord {
    /// UUID of the blob.
    pub uuid: BlobId,
    /// The state of the blob.
    pub state: BlobState,
    /// The metadata that the namespace of the caller has set: any JSON values by key.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// The version of the record format; released clients expect it.
    pub version: i64,
    /// The size in bytes.
    pub size: i64,
    /// The time of the last change as reported by the source of the caller's namespace.
    pub modified: Option<String>,
    /// The Unix time when the caller's namespace received it, or when the first visible object used it; 0 if neither is
    /// known.
    pub fetched_at: f64,
    /// The base that this blob contains only the differences to.
    pub depends_on: Option<BlobId>,
    /// The blobs with this content in other formats, by format.
    pub transcodes: BTreeMap<String, BlobId>,
    /// The names of the nodes that have a complete copy.
    pub locations: Vec<String>,
    /// The number of objects that reference it.
    pub reference_count: i64,
    /// SHA-512 of the content, in hexadecimal; `null` until it is computed.
    pub sha512: Option<String>,
    /// The checksums of the content that are computed so far, by algorithm, in hexadecimal.
    #[schema(value_type = BTreeMap<String, String>)]
    pub checksums: BTreeMap<HashAlgorithm, String>,
    /// The Unix time of its last use by the caller's namespace.
    pub last_used: Option<f64>,
    /// The instances that use it; only returned for a single blob.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instances: Option<Vec<InstanceId>>,
    /// The references that the caller may see.
    pub references_to: BTreeMap<String, Vec<Reference>>,
    /// The objects that this one refers to, by relationship.
    pub references_from: BTreeMap<String, Vec<Reference>>,
    /// Of a disk image: `file format`, `virtual size`, `disk size`, `mime-type` and more.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub image: Map<String, Value>,
}
