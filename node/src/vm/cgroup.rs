//! Cgroups: the kernel divides CPU time between VMs in proportion to their vCPUs, and a misbehaving QEMU cannot exhaust
//! the host's memory or processes.
//!
//! Every VM has the cgroup `muster/<id>`, with its generation after a dot from the second on, in the hierarchy of version 2 or in
//! those of version 1, whichever has the controllers; or in that of `muster-vms.service`, if systemd runs it. All daemons that run as root share the cgroup `muster`; those of another user share `muster-<uid>`. Where
//! cgroups are not available or not writable, VMs run without them. Everything here blocks. See docs/decisions/0020.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_types::Result;
use muster_types::ids::InstanceId;
use muster_types::instance::first_generation;
use nix::libc;
use nix::poll::{PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::command::wait_readable;
use crate::files::io_error;
use crate::host;

/// The mount point of the hierarchies.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The parent cgroup of all VMs of root.
const PARENT_CGROUP: &str = "muster";

/// The cgroup of `muster-vms.service` below each hierarchy, which systemd delegates to us. It replaces the parent where it
/// exists. See docs/decisions/0098.
const DELEGATED_CGROUP: &str = "muster.slice/muster-vms.service";

/// The hierarchies without controllers by which systemd knows which processes belong to a service, where controllers have
/// hierarchies of version 1. It uses the first of them, or both.
const SYSTEMD_HIERARCHIES: [&str; 2] = ["systemd", "unified"];

/// The user ids of this process's user namespace and of its parent.
const UID_MAP: &str = "/proc/self/uid_map";

const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// The minimum memory for QEMU in addition to the guest's: without KVM it caches up to 1 GiB of translated code.
const MEMORY_OVERHEAD: u64 = 2 << 30;

/// The maximum number of tasks of a VM in addition to one per vCPU.
const TASK_OVERHEAD: u64 = 512;

/// The number of attempts to remove a cgroup, and how long to wait for its processes to exit each time.
const REMOVE_ATTEMPTS: usize = 20;
const KILL_TIMEOUT: Duration = Duration::from_millis(500);

/// How long to wait for a cgroup that is still busy after its processes exited, in milliseconds.
const BUSY_DELAY_MS: u16 = 10;

/// The cgroup of a VM.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// One per hierarchy.
    dirs: Vec<PathBuf>,
}

impl Cgroup {
    /// Creates the cgroup of a VM, or updates the existing one. Returns `None` where cgroups are not available.
    pub(crate) fn create(id: InstanceId, generation: i64, cpus: u32, memory_mb: u64) -> Result<Option<Self>> {
        Self::create_in(Path::new(CGROUP_ROOT), &parent_cgroup(), &name(id, generation), cpus, memory_mb)
    }

    fn create_in(root: &Path, parent: &str, name: &str, cpus: u32, memory_mb: u64) -> Result<Option<Self>> {
        let mut dirs = Vec::new();
        for hierarchy in hierarchies(root) {
            match hierarchy.create(parent, name, cpus, memory_mb) {
                Ok(dir) => dirs.push(dir),
                Err(error) if is_unavailable(&error) => {
                    tracing::debug!(%error, path = %hierarchy.root.display(), "cgroups are not available");
                }
                Err(error) => return Err(io_error("failed to create cgroup")(error)),
            }
        }
        Ok((!dirs.is_empty()).then_some(Self { dirs }))
    }

    /// Moves a process into the cgroup, and thereby its future children.
    pub(crate) fn add(&self, pid: u32) -> Result<()> {
        let added =
            self.dirs.iter().try_for_each(|dir| write_control_file(dir, "cgroup.procs", &pid.to_string()));
        added.map_err(io_error("failed to move process into cgroup"))
    }
}

/// Removes the cgroup of a VM, if it exists, and kills the processes in it. A cgroup that this process may not remove is
/// kept: it is another user's.
pub(crate) fn remove(id: InstanceId, generation: i64) -> Result<()> {
    remove_in(Path::new(CGROUP_ROOT), &parent_cgroup(), &name(id, generation))
}

