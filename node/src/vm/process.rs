//! QEMU processes: spawning them detached from the daemon, recognizing them, killing them, and their resource usage.

#![allow(unsafe_code, reason = "only system calls are allowed between fork and exec")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muster_types::ids::InstanceId;
use nix::errno::Errno;
use nix::libc;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::network_isolation;
use super::watchdog::{self, SIGNAL_EXIT_CODE, WatchdogCommand};

/// How long the watchdog of a process may take to report its exit.
const WATCHDOG_TIMEOUT: Duration = Duration::from_secs(2);

/// Nanoseconds of one tick of USER_HZ, in which the kernel reports CPU time.
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// The user and groups of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// The supplementary group that gives access to KVM, if needed.
    pub(super) kvm_gid: Option<u32>,
}

/// A process to spawn.
pub(super) struct SpawnRequest<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [String],
    pub(super) environment: &'a [(&'static str, &'static str)],
    pub(super) working_dir: &'a Path,
    /// If unset, the process keeps our credentials.
    pub(super) credentials: Option<Credentials>,
    /// File descriptors that it inherits under the same numbers.
    pub(super) inherited_fds: &'a [RawFd],
    /// The file into which it writes its PID before it executes the program, so that its PID is known at any time.
    pub(super) pid_file: File,
    pub(super) log: File,
    /// The watchdog that becomes its parent.
    pub(super) watchdog: Option<WatchdogCommand>,
}

/// A process, referenced by a pidfd.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    /// The watchdog that is its parent and reports its exit, if that is our child.
    watchdog: Option<AsyncFd<OwnedFd>>,
}

/// How a process exited. Unknown unless it was our child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessExit {
    Code(i32),
    Signal(i32),
    Unknown,
}

/// Spawns a process in a new session that cannot open network connections. Returns the PID of the child of this process: of
/// its watchdog if it has one, otherwise its own.
pub(super) fn spawn(request: &SpawnRequest<'_>) -> io::Result<u32> {
    let mut command = Command::new(request.program);
    command
        .args(request.arguments)
        .env_clear()
        .env("LC_ALL", "C")
        .env("PATH", "/usr/bin:/bin")
        .envs(request.environment.iter().copied())
        .current_dir(request.working_dir)
        .stdin(Stdio::null())
        .stdout(request.log.try_clone()?)
        .stderr(request.log.try_clone()?);
    let fds = request.inherited_fds.to_vec();
    let (credentials, pid_file) = (request.credentials, request.pid_file.as_raw_fd());
    let daemon = std::process::id();
    let watchdog_command = request.watchdog.clone();
    let prepare = move || {
        // If the daemon ended before the PID was written, the next one may have missed it: do not continue.
        let watchdog = match &watchdog_command {
            Some(command) => Some(command.fork(pid_file, daemon)?),
            None => {
                write_pid(pid_file, std::process::id())?;
                require_parent(daemon)?;
                None
            }
        };
        nix::unistd::setsid()?;
        for fd in &fds {
            // SAFETY: takes integers only.
            Errno::result(unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) })?;
        }
        // SAFETY: always succeeds.
        unsafe { libc::umask(0o077) };
        network_isolation::leave_network();
        drop_privileges(credentials)?;
        watchdog.map_or(Ok(()), watchdog::end_with)?;
        network_isolation::deny_network_sockets()?;
        Ok(())
    };
    // SAFETY: the closure makes system calls only; all memory was allocated before the fork.
    unsafe { command.pre_exec(prepare) };
    command.spawn().map(|child| child.id())
}

/// Fails if the parent of this process has ended, without allocating.
pub(super) fn require_parent(pid: u32) -> Result<(), Errno> {
    // SAFETY: always succeeds.
    if unsafe { libc::getppid() }.unsigned_abs() == pid { Ok(()) } else { Err(Errno::ESRCH) }
}

