//! What the guest says of itself.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::process;

/// The most of a file that tells something.
const MOST: u64 = 64 << 10;
/// How long systemd is given to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Which boot of the guest this is.
pub(crate) fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id").trim().to_owned()
}

/// Unix time of the guest's boot.
pub(crate) fn boot_time() -> Value {
    let stat = read("/proc/stat");
    let time = stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<f64>().ok());
    time.map_or(Value::Null, Value::from)
}

/// Whether the guest is up, and what it calls that.
pub(crate) fn system_state() -> (bool, String) {
    if !Path::new("/run/systemd/system").is_dir() {
        return (true, "running".into());
    }
    let said = process::ask("systemctl", &["is-system-running"], PATIENCE);
    let said = said.filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".into());
    (said == "running", said.chars().take(100).collect())
}

/// All that can be told.
pub(crate) fn gather() -> Value {
    json!({
        "distribution": distribution(&[read("/etc/os-release"), read("/usr/lib/os-release")]),
        "mounts": mounts(&read("/proc/self/mounts")),
        "ssh-host-keys": host_keys(),
    })
}

fn read(path: impl AsRef<Path>) -> String {
    let mut text = Vec::new();
    if let Ok(file) = File::open(path) {
        _ = file.take(MOST).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// The first of these texts that says anything.
fn distribution(texts: &[String]) -> Value {
    let text = texts.iter().find(|text| !text.trim().is_empty()).map_or("", String::as_str);
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix('='));
        line.map_or("", |value| value.trim_matches(['"', '\''])).to_owned()
    };
    let version = value("VERSION_ID");
    let mut parts = version.split('.').map(str::to_owned);
    let mut part = || parts.next().unwrap_or_default();
    json!({
        "id": value("ID"), "name": value("NAME"), "pretty_name": value("PRETTY_NAME"),
        "version_parts": { "major": part(), "minor": part(), "build_number": part() },
        "version": version, "like": value("ID_LIKE"), "codename": value("VERSION_CODENAME"),
    })
}

fn mounts(text: &str) -> Vec<Value> {
    let mount = |line: &str| {
        let mut fields = line.split(' ').map(unescaped);
        let (device, point, kind) = (fields.next()?, fields.next()?, fields.next()?);
        Some(json!({ "device": device, "mount_point": point, "vfs_type": kind }))
    };
    text.lines().filter_map(mount).collect()
}

/// Blanks and the like are three octal digits after a backslash there.
fn unescaped(field: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = field.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(u8::is_ascii_digit));
        let code = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The public keys by their kind.
fn host_keys() -> Value {
    let mut keys = Map::new();
    for entry in fs::read_dir("/etc/ssh").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let kind = name.to_str().and_then(|name| name.strip_prefix("ssh_host_")?.strip_suffix("_key.pub"));
        if let Some(kind) = kind {
            keys.insert(kind.to_owned(), read(entry.path()).into());
        }
    }
    for entry in fs::read_dir("/etc/dropbear").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let kind = name.to_str().and_then(|name| match name {
            "rsa" | "ecdsa" | "ed25519" => Some(name),
            _ => name.strip_prefix("dropbear_")?.strip_suffix("_host_key"),
        });
        if let Some(kind) = kind.filter(|kind| !keys.contains_key(*kind)) {
            // Its file is a secret; the public half is what its own tool says of it.
            let path = entry.path();
            let said = process::ask("dropbearkey", &["-y", "-f", &path.to_string_lossy()], PATIENCE);
            let key = said.as_deref().and_then(|said| said.lines().find(|line| line.contains("AAAA")));
            if let Some(key) = key {
                keys.insert(kind.to_owned(), format!("{key}\n").into());
            }
        }
    }
    Value::Object(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_read_from_its_file() {
        let text = "NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12.4\"\nID=debian\nVERSION_CODENAME=bookworm\n";
        let read = distribution(&[String::new(), text.into()]);
        assert_eq!(read["id"], "debian");
        assert_eq!(read["name"], "Debian GNU/Linux");
        assert_eq!(read["version"], "12.4");
        assert_eq!(read["version_parts"]["minor"], "4");
        assert_eq!(read["codename"], "bookworm");
    }

    #[test]
    fn mounts_have_their_names() {
        let read = mounts("/dev/vda1 / ext4 rw 0 0\nnone /mnt/two\\040words tmpfs rw 0 0\nbad\n");
        assert_eq!(read.len(), 2);
        assert_eq!(read[1]["mount_point"], "/mnt/two words");
        assert_eq!(unescaped("a\\999\\04"), "a\\999\\04");
    }
}
