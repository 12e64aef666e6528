//! File transfers: both directions, errors and aborts.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use serde_json::json;

use crate::host::{Host, chunk_packet, decode, random_bytes, wait_until};

fn mode(path: &str) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Returns the names in the test directory, without the port and the spool.
fn names(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.directory.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "port" && name != "spool").collect();
    names.sort();
    names
}

#[test]
fn transfers_files_in_large_chunks() {
    let mut host = Host::new();
    for length in [0, 1, 65536, 3_000_001] {
        let bytes = random_bytes(length);
        let path = host.path_text("file");
        let reply = host.put(&path, &bytes);
        assert_eq!((&reply["command"], &reply["path"]), (&json!("put-file-response"), &json!(path)));
        assert!(reply.get("offset").is_none());
        assert!(fs::read(&path).unwrap() == bytes, "{length}");
        let (stat, got) = host.get(&path, Some(200_000)).unwrap();
        assert!(got == bytes, "{length}");
        assert_eq!(
            (stat["size"].as_u64(), stat["uid"].as_u64()),
            (Some(length as u64), Some(nix::unistd::geteuid().as_raw().into()))
        );
    }
    assert_eq!(names(&host), ["file"]);
    assert_eq!(fs::read_dir(host.path("spool/leftovers")).unwrap().count(), 0);
    // A requested mode is set before the file is visible.
    let path = host.path_text("key");
    host.put_with_stat(&path, &json!({ "mode": 0o100_600 }), b"secret");
    assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o600, b"secret".to_vec()));
}

#[test]
fn transfers_files_of_hosts_without_extensions() {
    let mut host = Host::new();
    let bytes = random_bytes(300_000);
    let path = host.path_text("file");
    assert_eq!(host.put_plain(&path, 0o100_640, &bytes)["path"], json!(path));
    assert!(fs::read(&path).unwrap() == bytes);
    assert_eq!(mode(&path), 0o640);
    let (stat, got) = host.get(&path, None).unwrap();
    assert!(got == bytes);
    assert_eq!(stat["mode"], 0o100_640);
    for name in ["size", "uid", "gid", "atime", "mtime", "ctime"] {
        assert!(stat[name].is_number(), "{name}");
    }
    // Some hosts identify a transfer only by its path.
    for (offset, chunk) in [(0, Some("aGk=")), (2, None)] {
        host.send(&json!({ "command": "put-file", "path": path, "offset": offset, "chunk": chunk }));
    }
    assert_eq!(host.receive()["command"], "put-file-response");
    assert_eq!(fs::read(&path).unwrap(), b"hi");
}

#[test]
fn replaces_file_atomically_and_keeps_its_mode() {
    let mut host = Host::new();
    let (path, link) = (host.path_text("file"), host.path_text("link"));
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o751)).unwrap();
    symlink("file", &link).unwrap();
    let unique =
        host.request(json!({ "command": "put-file", "path": link, "stat_result": {}, "pieces": true }));
    host.send(&chunk_packet(&unique, &link, 0, Some(b"new")));
    assert_eq!(host.reply(&unique)["offset"], 3);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    host.send(&chunk_packet(&unique, &link, 3, None));
    assert_eq!(host.reply(&unique)["path"], json!(link));
    assert_eq!((fs::read(&path).unwrap().as_slice(), mode(&path)), (b"new".as_slice(), 0o751));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(names(&host), ["file", "link"]);
}

