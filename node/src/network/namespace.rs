//! Network namespaces: each router has one, named after the network's id.
//!
//! A thread that has entered a namespace does not return to that of the process, so only separate threads do so.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use muster_types::ids::NetworkId;
use muster_types::{Error, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, statfs};

use super::names::marker;
use super::netlink::NetlinkSocket;
use super::observed;

/// The directory of `ip netns`.
const NETNS_DIR: &str = "/run/netns";

/// The settings of a router's namespace before it has devices. Routers have no IPv6, filter strictly by reverse path,
/// announce themselves by ARP when a device comes up, and answer ARP for routed addresses without delay. The settings
/// that a router depends on are also checked on each of its devices.
const ROUTER_SYSCTLS: [(&str, &str); 9] = [
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

fn path_of(network: NetworkId) -> PathBuf {
    Path::new(NETNS_DIR).join(network.to_string())
}

/// Returns the inode of a namespace, if it exists. The kernel does not reuse it while the namespace exists.
pub(crate) fn inode(network: NetworkId) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let path = path_of(network);
    let is_mounted = statfs(&path).is_ok_and(|found| found.filesystem_type() == NSFS_MAGIC);
    is_mounted.then(|| path.metadata().ok().map(|found| found.ino())).flatten()
}

/// Returns whether the name of a namespace exists, with or without a namespace mounted on it.
pub(crate) fn name_exists(network: NetworkId) -> bool {
    path_of(network).symlink_metadata().is_ok()
}

/// Returns the networks for which a namespace name exists.
pub(crate) fn list_names() -> Vec<NetworkId> {
    let entries = fs::read_dir(NETNS_DIR).into_iter().flatten().flatten();
    let canonical = |name: String| name.parse().ok().filter(|id: &NetworkId| id.to_string() == name);
    entries.filter_map(|entry| canonical(entry.file_name().into_string().ok()?)).collect()
}

/// Creates a namespace and marks it before it gets its name.
pub(crate) fn create(network: NetworkId) -> Result<()> {
    let failed =
        |error: std::io::Error| Error::Internal(format!("failed to create namespace {network}: {error}"));
    share_netns_dir().map_err(failed)?;
    let path = path_of(network);
    fs::File::create(&path).map_err(failed)?;
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| failed(error.into()))?;
        observed::mark_loopback(&mut NetlinkSocket::route()?, &marker(network))?;
        for (name, value) in ROUTER_SYSCTLS {
            try_set_sysctl(name, value);
        }
        let none: Option<&str> = None;
        mount(Some("/proc/thread-self/ns/net"), &path, none, MsFlags::MS_BIND, none)
            .map_err(|error| failed(error.into()))
    })
}

/// Removes the name of a namespace; the kernel removes the namespace when no process is in it.
pub(crate) fn delete(network: NetworkId) -> Result<()> {
    let path = path_of(network);
    // It may be mounted several times.
    while umount2(&path, MntFlags::MNT_DETACH).is_ok() {}
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Internal(format!("failed to remove namespace {network}: {error}")))
        }
        _ => Ok(()),
    }
}

/// Runs a closure inside a namespace.
pub(crate) fn inside<T: Send>(network: NetworkId, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    in_thread(|| {
        enter(network)?;
        work()
    })
}

/// Runs a closure in a new thread, which may [`enter`] several namespaces one after the other.
pub(crate) fn in_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Moves this thread into a new namespace without a name.
pub(crate) fn unshare_network() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|error| Error::Unavailable(format!("failed to create a network namespace: {error}")))
}

/// Moves this thread into a namespace, which it cannot leave.
pub(crate) fn enter(network: NetworkId) -> Result<()> {
    let failed = |reason: String| Error::Internal(format!("failed to enter namespace {network}: {reason}"));
    let file = fs::File::open(path_of(network)).map_err(|error| failed(error.to_string()))?;
    setns(file, CloneFlags::CLONE_NEWNET).map_err(|error| failed(error.to_string()))
}

/// Sets a value below `/proc/sys/net` in the namespace of this thread. A setting that this kernel lacks is ignored.
pub(crate) fn set_sysctl(name: &str, value: &str) -> Result<()> {
    match fs::write(Path::new("/proc/sys/net").join(name), value) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Unavailable(format!("failed to set net/{name} to {value}: {error}")))
        }
        _ => Ok(()),
    }
}

/// Sets a value that networks do not depend on. A failure is logged once.
pub(crate) fn try_set_sysctl(name: &'static str, value: &str) {
    static LOGGED: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    if let Err(error) = set_sysctl(name, value)
        && LOGGED.lock().insert(name)
    {
        tracing::warn!(%error, "failed to change a kernel setting");
    }
}

/// Returns a value below `/proc/sys/net`, if this kernel has it.
pub(crate) fn get_sysctl(name: &str) -> Option<String> {
    let text = fs::read_to_string(Path::new("/proc/sys/net").join(name)).ok()?;
    Some(text.trim().to_owned())
}

/// Makes names appear and disappear in every mount namespace, as `ip netns` does: otherwise a process with its own mount
/// namespace would keep a network namespace alive.
fn share_netns_dir() -> std::io::Result<()> {
    // Two threads at the same time would mount it twice.
    static LOCK: Mutex<()> = Mutex::new(());
    let _guard = LOCK.lock();
    fs::create_dir_all(NETNS_DIR)?;
    let none: Option<&str> = None;
    let share = || mount(none, NETNS_DIR, none, MsFlags::MS_SHARED | MsFlags::MS_REC, none);
    if share() == Err(nix::Error::EINVAL) {
        mount(Some(NETNS_DIR), NETNS_DIR, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
        share()?;
    }
    Ok(())
}
