//! Measurements, which only make sense on an idle machine and with a release build:
//! `cargo test --release -p muster-node --test storage -- --ignored --nocapture --exact speed::how_fast_it_is`

use std::fs::File;
use std::io::{Read, Write};
use std::time::Instant;

use bytes::Bytes;
use muster_types::ids::{BlobId, UploadId};
use muster_types::storage::{ByteStream, Draft};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::world::{ANY, Disk, MIB, bytes, next, results};

const SIZE: usize = 2048 * MIB;

/// Processor time of this process, in seconds.
fn processor() -> f64 {
    let used = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let seconds = |time: TimeVal| time.num_microseconds() as f64 / 1e6;
    seconds(used.user_time()) + seconds(used.system_time())
}

#[derive(Clone, Copy)]
struct Start(Instant, f64);

impl Start {
    fn now() -> Self {
        Self(Instant::now(), processor())
    }
}

fn said(what: &str, since: Start) {
    let (seconds, used) = (since.0.elapsed().as_secs_f64(), processor() - since.1);
    let memory = std::fs::read_to_string("/proc/self/status").unwrap();
    let memory = memory.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    eprintln!(
        "{what:<40} {:6.0} MiB/s  {seconds:5.2} s  {used:5.2} s of processors  {memory}",
        (SIZE / MIB) as f64 / seconds
    );
}

/// A stream that repeats 8 MiB in parts, without memory of its own.
fn stream(pool: &Bytes, from: usize, size: usize, part: usize) -> ByteStream {
    let parts = (0..size / part).map(|number| {
        let at = (from + number * part) % pool.len();
        Ok(pool.slice(at..at + part))
    });
    results(parts.collect())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn how_fast_it_is() {
    use aws_lc_rs::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA512};
    let disk = Disk::new();
    let pool = Bytes::from(bytes(8 * MIB, 1));
    for _ in 0..2 {
        let path = disk.folder.join("plain");
        let start = Start::now();
        let mut file = File::create(&path).unwrap();
        let mut sums = [&SHA1_FOR_LEGACY_USE_ONLY, &SHA256, &SHA512].map(Context::new);
        let mut xxh128 = xxhash_rust::xxh3::Xxh3::new();
        for number in 0..SIZE / MIB {
            let part = &pool[number % 8 * MIB..][..MIB];
            file.write_all(part).unwrap();
            sums.iter_mut().for_each(|sum| sum.update(part));
            xxh128.update(part);
        }
        said("one thread writes and sums up", start);
        std::fs::remove_file(path).unwrap();

        for part in [64 << 10, MIB] {
            let draft = Draft::Upload(UploadId::new());
            let start = Start::now();
            disk.storage().append(draft, Some(0), ANY, stream(&pool, 0, SIZE, part)).await.unwrap();
            disk.storage().content(draft).await.unwrap();
            said(&format!("append, one stream of {} KiB", part >> 10), start);
            disk.storage().remove_draft(draft).await.unwrap();
        }

        let draft = Draft::Upload(UploadId::new());
        let start = Start::now();
        for at in (0..SIZE).step_by(2 * MIB) {
            let part = stream(&pool, at, 2 * MIB, 64 << 10);
            disk.storage().append(draft, Some(at as u64), ANY, part).await.unwrap();
        }
        disk.storage().content(draft).await.unwrap();
        said("append, 1024 calls of 2 MiB", start);

        let blob = BlobId::new();
        let start = Start::now();
        disk.storage().keep(draft, blob).await.unwrap();
        said("keep", start);

        let start = Start::now();
        let mut file = File::open(disk.blob_path(blob)).unwrap();
        let mut buffer = vec![0; MIB];
        while file.read(&mut buffer).unwrap() > 0 {}
        said("plain read", start);
        let start = Start::now();
        let mut stream = disk.storage().read(blob, 0..SIZE as u64).await.unwrap();
        while let Some(part) = next(&mut stream).await {
            part.unwrap();
        }
        said("read", start);
        disk.storage().remove(blob).await.unwrap();
        disk.storage().remove_draft(draft).await.unwrap();
    }
}
