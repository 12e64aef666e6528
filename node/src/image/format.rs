//! What kind of image some bytes are, by their first ones. Pure, and safe on whatever bytes.
//!
//! What a disk tool would take for a format that may refer to other files is refused by name: nobody may get there
//! what this module calls raw.

use muster_types::blob::Compression;
use muster_types::{Error, Result};

use super::qcow2::{self, Qcow2};

/// How many bytes from the beginning tell everything.
pub(crate) const HEAD: usize = 64 << 10;

/// What some bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Raw,
    Iso,
    Qcow2(Qcow2),
    Packed(Compression),
}

/// Where which bytes give a format away that is not taken in.
const REFUSED: [(usize, &[u8], &str); 12] = [
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

/// Tells what the bytes are that begin with `head`, `size` bytes in all. [`Error::Invalid`] if they are nothing that
/// anybody should use.
pub(crate) fn look(head: &[u8], size: u64) -> Result<Kind> {
    if let Some(name) = refused(head) {
        return Err(refuse(&format!("the image has the format {name}, which is not taken in")));
    }
    if head.starts_with(qcow2::MAGIC) {
        return qcow2::read(head, size).map(Kind::Qcow2);
    }
    if size == 0 {
        return Err(refuse("the image is empty"));
    }
    Ok(match packing(head) {
        Some(packing) => Kind::Packed(packing),
        None if has(head, 0x8001, b"CD001") => Kind::Iso,
        None => Kind::Raw,
    })
}

pub(crate) fn packing(head: &[u8]) -> Option<Compression> {
    let packings =
        [(b"\x1f\x8b\x08".as_slice(), Compression::Gzip), (b"\xfd7zXZ\0".as_slice(), Compression::Xz)];
    packings.into_iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, packing)| packing)
}

/// The name of the format, if it is one that is not taken in.
fn refused(head: &[u8]) -> Option<&'static str> {
    let found = REFUSED.into_iter().find(|(at, magic, _)| has(head, *at, magic)).map(|(_, _, name)| name);
    found.or_else(|| is_descriptor(head).then_some("VMDK")).or_else(|| {
        let version =
            head.get(4..8).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok()).map(u32::from_be_bytes);
        (head.starts_with(qcow2::MAGIC) && version == Some(1)).then_some("QCOW (version 1)")
    })
}

/// Whether these bytes are the beginning of an image that may refer to other files.
pub(crate) fn may_refer(head: &[u8]) -> bool {
    refused(head).is_some() || head.starts_with(qcow2::MAGIC)
}

/// Whether this is the text that describes a VMDK: a version behind comments and empty lines.
fn is_descriptor(head: &[u8]) -> bool {
    let mut lines = head.split(|byte| *byte == b'\n');
    let telling = lines.find(|line| !line.starts_with(b"#") && !line.trim_ascii().is_empty());
    telling.is_some_and(|line| line.trim_ascii_start().starts_with(b"version="))
}

fn has(head: &[u8], at: usize, magic: &[u8]) -> bool {
    head.get(at..).is_some_and(|rest| rest.starts_with(magic))
}

pub(super) fn refuse(why: &str) -> Error {
    Error::Invalid(why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(at: usize, magic: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 0x9000];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        bytes
    }

    fn kind(bytes: &[u8]) -> Result<Kind> {
        look(&bytes[..bytes.len().min(HEAD)], bytes.len() as u64)
    }

    #[test]
    fn what_is_taken_in_is_told_apart() {
        assert_eq!(kind(&[0; 512]).unwrap(), Kind::Raw);
        assert_eq!(kind(b"x").unwrap(), Kind::Raw);
        assert_eq!(kind(&padded(0x8001, b"CD001")).unwrap(), Kind::Iso);
        assert_eq!(kind(&padded(0, b"\x1f\x8b\x08\0")).unwrap(), Kind::Packed(Compression::Gzip));
        assert_eq!(kind(&padded(0, b"\xfd7zXZ\0")).unwrap(), Kind::Packed(Compression::Xz));
        // The end of a file tells nothing: disk tools do not look there either.
        let mut fixed = vec![0; 1024];
        fixed[512..520].copy_from_slice(b"conectix");
        assert_eq!(kind(&fixed).unwrap(), Kind::Raw);
    }

    #[test]
    fn other_formats_are_refused_by_their_name() {
        for (at, magic, name) in REFUSED {
            let refusal = kind(&padded(at, magic)).unwrap_err().to_string();
            assert!(refusal.contains(name), "{name}: {refusal}");
        }
        let texts: [&[u8]; 4] = [
            b"version=1\nCID=1\n",
            b"# comment\n\n \r\nversion=3\r\n",
            b"# Disk DescriptorFile\nversion=1\nRW 1 FLAT \"/etc/shadow\" 0\n",
            b"#\n# Disk DescriptorFile\n version=1\n",
        ];
        for text in texts {
            let refusal = kind(text).unwrap_err().to_string();
            assert!(refusal.contains("VMDK") && !refusal.contains("shadow"), "{refusal}");
        }
        assert!(kind(b"QFI\xfb\0\0\0\x01more").unwrap_err().to_string().contains("QCOW (version 1)"));
        assert!(kind(b"").unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn what_may_refer_to_other_files_is_known() {
        assert!(may_refer(b"QFI\xfb\0\0\0\x03") && may_refer(b"KDMV") && may_refer(b"version=1\n"));
        assert!(!may_refer(&[0; 512]) && !may_refer(b"") && !may_refer(b"\x1f\x8b\x08"));
    }
}
