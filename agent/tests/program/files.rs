//! Files: put, got, refused, abandoned.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use serde_json::json;

use crate::host::{Host, decode, noise, part, until};

fn mode(path: &str) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// What is in the folder beside the port and the spool.
fn names(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.folder.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "port" && name != "spool").collect();
    names.sort();
    names
}

#[test]
fn files_go_in_and_out_in_large_pieces() {
    let mut host = Host::new();
    for length in [0, 1, 65536, 3_000_001] {
        let bytes = noise(length);
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
    // What is to be private is so from the first moment.
    let path = host.path_text("key");
    host.put_as(&path, &json!({ "mode": 0o100_600 }), b"secret");
    assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o600, b"secret".to_vec()));
}

#[test]
fn files_go_in_and_out_as_older_hosts_move_them() {
    let mut host = Host::new();
    let bytes = noise(300_000);
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
    // Some name a file by its path alone.
    for (offset, chunk) in [(0, Some("aGk=")), (2, None)] {
        host.send(&json!({ "command": "put-file", "path": path, "offset": offset, "chunk": chunk }));
    }
    assert_eq!(host.receive()["command"], "put-file-response");
    assert_eq!(fs::read(&path).unwrap(), b"hi");
}

#[test]
fn a_file_that_is_replaced_keeps_its_permissions_and_is_never_half_there() {
    let mut host = Host::new();
    let (path, link) = (host.path_text("file"), host.path_text("link"));
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o751)).unwrap();
    symlink("file", &link).unwrap();
    let unique =
        host.request(json!({ "command": "put-file", "path": link, "stat_result": {}, "pieces": true }));
    host.send(&part(&unique, &link, 0, Some(b"new")));
    assert_eq!(host.reply(&unique)["offset"], 3);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(host.ask(json!({ "command": "ping" }))["command"], "pong");
    host.send(&part(&unique, &link, 3, None));
    assert_eq!(host.reply(&unique)["path"], json!(link));
    assert_eq!((fs::read(&path).unwrap().as_slice(), mode(&path)), (b"new".as_slice(), 0o751));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(names(&host), ["file", "link"]);
}