/// Writes a PID, without allocating.
pub(super) fn write_pid(file: RawFd, mut pid: u32) -> Result<(), Errno> {
    let mut digits = [0_u8; 10];
    let mut index = digits.len();
    while index > 0 {
        index -= 1;
        digits[index] = b"0123456789"[(pid % 10) as usize];
        pid /= 10;
        if pid == 0 {
            break;
        }
    }
    let digits = &digits[index..];
    // SAFETY: the pointer and the length are those of a slice.
    Errno::result(unsafe { libc::write(file, digits.as_ptr().cast(), digits.len()) }).map(|_| ())
}

fn drop_privileges(credentials: Option<Credentials>) -> Result<(), Errno> {
    // There are at most 64 capabilities; dropping fails at the first that does not exist, or without the privilege. Root of a
    // user namespace that keeps its id loses them when it executes QEMU.
    for capability in 0..64 {
        // SAFETY: takes integers only.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability as libc::c_ulong, 0, 0, 0) } != 0 {
            break;
        }
    }
    if let Some(Credentials { uid, gid, kvm_gid }) = credentials {
        // Raw system calls, because the wrappers of libc synchronize with other threads.
        let groups = kvm_gid.map(|gid| [gid]);
        let (count, list) = groups.as_ref().map_or((0, std::ptr::null()), |list| (1, list.as_ptr()));
        // SAFETY: `list` has `count` elements.
        Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, count, list) })?;
        // SAFETY: takes integers only.
        Errno::result(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
        // SAFETY: takes integers only.
        Errno::result(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })?;
    }
    // SAFETY: takes integers only.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(|_| ())
}

impl Process {
    /// Opens the process with this PID if it is alive and is the QEMU of this VM.
    pub(super) fn open_qemu(pid: u32, vm: InstanceId) -> io::Result<Option<Self>> {
        let process = Self::open(pid)?;
        // Read after the pidfd was opened: if the files are about another process, the pidfd is of an exited one.
        Ok(process.filter(|process| is_qemu(process.pid, vm)))
    }

    /// Opens a process whose parent is a watchdog, which is our child.
    pub(super) fn open_watched(pid: u32, watchdog: u32) -> io::Result<Option<Self>> {
        let Some(parent) = Self::open(watchdog)? else { return Ok(None) };
        // If the process has exited already, its watchdog is about to.
        let process = match Self::open(pid)?.filter(|process| parent_of(process.pid) == Some(watchdog)) {
            Some(process) => Some(process),
            None => Self::open(watchdog)?,
        };
        Ok(process.map(|process| Self { pid, watchdog: Some(parent.pidfd), ..process }))
    }

    /// Opens the process with this PID, if it exists. The caller must know that the PID was not reused, such as that of
    /// a child.
    pub(super) fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let Some(pidfd) = open_pidfd(raw)? else { return Ok(None) };
        // SAFETY: the `AsyncFd` owns the file descriptor, which stays open as long as it lives.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
        Ok(Some(Self { pid, pidfd: pidfd?, watchdog: None }))
    }

    /// Waits until the process has exited.
    pub(super) async fn exited(&self) {
        // Fails only while the runtime shuts down.
        if self.pidfd.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
        if let Some(watchdog) = &self.watchdog {
            let _ = tokio::time::timeout(WATCHDOG_TIMEOUT, watchdog.readable()).await;
        }
    }

    pub(super) async fn exits_within(&self, timeout: Duration) -> bool {
        tokio::time::timeout(timeout, self.exited()).await.is_ok()
    }

    pub(super) fn kill(&self) {
        // Fails if the process has exited already.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }

    /// Returns how the process exited, and reaps our child: the process or its watchdog.
    pub(super) fn exit(&self) -> ProcessExit {
        let child = self.watchdog.as_ref().unwrap_or(&self.pidfd);
        let status =
            waitid(WaitId::PidFd(child.get_ref().as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        let Ok(Some(status)) = status else { return ProcessExit::Unknown };
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) if self.watchdog.is_some() && code > SIGNAL_EXIT_CODE => {
                ProcessExit::Signal(code - SIGNAL_EXIT_CODE)
            }
            (Some(code), _) => ProcessExit::Code(code),
            (None, Some(signal)) => ProcessExit::Signal(signal),
            (None, None) => ProcessExit::Unknown,
        }
    }

    /// Returns the CPU time used so far.
    pub(super) fn cpu_times(&self) -> io::Result<CpuTimes> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid))?;
        parse_cpu_times(&stat).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Returns the resident memory in bytes.
    pub(super) fn memory(&self) -> io::Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/statm", self.pid))?;
        let pages: Option<u64> = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
        pages.map(|pages| pages * 4096).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Opens the pidfd of the process with this PID, if it exists.