/// Returns the name of the cgroup of a VM. Each generation has its own, because daemons on one host may share the parent, and
/// removing a stale VM must not affect its successor.
fn name(id: InstanceId, generation: i64) -> String {
    if generation == first_generation() { id.to_string() } else { format!("{id}.{generation}") }
}

fn remove_in(root: &Path, parent: &str, name: &str) -> Result<()> {
    let hierarchies = hierarchies(root);
    for dir in hierarchies.iter().flat_map(|hierarchy| hierarchy.parents(parent)).map(|dir| dir.join(name)) {
        match remove_dir(&dir) {
            Err(error) if is_not_permitted(&error) => {
                tracing::debug!(%error, path = %dir.display(), "failed to remove a cgroup");
            }
            removed => removed.map_err(io_error("failed to remove cgroup"))?,
        }
    }
    Ok(())
}

/// Returns the name of the parent cgroup of the VMs of this process's user.
fn parent_cgroup() -> String {
    // The first line of the map is sufficient: it has the id 0 of a daemon that is root in its own user namespace.
    let map = fs::read_to_string(UID_MAP).unwrap_or_default();
    parent_cgroup_of(nix::unistd::geteuid().as_raw(), &map)
}

/// Returns the name for a user id in a user namespace with this map.
fn parent_cgroup_of(uid: u32, uid_map: &str) -> String {
    let numbers: Vec<u32> = uid_map.split_whitespace().take(3).filter_map(|word| word.parse().ok()).collect();
    let owner = match numbers[..] {
        [first, outside, count] if uid >= first && uid - first < count => outside.saturating_add(uid - first),
        _ => uid,
    };
    if owner == 0 { PARENT_CGROUP.to_owned() } else { format!("{PARENT_CGROUP}-{owner}") }
}

fn remove_dir(dir: &Path) -> io::Result<()> {
    let mut last = Ok(());
    for _ in 0..REMOVE_ATTEMPTS {
        match fs::remove_dir(dir) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = Err(error),
            Err(error) => return Err(error),
        }
        if !kill_all(dir)? {
            // Processes that exited leave the cgroup with a delay.
            poll(&mut [], PollTimeout::from(BUSY_DELAY_MS))?;
        }
    }
    last
}

/// Kills the processes of a cgroup and waits for them. Returns whether there were any.
fn kill_all(dir: &Path) -> io::Result<bool> {
    let mut killed = false;
    for number in processes(dir)? {
        let Some(pid) = Pid::from_raw(number) else { continue };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // The PID may have been reused before it was opened, so it must still be in the cgroup.
        if processes(dir)?.contains(&number) {
            tracing::warn!(pid = number, cgroup = %dir.display(), "killing a process that remains in a cgroup");
            let _ = pidfd_send_signal(&process, Signal::KILL);
            killed |= wait_readable(&process, KILL_TIMEOUT)?;
        }
    }
    Ok(killed)
}

fn processes(dir: &Path) -> io::Result<Vec<i32>> {
    match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// A cgroup hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct CgroupHierarchy {
    root: PathBuf,
    version: CgroupVersion,
}

