//! Network namespaces: each router lives in one, named by the network's id.
//!
//! A thread moves into a namespace and never comes back: it ends there.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use muster_types::ids::NetworkId;
use muster_types::{Error, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, statfs};

use super::names::marker;
use super::netlink::Socket;
use super::view;

/// Where `ip netns` looks, too.
const FOLDER: &str = "/run/netns";

/// How a router's namespace is set before it has devices. A router speaks no IPv6, and strictly expects packets
/// from where it would send the answer. It says where it is whenever a device comes up, and answers at once for the
/// addresses that are routed through it. What a router cannot be without is also looked at on each of its devices.
const SETTINGS: [(&str, &str); 9] = [
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    ("ipv4/conf/all/rp_filter", "1"),
    ("ipv4/conf/default/rp_filter", "1"),
    ("ipv4/conf/default/arp_notify", "1"),
    ("ipv4/neigh/default/proxy_delay", "0"),
    ("ipv4/ip_forward", "1"),
];

fn path(network: NetworkId) -> PathBuf {
    Path::new(FOLDER).join(network.to_string())
}

/// The number of a namespace that exists. It is not given to another one while this one lives.
pub(crate) fn number(network: NetworkId) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let path = path(network);
    let real = statfs(&path).is_ok_and(|found| found.filesystem_type() == NSFS_MAGIC);
    real.then(|| path.metadata().ok().map(|found| found.ino())).flatten()
}

/// Whether there is anything of this name, a namespace or only the file for one.
pub(crate) fn is_named(network: NetworkId) -> bool {
    path(network).symlink_metadata().is_ok()
}

/// The networks of which there is a name.
pub(crate) fn named() -> Vec<NetworkId> {
    let entries = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    let canonical = |name: String| name.parse().ok().filter(|id: &NetworkId| id.to_string() == name);
    entries.filter_map(|entry| canonical(entry.file_name().into_string().ok()?)).collect()
}

/// Makes a namespace that carries its marker before it has a name.
pub(crate) fn create(network: NetworkId) -> Result<()> {
    let failed = |error: std::io::Error| Error::Internal(format!("cannot make namespace {network}: {error}"));
    share_folder().map_err(failed)?;
    let path = path(network);
    fs::File::create(&path).map_err(failed)?;
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| failed(error.into()))?;
        view::mark_loopback(&mut Socket::route()?, &marker(network))?;
        for (name, value) in SETTINGS {
            prefer(name, value);
        }
        let nothing: Option<&str> = None;
        mount(Some("/proc/thread-self/ns/net"), &path, nothing, MsFlags::MS_BIND, nothing)
            .map_err(|error| failed(error.into()))
    })
}

/// Takes the name away; the namespace goes when nobody is in it.
pub(crate) fn delete(network: NetworkId) -> Result<()> {
    let path = path(network);
    // One for each time that somebody mounted it.
    while umount2(&path, MntFlags::MNT_DETACH).is_ok() {}
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Internal(format!("cannot remove namespace {network}: {error}")))
        }
        _ => Ok(()),
    }
}

/// Does something inside a namespace.
pub(crate) fn inside<T: Send>(network: NetworkId, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    in_thread(|| {
        enter(network)?;
        work()
    })
}

/// Does something in a thread of its own, which may [`enter`] one namespace after the other.
pub(crate) fn in_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Moves this thread into a new namespace without a name.
pub(crate) fn leave() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|error| Error::Unavailable(format!("cannot make a namespace: {error}")))
}

/// Moves this thread; only for threads that end there.
pub(crate) fn enter(network: NetworkId) -> Result<()> {
    let failed = |why: String| Error::Internal(format!("cannot enter namespace {network}: {why}"));
    let file = fs::File::open(path(network)).map_err(|error| failed(error.to_string()))?;
    setns(file, CloneFlags::CLONE_NEWNET).map_err(|error| failed(error.to_string()))
}

/// Sets a value below `/proc/sys/net` in the namespace of this thread. What this kernel does not have is left alone.
pub(crate) fn set(name: &str, value: &str) -> Result<()> {
    match fs::write(Path::new("/proc/sys/net").join(name), value) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Unavailable(format!("cannot set net/{name} to {value}: {error}")))
        }
        _ => Ok(()),
    }
}

/// The same for what a network can be without: that it cannot be set is said once.
pub(crate) fn prefer(name: &'static str, value: &str) {
    static SAID: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    if let Err(error) = set(name, value)
        && SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name)
    {
        tracing::warn!(%error, "a setting of the kernel stays as it is");
    }
}

/// A value below `/proc/sys/net`, if this kernel has it.
pub(crate) fn get(name: &str) -> Option<String> {
    let text = fs::read_to_string(Path::new("/proc/sys/net").join(name)).ok()?;
    Some(text.trim().to_owned())
}

/// Makes names appear and vanish in every mount namespace, as `ip netns` does: a process that was started with a
/// view of its own would keep a namespace alive otherwise.
fn share_folder() -> std::io::Result<()> {
    // Two at once would mount it twice.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _held = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    fs::create_dir_all(FOLDER)?;
    let nothing: Option<&str> = None;
    let share = || mount(nothing, FOLDER, nothing, MsFlags::MS_SHARED | MsFlags::MS_REC, nothing);
    if share() == Err(nix::Error::EINVAL) {
        mount(Some(FOLDER), FOLDER, nothing, MsFlags::MS_BIND | MsFlags::MS_REC, nothing)?;
        share()?;
    }
    Ok(())
}
