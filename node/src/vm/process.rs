//! The processes of machines: how they are started so that they outlive us, recognised, ended, and what they used.

#![allow(unsafe_code, reason = "between fork and exec there are only system calls")]

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

/// What the kernel counts processor time in for user space, whatever its own tick is.
const NANOSECONDS_OF_A_TICK: u64 = 10_000_000;

/// Who a machine's process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// A group that it needs to reach the processor.
    pub(super) kvm: Option<u32>,
}

/// What shall run.
pub(super) struct Order<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [String],
    pub(super) environment: &'a [(&'static str, &'static str)],
    pub(super) folder: &'a Path,
    /// Nothing: it stays who we are.
    pub(super) identity: Option<Identity>,
    /// The files that it inherits, by the numbers that they have here.
    pub(super) files: &'a [RawFd],
    /// Where it writes its number before it becomes QEMU, so that there is no moment when nobody knows it.
    pub(super) pid_file: File,
    pub(super) log: File,
}

/// A process of a machine that was recognised.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    handle: AsyncFd<OwnedFd>,
}

/// How a process ended, if it was our child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Code(i32),
    Signal(i32),
    Unknown,
}

/// Starts a program in a session of its own, and answers its number.
pub(super) fn start(order: &Order<'_>) -> io::Result<u32> {
    let mut command = Command::new(order.program);
    command
        .args(order.arguments)
        .env_clear()
        .env("LC_ALL", "C")
        .env("PATH", "/usr/bin:/bin")
        .envs(order.environment.iter().copied())
        .current_dir(order.folder)
        .stdin(Stdio::null())
        .stdout(order.log.try_clone()?)
        .stderr(order.log.try_clone()?);
    let files = order.files.to_vec();
    let (identity, number) = (order.identity, order.pid_file.as_raw_fd());
    let parent = std::process::id();
    let become_machine = move || {
        write_number(number)?;
        // Whoever looks for the number after us finds it: if we are gone before it was written, this ends here.
        // SAFETY: always succeeds.
        if unsafe { libc::getppid() }.unsigned_abs() != parent {
            return Err(Errno::ESRCH.into());
        }
        nix::unistd::setsid()?;
        for file in &files {
            // SAFETY: only numbers are passed.
            Errno::result(unsafe { libc::fcntl(*file, libc::F_SETFD, 0) })?;
        }
        // SAFETY: always succeeds.
        unsafe { libc::umask(0o077) };
        drop_rights(identity)?;
        Ok(())
    };
    // SAFETY: it makes system calls only; everything it needs was allocated before the fork.
    unsafe { command.pre_exec(become_machine) };
    command.spawn().map(|child| child.id())
}

/// Writes our own number, without allocating.
fn write_number(file: RawFd) -> Result<(), Errno> {
    // SAFETY: always succeeds.
    let mut number = unsafe { libc::getpid() }.unsigned_abs();
    let mut digits = [0_u8; 10];
    let mut at = digits.len();
    while at > 0 {
        at -= 1;
        digits[at] = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        if number == 0 {
            break;
        }
    }
    let digits = &digits[at..];
    // SAFETY: the memory is ours and as long as is said.
    Errno::result(unsafe { libc::write(file, digits.as_ptr().cast(), digits.len()) }).map(|_| ())
}

fn drop_rights(identity: Option<Identity>) -> Result<(), Errno> {
    if let Some(Identity { uid, gid, kvm }) = identity {
        // The kernel knows up to 64; the first that it does not know ends it, as does not being allowed to.
        for right in 0..64 {
            // SAFETY: only numbers are passed.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, right as libc::c_ulong, 0, 0, 0) } != 0 {
                break;
            }
        }
        // The plain system calls: those of the library speak with other threads.
        let groups = kvm.map(|group| [group]);
        let (count, list) = groups.as_ref().map_or((0, std::ptr::null()), |list| (1, list.as_ptr()));
        // SAFETY: the list is as long as is said.
        Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, count, list) })?;
        // SAFETY: only numbers are passed.
        Errno::result(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
        // SAFETY: only numbers are passed.
        Errno::result(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })?;
    }
    // SAFETY: only numbers are passed.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(|_| ())
}

impl Process {
    /// The process of that number, if it is alive and runs this machine.
    pub(super) fn recognise(pid: u32, machine: InstanceId) -> io::Result<Option<Self>> {
        let Some(process) = Self::hold(pid)? else { return Ok(None) };
        // Looked at after it is held, when the number cannot become somebody else's any more.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        Ok((is_alive(&stat) && runs(&command, machine)).then_some(process))
    }