#[test]
fn aborted_transfer_leaves_no_files() {
    let mut host = Host::new();
    let path = host.path_text("file");
    fs::write(&path, "old").unwrap();
    let begin = |host: &mut Host| {
        let unique =
            host.request(json!({ "command": "put-file", "path": path, "stat_result": {}, "pieces": true }));
        host.send(&chunk_packet(&unique, &path, 0, Some(b"new")));
        assert_eq!(host.reply(&unique)["offset"], 3);
        assert_eq!(names(host).len(), 2);
        unique
    };
    let unique = begin(&mut host);
    host.send(&json!({ "command": "abandon", "unique": unique }));
    wait_until("the temporary file is removed", || names(&host) == ["file"]);

    let unique = begin(&mut host);
    host.send(&chunk_packet(&unique, &path, 5, Some(b"gap")));
    let reply = host.reply(&unique);
    assert_eq!(reply["command"], "command-error");
    wait_until("the temporary file is removed", || names(&host) == ["file"]);
    // Remaining packets of a rejected transfer are ignored.
    host.send(&chunk_packet(&unique, &path, 8, Some(b"gap")));
    host.send(&chunk_packet(&unique, &path, 11, None));
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");

    begin(&mut host);
    host.reconnect();
    wait_until("the temporary file is removed", || names(&host) == ["file"]);

    begin(&mut host);
    host.restart_agent();
    assert_eq!(names(&host), ["file"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn reports_errors_with_path() {
    let mut host = Host::new();
    let missing = host.path_text("no/such");
    let parent = host.path_text("");
    for (path, reason) in [(&missing, "No such file or directory"), (&parent, "Is a directory")] {
        let message = json!(format!("{path}: {reason}"));
        for reply in [host.put(path, b"x"), host.put_plain(path, 0o644, &random_bytes(5000))] {
            assert_eq!((&reply["command"], &reply["message"]), (&json!("command-error"), &message));
        }
        for window in [None, Some(1000)] {
            let reply = host.get(path, window).unwrap_err();
            assert_eq!((&reply["command"], &reply["message"]), (&json!("get-file-response"), &message));
        }
    }
    for path in ["/proc/self/mem", "/dev/tty"] {
        assert_eq!(host.get(path, None).unwrap_err()["result"], false, "{path}");
    }
    assert_eq!(host.call(json!({ "command": "get-file" }))["message"], "path is not set");
}

#[test]
fn transfers_special_files_in_place() {
    let mut host = Host::new();
    let (_, got) = host.get("/proc/version", Some(1 << 20)).unwrap();
    assert_eq!(got, fs::read("/proc/version").unwrap());
    assert_eq!(host.put("/dev/null", b"gone")["path"], "/dev/null");

    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    assert_eq!(host.put(&fifo, b"x")["command"], "command-error", "the FIFO has no reader");
    let reader = host.request(json!({ "command": "execute", "command-line": format!("cat {fifo}") }));
    wait_until("the FIFO has a reader", || {
        let flags = nix::fcntl::OFlag::O_WRONLY | nix::fcntl::OFlag::O_NONBLOCK;
        // Kept open until the transfer has finished: closing it would be the end of file for the reader.
        match nix::fcntl::open(fifo.as_str(), flags, nix::sys::stat::Mode::empty()) {
            Ok(writer) => {
                assert_eq!(host.put(&fifo, b"through")["path"], json!(fifo));
                drop(writer);
                true
            }
            Err(_) => false,
        }
    });
    assert_eq!(host.reply(&reader)["stdout"], "through");
    assert!(fs::metadata(&fifo).unwrap().mode() & 0o170_000 == 0o010_000, "the FIFO was not replaced");
}

#[test]
fn sends_no_more_than_the_window() {
    let mut host = Host::new();
    let bytes = random_bytes(1 << 20);
    let path = host.path_text("file");
    fs::write(&path, &bytes).unwrap();
    let unique = host.request(json!({ "command": "get-file", "path": path, "window": 100_000 }));
    assert_eq!(host.reply(&unique)["stat_result"]["size"], 1 << 20);
    let first = decode(&host.reply(&unique)["chunk"]);
    let second = decode(&host.reply(&unique)["chunk"]);
    assert_eq!((first.len(), second.len()), (65536, 100_000 - 65536));
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    host.send(&json!({ "command": "get-file-more", "unique": unique, "offset": 50_000 }));
    assert_eq!(host.reply(&unique)["offset"], 100_000);
    host.send(&json!({ "command": "abandon", "unique": unique }));
    host.send(&json!({ "command": "get-file-more", "unique": unique, "offset": 1 << 20 }));
    assert!(host.get(&path, Some(1 << 20)).unwrap().1 == bytes);
}

#[test]
fn changes_mode_and_owner() {
    let mut host = Host::new();
    let path = host.path_text("file");
    fs::write(&path, "").unwrap();
    for (requested, expected) in
        [(json!(0o100_640), 0o640), (json!("ugo+r"), 0o644), (json!("u=rwx,go="), 0o700)]
    {
        let reply = host.call(json!({ "command": "chmod", "path": path, "mode": requested }));
        assert_eq!((&reply["command"], &reply["path"]), (&json!("chmod-response"), &json!(path)));
        assert_eq!(mode(&path), expected);
    }
    let reply = host.call(json!({ "command": "chmod", "path": path, "mode": "nonsense" }));
    assert_eq!(
        (&reply["command"], &reply["message"]),
        (&json!("command-error"), &json!("invalid mode: nonsense"))
    );
    let missing = host.path_text("missing");
    let reply = host.call(json!({ "command": "chmod", "path": missing, "mode": 420 }));
    assert_eq!(reply["message"], json!(format!("{missing}: No such file or directory")));

    let metadata = fs::metadata(&path).unwrap();
    let reply = host.call(
        json!({ "command": "chown", "path": path, "user": metadata.uid(), "group": metadata.gid().to_string() }),
    );
    assert_eq!(reply["command"], "chown-response");
    let reply = host.call(json!({ "command": "chown", "path": path, "user": "no-such-user" }));
    assert_eq!(reply["message"], "no such user: no-such-user");
    if metadata.uid() == 0 {
        assert_eq!(
            host.call(json!({ "command": "chown", "path": path, "user": "daemon" }))["command"],
            "chown-response"
        );
        assert_eq!(fs::metadata(&path).unwrap().uid(), 1);
    }
}
