use muster_types::Error;
use proptest::prelude::*;

use super::*;
use crate::image::format::{self, HEADER_SIZE};

/// A version 3 image of 1 GiB with clusters of 64 KiB, as `qemu-img create` makes it.
pub(crate) fn image() -> Vec<u8> {
    let mut bytes = vec![0; 0x3_0010];
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    put(0, MAGIC);
    put(4, &3u32.to_be_bytes());
    put(20, &16u32.to_be_bytes());
    put(24, &(1u64 << 30).to_be_bytes());
    put(36, &2u32.to_be_bytes());
    put(40, &0x3_0000u64.to_be_bytes());
    put(48, &0x1_0000u64.to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &112u32.to_be_bytes());
    bytes
}

fn parse(bytes: &[u8]) -> Result<Qcow2> {
    match format::detect(&bytes[..bytes.len().min(HEADER_SIZE)], bytes.len() as u64)? {
        format::ImageKind::Qcow2(image) => Ok(image),
        other => panic!("{other:?}"),
    }
}

fn image_with(offset: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = image();
    bytes[offset..offset + value.len()].copy_from_slice(value);
    bytes
}

#[test]
fn reads_a_valid_image() {
    let image = parse(&image()).unwrap();
    assert_eq!(image.virtual_size, 1 << 30);
    let format_details = serde_json::to_string(&image.format_details()).unwrap();
    let expected = r#"{"cluster_size":65536,"compat":"1.1","compression type":"zlib","extended l2":false}"#;
    assert_eq!(format_details, expected);
    assert!(parse(&image_with(72, &1u64.to_be_bytes())).is_ok(), "dirty");
    let old = parse(&image_with(4, &2u32.to_be_bytes())).unwrap();
    assert_eq!(old.format_details()["compat"], "0.10");
    let mut zstd = image_with(72, &8u64.to_be_bytes());
    zstd[104] = 1;
    assert_eq!(parse(&zstd).unwrap().format_details()["compression type"], "zstd");
}

#[test]
fn refuses_unsafe_images_with_the_reason() {
    let extension = |kind: u32| image_with(112, &[kind.to_be_bytes(), 5u32.to_be_bytes()].concat());
    for (bytes, reason) in [
        (image_with(8, &512u64.to_be_bytes()), "backing file"),
        (image_with(16, &9u32.to_be_bytes()), "backing file"),
        (extension(BACKING_FORMAT), "backing file"),
        (extension(DATA_FILE_NAME), "another file"),
        (extension(ENCRYPTION), "encrypted"),
        (image_with(112, &[1u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat()), "exceeds"),
        (image_with(4, &4u32.to_be_bytes()), "version"),
        (image_with(20, &8u32.to_be_bytes()), "cluster size"),
        (image_with(20, &63u32.to_be_bytes()), "cluster size"),
        (image_with(32, &2u32.to_be_bytes()), "encrypted"),
        (image_with(72, &2u64.to_be_bytes()), "corrupt"),
        (image_with(72, &4u64.to_be_bytes()), "another file"),
        (image_with(72, &(1u64 << 40).to_be_bytes()), "unknown qcow2 features"),
        (image_with(96, &7u32.to_be_bytes()), "reference count size"),
        (image_with(100, &8u32.to_be_bytes()), "header length"),
        (image_with(100, &u32::MAX.to_be_bytes()), "header length"),
        (image_with(104, &[1]), "compression type"),
        (image_with(36, &u32::MAX.to_be_bytes()), "larger than any"),
        (image_with(36, &1u32.to_be_bytes()), "too small"),
        (image_with(24, &u64::MAX.to_be_bytes()), "too small"),
        (image_with(40, &0x4_0000u64.to_be_bytes()), "truncated"),
        (image_with(40, &(u64::MAX - 0xffff).to_be_bytes()), "truncated"),
        (image_with(40, &0u64.to_be_bytes()), "truncated"),
        (image_with(48, &0x8_0000u64.to_be_bytes()), "refcount table"),
        (image_with(56, &u32::MAX.to_be_bytes()), "refcount table"),
        (image_with(60, &u32::MAX.to_be_bytes()), "snapshots"),
        (image_with(60, &[1u32.to_be_bytes(), [0xff; 4], [0xff; 4]].concat()), "snapshot table"),
    ] {
        match parse(&bytes) {
            Err(Error::Invalid(text)) => assert!(text.contains(reason), "{reason}: {text}"),
            other => panic!("{reason}: {other:?}"),
        }
    }
}

#[test]
fn refuses_an_image_truncated_anywhere() {
    let whole = image();
    for size in (4..200).chain([0x1_0000, 0x1_ffff, 0x3_0000, 0x3_000f]) {
        assert!(matches!(parse(&whole[..size]), Err(Error::Invalid(_))), "{size}");
    }
    assert!(parse(&whole).is_ok());
}

proptest! {
    #[test]
    fn arbitrary_headers_do_not_panic(changes in prop::collection::vec((0usize..256, any::<u8>()), 1..12),
                              size in prop::option::of(any::<u64>())) {
        let mut bytes = image();
        for (offset, value) in changes {
            bytes[offset] = value;
        }
        let size = size.unwrap_or(bytes.len() as u64);
        let _ = format::detect(&bytes[..HEADER_SIZE], size);
    }

    #[test]
    fn arbitrary_tables_do_not_panic(tables in prop::collection::vec(any::<u64>(), 2),
                     entries in prop::collection::vec(any::<u64>(), 1..20), extended in any::<bool>()) {
        let mut bytes = image_with(24, &(1u64 << 29).to_be_bytes());
        bytes.resize(0x5_0000, 0);
        bytes[79] = if extended { 16 } else { 0 };
        let offset = if tables[0] % 2 == 0 { 0x4_0000 } else { tables[0] };
        for (position, entry) in [(0x3_0000, offset), (0x3_0008, tables[1])] {
            bytes[position..position + 8].copy_from_slice(&entry.to_be_bytes());
        }
        for (entry, position) in entries.iter().zip((0x4_0000..).step_by(8)) {
            bytes[position..position + 8].copy_from_slice(&entry.to_be_bytes());
        }
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let _ = parse(&bytes).unwrap().require_complete(&file, bytes.len() as u64, 1 << 30, &|| true);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = format::detect(&bytes, bytes.len() as u64);
        let _ = read(&bytes, u64::MAX);
    }
}
