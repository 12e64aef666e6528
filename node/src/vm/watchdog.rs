//! The watchdog of a VM with self-fencing: a small process that kills QEMU when the fencing lease of the node expires. See
//! docs/decisions/0052.
//!
//! ```text
//! daemon ──fork──▶ watchdog ──fork──▶ QEMU
//! ```
//!
//! The watchdog is the parent of QEMU, which the kernel kills when the watchdog ends, so that QEMU never runs without it. A VM
//! that was started without self-fencing and has it now gets a watchdog that is not its parent, until its next start. The
//! directory of the VM tells whether the watchdog acts, so that the policy can change while the VM runs.

#![allow(unsafe_code, reason = "only system calls are allowed between fork and exec")]

use std::ffi::{CString, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::ptr;
use std::time::Duration;

use muster_types::ids::InstanceId;
use muster_types::instance::FencingPolicy;
use muster_types::{Error, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sys::signal::{SigHandler, Signal, signal};
use rustix::process::{Pid, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use super::hypervisor;
use super::process::{self, open_pidfd, require_parent, write_pid};
use super::vm_dir::VmDir;
use crate::command::wait_readable;
use crate::fencing;
use crate::files::io_error;

/// The sub-command of the executable that runs a watchdog. Its arguments are the storage directory and the id of the VM.
const SUBCOMMAND: &str = "watchdog";
const EXECUTABLE: &str = "/proc/self/exe";
/// The name of the executable in the list of processes.
const PROGRAM: &str = "muster";
/// The file in the directory of a VM that its watchdog locks.
const LOCK_FILE: &str = "watchdog.lock";
/// How often the watchdog reads the lease.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long the daemon waits for a watchdog that it has started.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const START_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Added to the number of the signal that ended QEMU in the exit code of the watchdog.
pub(super) const SIGNAL_EXIT_CODE: i32 = 128;

/// The command line of a watchdog, allocated before the fork.
#[derive(Debug, Clone)]
pub(super) struct WatchdogCommand {
    executable: CString,
    program: CString,
    subcommand: CString,
    storage_dir: CString,
    id: CString,
}

impl WatchdogCommand {
    pub(super) fn new(storage_dir: &Path, id: InstanceId) -> io::Result<Self> {
        Ok(Self {
            executable: CString::new(EXECUTABLE)?,
            program: CString::new(PROGRAM)?,
            subcommand: CString::new(SUBCOMMAND)?,
            storage_dir: CString::new(storage_dir.as_os_str().as_bytes())?,
            id: CString::new(id.to_string())?,
        })
    }

    /// Turns this process, a child of the daemon, into the watchdog. Returns only in a new child of it, in which QEMU is to be
    /// executed, with the PID of the watchdog. Makes system calls only.
    pub(super) fn fork(&self, pid_file: RawFd, daemon: u32) -> Result<u32, Errno> {
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let watchdog = nix::unistd::getpid().as_raw().unsigned_abs();
        // SAFETY: this process has one thread.
        let pid = Errno::result(unsafe { libc::fork() })?;
        if pid == 0 {
            drop(writer);
            // The pipe ends without a byte if the watchdog failed.
            return match nix::unistd::read(&reader, &mut [0])? {
                0 => Err(Errno::ESRCH),
                _ => Ok(watchdog),
            };
        }
        write_pid(pid_file, pid.unsigned_abs())?;
        require_parent(daemon)?;
        nix::unistd::setsid()?;
        nix::unistd::write(&writer, &[0])?;
        let arguments = [
            self.program.as_ptr(),
            self.subcommand.as_ptr(),
            self.storage_dir.as_ptr(),
            self.id.as_ptr(),
            ptr::null(),
        ];
        let environment = [ptr::null()];
        // SAFETY: the strings and the arrays end with null, and live until the call has failed.
        unsafe { libc::execve(self.executable.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        Err(Errno::last())
    }
}

/// Lets the kernel kill this process when its parent, the watchdog, ends. Call it after the credentials were changed, which
/// undoes it.
pub(super) fn end_with(watchdog: u32) -> Result<(), Errno> {
    // SAFETY: takes integers only.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) })?;
    require_parent(watchdog)
}

/// Waits until the watchdog of a VM runs.
pub(super) async fn wait(dir: &VmDir) -> Result<()> {
    let running = async {
        while !is_watched(dir).map_err(io_error("failed to open the lock of a watchdog"))? {
            tokio::time::sleep(START_POLL_INTERVAL).await;
        }
        Ok(())
    };
    let waited = tokio::time::timeout(START_TIMEOUT, running).await;
    waited.unwrap_or_else(|_| Err(Error::Unavailable("the watchdog of the VM does not start".into())))
}

/// Starts a watchdog for a VM that runs without one, and waits for it.
pub(super) async fn ensure(storage_dir: &Path, id: InstanceId, dir: &VmDir) -> Result<()> {
    let failed = |error| io_error("failed to start the watchdog of a VM")(error);
    if is_watched(dir).map_err(failed)? {
        return Ok(());
    }
    let mut command = Command::new(EXECUTABLE);
    command.arg0(PROGRAM).arg(SUBCOMMAND).arg(storage_dir).arg(id.to_string()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // Its own group, so that it survives the daemon.
    let mut watchdog = command.process_group(0).spawn().map_err(failed)?;
    // Collects its exit status.
    std::thread::Builder::new().name(SUBCOMMAND.into()).spawn(move || watchdog.wait()).map_err(failed)?;
    wait(dir).await
}

/// Starts a watchdog for each VM of a node that has self-fencing and runs without one.
pub(crate) async fn ensure_watchdogs(storage_dir: &Path) -> Result<()> {
    for (id, dir) in hypervisor::self_fencing(storage_dir) {
        if dir.pid().is_some_and(|pid| process::is_qemu(pid, id)) {
            ensure(storage_dir, id, &dir).await?;
        }
    }
    Ok(())
}

/// An exclusive lock of a whole file.
const WHOLE_FILE: libc::flock = libc::flock {
    l_type: libc::F_WRLCK as libc::c_short,
    l_whence: libc::SEEK_SET as libc::c_short,
    l_start: 0,
    l_len: 0,
    l_pid: 0,
};

fn open_lock(dir: &VmDir) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(dir.file(LOCK_FILE))
}

/// Returns whether a watchdog runs for a VM.
fn is_watched(dir: &VmDir) -> io::Result<bool> {
    // Only asks, so that it does not keep a watchdog from locking the file.
    let mut lock = WHOLE_FILE;
    fcntl(open_lock(dir)?, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Runs the watchdog of a VM until its QEMU ends, if these are the arguments of one. Uses little memory, because every VM with
/// self-fencing has one.
#[must_use]
pub fn run_watchdog(arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let arguments: Vec<OsString> = arguments.skip(1).take(4).collect();
    let [subcommand, storage_dir, id] = &arguments[..] else { return None };
    if subcommand != SUBCOMMAND {
        return None;
    }
    let id = id.to_str().and_then(|id| id.parse().ok());
    let ended = id.ok_or_else(|| io::Error::other("the id of the VM is malformed"));
    let ended = ended.and_then(|id| watch(Path::new(storage_dir), id));
    Some(match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: the watchdog of a VM failed: {error}");
            ExitCode::FAILURE
        }
    })
}

/// Watches a VM until its process has ended. Returns its exit code if this process is its parent.
fn watch(storage_dir: &Path, id: InstanceId) -> io::Result<u8> {
    let dir = hypervisor::vm_dir(storage_dir, id);
    let missing = || io::Error::other("the VM has no process");
    let pid =
        dir.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw).ok_or_else(missing)?;
    let pidfd = open_pidfd(pid)?.ok_or_else(missing)?;
    let exit = |options| waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | options);
    // Before QEMU was executed, only its parent can recognize it.
    let is_parent = exit(WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT).is_ok();
    let lock = open_lock(&dir)?;
    let try_lock = || fcntl(&lock, FcntlArg::F_OFD_SETLK(&WHOLE_FILE)).is_ok();
    let mut is_locked = try_lock();
    if !is_parent && (!is_locked || !process::is_qemu(pid.as_raw_nonzero().get().unsigned_abs(), id)) {
        return Ok(0);
    }
    // QEMU flushes its caches when the host shuts down, and must not be killed before that.
    for number in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
        // SAFETY: no handler is called.
        unsafe { signal(number, SigHandler::SigIgn) }?;
    }
    // A lease that was never read has expired.
    let mut deadline = Some(Duration::ZERO);
    let mut is_fenced = false;
    while !wait_readable(&pidfd, POLL_INTERVAL)? {
        // The watchdog of the last run may have held it.
        is_locked = is_locked || try_lock();
        // A lease that cannot be read is not renewed.
        deadline = fencing::read_deadline(storage_dir).unwrap_or(deadline);
        if dir.fencing() == FencingPolicy::Own && deadline.is_some_and(fencing::is_past) {
            // Before it ends, so that a daemon does not report a crash. Without a note it is still killed.
            is_fenced = is_fenced || dir.mark_fenced().is_ok();
            let _ = pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        }
    }
    let status = if is_parent { exit(WaitIdOptions::empty())? } else { None };
    let code = status.and_then(|status| {
        status.exit_status().or_else(|| Some(SIGNAL_EXIT_CODE + status.terminating_signal()?))
    });
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(0))
}
