//! Benchmarks uploads and downloads of large files.
//!
//! The baseline of uploads is one thread that writes a file, computes the same four checksums and syncs it; that of
//! downloads is one thread that reads the file. Files are read from disk: the page cache is dropped before. The rates
//! with a warm page cache have no target, because no socket is as fast as memory.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use aws_lc_rs::digest;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::load::{self, request};
use crate::sampling::{median, progress};
use crate::server::Server;
use crate::table::{Row, Table};

/// The buffer size.
const BUFFER_SIZE: usize = 1 << 20;
const MEBIBYTES: usize = 2048;
const ROUNDS: usize = 3;
/// The target for the growth of the server's memory in MB.
const MAX_MEMORY_GROWTH: f64 = 48.0;

/// The rates of one round in MiB/s.
#[derive(Default)]
struct Rates {
    written: f64,
    uploaded: f64,
    uploaded_in_parts: f64,
    read: f64,
    downloaded: f64,
    read_warm: f64,
    downloaded_warm: f64,
}

pub(crate) async fn measure(program: &Path, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    let mebibytes = if quick { MEBIBYTES / 8 } else { MEBIBYTES };
    table.section(&format!("images: {mebibytes} MiB, MiB/s"));
    let directory = tempfile::tempdir_in(program.parent().context("the program has no parent directory")?)?;
    let data = directory.path().join("data");
    let server = Server::start(program, &data, &[("MUSTER_BLOB_DELETION_DELAY".into(), "0".into())]).await?;
    let before = server.peak_memory()?;
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        progress(&format!("images, round {round} of {ROUNDS}"));
        rounds.push(run(&server, &data, directory.path(), mebibytes).await?);
    }
    let growth = server.peak_memory()? - before;
    server.stop().await?;
    let rate = |pick: fn(&Rates) -> f64| median(rounds.iter().map(pick).collect());
    let ratio = |pick: fn(&Rates) -> (f64, f64)| {
        median(rounds.iter().map(pick).map(|(own, other)| own / other).collect())
    };
    let show = |rate: f64| format!("{rate:.0}");
    let compare = |label: &str, rate: f64, ratio: f64| {
        Row::new(label, format!("{} = {:.0} %", show(rate), ratio * 100.0))
    };
    table.add(Row::new("one thread: write, checksum, sync (baseline)", show(rate(|r| r.written))));
    let (upload, share) = (rate(|r| r.uploaded), ratio(|r| (r.uploaded, r.written)));
    table.add(
        compare("upload in one request, up to the artifact", upload, share).target(">= 60 %", share >= 0.6),
    );
    let (upload, share) = (rate(|r| r.uploaded_in_parts), ratio(|r| (r.uploaded_in_parts, r.written)));
    table.add(
        compare("upload in requests of 2 MiB, up to the artifact", upload, share)
            .target(">= 60 %", share >= 0.6),
    );
    table.add(Row::new("one thread: read from disk (baseline)", show(rate(|r| r.read))));
    let (download, share) = (rate(|r| r.downloaded), ratio(|r| (r.downloaded, r.read)));
    // A short download ends before the disk reaches its full rate.
    table.add(compare("download from disk", download, share).target_if(!quick, ">= 80 %", share >= 0.8));
    table.add(Row::new("one thread: read from page cache (baseline)", show(rate(|r| r.read_warm))));
    let (download, share) = (rate(|r| r.downloaded_warm), ratio(|r| (r.downloaded_warm, r.read_warm)));
    table.add(compare("download from page cache", download, share));
    let limit = format!("< {MAX_MEMORY_GROWTH:.0} MB");
    table.add(
        Row::new("growth of the server's memory", format!("{growth:.1} MB"))
            .target(limit, growth < MAX_MEMORY_GROWTH),
    );
    Ok(())
}

async fn run(server: &Server, data: &Path, directory: &Path, mebibytes: usize) -> anyhow::Result<Rates> {
    let source = directory.join("source");
    create_random_file(&source, mebibytes)?;
    let copy = directory.join("copy");
    let mut rates = Rates { written: rate(mebibytes, write_locally(&source, &copy)?), ..Rates::default() };
    std::fs::remove_file(&copy)?;
    let token = server.token().await?;
    let mut blob = String::new();
    for in_parts in [false, true] {
        let began = Instant::now();
        let id = begin_upload(server, &token).await?;
        if in_parts {
            send_in_parts(server, &token, &id, &source)?
        } else {
            upload_part(server, &token, &id, &source, 0, None)?
        };
        blob = finish_upload(server, &token, &id).await?;
        let rate = rate(mebibytes, began.elapsed());
        if in_parts {
            rates.uploaded_in_parts = rate;
        } else {
            rates.uploaded = rate;
            // The server would deduplicate identical content.
            change_first_bytes(&source)?;
        }
    }
    let stored = data.join("simulated/1/blobs").join(&blob[..2]).join(&blob);
    for is_warm in [false, true] {
        let file = File::open(&source)?;
        let drop_cache = |file: &File| {
            if is_warm {
                Ok(())
            } else {
                posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
            }
        };
        file.sync_all()?;
        drop_cache(&file)?;
        let read = rate(mebibytes, read_locally(file)?);
        drop_cache(&File::open(&stored)?)?;
        let downloaded = rate(mebibytes, download(server, &token, &blob, mebibytes)?);
        if is_warm {
            (rates.read_warm, rates.downloaded_warm) = (read, downloaded);
        } else {
            (rates.read, rates.downloaded) = (read, downloaded);
        }
    }
    Ok(rates)
}

