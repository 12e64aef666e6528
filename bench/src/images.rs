//! How fast a large content goes in and comes out, compared with the same bytes written and read without a server.
//!
//! Going in is compared with one thread that writes a file, sums it up in the same four ways and synchronises it;
//! coming out with one thread that reads the file. Both sides read from disk: what the kernel keeps in memory of the
//! files is dropped before. What they reach when it is not is shown, too, and has no target: through memory a file
//! is read faster than anything passes a socket.

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
use crate::server::Server;
use crate::table::{Row, Table};
use crate::{median, progress};

const PIECE: usize = 1 << 20;
const MEBIBYTES: usize = 2048;
const ROUNDS: usize = 3;
/// Megabytes that the server's memory may grow by.
const GROWTH: f64 = 48.0;

/// One measurement: bytes a second of each.
#[derive(Default)]
struct Rates {
    written: f64,
    uploaded: f64,
    pieces: f64,
    read: f64,
    downloaded: f64,
    read_warm: f64,
    downloaded_warm: f64,
}

pub(crate) async fn measure(program: &Path, part: usize, table: &mut Table) -> anyhow::Result<()> {
    let mebibytes = MEBIBYTES / part;
    table.section(&format!("images: {mebibytes} MiB, MiB/s"));
    let folder = tempfile::tempdir_in(program.parent().context("a program without a folder")?)?;
    let data = folder.path().join("data");
    let server = Server::start(program, &data, &[("MUSTER_BLOB_DELETION_DELAY".into(), "0".into())]).await?;
    let before = server.peak()?;
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        progress(&format!("images, round {round} of {ROUNDS}"));
        rounds.push(run(&server, &data, folder.path(), mebibytes).await?);
    }
    let growth = server.peak()? - before;
    server.stop().await?;
    let rate = |pick: fn(&Rates) -> f64| median(rounds.iter().map(pick).collect());
    let ratio = |pick: fn(&Rates) -> (f64, f64)| {
        median(rounds.iter().map(pick).map(|(own, other)| own / other).collect())
    };
    let show = |rate: f64| format!("{rate:.0}");
    let compare = |what: &str, rate: f64, ratio: f64| {
        Row::new(what, format!("{} = {:.0} %", show(rate), ratio * 100.0))
    };
    table.add(Row::new("one thread writes, sums up, synchronises", show(rate(|r| r.written))));
    let (upload, share) = (rate(|r| r.uploaded), ratio(|r| (r.uploaded, r.written)));
    table.add(
        compare("upload in one request, to the artifact", upload, share).target(">= 60 %", share >= 0.6),
    );
    let (upload, share) = (rate(|r| r.pieces), ratio(|r| (r.pieces, r.written)));
    table.add(
        compare("upload in pieces of 2 MiB, to the artifact", upload, share).target(">= 60 %", share >= 0.6),
    );
    table.add(Row::new("one thread reads, from disk", show(rate(|r| r.read))));
    let (download, share) = (rate(|r| r.downloaded), ratio(|r| (r.downloaded, r.read)));
    // A short one is over before the disk has found its pace.
    table.add(compare("download, from disk", download, share).target_if(part == 1, ">= 80 %", share >= 0.8));
    table.add(Row::new("one thread reads, from memory", show(rate(|r| r.read_warm))));
    let (download, share) = (rate(|r| r.downloaded_warm), ratio(|r| (r.downloaded_warm, r.read_warm)));
    table.add(compare("download, from memory", download, share));
    let limit = format!("< {GROWTH:.0} MB");
    table.add(
        Row::new("growth of the server's memory by all that", format!("{growth:.1} MB"))
            .target(limit, growth < GROWTH),
    );
    Ok(())
}