#[derive(Debug, PartialEq, Eq)]
enum CgroupVersion {
    /// With the controllers that we use.
    V2(Vec<&'static str>),
    /// With its single controller.
    V1(&'static str),
}

/// Returns the hierarchies with controllers that we use.
fn hierarchies(root: &Path) -> Vec<CgroupHierarchy> {
    // Absent on hosts with version 1.
    let available = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let has = |controller: &&'static str| available.split_whitespace().any(|word| word == *controller);
    let controllers: Vec<&'static str> = CONTROLLERS.into_iter().filter(has).collect();
    if !controllers.is_empty() {
        return vec![CgroupHierarchy { root: root.to_owned(), version: CgroupVersion::V2(controllers) }];
    }
    let v1 =
        |controller| CgroupHierarchy { root: root.join(controller), version: CgroupVersion::V1(controller) };
    let has_delegated = |name: &&str| root.join(name).join(DELEGATED_CGROUP).is_dir();
    CONTROLLERS
        .into_iter()
        .chain(SYSTEMD_HIERARCHIES.into_iter().filter(has_delegated))
        .map(v1)
        .filter(|hierarchy| hierarchy.root.join("cgroup.procs").exists())
        .collect()
}

impl CgroupHierarchy {
    /// Returns the cgroups in which VMs may be: first that in which new ones are created.
    fn parents(&self, parent: &str) -> Vec<PathBuf> {
        let delegated = self.root.join(DELEGATED_CGROUP);
        let is_delegated = parent == PARENT_CGROUP && delegated.is_dir();
        is_delegated.then_some(delegated).into_iter().chain([self.root.join(parent)]).collect()
    }

    fn create(&self, parent: &str, name: &str, cpus: u32, memory_mb: u64) -> io::Result<PathBuf> {
        let parent = self.parents(parent).swap_remove(0);
        ensure_dir(&parent)?;
        if let CgroupVersion::V2(controllers) = &self.version {
            for controller in controllers {
                // A cgroup has the controllers that its ancestors delegate. Those of a delegated one are enabled by systemd.
                let is_delegated = parent.ends_with(DELEGATED_CGROUP);
                for ancestor in (!is_delegated).then_some(&self.root).into_iter().chain([&parent]) {
                    write_control_file(ancestor, "cgroup.subtree_control", &format!("+{controller}"))?;
                }
            }
        }
        // All VMs together weigh as much as all CPUs: other processes of the host still get about one CPU.
        if let Some((file, value)) = self.weight(host::cpus() as u64) {
            // The weight counts among the children of the root.
            let top = parent.strip_prefix(&self.root).ok().and_then(|path| path.iter().next());
            let top = top.map_or_else(|| parent.clone(), |name| self.root.join(name));
            write_control_file(&top, file, &value.to_string())?;
        }
        let dir = parent.join(name);
        ensure_dir(&dir)?;
        let configured = self
            .settings(cpus, memory_mb)
            .into_iter()
            .try_for_each(|(file, value)| write_control_file(&dir, file, &value.to_string()));
        if let Err(error) = configured {
            let _ = fs::remove_dir(&dir);
            return Err(error);
        }
        Ok(dir)
    }

    /// Returns the file and the value of the CPU weight for a number of vCPUs.
    fn weight(&self, cpus: u64) -> Option<(&'static str, u64)> {
        let cpus = cpus.max(1);
        match &self.version {
            CgroupVersion::V2(controllers) => {
                controllers.contains(&"cpu").then(|| ("cpu.weight", cpus.saturating_mul(100).min(10_000)))
            }
            CgroupVersion::V1("cpu") => Some(("cpu.shares", cpus.saturating_mul(1024).min(1 << 18))),
            CgroupVersion::V1(_) => None,
        }
    }

    fn settings(&self, cpus: u32, memory_mb: u64) -> Vec<(&'static str, u64)> {
        let guest = memory_mb.saturating_mul(1 << 20);
        let memory = guest.saturating_add(guest / 8).saturating_add(MEMORY_OVERHEAD);
        let tasks = TASK_OVERHEAD + u64::from(cpus);
        let limits = [("memory", "memory.max", memory), ("pids", "pids.max", tasks)];
        let limits = limits.into_iter().filter_map(|(controller, file, value)| match &self.version {
            CgroupVersion::V2(controllers) => controllers.contains(&controller).then_some((file, value)),
            CgroupVersion::V1("memory") if controller == "memory" => Some(("memory.limit_in_bytes", value)),
            CgroupVersion::V1(own) => (*own == controller).then_some((file, value)),
        });
        self.weight(u64::from(cpus)).into_iter().chain(limits).collect()
    }
}

fn ensure_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Writes a control file, which must exist.
fn write_control_file(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(dir.join(file))?;
    io::Write::write_all(&mut file, value.as_bytes())
}

/// Returns whether an error means that cgroups are not available to this process.
fn is_unavailable(error: &io::Error) -> bool {
    let numbers = [libc::ENOENT, libc::EOPNOTSUPP, libc::EBUSY];
    is_not_permitted(error) || error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}

/// Returns whether an error means that this process may not change a cgroup.
fn is_not_permitted(error: &io::Error) -> bool {
    let numbers = [libc::EACCES, libc::EPERM, libc::EROFS];
    error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// An idle process, killed when dropped.
    struct IdleProcess(Child);

    impl IdleProcess {
        fn new() -> Self {
            Self(Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap())
        }
    }

    impl Drop for IdleProcess {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Removes the cgroup of a VM when dropped.
    struct Cleanup(InstanceId);

    impl Drop for Cleanup {
        fn drop(&mut self) {
            let _ = remove(self.0, 1);
        }
    }

    #[test]
    fn process_is_killed_with_its_cgroup() {
        let id = InstanceId::new();
        let _cleanup = Cleanup(id);
        let Some(cgroup) = Cgroup::create(id, 1, 2, 128).unwrap() else {
            return muster_testing::skipped("root and cgroups");
        };
        let mut idle = IdleProcess::new();
        cgroup.add(idle.0.id()).unwrap();
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", idle.0.id())).unwrap();
        let within =
            cgroups.lines().filter(|line| line.ends_with(&format!("/{}/{id}", parent_cgroup()))).count();
        assert_eq!(within, cgroup.dirs.len(), "{cgroups}");
        // Creating it again updates its limits.
        let again = Cgroup::create(id, 1, 4, 1024).unwrap().unwrap();
        assert_eq!(again.dirs, cgroup.dirs);
        let read = |name: &str| {
            let mut found = cgroup.dirs.iter().filter_map(|dir| fs::read_to_string(dir.join(name)).ok());
            found.next().map(|text| text.trim().to_owned())
        };
        let memory = ((1024 + 128) << 20) + MEMORY_OVERHEAD;
        let memory = [read("memory.max"), read("memory.limit_in_bytes")]
            .map(|found| found == Some(memory.to_string()));
        let shares = [read("cpu.weight") == Some("400".into()), read("cpu.shares") == Some("4096".into())];
        assert!(memory.contains(&true) || shares.contains(&true), "{:?}", cgroup.dirs);
        remove(id, 1).unwrap();
        assert!(cgroup.dirs.iter().all(|dir| !dir.exists()));
        assert!(!idle.0.wait().unwrap().success());
        remove(id, 1).unwrap();
    }

    #[test]
    fn detects_versions_by_their_controllers() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(hierarchies(root), []);
        assert!(Cgroup::create_in(root, PARENT_CGROUP, "one", 1, 1).unwrap().is_none());
        for controller in ["cpu", "pids"] {
            fs::create_dir(root.join(controller)).unwrap();
            fs::write(root.join(controller).join("cgroup.procs"), "").unwrap();
        }
        let found: Vec<CgroupVersion> = hierarchies(root).into_iter().map(|found| found.version).collect();
        assert_eq!(found, [CgroupVersion::V1("cpu"), CgroupVersion::V1("pids")]);
        // A hierarchy of version 2 without any of our controllers is ignored.
        fs::write(root.join("cgroup.controllers"), "hugetlb\n").unwrap();
        assert_eq!(hierarchies(root).len(), 2);
        fs::write(root.join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let v2 = CgroupHierarchy { root: root.to_owned(), version: CgroupVersion::V2(CONTROLLERS.to_vec()) };
        assert_eq!(hierarchies(root), [v2]);
    }

    #[test]
    fn delegated_cgroup_replaces_the_parent_of_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let delegated = root.join(DELEGATED_CGROUP);
        for (dir, files) in [
            (root.to_owned(), "cgroup.controllers cgroup.subtree_control"),
            (delegated.join("vm"), "cpu.weight memory.max pids.max cgroup.procs"),
            (delegated.clone(), "cgroup.subtree_control"),
            (root.join("muster.slice"), "cpu.weight"),
            (root.join("muster-1000/vm"), "cpu.weight memory.max pids.max"),
            (root.join("muster-1000"), "cgroup.subtree_control cpu.weight"),
        ] {
            fs::create_dir_all(&dir).unwrap();
            files.split(' ').for_each(|file| fs::write(dir.join(file), "").unwrap());
        }
        fs::write(root.join("cgroup.controllers"), "cpu memory pids\n").unwrap();
        let create = |parent| Cgroup::create_in(root, parent, "vm", 2, 128).unwrap().unwrap().dirs;
        assert_eq!(create(PARENT_CGROUP), [delegated.join("vm")]);
        let read = |file: &str| fs::read_to_string(root.join(file)).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "", "systemd owns the cgroups above");
        assert_ne!(read("muster.slice/cpu.weight"), "");
        assert_eq!(read(&format!("{DELEGATED_CGROUP}/vm/cpu.weight")), "200");
        assert_eq!(create("muster-1000"), [root.join("muster-1000/vm")], "of another user");
        // VMs that were started before the service existed are found, too.
        let hierarchies = hierarchies(root);
        let [hierarchy] = &hierarchies[..] else { panic!("{hierarchies:?}") };
        assert_eq!(hierarchy.parents(PARENT_CGROUP), [delegated, root.join(PARENT_CGROUP)]);
        assert_eq!(hierarchy.parents("muster-1000"), [root.join("muster-1000")]);
    }

    #[test]
    fn moves_vms_in_the_hierarchies_of_systemd() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for controller in ["cpu", "systemd", "unified"] {
            fs::create_dir(root.join(controller)).unwrap();
            fs::write(root.join(controller).join("cgroup.procs"), "").unwrap();
        }
        assert_eq!(hierarchies(root).len(), 1);
        let delegated = root.join("unified").join(DELEGATED_CGROUP);
        fs::create_dir_all(&delegated).unwrap();
        fs::create_dir_all(root.join("systemd").join(DELEGATED_CGROUP)).unwrap();
        let found = hierarchies(root);
        let versions: Vec<&CgroupVersion> = found.iter().map(|found| &found.version).collect();
        assert_eq!(versions, ["cpu", "systemd", "unified"].map(CgroupVersion::V1).each_ref());
        assert_eq!(found[2].create(PARENT_CGROUP, "vm", 1, 1).unwrap(), delegated.join("vm"));
    }