pub(super) fn open_pidfd(pid: Pid) -> io::Result<Option<OwnedFd>> {
    match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether the process with this PID is alive and is the QEMU of this VM.
pub(super) fn is_qemu(pid: u32, vm: InstanceId) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    is_alive(&stat) && is_qemu_of(&command_line, vm)
}

/// Returns the PID of the parent of a process.
fn parent_of(pid: u32) -> Option<u32> {
    fields(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?).get(1)?.parse().ok()
}

/// CPU time of a process, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CpuTimes {
    pub(super) user_ns: u64,
    pub(super) system_ns: u64,
}

/// Returns whether a process is alive and has this working directory.
pub(super) fn has_working_dir(pid: u32, dir: &Path) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let inode = |path: &Path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
    let (working_dir, dir) = (inode(Path::new(&format!("/proc/{pid}/cwd"))), inode(dir));
    is_alive(&stat) && working_dir.is_ok_and(|working_dir| dir.is_ok_and(|dir| dir == working_dir))
}

/// Returns the fields after the process name, which may contain anything.
fn fields(stat: &str) -> Vec<&str> {
    stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default()
}

fn is_alive(stat: &str) -> bool {
    fields(stat).first().is_some_and(|state| !matches!(*state, "Z" | "X" | "x"))
}

fn parse_cpu_times(stat: &str) -> Option<CpuTimes> {
    let fields = fields(stat);
    let nanoseconds = |index: usize| Some(fields.get(index)?.parse::<u64>().ok()? * NANOSECONDS_PER_TICK);
    Some(CpuTimes { user_ns: nanoseconds(11)?, system_ns: nanoseconds(12)? })
}

/// Returns whether a command line is that of this VM's QEMU.
fn is_qemu_of(command_line: &[u8], vm: InstanceId) -> bool {
    let words: Vec<&[u8]> = command_line.split(|byte| *byte == 0).collect();
    let is_qemu = words.first().is_some_and(|word| word.windows(4).any(|part| part == b"qemu"));
    let id = vm.to_string();
    is_qemu && words.windows(2).any(|pair| pair[0] == b"-uuid" && pair[1] == id.as_bytes())
}

/// Returns the id of the host's current boot.
pub(super) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or_else(
        |error| {
            // A constant id is safe: running VMs are recognized by their command lines, too.
            tracing::warn!(%error, "failed to read the boot id");
            String::new()
        },
        |id| id.trim().to_owned(),
    )
}