    /// A process that cannot have gone unnoticed, such as a child; nothing if there is none.
    pub(super) fn hold(pid: u32) -> io::Result<Option<Self>> {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let handle = match pidfd_open(number, PidfdFlags::NONBLOCK) {
            Ok(handle) => handle,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // SAFETY: it owns the file, which stays open for as long as it lives.
        let handle = unsafe { AsyncFd::register_with_interest(handle, Interest::READABLE) };
        Ok(Some(Self { pid, handle: handle? }))
    }

    /// Waits for its end.
    pub(super) async fn ended(&self) {
        // That it cannot be waited for cannot happen; it is then as if it ran for ever.
        if self.handle.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    pub(super) async fn ends_within(&self, limit: Duration) -> bool {
        tokio::time::timeout(limit, self.ended()).await.is_ok()
    }

    pub(super) fn kill(&self) {
        // That it is gone already is as good.
        let _ = pidfd_send_signal(self.handle.get_ref(), Signal::KILL);
    }

    /// How it ended. Takes it from the kernel's list if it was our child.
    pub(super) fn end(&self) -> End {
        let status = waitid(
            WaitId::PidFd(self.handle.get_ref().as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
        match status {
            Ok(Some(status)) => status
                .exit_status()
                .map(End::Code)
                .or_else(|| status.terminating_signal().map(End::Signal))
                .unwrap_or(End::Unknown),
            _ => End::Unknown,
        }
    }

    /// Nanoseconds of processor time, of the user and of the system.
    pub(super) fn times(&self) -> (u64, u64) {
        times(&fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default())
    }

    /// Bytes of memory that it really has.
    pub(super) fn memory(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/statm", self.pid)).unwrap_or_default();
        let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        pages * 4096
    }
}

/// Whether a process is alive and works in this folder.
pub(super) fn is_in(pid: u32, folder: &Path) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let place = fs::metadata(format!("/proc/{pid}/cwd")).map(|found| (found.dev(), found.ino()));
    let folder = fs::metadata(folder).map(|found| (found.dev(), found.ino()));
    is_alive(&stat) && place.is_ok_and(|place| folder.is_ok_and(|folder| folder == place))
}

/// The fields behind the name, which may hold anything.
fn fields(stat: &str) -> Vec<&str> {
    stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default()
}

fn is_alive(stat: &str) -> bool {
    fields(stat).first().is_some_and(|state| !matches!(*state, "Z" | "X" | "x"))
}

fn times(stat: &str) -> (u64, u64) {
    let fields = fields(stat);
    let ticks = |at: usize| fields.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    (ticks(11) * NANOSECONDS_OF_A_TICK, ticks(12) * NANOSECONDS_OF_A_TICK)
}

/// Whether a command line is that of this machine's QEMU.
fn runs(command: &[u8], machine: InstanceId) -> bool {
    let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
    let program = words.first().is_some_and(|word| word.windows(4).any(|part| part == b"qemu"));
    let id = machine.to_string();
    program && words.windows(2).any(|pair| pair[0] == b"-uuid" && pair[1] == id.as_bytes())
}

/// Changes with every start of the host.
pub(super) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

impl End {
    /// What to tell those who wonder why their machine is gone.
    pub(super) fn reason(self) -> String {
        match self {
            Self::Code(code) => format!("QEMU ended by itself with exit status {code}"),
            Self::Signal(libc::SIGKILL) => {
                "QEMU was killed by signal 9, which somebody sent or the kernel did because memory ran out"
                    .into()
            }
            Self::Signal(signal) => {
                let name =
                    nix::sys::signal::Signal::try_from(signal).map_or("unknown", |signal| signal.as_str());
                format!("QEMU was ended by signal {signal} ({name})")
            }
            Self::Unknown => "QEMU ended".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_recognised_by_its_machine() {
        let (id, other) = (InstanceId::new(), InstanceId::new());
        let command = format!("/usr/bin/qemu-system-x86_64\0-uuid\0{id}\0-S\0");
        assert!(runs(command.as_bytes(), id) && !runs(command.as_bytes(), other));
        assert!(!runs(format!("/bin/less\0-uuid\0{id}\0").as_bytes(), id) && !runs(b"", id));
        assert!(is_alive("7 (a) Z) S 1 1") && !is_alive("7 (a) S) Z 1 1") && !is_alive(""));
    }

    #[test]
    fn processor_times_are_nanoseconds() {
        let stat = "7 (a) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 4 0 1000 0 0";
        assert_eq!(times(stat), (1_500_000_000, 500_000_000));
        assert_eq!(times("nonsense"), (0, 0));
    }

    #[test]
    fn ends_are_told_apart() {
        assert!(End::Signal(9).reason().contains("memory"));
        assert!(End::Signal(11).reason().contains("SIGSEGV"));
        assert!(End::Code(1).reason().contains("exit status 1"));
    }

    #[tokio::test]
    async fn a_process_writes_its_number_leads_its_session_and_is_seen_to_end() {
        let folder = tempfile::tempdir().unwrap();
        let number = folder.path().join("pid");
        let log = folder.path().join("log");
        let inherited = File::open("/dev/null").unwrap();
        let order = Order {
            program: Path::new("/bin/sh"),
            arguments: &[
                "-c".into(),
                format!("test -e /proc/self/fd/{} && exec sleep 600", inherited.as_raw_fd()),
            ],
            environment: &[],
            folder: folder.path(),
            identity: None,
            files: &[inherited.as_raw_fd()],
            pid_file: File::create(&number).unwrap(),
            log: File::create(&log).unwrap(),
        };
        let pid = start(&order).unwrap();
        let process = Process::hold(pid).unwrap().unwrap();
        assert_eq!(fs::read_to_string(number).unwrap(), pid.to_string());
        let session = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        assert_eq!(fields(&session)[3], pid.to_string());
        assert!(Process::recognise(pid, InstanceId::new()).unwrap().is_none());
        assert!(is_in(pid, folder.path()) && !is_in(pid, Path::new("/")));
        process.kill();
        assert!(process.ends_within(Duration::from_secs(20)).await);
        assert_eq!(process.end(), End::Signal(9));
        assert!(Process::hold(pid).unwrap().is_none());
    }
}