#[test]
fn what_is_abandoned_leaves_nothing() {
    let mut host = Host::new();
    let path = host.path_text("file");
    fs::write(&path, "old").unwrap();
    let begin = |host: &mut Host| {
        let unique =
            host.request(json!({ "command": "put-file", "path": path, "stat_result": {}, "pieces": true }));
        host.send(&part(&unique, &path, 0, Some(b"new")));
        assert_eq!(host.reply(&unique)["offset"], 3);
        assert_eq!(names(host).len(), 2);
        unique
    };
    let unique = begin(&mut host);
    host.send(&json!({ "command": "abandon", "unique": unique }));
    until("it is removed", || names(&host) == ["file"]);

    let unique = begin(&mut host);
    host.send(&part(&unique, &path, 5, Some(b"gap")));
    let reply = host.reply(&unique);
    assert_eq!(reply["command"], "command-error");
    until("it is removed", || names(&host) == ["file"]);
    // What still comes of it is not answered.
    host.send(&part(&unique, &path, 8, Some(b"gap")));
    host.send(&part(&unique, &path, 11, None));
    assert_eq!(host.ask(json!({ "command": "ping" }))["command"], "pong");

    begin(&mut host);
    host.reconnect();
    until("it is removed", || names(&host) == ["file"]);

    begin(&mut host);
    host.restart_agent();
    assert_eq!(names(&host), ["file"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn what_cannot_be_put_or_got_is_named() {
    let mut host = Host::new();
    let missing = host.path_text("no/such");
    let folder = host.path_text("");
    for (path, reason) in [(&missing, "No such file or directory"), (&folder, "Is a directory")] {
        let message = json!(format!("{path}: {reason}"));
        for reply in [host.put(path, b"x"), host.put_plain(path, 0o644, &noise(5000))] {
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
    assert_eq!(host.ask(json!({ "command": "get-file" }))["message"], "path is not set");
}

#[test]
fn files_that_are_none_are_read_and_written_in_place() {
    let mut host = Host::new();
    let (_, got) = host.get("/proc/version", Some(1 << 20)).unwrap();
    assert_eq!(got, fs::read("/proc/version").unwrap());
    assert_eq!(host.put("/dev/null", b"gone")["path"], "/dev/null");

    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    assert_eq!(host.put(&fifo, b"x")["command"], "command-error", "nobody reads it");
    let reader = host.request(json!({ "command": "execute", "command-line": format!("cat {fifo}") }));
    until("somebody reads it", || {
        let flags = nix::fcntl::OFlag::O_WRONLY | nix::fcntl::OFlag::O_NONBLOCK;
        // Opening it would be taken for a writer that ends; so it is kept until the real one is there.
        match nix::fcntl::open(fifo.as_str(), flags, nix::sys::stat::Mode::empty()) {
            Ok(kept) => {
                assert_eq!(host.put(&fifo, b"through")["path"], json!(fifo));
                drop(kept);
                true
            }
            Err(_) => false,
        }
    });
    assert_eq!(host.reply(&reader)["stdout"], "through");
    assert!(fs::metadata(&fifo).unwrap().mode() & 0o170_000 == 0o010_000, "it is still a pipe");
}

#[test]
fn a_file_is_sent_no_faster_than_it_is_taken() {
    let mut host = Host::new();
    let bytes = noise(1 << 20);
    let path = host.path_text("file");
    fs::write(&path, &bytes).unwrap();
    let unique = host.request(json!({ "command": "get-file", "path": path, "window": 100_000 }));
    assert_eq!(host.reply(&unique)["stat_result"]["size"], 1 << 20);
    let first = decode(&host.reply(&unique)["chunk"]);
    let second = decode(&host.reply(&unique)["chunk"]);
    assert_eq!((first.len(), second.len()), (65536, 100_000 - 65536));
    assert_eq!(host.ask(json!({ "command": "ping" }))["command"], "pong");
    host.send(&json!({ "command": "get-file-more", "unique": unique, "offset": 50_000 }));
    assert_eq!(host.reply(&unique)["offset"], 100_000);
    host.send(&json!({ "command": "abandon", "unique": unique }));
    host.send(&json!({ "command": "get-file-more", "unique": unique, "offset": 1 << 20 }));
    assert!(host.get(&path, Some(1 << 20)).unwrap().1 == bytes);
}

#[test]
fn permissions_and_owners_change() {
    let mut host = Host::new();
    let path = host.path_text("file");
    fs::write(&path, "").unwrap();
    for (wanted, is) in [(json!(0o100_640), 0o640), (json!("ugo+r"), 0o644), (json!("u=rwx,go="), 0o700)] {
        let reply = host.ask(json!({ "command": "chmod", "path": path, "mode": wanted }));
        assert_eq!((&reply["command"], &reply["path"]), (&json!("chmod-response"), &json!(path)));
        assert_eq!(mode(&path), is);
    }
    let reply = host.ask(json!({ "command": "chmod", "path": path, "mode": "nonsense" }));
    assert_eq!(
        (&reply["command"], &reply["message"]),
        (&json!("command-error"), &json!("invalid mode: nonsense"))
    );
    let missing = host.path_text("missing");
    let reply = host.ask(json!({ "command": "chmod", "path": missing, "mode": 420 }));
    assert_eq!(reply["message"], json!(format!("{missing}: No such file or directory")));

    let facts = fs::metadata(&path).unwrap();
    let reply = host.ask(
        json!({ "command": "chown", "path": path, "user": facts.uid(), "group": facts.gid().to_string() }),
    );
    assert_eq!(reply["command"], "chown-response");
    let reply = host.ask(json!({ "command": "chown", "path": path, "user": "nobody-of-that-name" }));
    assert_eq!(reply["message"], "no such user: nobody-of-that-name");
    if facts.uid() == 0 {
        assert_eq!(
            host.ask(json!({ "command": "chown", "path": path, "user": "daemon" }))["command"],
            "chown-response"
        );
        assert_eq!(fs::metadata(&path).unwrap().uid(), 1);
    }
}
