//! Drafts: appended to, truncated, resumed, interrupted.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use bytes::Bytes;
use muster_types::Error;
use muster_types::ids::{BlobId, OperationId, UploadId};
use muster_types::storage::{Draft, StoredFileKind};

use crate::fixture::{MIB, NO_LIMIT, TestNode, bytes, checksums, manual_stream, parts, results};

#[tokio::test(flavor = "multi_thread")]
async fn checksums_of_drafts_match_other_programs() {
    let node = TestNode::new();
    let storage = node.storage();
    let data = bytes(5 * MIB + 12_345, 1);
    for draft in
        [Draft::Upload(UploadId::new()), Draft::Fetch(OperationId::new()), Draft::Copy(BlobId::new())]
    {
        assert_eq!(storage.draft_size(draft).await.unwrap(), None);
        let (first, second) = data.split_at(2 * MIB + 77);
        assert_eq!(
            storage.append(draft, Some(0), NO_LIMIT, parts(first, 131)).await.unwrap(),
            first.len() as u64
        );
        storage.append(draft, Some(first.len() as u64), NO_LIMIT, parts(&[], 1)).await.unwrap();
        storage.append(draft, None, NO_LIMIT, parts(second, 3 * MIB)).await.unwrap();
        assert_eq!(storage.draft_size(draft).await.unwrap(), Some(data.len() as u64));
        let content = storage.digest(draft).await.unwrap();
        assert_eq!((content.size, &content.checksums), (data.len() as u64, &checksums(&data)));
        // Also when it is read again after a restart, and when it grows after its checksums were requested.
        assert_eq!(TestNode::at(&node.directory).storage().digest(draft).await.unwrap(), content);
        storage.append(draft, None, NO_LIMIT, parts(b"more", 1)).await.unwrap();
        let more = [&data[..], b"more"].concat();
        assert_eq!(storage.digest(draft).await.unwrap().checksums, checksums(&more));
    }
    let empty = node.draft(b"").await;
    assert_eq!(storage.digest(empty).await.unwrap().checksums, checksums(b""));
    let absent = storage.digest(Draft::Upload(UploadId::new())).await;
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn append_at_wrong_offset_is_refused_with_the_current_size() {
    let node = TestNode::new();
    let draft = node.draft(b"four").await;
    for at in [0, 3, 5] {
        match node.storage().append(draft, Some(at), NO_LIMIT, parts(b"x", 1)).await {
            Err(Error::Conflict(text)) => assert!(text.contains(" 4 bytes"), "{text}"),
            other => panic!("{other:?}"),
        }
    }
    let never = Draft::Upload(UploadId::new());
    let refused = node.storage().append(never, Some(7), NO_LIMIT, parts(b"x", 1)).await;
    assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
    assert_eq!(node.storage().draft_size(never).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_append_keeps_received_bytes_and_oversized_append_is_undone() {
    let node = TestNode::new();
    let storage = node.storage();
    let draft = node.draft(b"begin ").await;
    let failing =
        || vec![Ok(Bytes::from("middle ")), Err(Error::Timeout("gone".into())), Ok(Bytes::from("no"))];
    // Received bytes are only kept if the offset was given.
    for (at, left) in [(None, &b"begin "[..]), (Some(6), b"begin middle ")] {
        let failed = storage.append(draft, at, NO_LIMIT, results(failing())).await;
        assert!(matches!(failed, Err(Error::Timeout(_))), "{failed:?}");
        assert_eq!(std::fs::read(node.draft_path(draft)).unwrap(), left);
    }
    let large = bytes(3 * MIB, 2);
    let refused = storage.append(draft, Some(13), 13 + 3 * MIB as u64 - 1, parts(&large, MIB)).await;
    assert!(matches!(refused, Err(Error::TooLarge(_))), "{refused:?}");
    assert_eq!(storage.draft_size(draft).await.unwrap(), Some(13));
    storage.append(draft, Some(13), 13 + 3 * MIB as u64, parts(&large, MIB)).await.unwrap();
    let whole = [b"begin middle ", &large[..]].concat();
    assert_eq!(storage.digest(draft).await.unwrap().checksums, checksums(&whole));
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_draft_can_be_continued() {
    let node = TestNode::new();
    let storage = node.storage();
    let data = bytes(3 * MIB, 3);
    let draft = node.draft(&data).await;
    let size = data.len() as u64;
    let beyond = storage.truncate(draft, size + 1).await;
    assert!(matches!(beyond, Err(Error::Invalid(_))), "{beyond:?}");
    storage.truncate(draft, size).await.unwrap();
    storage.truncate(draft, 1000).await.unwrap();
    storage.append(draft, Some(1000), NO_LIMIT, parts(&data[1000..], 99_999)).await.unwrap();
    assert_eq!(storage.digest(draft).await.unwrap().checksums, checksums(&data));
    storage.truncate(draft, 0).await.unwrap();
    storage.append(draft, Some(0), NO_LIMIT, parts(b"new", 1)).await.unwrap();
    assert_eq!(storage.digest(draft).await.unwrap().checksums, checksums(b"new"));
    storage.remove_draft(draft).await.unwrap();
    storage.remove_draft(draft).await.unwrap();
    assert_eq!(storage.draft_size(draft).await.unwrap(), None);
    assert!(matches!(storage.truncate(draft, 0).await, Err(Error::NotFound(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn truncate_interrupts_running_and_waiting_appends() {
    let node = Arc::new(TestNode::new());
    let draft = node.draft(b"first").await;
    let (feed, stream) = manual_stream();
    let append = |stream| {
        let node = node.clone();
        tokio::spawn(async move { node.storage().append(draft, None, NO_LIMIT, stream).await })
    };
    let running = append(stream);
    feed.send(Ok(bytes(2 * MIB, 4).into())).await.unwrap();
    // The channel has room for one part: when it takes the second, the first is being written.
    feed.send(Ok(Bytes::from("tail"))).await.unwrap();
    let waiting = append(parts(b"waits", 1));
    tokio::task::yield_now().await;
    node.storage().truncate(draft, 5).await.unwrap();
    let interrupted = running.await.unwrap();
    assert!(matches!(interrupted, Err(Error::Conflict(_))), "{interrupted:?}");
    match waiting.await.unwrap() {
        Err(Error::Conflict(_)) => assert_eq!(std::fs::read(node.draft_path(draft)).unwrap(), b"first"),
        // It may also run after the truncation.
        other => assert_eq!(other.unwrap(), 10),
    }
    // The draft is not locked any longer.
    node.storage().truncate(draft, 5).await.unwrap();
    node.storage().append(draft, Some(5), NO_LIMIT, parts(b" second", 1)).await.unwrap();
    assert_eq!(node.storage().digest(draft).await.unwrap().checksums, checksums(b"first second"));
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_appends_are_serialized() {
    let node = Arc::new(TestNode::new());
    let draft = Draft::Upload(UploadId::new());
    let (one, other) = (bytes(4 * MIB, 5), bytes(4 * MIB, 6));
    let append = |data: Vec<u8>| {
        let node = node.clone();
        tokio::spawn(async move {
            node.storage().append(draft, None, NO_LIMIT, parts(&data, 10_007)).await.unwrap();
        })
    };
    let both = [append(one.clone()), append(other.clone())];
    for task in both {
        task.await.unwrap();
    }
    let found = std::fs::read(node.draft_path(draft)).unwrap();
    let orders = [[&one[..], &other[..]].concat(), [&other[..], &one[..]].concat()];
    assert!(orders.contains(&found));
    assert_eq!(node.storage().digest(draft).await.unwrap().checksums, checksums(&found));
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_append_leaves_a_consistent_prefix() {
    let node = Arc::new(TestNode::new());
    let data = bytes(24 * MIB, 7);
    for pause in 0..12 {
        let draft = Draft::Upload(UploadId::new());
        let (feed, stream) = manual_stream();
        let task = {
            let node = node.clone();
            tokio::spawn(async move { node.storage().append(draft, Some(0), NO_LIMIT, stream).await })
        };
        for part in data.chunks(700_001).take(1 + pause * 3) {
            feed.send(Ok(Bytes::copy_from_slice(part))).await.unwrap();
        }
        task.abort();
        // Requesting the content waits until the last write is done.
        let _ = task.await;
        let content = match node.storage().digest(draft).await {
            // It had not started.
            Err(Error::NotFound(_)) => continue,
            other => other.unwrap(),
        };
        let size = usize::try_from(content.size).unwrap();
        assert_eq!(content.checksums, checksums(&data[..size]), "{size}");
        let rest = parts(&data[size..], MIB + 1);
        node.storage().append(draft, Some(content.size), NO_LIMIT, rest).await.unwrap();
        assert_eq!(node.storage().digest(draft).await.unwrap().checksums, checksums(&data));
        node.storage().remove_draft(draft).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_and_resumed_drafts_are_complete() {
    let node = Arc::new(TestNode::new());
    let tasks = (0..10u64).map(|number| {
        let node = node.clone();
        tokio::spawn(async move {
            let data = bytes(20 * MIB, 100 + number);
            let draft = Draft::Upload(UploadId::new());
            let mut random = bytes(8 * 1000, number).into_iter().skip(16);
            let mut some = move |limit: usize| {
                (0..4).fold(0usize, |n, _| n << 8 | random.next().unwrap() as usize) % limit
            };
            loop {
                let size = node.storage().draft_size(draft).await.unwrap().unwrap_or(0);
                let at = usize::try_from(size).unwrap();
                if at == data.len() {
                    break;
                }
                let end = data.len().min(at + 1 + some(6 * MIB));
                let mut stream: Vec<_> = data[at..end]
                    .chunks(1 + some(MIB))
                    .map(|part| Ok(Bytes::copy_from_slice(part)))
                    .collect();
                if some(3) == 0 {
                    stream.push(Err(Error::Timeout("cut".into())));
                }
                let _ = node.storage().append(draft, Some(size), NO_LIMIT, results(stream)).await;
                if some(4) == 0 {
                    let _ = node.storage().truncate(draft, at as u64).await;
                }
            }
            assert_eq!(node.storage().digest(draft).await.unwrap().checksums, checksums(&data));
            assert!(std::fs::read(node.draft_path(draft)).unwrap() == data);
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_drafts_still_have_correct_checksums() {
    let node = TestNode::new();
    let mut drafts = Vec::new();
    for number in 0..300u32 {
        drafts.push((node.draft(&number.to_le_bytes()).await, number));
    }
    for (draft, number) in &drafts {
        node.storage().append(*draft, Some(4), NO_LIMIT, parts(b"x", 1)).await.unwrap();
        let sha1 = node.storage().digest(*draft).await.unwrap().checksums.sha1;
        if number % 50 == 0 {
            assert_eq!(sha1, checksums(&[&number.to_le_bytes()[..], b"x"].concat()).sha1);
        }
    }
    let found = node.storage().list_files().await.unwrap();
    assert_eq!(found.len(), 300);
    assert!(found.iter().all(|found| found.size == 5 && matches!(found.kind, StoredFileKind::Draft(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn draft_is_immutable_while_its_blob_exists() {
    let node = TestNode::new();
    let storage = node.storage();
    let (draft, blob) = (node.draft(b"kept").await, BlobId::new());
    storage.commit(draft, blob).await.unwrap();
    // Neither now nor after a restart.
    for storage in [storage, TestNode::at(&node.directory).storage()] {
        let refused = storage.append(draft, None, NO_LIMIT, parts(b"x", 1)).await;
        assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
        let refused = storage.truncate(draft, 1).await;
        assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
    }
    assert_eq!(storage.digest(draft).await.unwrap().checksums, checksums(b"kept"));
    storage.commit(draft, blob).await.unwrap();
    storage.remove_draft(draft).await.unwrap();
    assert_eq!(node.bytes(blob).await.unwrap(), b"kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn draft_is_writable_again_after_its_blob_is_removed() {
    let node = TestNode::new();
    let storage = node.storage();
    let (draft, blob) = (node.draft(b"begin ").await, BlobId::new());
    let mode = || node.draft_path(draft).metadata().unwrap().permissions().mode() & 0o777;
    storage.commit(draft, blob).await.unwrap();
    storage.commit(draft, blob).await.unwrap();
    assert_eq!(mode(), 0o444);
    storage.remove(blob).await.unwrap();
    assert_eq!(mode(), 0o644);
    storage.append(draft, Some(6), NO_LIMIT, parts(b"end", 1)).await.unwrap();
    storage.commit(draft, blob).await.unwrap();
    assert_eq!(node.bytes(blob).await.unwrap(), b"begin end");
    // Another draft replaces the blob.
    let other = node.draft(b"other").await;
    storage.commit(other, blob).await.unwrap();
    assert_eq!(mode(), 0o644);
    assert_eq!(node.blob_path(blob).metadata().unwrap().permissions().mode() & 0o777, 0o444);
}
