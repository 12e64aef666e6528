//! Drafts: appended to, cut, resumed, interrupted.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use bytes::Bytes;
use muster_types::Error;
use muster_types::ids::{BlobId, OperationId, UploadId};
use muster_types::storage::{Draft, StoredFileKind};

use crate::world::{ANY, Disk, MIB, bytes, checksums, fed, parts, results};

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_grows_and_is_summed_up_as_other_programs_do_it() {
    let disk = Disk::new();
    let storage = disk.storage();
    let data = bytes(5 * MIB + 12_345, 1);
    for draft in
        [Draft::Upload(UploadId::new()), Draft::Fetch(OperationId::new()), Draft::Copy(BlobId::new())]
    {
        assert_eq!(storage.draft_size(draft).await.unwrap(), None);
        let (first, second) = data.split_at(2 * MIB + 77);
        assert_eq!(storage.append(draft, Some(0), ANY, parts(first, 131)).await.unwrap(), first.len() as u64);
        storage.append(draft, Some(first.len() as u64), ANY, parts(&[], 1)).await.unwrap();
        storage.append(draft, None, ANY, parts(second, 3 * MIB)).await.unwrap();
        assert_eq!(storage.draft_size(draft).await.unwrap(), Some(data.len() as u64));
        let content = storage.content(draft).await.unwrap();
        assert_eq!((content.size, &content.checksums), (data.len() as u64, &checksums(&data)));
        // Also when it is read once more, and when it goes on after a look.
        assert_eq!(Disk::at(&disk.folder).storage().content(draft).await.unwrap(), content);
        storage.append(draft, None, ANY, parts(b"more", 1)).await.unwrap();
        let more = [&data[..], b"more"].concat();
        assert_eq!(storage.content(draft).await.unwrap().checksums, checksums(&more));
    }
    let empty = disk.draft(b"").await;
    assert_eq!(storage.content(empty).await.unwrap().checksums, checksums(b""));
    let absent = storage.content(Draft::Upload(UploadId::new())).await;
    assert!(matches!(absent, Err(Error::NotFound(_))), "{absent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_at_another_place_is_refused_with_the_real_size() {
    let disk = Disk::new();
    let draft = disk.draft(b"four").await;
    for at in [0, 3, 5] {
        match disk.storage().append(draft, Some(at), ANY, parts(b"x", 1)).await {
            Err(Error::Conflict(text)) => assert!(text.contains(" 4 bytes"), "{text}"),
            other => panic!("{other:?}"),
        }
    }
    let never = Draft::Upload(UploadId::new());
    let refused = disk.storage().append(never, Some(7), ANY, parts(b"x", 1)).await;
    assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
    assert_eq!(disk.storage().draft_size(never).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_came_before_a_failure_stays_and_what_is_too_much_goes() {
    let disk = Disk::new();
    let storage = disk.storage();
    let draft = disk.draft(b"begin ").await;
    let failing =
        || vec![Ok(Bytes::from("middle ")), Err(Error::Timeout("gone".into())), Ok(Bytes::from("no"))];
    // Only if it is said where it belongs.
    for (at, left) in [(None, &b"begin "[..]), (Some(6), b"begin middle ")] {
        let failed = storage.append(draft, at, ANY, results(failing())).await;
        assert!(matches!(failed, Err(Error::Timeout(_))), "{failed:?}");
        assert_eq!(std::fs::read(disk.draft_path(draft)).unwrap(), left);
    }
    let large = bytes(3 * MIB, 2);
    let refused = storage.append(draft, Some(13), 13 + 3 * MIB as u64 - 1, parts(&large, MIB)).await;
    assert!(matches!(refused, Err(Error::TooLarge(_))), "{refused:?}");
    assert_eq!(storage.draft_size(draft).await.unwrap(), Some(13));
    storage.append(draft, Some(13), 13 + 3 * MIB as u64, parts(&large, MIB)).await.unwrap();
    let whole = [b"begin middle ", &large[..]].concat();
    assert_eq!(storage.content(draft).await.unwrap().checksums, checksums(&whole));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_is_cut_and_goes_on_from_there() {
    let disk = Disk::new();
    let storage = disk.storage();
    let data = bytes(3 * MIB, 3);
    let draft = disk.draft(&data).await;
    let size = data.len() as u64;
    let beyond = storage.truncate(draft, size + 1).await;
    assert!(matches!(beyond, Err(Error::Invalid(_))), "{beyond:?}");
    storage.truncate(draft, size).await.unwrap();
    storage.truncate(draft, 1000).await.unwrap();
    storage.append(draft, Some(1000), ANY, parts(&data[1000..], 99_999)).await.unwrap();
    assert_eq!(storage.content(draft).await.unwrap().checksums, checksums(&data));
    storage.truncate(draft, 0).await.unwrap();
    storage.append(draft, Some(0), ANY, parts(b"new", 1)).await.unwrap();
    assert_eq!(storage.content(draft).await.unwrap().checksums, checksums(b"new"));
    storage.remove_draft(draft).await.unwrap();
    storage.remove_draft(draft).await.unwrap();
    assert_eq!(storage.draft_size(draft).await.unwrap(), None);
    assert!(matches!(storage.truncate(draft, 0).await, Err(Error::NotFound(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_interrupts_whoever_appends_and_whoever_waits_for_that() {
    let disk = Arc::new(Disk::new());
    let draft = disk.draft(b"first").await;
    let (feed, stream) = fed();
    let append = |stream| {
        let disk = disk.clone();
        tokio::spawn(async move { disk.storage().append(draft, None, ANY, stream).await })
    };
    let running = append(stream);
    feed.send(Ok(bytes(2 * MIB, 4).into())).await.unwrap();
    // Room for one: that the second is taken means that the first is being worked on.
    feed.send(Ok(Bytes::from("tail"))).await.unwrap();
    let waiting = append(parts(b"waits", 1));
    tokio::task::yield_now().await;
    disk.storage().truncate(draft, 5).await.unwrap();
    let interrupted = running.await.unwrap();
    assert!(matches!(interrupted, Err(Error::Conflict(_))), "{interrupted:?}");
    match waiting.await.unwrap() {
        Err(Error::Conflict(_)) => assert_eq!(std::fs::read(disk.draft_path(draft)).unwrap(), b"first"),
        // It may also come after the cut.
        other => assert_eq!(other.unwrap(), 10),
    }
    // Nobody holds it any more.
    disk.storage().truncate(draft, 5).await.unwrap();
    disk.storage().append(draft, Some(5), ANY, parts(b" second", 1)).await.unwrap();
    assert_eq!(disk.storage().content(draft).await.unwrap().checksums, checksums(b"first second"));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_appends_at_once_come_one_after_the_other() {
    let disk = Arc::new(Disk::new());
    let draft = Draft::Upload(UploadId::new());
    let (one, other) = (bytes(4 * MIB, 5), bytes(4 * MIB, 6));
    let append = |data: Vec<u8>| {
        let disk = disk.clone();
        tokio::spawn(async move {
            disk.storage().append(draft, None, ANY, parts(&data, 10_007)).await.unwrap();
        })
    };
    let both = [append(one.clone()), append(other.clone())];
    for task in both {
        task.await.unwrap();
    }
    let found = std::fs::read(disk.draft_path(draft)).unwrap();
    let orders = [[&one[..], &other[..]].concat(), [&other[..], &one[..]].concat()];
    assert!(orders.contains(&found));
    assert_eq!(disk.storage().content(draft).await.unwrap().checksums, checksums(&found));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_nobody_waits_for_leaves_a_beginning() {
    let disk = Arc::new(Disk::new());
    let data = bytes(24 * MIB, 7);
    for pause in 0..12 {
        let draft = Draft::Upload(UploadId::new());
        let (feed, stream) = fed();
        let task = {
            let disk = disk.clone();
            tokio::spawn(async move { disk.storage().append(draft, Some(0), ANY, stream).await })
        };
        for part in data.chunks(700_001).take(1 + pause * 3) {
            feed.send(Ok(Bytes::copy_from_slice(part))).await.unwrap();
        }
        task.abort();
        // Asking for the content waits until the last write is done.
        let _ = task.await;
        let content = match disk.storage().content(draft).await {
            // Not even begun.
            Err(Error::NotFound(_)) => continue,
            other => other.unwrap(),
        };
        let size = usize::try_from(content.size).unwrap();
        assert_eq!(content.checksums, checksums(&data[..size]), "{size}");
        let rest = parts(&data[size..], MIB + 1);
        disk.storage().append(draft, Some(content.size), ANY, rest).await.unwrap();
        assert_eq!(disk.storage().content(draft).await.unwrap().checksums, checksums(&data));
        disk.storage().remove_draft(draft).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_drafts_cut_anywhere_and_resumed_are_whole_in_the_end() {
    let disk = Arc::new(Disk::new());
    let tasks = (0..10u64).map(|number| {
        let disk = disk.clone();
        tokio::spawn(async move {
            let data = bytes(20 * MIB, 100 + number);
            let draft = Draft::Upload(UploadId::new());
            let mut random = bytes(8 * 1000, number).into_iter().skip(16);
            let mut some = move |most: usize| {
                (0..4).fold(0usize, |n, _| n << 8 | random.next().unwrap() as usize) % most
            };
            loop {
                let size = disk.storage().draft_size(draft).await.unwrap().unwrap_or(0);
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
                let _ = disk.storage().append(draft, Some(size), ANY, results(stream)).await;
                if some(4) == 0 {
                    let _ = disk.storage().truncate(draft, at as u64).await;
                }
            }
            assert_eq!(disk.storage().content(draft).await.unwrap().checksums, checksums(&data));
            assert!(std::fs::read(disk.draft_path(draft)).unwrap() == data);
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_drafts_than_are_remembered_are_summed_up_right() {
    let disk = Disk::new();
    let mut drafts = Vec::new();
    for number in 0..300u32 {
        drafts.push((disk.draft(&number.to_le_bytes()).await, number));
    }
    for (draft, number) in &drafts {
        disk.storage().append(*draft, Some(4), ANY, parts(b"x", 1)).await.unwrap();
        let sha1 = disk.storage().content(*draft).await.unwrap().checksums.sha1;
        if number % 50 == 0 {
            assert_eq!(sha1, checksums(&[&number.to_le_bytes()[..], b"x"].concat()).sha1);
        }
    }
    let found = disk.storage().find().await.unwrap();
    assert_eq!(found.len(), 300);
    assert!(found.iter().all(|found| found.size == 5 && matches!(found.what, StoredFileKind::Draft(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_that_is_kept_changes_no_more() {
    let disk = Disk::new();
    let storage = disk.storage();
    let (draft, blob) = (disk.draft(b"kept").await, BlobId::new());
    storage.keep(draft, blob).await.unwrap();
    // Neither now nor after a restart.
    for storage in [storage, Disk::at(&disk.folder).storage()] {
        let refused = storage.append(draft, None, ANY, parts(b"x", 1)).await;
        assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
        let refused = storage.truncate(draft, 1).await;
        assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
    }
    assert_eq!(storage.content(draft).await.unwrap().checksums, checksums(b"kept"));
    storage.keep(draft, blob).await.unwrap();
    storage.remove_draft(draft).await.unwrap();
    assert_eq!(disk.bytes(blob).await.unwrap(), b"kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_goes_on_after_the_blob_that_was_made_of_it_is_removed() {
    let disk = Disk::new();
    let storage = disk.storage();
    let (draft, blob) = (disk.draft(b"begin ").await, BlobId::new());
    let mode = || disk.draft_path(draft).metadata().unwrap().permissions().mode() & 0o777;
    storage.keep(draft, blob).await.unwrap();
    storage.keep(draft, blob).await.unwrap();
    assert_eq!(mode(), 0o444);
    storage.remove(blob).await.unwrap();
    assert_eq!(mode(), 0o644);
    storage.append(draft, Some(6), ANY, parts(b"end", 1)).await.unwrap();
    storage.keep(draft, blob).await.unwrap();
    assert_eq!(disk.bytes(blob).await.unwrap(), b"begin end");
    // Another one takes the blob's place.
    let other = disk.draft(b"other").await;
    storage.keep(other, blob).await.unwrap();
    assert_eq!(mode(), 0o644);
    assert_eq!(disk.blob_path(blob).metadata().unwrap().permissions().mode() & 0o777, 0o444);
}
