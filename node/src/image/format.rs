//! Detects the format of an image by its header. Pure, and safe on arbitrary bytes.
//!
//! Formats that a disk tool would recognise and that may refer to other files are refused by name: they must not pass as
//! raw images.

use muster_types::blob::Compression;
use muster_types::{Error, Result};

use super::qcow2::{self, Qcow2};

/// The number of bytes that determine the format.
pub(crate) const HEADER_SIZE: usize = 64 << 10;

/// The format of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ImageKind {
    Raw,
    Iso,
    Qcow2(Qcow2),
    Compressed(Compression),
}

/// Unsupported formats: offset, magic bytes and name.
const UNSUPPORTED_FORMATS: [(usize, &[u8], &str); 12] = [
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (64, &[0x7f, 0x10, 0xda, 0xbe], "VDI"),
    (0, b"QED\0", "QED"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
    (0, b"Bochs Virtual HD Image", "Bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "cloop"),
];

/// Detects the format of an image of `size` bytes that begins with `head`. [`Error::Invalid`] if it is not supported or
/// not safe to use.
pub(crate) fn detect(head: &[u8], size: u64) -> Result<ImageKind> {
    if let Some(name) = unsupported(head) {
        return Err(invalid(&format!("the image has the unsupported format {name}, convert it to qcow2")));
    }
    if head.starts_with(qcow2::MAGIC) {
        return qcow2::read(head, size).map(ImageKind::Qcow2);
    }
    if size == 0 {
        return Err(invalid("the image is empty"));
    }
    Ok(match compression_of(head) {
        Some(compression) => ImageKind::Compressed(compression),
        None if has_magic(head, 0x8001, b"CD001") => ImageKind::Iso,
        None => ImageKind::Raw,
    })
}

pub(crate) fn compression_of(head: &[u8]) -> Option<Compression> {
    let compressions =
        [(b"\x1f\x8b\x08".as_slice(), Compression::Gzip), (b"\xfd7zXZ\0".as_slice(), Compression::Xz)];
    compressions.into_iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, compression)| compression)
}

/// Returns the name of the format, if it is an unsupported one.
fn unsupported(head: &[u8]) -> Option<&'static str> {
    let found = UNSUPPORTED_FORMATS
        .into_iter()
        .find(|(offset, magic, _)| has_magic(head, *offset, magic))
        .map(|(_, _, name)| name);
    found.or_else(|| is_vmdk_descriptor(head).then_some("VMDK")).or_else(|| {
        let version =
            head.get(4..8).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok()).map(u32::from_be_bytes);
        (head.starts_with(qcow2::MAGIC) && version == Some(1)).then_some("QCOW (version 1)")
    })
}

/// Returns whether this is the beginning of an image that may refer to other files.
pub(crate) fn may_refer_to_files(head: &[u8]) -> bool {
    unsupported(head).is_some() || head.starts_with(qcow2::MAGIC)
}

/// Returns whether this is a VMDK descriptor: a version after comments and empty lines.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = lines.find(|line| !line.starts_with(b"#") && !line.trim_ascii().is_empty());
    first.is_some_and(|line| line.trim_ascii_start().starts_with(b"version="))
}

fn has_magic(head: &[u8], offset: usize, magic: &[u8]) -> bool {
    head.get(offset..).is_some_and(|rest| rest.starts_with(magic))
}

pub(super) fn invalid(reason: &str) -> Error {
    Error::Invalid(reason.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(offset: usize, magic: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 0x9000];
        bytes[offset..offset + magic.len()].copy_from_slice(magic);
        bytes
    }

    fn kind(bytes: &[u8]) -> Result<ImageKind> {
        detect(&bytes[..bytes.len().min(HEADER_SIZE)], bytes.len() as u64)
    }

    #[test]
    fn detects_supported_formats() {
        assert_eq!(kind(&[0; 512]).unwrap(), ImageKind::Raw);
        assert_eq!(kind(b"x").unwrap(), ImageKind::Raw);
        assert_eq!(kind(&padded(0x8001, b"CD001")).unwrap(), ImageKind::Iso);
        assert_eq!(kind(&padded(0, b"\x1f\x8b\x08\0")).unwrap(), ImageKind::Compressed(Compression::Gzip));
        assert_eq!(kind(&padded(0, b"\xfd7zXZ\0")).unwrap(), ImageKind::Compressed(Compression::Xz));
        // Disk tools do not look for the footer of a VHD either.
        let mut fixed = vec![0; 1024];
        fixed[512..520].copy_from_slice(b"conectix");
        assert_eq!(kind(&fixed).unwrap(), ImageKind::Raw);
    }

    #[test]
    fn refuses_unsupported_formats_by_name() {
        for (offset, magic, name) in UNSUPPORTED_FORMATS {
            let error = kind(&padded(offset, magic)).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
        let texts: [&[u8]; 4] = [
            b"version=1\nCID=1\n",
            b"# comment\n\n \r\nversion=3\r\n",
            b"# Disk DescriptorFile\nversion=1\nRW 1 FLAT \"/etc/shadow\" 0\n",
            b"#\n# Disk DescriptorFile\n version=1\n",
        ];
        for text in texts {
            let error = kind(text).unwrap_err().to_string();
            assert!(error.contains("VMDK") && !error.contains("shadow"), "{error}");
        }
        assert!(kind(b"QFI\xfb\0\0\0\x01more").unwrap_err().to_string().contains("QCOW (version 1)"));
        assert!(kind(b"").unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn detects_formats_that_may_refer_to_other_files() {
        assert!(
            may_refer_to_files(b"QFI\xfb\0\0\0\x03")
                && may_refer_to_files(b"KDMV")
                && may_refer_to_files(b"version=1\n")
        );
        assert!(
            !may_refer_to_files(&[0; 512])
                && !may_refer_to_files(b"")
                && !may_refer_to_files(b"\x1f\x8b\x08")
        );
    }
}
