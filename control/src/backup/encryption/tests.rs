use super::*;

fn sealed(protection: &Protection, content: &[u8]) -> Vec<u8> {
    let mut writer = EncryptedWriter::new(Vec::new(), protection).unwrap();
    writer.write_all(content).unwrap();
    writer.finish().unwrap()
}

fn opened(file: &[u8], key: &DecryptionKey) -> Result<Vec<u8>, BackupError> {
    let mut content = Vec::new();
    EncryptedReader::new(file, key)?.read_to_end(&mut content)?;
    Ok(content)
}

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn every_recipient_decrypts_content_of_every_length() {
    let (first, second, third) = (generate_key().unwrap(), generate_key().unwrap(), generate_key().unwrap());
    let protection = Protection::Recipients(vec![first.0, second.0]);
    for length in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES] {
        let file = sealed(&protection, &content(length));
        for private in [&first.1, &second.1] {
            let key = DecryptionKey::PrivateKey(private.clone());
            assert_eq!(opened(&file, &key).unwrap(), content(length));
        }
        let other = opened(&file, &DecryptionKey::PrivateKey(third.1.clone())).unwrap_err();
        assert!(matches!(other, BackupError::WrongKey(_)), "{other}");
        let passphrase = opened(&file, &DecryptionKey::Passphrase(Secret::new("x"))).unwrap_err().to_string();
        assert!(passphrase.contains("wrong key") && passphrase.contains("--key-file"), "{passphrase}");
    }
}

#[test]
fn wrong_passphrase_is_named_as_such() {
    let file = sealed(&Protection::Passphrase(Secret::new("correct horse")), b"content");
    assert_eq!(opened(&file, &DecryptionKey::Passphrase(Secret::new("correct horse"))).unwrap(), b"content");
    let wrong = opened(&file, &DecryptionKey::Passphrase(Secret::new("Correct horse"))).unwrap_err();
    assert_eq!(wrong.to_string(), "wrong key: the passphrase is wrong");
    assert!(EncryptedWriter::new(Vec::new(), &Protection::Passphrase(Secret::new(""))).is_err());
    assert!(EncryptedWriter::new(Vec::new(), &Protection::Recipients(vec![])).is_err());
}

#[test]
fn every_changed_byte_and_every_truncation_is_detected() {
    let (recipient, private) = generate_key().unwrap();
    let key = DecryptionKey::PrivateKey(private);
    let file = sealed(&Protection::Recipients(vec![recipient]), &content(2 * CHUNK_BYTES + 100));
    // All of the header and of the end, and some of the rest.
    for at in (0..600).chain((600..file.len()).step_by(997)).chain(file.len() - 200..file.len()) {
        for bit in [1, 0x80] {
            let mut changed = file.clone();
            changed[at] ^= bit;
            let error = opened(&changed, &key).expect_err("a changed byte is detected");
            assert!(matches!(error, BackupError::Damaged(_)), "byte {at}: {error}");
        }
    }
    let ends = (0..700).chain((700..file.len()).step_by(1031)).chain([file.len() - 1]);
    for length in ends {
        let error = opened(&file[..length], &key).expect_err("a truncation is detected");
        assert!(matches!(error, BackupError::Damaged(_)), "{length} bytes: {error}");
    }
    let longer = [&file[..], b"x"].concat();
    assert!(matches!(opened(&longer, &key), Err(BackupError::Damaged(_))));
}

#[test]
fn chunks_cannot_be_reordered_or_removed() {
    let (recipient, private) = generate_key().unwrap();
    let key = DecryptionKey::PrivateKey(private);
    let file = sealed(&Protection::Recipients(vec![recipient]), &content(3 * CHUNK_BYTES));
    let size = CHUNK_BYTES + TAG_BYTES;
    let start = file.len() - 3 * size;
    let part = |number: usize| &file[start + number * size..start + (number + 1) * size];
    for order in [vec![1, 0, 2], vec![0, 2], vec![0, 1], vec![0, 1, 1, 2], vec![2]] {
        let mut changed = file[..start].to_vec();
        order.iter().for_each(|number| changed.extend_from_slice(part(*number)));
        assert!(matches!(opened(&changed, &key), Err(BackupError::Damaged(_))), "{order:?}");
    }
}

#[test]
fn hostile_header_cannot_request_much_memory_or_time() {
    let start = |length: u32, header: &[u8]| {
        let start = [&MAGIC[..], &length.to_be_bytes(), header].concat();
        let checksum = digest::digest(&digest::SHA256, &start);
        [&start, checksum.as_ref()].concat()
    };
    let key = DecryptionKey::Passphrase(Secret::new("x"));
    let refused = opened(&start(u32::MAX, b"{}"), &key).unwrap_err().to_string();
    assert!(refused.contains("length"), "{refused}");
    for (memory, rounds) in [(u32::MAX, 1), (8, u32::MAX)] {
        let header = format!(
            r#"{{"keys":[{{"type":"argon2id","salt":"00112233445566778899aabbccddeeff","memory_kib":{memory},"rounds":{rounds},"sealed":""}}]}}"#
        );
        let length = u32::try_from(header.len()).unwrap();
        let refused = opened(&start(length, header.as_bytes()), &key).unwrap_err().to_string();
        assert!(refused.contains("too high"), "{refused}");
    }
}
