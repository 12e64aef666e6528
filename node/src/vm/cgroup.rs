//! Resource groups: the kernel shares processors between machines by what each was promised, and a QEMU that goes
//! wrong takes down nothing but itself.
//!
//! Every machine has the group `muster/<id>`, in the one hierarchy of version 2 or in those of version 1, whichever
//! has the controllers. All daemons of a host share the folder `muster`. Where there are none, or they are not ours to
//! change, machines run without. Everything here blocks.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_types::Result;
use muster_types::ids::InstanceId;
use nix::libc;
use nix::poll::{PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::command::wait_readable;
use crate::host;
use crate::storage::failed;

/// Where the hierarchies are.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The folder of all machines.
const OURS: &str = "muster";

const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// What QEMU may use beside the memory of the guest, at least: without KVM it keeps up to 1 GiB of translated code.
const OVERHEAD: u64 = 2 << 30;

/// Threads and processes of a machine beside one for each processor.
const TASKS: u64 = 512;

/// How often a group is asked to go, and how long it may take its processes to end each time.
const ATTEMPTS: usize = 20;
const PATIENCE: Duration = Duration::from_millis(500);

/// How long to wait for a group whose processes are gone and which is in use all the same.
const MOMENT: u16 = 10;

/// The group of a machine.
#[derive(Debug)]
pub(crate) struct Group {
    folders: Vec<PathBuf>,
}

impl Group {
    /// Makes the group of a machine, or makes one that is there as it should be. Nothing where there are none.
    pub(crate) fn create(id: InstanceId, cpus: u32, memory_mb: u64) -> Result<Option<Self>> {
        Self::create_in(Path::new(CGROUPS), &id.to_string(), cpus, memory_mb)
    }

    fn create_in(root: &Path, name: &str, cpus: u32, memory_mb: u64) -> Result<Option<Self>> {
        let mut folders = Vec::new();
        for hierarchy in hierarchies(root) {
            match hierarchy.make(name, cpus, memory_mb) {
                Ok(folder) => folders.push(folder),
                Err(error) if is_refusal(&error) => {
                    tracing::debug!(%error, path = %hierarchy.root.display(), "no resource group");
                }
                Err(error) => return Err(failed("a resource group cannot be made")(error)),
            }
        }
        Ok((!folders.is_empty()).then_some(Self { folders }))
    }

    /// Puts a process into the group, with all that it starts from now on.
    pub(crate) fn add(&self, pid: u32) -> Result<()> {
        let added = self.folders.iter().try_for_each(|folder| set(folder, "cgroup.procs", &pid.to_string()));
        added.map_err(failed("a process cannot be put into its resource group"))
    }
}

/// Removes the group of a machine, and ends what is still in it. Nothing there is no error.
pub(crate) fn remove(id: InstanceId) -> Result<()> {
    remove_in(Path::new(CGROUPS), &id.to_string())
}

fn remove_in(root: &Path, name: &str) -> Result<()> {
    let mut folders = hierarchies(root).into_iter().map(|hierarchy| hierarchy.root.join(OURS).join(name));
    let removed = folders.try_for_each(|folder| remove_folder(&folder));
    removed.map_err(failed("a resource group cannot be removed"))
}

fn remove_folder(folder: &Path) -> io::Result<()> {
    let mut last = Ok(());
    for _ in 0..ATTEMPTS {
        match fs::remove_dir(folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = Err(error),
            Err(error) => return Err(error),
        }
        if !end_all(folder)? {
            // Those that ended leave the group a moment later.
            poll(&mut [], PollTimeout::from(MOMENT))?;
        }
    }
    last
}

/// Ends the processes of a group and waits for them. Says whether there were any.
fn end_all(folder: &Path) -> io::Result<bool> {
    let mut any = false;
    for number in processes(folder)? {
        let Some(pid) = Pid::from_raw(number) else { continue };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // The number may be another's by now: what the group still has is what we hold.
        if processes(folder)?.contains(&number) {
            tracing::warn!(pid = number, group = %folder.display(), "a process is left in a resource group");
            let _ = pidfd_send_signal(&process, Signal::KILL);
            any |= wait_readable(&process, PATIENCE)?;
        }
    }
    Ok(any)
}

fn processes(folder: &Path) -> io::Result<Vec<i32>> {
    match fs::read_to_string(folder.join("cgroup.procs")) {
        Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// A tree of groups.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    root: PathBuf,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// Version 2, with these of the controllers.
    Unified(Vec<&'static str>),
    /// Version 1, of one controller.
    Single(&'static str),
}

/// Those that have controllers we use.
fn hierarchies(root: &Path) -> Vec<Hierarchy> {
    let unified = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let has = |controller: &&'static str| unified.split_whitespace().any(|word| word == *controller);
    let controllers: Vec<&'static str> = CONTROLLERS.into_iter().filter(has).collect();
    if !controllers.is_empty() {
        return vec![Hierarchy { root: root.to_owned(), kind: Kind::Unified(controllers) }];
    }
    let single = |controller| Hierarchy { root: root.join(controller), kind: Kind::Single(controller) };
    CONTROLLERS
        .map(single)
        .into_iter()
        .filter(|hierarchy| hierarchy.root.join("cgroup.procs").exists())
        .collect()
}

impl Hierarchy {
    fn make(&self, name: &str, cpus: u32, memory_mb: u64) -> io::Result<PathBuf> {
        let ours = self.root.join(OURS);
        make_folder(&ours)?;
        // All machines together weigh as much as all processors: what else runs here still gets about one of them.
        let all = u32::try_from(host::cpus()).unwrap_or(u32::MAX);
        if let Kind::Unified(controllers) = &self.kind {
            for controller in controllers {
                // Groups have the controllers that those above hand down.
                for above in [&self.root, &ours] {
                    set(above, "cgroup.subtree_control", &format!("+{controller}"))?;
                }
            }
        }
        if let Some((file, value)) = self.weight(all) {
            set(&ours, file, &value.to_string())?;
        }
        let folder = ours.join(name);
        make_folder(&folder)?;
        let set_all = self
            .settings(cpus, memory_mb)
            .into_iter()
            .try_for_each(|(file, value)| set(&folder, file, &value.to_string()));
        if let Err(error) = set_all {
            let _ = fs::remove_dir(&folder);
            return Err(error);
        }
        Ok(folder)
    }

    /// The share of the processors of a group that was promised some.
    fn weight(&self, cpus: u32) -> Option<(&'static str, u64)> {
        let cpus = u64::from(cpus.max(1));
        match &self.kind {
            Kind::Unified(controllers) => {
                controllers.contains(&"cpu").then(|| ("cpu.weight", (100 * cpus).min(10_000)))
            }
            Kind::Single("cpu") => Some(("cpu.shares", (1024 * cpus).min(1 << 18))),
            Kind::Single(_) => None,
        }
    }

    fn settings(&self, cpus: u32, memory_mb: u64) -> Vec<(&'static str, u64)> {
        let guest = memory_mb.saturating_mul(1 << 20);
        let memory = guest.saturating_add(guest / 8).saturating_add(OVERHEAD);
        let tasks = TASKS + u64::from(cpus);
        let limits = [("memory", "memory.max", memory), ("pids", "pids.max", tasks)];
        let limits = limits.into_iter().filter_map(|(controller, file, value)| match &self.kind {
            Kind::Unified(controllers) => controllers.contains(&controller).then_some((file, value)),
            Kind::Single("memory") if controller == "memory" => Some(("memory.limit_in_bytes", value)),
            Kind::Single(own) => (*own == controller).then_some((file, value)),
        });
        self.weight(cpus).into_iter().chain(limits).collect()
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Files of groups are there already, or the group is none.
fn set(folder: &Path, file: &str, value: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(folder.join(file))?;
    io::Write::write_all(&mut file, value.as_bytes())
}

/// Whether groups are not ours to make here, rather than something being wrong with them.
fn is_refusal(error: &io::Error) -> bool {
    let refusals = [libc::EACCES, libc::EPERM, libc::EROFS, libc::ENOENT, libc::EOPNOTSUPP, libc::EBUSY];
    error.raw_os_error().is_some_and(|number| refusals.contains(&number))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that does nothing, and ends with the test.
    struct Idle(Child);

    impl Idle {
        fn new() -> Self {
            Self(Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap())
        }
    }

    impl Drop for Idle {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// The group of a machine goes with the test.
    struct Gone(InstanceId);

    impl Drop for Gone {
        fn drop(&mut self) {
            let _ = remove(self.0);
        }
    }

    #[test]
    fn a_process_is_in_its_group_and_ends_with_it() {
        let id = InstanceId::new();
        let _gone = Gone(id);
        let Some(group) = Group::create(id, 2, 128).unwrap() else {
            return muster_testing::skipped("root and cgroups");
        };
        let mut idle = Idle::new();
        group.add(idle.0.id()).unwrap();
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", idle.0.id())).unwrap();
        let within = groups.lines().filter(|line| line.ends_with(&format!("/{OURS}/{id}"))).count();
        assert_eq!(within, group.folders.len(), "{groups}");
        // It may be made again, and sized again.
        let again = Group::create(id, 4, 1024).unwrap().unwrap();
        assert_eq!(again.folders, group.folders);
        let read = |name: &str| {
            let mut found =
                group.folders.iter().filter_map(|folder| fs::read_to_string(folder.join(name)).ok());
            found.next().map(|text| text.trim().to_owned())
        };
        let memory = ((1024 + 128) << 20) + OVERHEAD;
        let memory = [read("memory.max"), read("memory.limit_in_bytes")]
            .map(|found| found == Some(memory.to_string()));
        let shares = [read("cpu.weight") == Some("400".into()), read("cpu.shares") == Some("4096".into())];
        assert!(memory.contains(&true) || shares.contains(&true), "{:?}", group.folders);
        remove(id).unwrap();
        assert!(group.folders.iter().all(|folder| !folder.exists()));
        assert!(!idle.0.wait().unwrap().success());
        remove(id).unwrap();
    }

    #[test]
    fn both_versions_are_known_by_their_controllers() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(hierarchies(root), []);
        assert!(Group::create_in(root, "one", 1, 1).unwrap().is_none());
        for controller in ["cpu", "pids"] {
            fs::create_dir(root.join(controller)).unwrap();
            fs::write(root.join(controller).join("cgroup.procs"), "").unwrap();
        }
        let found: Vec<Kind> = hierarchies(root).into_iter().map(|found| found.kind).collect();
        assert_eq!(found, [Kind::Single("cpu"), Kind::Single("pids")]);
        // A unified one that has nothing of use is none.
        fs::write(root.join("cgroup.controllers"), "hugetlb\n").unwrap();
        assert_eq!(hierarchies(root).len(), 2);
        fs::write(root.join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let unified = Hierarchy { root: root.to_owned(), kind: Kind::Unified(CONTROLLERS.to_vec()) };
        assert_eq!(hierarchies(root), [unified]);
    }

    #[test]
    fn each_version_is_told_in_its_own_words() {
        let of = |kind| Hierarchy { root: PathBuf::new(), kind }.settings(3, 800);
        let memory = (900 << 20) + OVERHEAD;
        assert_eq!(
            of(Kind::Unified(CONTROLLERS.to_vec())),
            [("cpu.weight", 300), ("memory.max", memory), ("pids.max", 515)]
        );
        assert_eq!(of(Kind::Unified(vec!["pids"])), [("pids.max", 515)]);
        assert_eq!(of(Kind::Single("cpu")), [("cpu.shares", 3072)]);
        assert_eq!(of(Kind::Single("memory")), [("memory.limit_in_bytes", memory)]);
        assert_eq!(of(Kind::Single("pids")), [("pids.max", 515)]);
    }
}
