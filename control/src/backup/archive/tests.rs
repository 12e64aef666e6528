use super::*;

fn archive() -> Vec<u8> {
    let mut writer = ArchiveWriter::new(Vec::new());
    writer.begin(&PartHeader::Seed).unwrap();
    writer.add(b"seed").unwrap();
    writer.begin(&PartHeader::Table { name: "nodes".into() }).unwrap();
    writer.add(b"one").unwrap();
    writer.add(b"").unwrap();
    writer.finish().unwrap()
}

/// A part and its records.
type Part = (PartHeader, Vec<Vec<u8>>);

fn read(bytes: &[u8]) -> Result<Vec<Part>, BackupError> {
    let mut reader = ArchiveReader::new(bytes);
    let mut parts = Vec::new();
    while let Some(header) = reader.next_part()? {
        let mut records = Vec::new();
        while let Some(record) = reader.next_record()? {
            records.push(record);
        }
        parts.push((header, records));
    }
    Ok(parts)
}

#[test]
fn returns_the_parts_that_were_written() {
    let parts = read(&archive()).unwrap();
    let table = PartHeader::Table { name: "nodes".into() };
    assert_eq!(
        parts,
        [(PartHeader::Seed, vec![b"seed".to_vec()]), (table, vec![b"one".to_vec(), b"".to_vec()])]
    );
}

#[test]
fn changed_truncated_and_longer_archives_are_rejected() {
    let bytes = archive();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        // A changed name of a table is valid here, and rejected by the database.
        let name = bytes.windows(5).position(|window| window == b"nodes").unwrap();
        if !(name..name + 5).contains(&at) {
            assert!(read(&changed).is_err(), "byte {at}");
        }
        assert!(read(&bytes[..at]).is_err(), "{at} bytes");
    }
    assert!(read(&[&bytes[..], b"x"].concat()).is_err());
}

#[test]
fn huge_lengths_are_rejected_before_memory_is_allocated() {
    for (kind, length) in [(RECORD, u32::MAX), (PART, 1 << 20), (ARCHIVE_END, u32::MAX)] {
        let mut bytes = archive();
        let start = bytes.len();
        bytes.truncate(5 + 15);
        assert!(start > 20);
        bytes.push(kind);
        bytes.extend_from_slice(&length.to_be_bytes());
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains("larger than permitted") || error.contains("damaged"), "{error}");
    }
    // A permitted length of which almost nothing follows.
    let mut bytes = vec![PART];
    bytes.extend_from_slice(&15u32.to_be_bytes());
    bytes.extend_from_slice(br#"{"part":"seed"}"#);
    bytes.push(RECORD);
    bytes.extend_from_slice(&u32::try_from(MAX_RECORD_BYTES).unwrap().to_be_bytes());
    bytes.extend_from_slice(b"few bytes");
    assert!(read(&bytes).unwrap_err().to_string().contains("within a record"));
}