async fn run(server: &Server, data: &Path, folder: &Path, mebibytes: usize) -> anyhow::Result<Rates> {
    let source = folder.join("source");
    make(&source, mebibytes)?;
    let copy = folder.join("copy");
    let mut rates = Rates { written: rate(mebibytes, write_locally(&source, &copy)?), ..Rates::default() };
    std::fs::remove_file(&copy)?;
    let token = server.token().await?;
    let mut blob = String::new();
    for in_pieces in [false, true] {
        let began = Instant::now();
        let id = begin(server, &token).await?;
        if in_pieces {
            send_pieces(server, &token, &id, &source)?
        } else {
            send(server, &token, &id, &source, 0, None)?
        };
        blob = finish(server, &token, &id).await?;
        let rate = rate(mebibytes, began.elapsed());
        if in_pieces {
            rates.pieces = rate;
        } else {
            rates.uploaded = rate;
            // The same bytes again would only be recognised.
            scramble(&source)?;
        }
    }
    let stored = data.join("simulated/1/blobs").join(&blob[..2]).join(&blob);
    for warm in [false, true] {
        let file = File::open(&source)?;
        let drop = |file: &File| {
            if warm {
                Ok(())
            } else {
                posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
            }
        };
        file.sync_all()?;
        drop(&file)?;
        let read = rate(mebibytes, read_locally(file)?);
        drop(&File::open(&stored)?)?;
        let downloaded = rate(mebibytes, download(server, &token, &blob, mebibytes)?);
        if warm {
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

/// A file of random bytes.
fn make(path: &Path, mebibytes: usize) -> anyhow::Result<()> {
    let mut file = File::create(path)?;
    let mut piece = vec![0; PIECE];
    for _ in 0..mebibytes {
        aws_lc_rs::rand::fill(&mut piece).map_err(|_| anyhow::anyhow!("no random bytes"))?;
        file.write_all(&piece)?;
    }
    Ok(file.sync_all()?)
}

/// Changes a file's first bytes.
fn scramble(path: &Path) -> anyhow::Result<()> {
    let mut bytes = [0; 64];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| anyhow::anyhow!("no random bytes"))?;
    let mut file = File::options().write(true).open(path)?;
    Ok(file.write_all(&bytes)?)
}

fn write_locally(source: &Path, target: &Path) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let (mut from, mut to) = (File::open(source)?, File::create(target)?);
    let mut sums =
        [&digest::SHA1_FOR_LEGACY_USE_ONLY, &digest::SHA256, &digest::SHA512].map(digest::Context::new);
    let mut fast = Xxh3::new();
    let mut piece = vec![0; PIECE];
    loop {
        let size = from.read(&mut piece)?;
        if size == 0 {
            break;
        }
        sums.iter_mut().for_each(|sum| sum.update(&piece[..size]));
        fast.update(&piece[..size]);
        to.write_all(&piece[..size])?;
    }
    ensure!(sums.map(|sum| sum.finish().as_ref().len()).iter().sum::<usize>() > 0 && fast.digest128() != 0);
    to.sync_all()?;
    Ok(began.elapsed())
}

fn read_locally(mut file: File) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let mut piece = vec![0; PIECE];
    while file.read(&mut piece)? > 0 {}
    Ok(began.elapsed())
}

pub(crate) async fn begin(server: &Server, token: &str) -> anyhow::Result<String> {
    let answer = load::call(server.address, &request("POST", "/upload", Some(token), None)).await?.ok()?;
    let answer: Value = serde_json::from_slice(&answer)?;
    Ok(answer["uuid"].as_str().context("no upload")?.to_owned())
}

pub(crate) async fn finish(server: &Server, token: &str, upload: &str) -> anyhow::Result<String> {
    let body = json!({ "upload_uuid": upload, "artifact_type": "other" });
    let made = request("POST", "/artifacts/upload/bench", Some(token), Some(&body));
    let answer: Value = serde_json::from_slice(&load::call(server.address, &made).await?.ok()?)?;
    Ok(answer["blob_uuid"].as_str().context("no blob")?.to_owned())
}

/// Sends a part of a file in one request; the rest of it if no length is given.
pub(crate) fn send(
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
    let mut piece = vec![0; PIECE];
    let mut left = length;
    while left > 0 {
        let wanted = usize::try_from(left)?.min(PIECE);
        file.read_exact(&mut piece[..wanted])?;
        stream.write_all(&piece[..wanted])?;
        left -= wanted as u64;
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "an upload was refused: {answer}");
    Ok(length)
}

/// Sends a file as the released client does.
fn send_pieces(server: &Server, token: &str, upload: &str, source: &Path) -> anyhow::Result<u64> {
    let size = File::open(source)?.metadata()?.len();
    let mut sent = 0;
    while sent < size {
        sent += send(server, token, upload, source, sent, Some((2 << 20).min(size - sent)))?;
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
    let mut piece = vec![0; PIECE];
    let mut received = 0;
    loop {
        let size = stream.read(&mut piece)?;
        if size == 0 {
            break;
        }
        received += size;
    }
    ensure!(received > mebibytes * PIECE, "a download ended early, after {received} bytes");
    Ok(began.elapsed())
}
