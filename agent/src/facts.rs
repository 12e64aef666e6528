//! Facts about the guest.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::process::helper_output;

/// The maximum number of bytes read of a file.
const MAX_FILE_SIZE: u64 = 64 << 10;
/// The timeout of programs such as `systemctl`.
const HELPER_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the ID of the current boot.
pub(crate) fn boot_id() -> String {
    let path = "/proc/sys/kernel/random/boot_id";
    let boot_id = read_or_empty(path).trim().to_owned();
    if boot_id.is_empty() {
        eprintln!("failed to read boot ID from {path}; results of commands may outlive a reboot");
    }
    boot_id
}

/// Returns the Unix time of the boot, or null if it is not known.
pub(crate) fn boot_time() -> Value {
    let stat = read_or_empty("/proc/stat");
    let time = stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<f64>().ok());
    time.map_or(Value::Null, Value::from)
}

/// Returns whether the guest has booted, and the state that systemd reports.
pub(crate) fn system_state() -> (bool, String) {
    if !Path::new("/run/systemd/system").is_dir() {
        return (true, "running".into());
    }
    let state = helper_output("systemctl", &["is-system-running"], HELPER_TIMEOUT);
    let state = state.filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".into());
    (state == "running", state.chars().take(100).collect())
}

/// Returns the result of `gather-facts`.
pub(crate) fn gather() -> Value {
    json!({
        "distribution": distribution(&[read_or_empty("/etc/os-release"), read_or_empty("/usr/lib/os-release")]),
        "mounts": mounts(&read_or_empty("/proc/self/mounts")),
        "ssh-host-keys": host_keys(),
    })
}

/// Returns the content of a file, or nothing if it cannot be read: all facts are optional.
fn read_or_empty(path: impl AsRef<Path>) -> String {
    let mut text = Vec::new();
    if let Ok(file) = File::open(path) {
        _ = file.take(MAX_FILE_SIZE).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Parses the first of these `os-release` files that is not empty.
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
        let mut fields = line.split(' ').map(unescape);
        let (device, point, kind) = (fields.next()?, fields.next()?, fields.next()?);
        Some(json!({ "device": device, "mount_point": point, "vfs_type": kind }))
    };
    text.lines().filter_map(mount).collect()
}

/// Replaces the escapes of `/proc/mounts`: a backslash and three octal digits.
fn unescape(field: &str) -> String {
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

/// Returns the public SSH host keys by type.
fn host_keys() -> Value {
    let mut keys = Map::new();
    for entry in fs::read_dir("/etc/ssh").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let kind = name.to_str().and_then(|name| name.strip_prefix("ssh_host_")?.strip_suffix("_key.pub"));
        if let Some(kind) = kind {
            keys.insert(kind.to_owned(), read_or_empty(entry.path()).into());
        }
    }
    for entry in fs::read_dir("/etc/dropbear").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let kind = name.to_str().and_then(|name| match name {
            "rsa" | "ecdsa" | "ed25519" => Some(name),
            _ => name.strip_prefix("dropbear_")?.strip_suffix("_host_key"),
        });
        if let Some(kind) = kind.filter(|kind| !keys.contains_key(*kind)) {
            // Dropbear stores only the private key; its tool derives the public one.
            let path = entry.path();
            let output = helper_output("dropbearkey", &["-y", "-f", &path.to_string_lossy()], HELPER_TIMEOUT);
            let key = output.as_deref().and_then(|output| output.lines().find(|line| line.contains("AAAA")));
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
    fn parses_os_release() {
        let text = "NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12.4\"\nID=debian\nVERSION_CODENAME=bookworm\n";
        let facts = distribution(&[String::new(), text.into()]);
        assert_eq!(facts["id"], "debian");
        assert_eq!(facts["name"], "Debian GNU/Linux");
        assert_eq!(facts["version"], "12.4");
        assert_eq!(facts["version_parts"]["minor"], "4");
        assert_eq!(facts["codename"], "bookworm");
    }

    #[test]
    fn unescapes_mount_points() {
        let mounts = mounts("/dev/vda1 / ext4 rw 0 0\nnone /mnt/two\\040words tmpfs rw 0 0\nbad\n");
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[1]["mount_point"], "/mnt/two words");
        assert_eq!(unescape("a\\999\\04"), "a\\999\\04");
    }
}