    #[test]
    fn each_user_has_its_own_parent_cgroup() {
        let initial = "         0          0 4294967295\n";
        assert_eq!(parent_cgroup_of(0, initial), "muster");
        assert_eq!(parent_cgroup_of(1000, initial), "muster-1000");
        assert_eq!(parent_cgroup_of(0, "0 1000 1\n"), "muster-1000");
        assert_eq!(parent_cgroup_of(5, "0 1000 1\n1 100000 65536\n"), "muster-5");
        assert_eq!(parent_cgroup_of(7, ""), "muster-7");
    }

    /// The cgroup of another user, here of root, does not prevent the deletion of a VM.
    #[test]
    fn cgroup_of_another_user_is_kept() {
        let id = InstanceId::new();
        let _cleanup = Cleanup(id);
        let Some(cgroup) =
            Cgroup::create(id, 1, 1, 128).unwrap().filter(|_| nix::unistd::geteuid().is_root())
        else {
            return muster_testing::skipped("root and cgroups");
        };
        let name = id.to_string();
        let removal = std::thread::spawn(move || {
            // Only affects this thread.
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            remove_in(Path::new(CGROUP_ROOT), &parent_cgroup(), &name)
        });
        removal.join().unwrap().unwrap();
        assert!(cgroup.dirs.iter().all(|dir| dir.exists()));
        remove(id, 1).unwrap();
    }

    #[test]
    fn settings_use_the_files_of_each_version() {
        let settings = |version| CgroupHierarchy { root: PathBuf::new(), version }.settings(3, 800);
        let memory = (900 << 20) + MEMORY_OVERHEAD;
        assert_eq!(
            settings(CgroupVersion::V2(CONTROLLERS.to_vec())),
            [("cpu.weight", 300), ("memory.max", memory), ("pids.max", 515)]
        );
        assert_eq!(settings(CgroupVersion::V2(vec!["pids"])), [("pids.max", 515)]);
        assert_eq!(settings(CgroupVersion::V1("cpu")), [("cpu.shares", 3072)]);
        assert_eq!(settings(CgroupVersion::V1("memory")), [("memory.limit_in_bytes", memory)]);
        assert_eq!(settings(CgroupVersion::V1("pids")), [("pids.max", 515)]);
    }
}