impl ProcessExit {
    /// Describes the exit for the user.
    pub(super) fn reason(self) -> String {
        match self {
            Self::Code(code) => format!("QEMU exited with status {code}"),
            Self::Signal(libc::SIGKILL) => {
                "QEMU was killed by signal 9, possibly by the kernel because the host ran out of memory"
                    .into()
            }
            Self::Signal(signal) => {
                let name =
                    nix::sys::signal::Signal::try_from(signal).map_or("unknown", |signal| signal.as_str());
                format!("QEMU was killed by signal {signal} ({name})")
            }
            Self::Unknown => "QEMU exited".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_qemu_by_its_command_line() {
        let (id, other) = (InstanceId::new(), InstanceId::new());
        let command = format!("/usr/bin/qemu-system-x86_64\0-uuid\0{id}\0-S\0");
        assert!(is_qemu_of(command.as_bytes(), id) && !is_qemu_of(command.as_bytes(), other));
        assert!(!is_qemu_of(format!("/bin/less\0-uuid\0{id}\0").as_bytes(), id) && !is_qemu_of(b"", id));
        assert!(is_alive("7 (a) Z) S 1 1") && !is_alive("7 (a) S) Z 1 1") && !is_alive(""));
    }

    #[test]
    fn parses_cpu_times_in_nanoseconds() {
        let stat = "7 (a) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 4 0 1000 0 0";
        let expected = CpuTimes { user_ns: 1_500_000_000, system_ns: 500_000_000 };
        assert_eq!(parse_cpu_times(stat), Some(expected));
        assert_eq!(parse_cpu_times("nonsense"), None);
    }

    #[test]
    fn describes_process_exits() {
        assert!(ProcessExit::Signal(9).reason().contains("memory"));
        assert!(ProcessExit::Signal(11).reason().contains("SIGSEGV"));
        assert!(ProcessExit::Code(1).reason().contains("status 1"));
    }

    #[tokio::test]
    async fn spawned_process_cannot_open_network_connections() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // The address of a UDP socket need not be reachable.
        let script = format!(
            "for kind in tcp udp; do (exec 3<>/dev/$kind/127.0.0.1/{port}) && echo $kind; done; readlink /proc/self/ns/net"
        );
        let request = SpawnRequest {
            program: Path::new("/bin/bash"),
            arguments: &["-c".into(), script],
            environment: &[],
            working_dir: dir.path(),
            credentials: None,
            inherited_fds: &[],
            pid_file: File::create(dir.path().join("pid")).unwrap(),
            log: File::create(&log).unwrap(),
            watchdog: None,
        };
        let process = Process::open(spawn(&request).unwrap()).unwrap().unwrap();
        assert!(process.exits_within(Duration::from_secs(20)).await);
        assert_eq!(process.exit(), ProcessExit::Code(0));
        let output = fs::read_to_string(log).unwrap();
        assert_eq!(output.matches("socket: Permission denied").count(), 2, "{output}");
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        let is_isolated = !output.ends_with(&format!("{}\n", own.display()));
        assert!(is_isolated || !nix::unistd::geteuid().is_root(), "{output}");
    }

    #[tokio::test]
    async fn spawned_process_writes_its_pid_and_leads_its_session() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let log = dir.path().join("log");
        let inherited = File::open("/dev/null").unwrap();
        let request = SpawnRequest {
            program: Path::new("/bin/sh"),
            arguments: &[
                "-c".into(),
                format!("test -e /proc/self/fd/{} && exec sleep 600", inherited.as_raw_fd()),
            ],
            environment: &[],
            working_dir: dir.path(),
            credentials: None,
            inherited_fds: &[inherited.as_raw_fd()],
            pid_file: File::create(&pid_file).unwrap(),
            log: File::create(&log).unwrap(),
            watchdog: None,
        };
        let pid = spawn(&request).unwrap();
        let process = Process::open(pid).unwrap().unwrap();
        assert_eq!(fs::read_to_string(pid_file).unwrap(), pid.to_string());
        let session = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        assert_eq!(fields(&session)[3], pid.to_string());
        assert!(Process::open_qemu(pid, InstanceId::new()).unwrap().is_none());
        assert!(has_working_dir(pid, dir.path()) && !has_working_dir(pid, Path::new("/")));
        process.kill();
        assert!(process.exits_within(Duration::from_secs(20)).await);
        assert_eq!(process.exit(), ProcessExit::Signal(9));
        assert!(Process::open(pid).unwrap().is_none());
    }
}