#[expect(clippy::cast_precision_loss, reason = "a few thousand")]
fn rate(mebibytes: usize, time: Duration) -> f64 {
    mebibytes as f64 / time.as_secs_f64()
}

/// Creates a file of random bytes.
fn create_random_file(path: &Path, mebibytes: usize) -> anyhow::Result<()> {
    let mut file = File::create(path)?;
    let mut buffer = vec![0; BUFFER_SIZE];
    for _ in 0..mebibytes {
        aws_lc_rs::rand::fill(&mut buffer).map_err(|_| anyhow::anyhow!("failed to generate random bytes"))?;
        file.write_all(&buffer)?;
    }
    Ok(file.sync_all()?)
}

/// Overwrites the first bytes of a file with random ones.
fn change_first_bytes(path: &Path) -> anyhow::Result<()> {
    let mut bytes = [0; 64];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| anyhow::anyhow!("failed to generate random bytes"))?;
    let mut file = File::options().write(true).open(path)?;
    Ok(file.write_all(&bytes)?)
}

fn write_locally(source: &Path, target: &Path) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let (mut from, mut to) = (File::open(source)?, File::create(target)?);
    let mut checksums =
        [&digest::SHA1_FOR_LEGACY_USE_ONLY, &digest::SHA256, &digest::SHA512].map(digest::Context::new);
    let mut xxh3 = Xxh3::new();
    let mut buffer = vec![0; BUFFER_SIZE];
    loop {
        let size = from.read(&mut buffer)?;
        if size == 0 {
            break;
        }
        checksums.iter_mut().for_each(|checksum| checksum.update(&buffer[..size]));
        xxh3.update(&buffer[..size]);
        to.write_all(&buffer[..size])?;
    }
    ensure!(
        checksums.map(|checksum| checksum.finish().as_ref().len()).iter().sum::<usize>() > 0
            && xxh3.digest128() != 0
    );
    to.sync_all()?;
    Ok(began.elapsed())
}

fn read_locally(mut file: File) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let mut buffer = vec![0; BUFFER_SIZE];
    while file.read(&mut buffer)? > 0 {}
    Ok(began.elapsed())
}

/// Starts an upload and returns its ID.
pub(crate) async fn begin_upload(server: &Server, token: &str) -> anyhow::Result<String> {
    let response = load::call(server.address, &request("POST", "/upload", Some(token), None)).await?.ok()?;
    let response: Value = serde_json::from_slice(&response)?;
    Ok(response["uuid"].as_str().context("no upload")?.to_owned())
}

/// Creates an artifact of an upload and returns the ID of its blob.
pub(crate) async fn finish_upload(server: &Server, token: &str, upload: &str) -> anyhow::Result<String> {
    let body = json!({ "upload_uuid": upload, "artifact_type": "other" });
    let create = request("POST", "/artifacts/upload/bench", Some(token), Some(&body));
    let response: Value = serde_json::from_slice(&load::call(server.address, &create).await?.ok()?)?;
    Ok(response["blob_uuid"].as_str().context("no blob")?.to_owned())
}

/// Uploads a part of a file in one request, up to its end if no length is given.
pub(crate) fn upload_part(
    server: &Server,
    token: &str,
    upload: &str,
    source: &Path,
    from: u64,
    length: Option<u64>,
) -> anyhow::Result<u64> {
    use std::io::Seek as _;
    let mut file = File::open(source)?;
    let length = length.unwrap_or(file.metadata()?.len() - from);
    file.seek(std::io::SeekFrom::Start(from))?;
    let mut stream = TcpStream::connect(server.address)?;
    write!(
        stream,
        "POST /upload/{upload} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\
         Content-Length: {length}\r\n\r\n"
    )?;
    let mut buffer = vec![0; BUFFER_SIZE];
    let mut left = length;
    while left > 0 {
        let size = usize::try_from(left)?.min(BUFFER_SIZE);
        file.read_exact(&mut buffer[..size])?;
        stream.write_all(&buffer[..size])?;
        left -= size as u64;
    }
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    ensure!(response.starts_with("HTTP/1.1 200"), "the server rejected an upload: {response}");
    Ok(length)
}

/// Uploads a file in several requests, as the released client does.
fn send_in_parts(server: &Server, token: &str, upload: &str, source: &Path) -> anyhow::Result<u64> {
    let size = File::open(source)?.metadata()?.len();
    let mut sent = 0;
    while sent < size {
        sent += upload_part(server, token, upload, source, sent, Some((2 << 20).min(size - sent)))?;
    }
    Ok(sent)
}

fn download(server: &Server, token: &str, blob: &str, mebibytes: usize) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let mut stream = TcpStream::connect(server.address)?;
    write!(
        stream,
        "GET /blobs/{blob}/data HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    )?;
    let mut buffer = vec![0; BUFFER_SIZE];
    let mut received = 0;
    loop {
        let size = stream.read(&mut buffer)?;
        if size == 0 {
            break;
        }
        received += size;
    }
    ensure!(received > mebibytes * BUFFER_SIZE, "a download ended after {received} bytes");
    Ok(began.elapsed())
}
