//! Runs one program on an untrusted file, with access to nothing but that file and one directory. See
//! docs/decisions/0026.
//!
//! ```text
//! this thread ──▶ supervisor: new namespaces ──▶ program: another user, another root, limits
//! ```
//!
//! The supervisor only waits. When it exits, the program is killed, and when this thread exits, the supervisor is. The
//! program sees `/usr`, `/dev/null`, its input as `/in`, the base of that as `/base` and its output directory as `/out`.
//! If we are root, it runs as `IMAGE_USER`; otherwise in a user namespace as the same user without any capability.

#![allow(unsafe_code, reason = "only system calls are allowed between fork and exec")]

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, User};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::error::ImagesError;
use crate::command::wait_readable;
use crate::user_ids;

/// How often cancellation and timeout of a running program are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The address space of a program: twice what decompression may take, as threads reserve memory that they never use.
const MEMORY_LIMIT: u64 = 2 << 30;

/// The exit code if the supervisor itself was killed by a signal.
const SUPERVISOR_KILLED: i32 = 128;

/// The path of the old root between `pivot_root` and exec.
const OLD_ROOT: &CStr = c"/old";

/// The user that programs run as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Identity {
    /// We are root and switch to this user.
    SwitchTo(Uid, Gid),
    /// We are not root and keep our user, in a user namespace.
    Keep(Uid, Gid),
}

/// Runs the image tools of this host on untrusted files.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    identity: Identity,
}

/// A program to run and its limits.
pub(crate) struct SandboxCommand<'a> {
    pub(crate) program: &'a Path,
    pub(crate) arguments: &'a [&'a str],
    /// The file that it sees as `/in`.
    pub(crate) input: Option<&'a Path>,
    /// The file that it sees as `/base`.
    pub(crate) base: Option<&'a Path>,
    /// The directory that it sees as `/out`.
    pub(crate) output: Option<&'a Path>,
    pub(crate) stdin: Option<File>,
    pub(crate) stdout: File,
    pub(crate) stderr: File,
    /// The maximum size of a file that it writes.
    pub(crate) file_size: u64,
    /// The limit of both CPU time and wall-clock time.
    pub(crate) timeout: Duration,
    /// Polled while the program runs; it is killed if this returns `false`.
    pub(crate) should_continue: &'a dyn Fn() -> bool,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SandboxExit {
    /// It exited. A signal counts as 128 plus its number.
    Code(i32),
    TimedOut,
    /// `should_continue` returned `false`.
    Cancelled,
}

impl Sandbox {
    /// Creates a sandbox and probes it, or returns why it does not work on this host.
    pub(super) fn find(user: &str) -> Result<Self, ImagesError> {
        let (uid, gid) = (Uid::effective(), Gid::effective());
        let switch_user = || -> Result<Self, ImagesError> {
            let found = User::from_name(user)
                .map_err(|error| format!("failed to look up the user {user} (IMAGE_USER): {error}"))?;
            let found = found.ok_or_else(|| format!("the user {user} (IMAGE_USER) does not exist"))?;
            if found.uid.is_root() || found.gid.as_raw() == 0 {
                return Err(
                    format!("the user {user} (IMAGE_USER) must not be root or in the group root").into()
                );
            }
            Self { identity: Identity::SwitchTo(found.uid, found.gid) }.probed()
        };
        let same_user = || Self { identity: Identity::Keep(uid, gid) }.probed();
        if user_ids::can_switch() { switch_user() } else { same_user() }
    }

    fn probed(self) -> Result<Self, ImagesError> {
        let null = || File::options().read(true).write(true).open("/dev/null");
        let result = null().and_then(|stdout| {
            self.run(SandboxCommand {
                program: Path::new("/usr/bin/true"),
                arguments: &[],
                input: None,
                base: None,
                output: None,
                stdin: None,
                stdout,
                stderr: null()?,
                file_size: 0,
                timeout: Duration::from_secs(20),
                should_continue: &|| true,
            })
        });
        let needs = |requirement: &str, error| format!("the image sandbox needs {requirement}: {error}");
        match (result, self.identity) {
            (Ok(SandboxExit::Code(0)), _) => Ok(self),
            (Ok(end), _) => Err(format!("the image sandbox does not work: {end:?}").into()),
            (Err(error), Identity::SwitchTo(..)) => {
                Err(needs("CAP_SYS_ADMIN to create namespaces", error).into())
            }
            (Err(error), Identity::Keep(..)) => {
                Err(ImagesError::NoUserNamespaces(needs("root, or unprivileged user namespaces", error)))
            }
        }
    }

    /// Returns the owner of the files that a program writes to `/out`.
    pub(crate) fn owner(&self) -> (u32, u32) {
        let (Identity::SwitchTo(uid, gid) | Identity::Keep(uid, gid)) = self.identity;
        (uid.as_raw(), gid.as_raw())
    }

    /// Runs a program and waits for it. The program is killed if this thread exits.
    pub(crate) fn run(&self, spec: SandboxCommand<'_>) -> io::Result<SandboxExit> {
        let setup = SandboxSetup::new(self.identity, &spec)?;
        let mut command = Command::new(spec.program);
        command
            .args(spec.arguments)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", "/usr/bin")
            // Otherwise each thread reserves its own arena, which counts towards the limit.
            .env("MALLOC_ARENA_MAX", "2")
            .stdin(spec.stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(spec.stdout)
            .stderr(spec.stderr);
        // SAFETY: `enter` only makes system calls; everything it needs was allocated before the fork.
        unsafe { command.pre_exec(move || setup.enter().map_err(io::Error::from)) };
        let mut child = command.spawn()?;
        let end = wait(&mut child, spec.timeout, spec.should_continue);
        if !matches!(end, Ok(SandboxExit::Code(_))) {
            child.kill()?;
            child.wait()?;
        }
        end
    }
}

fn wait(child: &mut Child, timeout: Duration, should_continue: &dyn Fn() -> bool) -> io::Result<SandboxExit> {
    let deadline = Instant::now() + timeout;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let process = pidfd_open(pid.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    loop {
        if wait_readable(&process, POLL_INTERVAL)? {
            return Ok(SandboxExit::Code(child.wait()?.code().unwrap_or(SUPERVISOR_KILLED)));
        }
        if Instant::now() >= deadline {
            return Ok(SandboxExit::TimedOut);
        }
        if !should_continue() {
            return Ok(SandboxExit::Cancelled);
        }
    }
}

/// An entry of the new root directory.
#[derive(Debug)]
enum RootEntry {
    Directory(CString),
    Link { target: CString, path: CString },
    Bind { source: CString, path: CString, is_dir: bool, bind_flags: MsFlags, flags: MsFlags },
}

/// Everything that is needed between fork and exec.
#[derive(Debug)]
struct SandboxSetup {
    identity: Identity,
    entries: Vec<RootEntry>,
    /// An existing directory over which the new root is mounted.
    mountpoint: CString,
    limits: Vec<(Resource, u64)>,
    /// The files that set up the user namespace, and their contents.
    maps: [(&'static CStr, Vec<u8>); 3],
    parent: libc::pid_t,
}

impl SandboxSetup {
    fn new(identity: Identity, spec: &SandboxCommand<'_>) -> io::Result<Self> {
        let mut entries = Vec::new();
        let nosuid_nodev = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let data = nosuid_nodev | MsFlags::MS_NOEXEC;
        // In a user namespace, a bind mount must not reveal files that another mount hides.
        let non_recursive = matches!(identity, Identity::SwitchTo(..));
        // Programs and libraries, as on the host: symbolic links on a merged `/usr`.
        for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
            let path = Path::new("/").join(name);
            match fs::symlink_metadata(&path) {
                Ok(found) if found.is_symlink() => {
                    entries.push(RootEntry::Link {
                        target: c_string(&fs::read_link(&path)?)?,
                        path: c_string(&path)?,
                    });
                }
                Ok(found) if found.is_dir() => {
                    let entry = RootEntry::bind(&path, &path, true, nosuid_nodev | MsFlags::MS_RDONLY)?;
                    entries.push(if non_recursive { entry } else { entry.recursive() });
                }
                _ => {}
            }
        }
        let null = Path::new("/dev/null");
        entries.push(RootEntry::Directory(c_string(Path::new("/dev"))?));
        entries.push(RootEntry::bind(null, null, false, MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC)?);
        for (input, at) in [(spec.input, "/in"), (spec.base, "/base")] {
            if let Some(input) = input {
                entries.push(RootEntry::bind(input, Path::new(at), false, data | MsFlags::MS_RDONLY)?);
            }
        }
        if let Some(output) = spec.output {
            entries.push(RootEntry::bind(output, Path::new("/out"), true, data)?);
        }
        let (Identity::SwitchTo(uid, gid) | Identity::Keep(uid, gid)) = identity;
        Ok(Self {
            identity,
            entries,
            mountpoint: c_string(&fs::canonicalize("/tmp")?)?,
            limits: vec![
                (Resource::RLIMIT_AS, MEMORY_LIMIT),
                (Resource::RLIMIT_CPU, spec.timeout.as_secs().max(1)),
                (Resource::RLIMIT_FSIZE, spec.file_size),
                (Resource::RLIMIT_NOFILE, 64),
                (Resource::RLIMIT_CORE, 0),
            ],
            maps: [
                (c"/proc/self/setgroups", b"deny".to_vec()),
                (c"/proc/self/uid_map", format!("{uid} {uid} 1").into_bytes()),
                (c"/proc/self/gid_map", format!("{gid} {gid} 1").into_bytes()),
            ],
            // SAFETY: always succeeds.
            parent: unsafe { libc::getpid() },
        })
    }

    /// Runs between fork and exec. Nothing here may allocate: other threads may have held the allocator's locks.
    fn enter(&self) -> Result<(), Errno> {
        die_with_parent()?;
        // SAFETY: always succeeds.
        if unsafe { libc::getppid() } != self.parent {
            return Err(Errno::ESRCH);
        }
        // The program does not own the directories created here, whatever our umask is.
        // SAFETY: always succeeds.
        unsafe { libc::umask(0o022) };
        let namespaces = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWPID;
        match self.identity {
            Identity::SwitchTo(..) => unshare(namespaces)?,
            Identity::Keep(..) => {
                unshare(namespaces | CloneFlags::CLONE_NEWUSER)?;
                self.maps.iter().try_for_each(|(path, text)| write(path, text))?;
            }
        }
        fork_into_pid_namespace()?;
        self.mount()?;
        for (resource, limit) in &self.limits {
            let limit = getrlimit(*resource)?.1.min(*limit);
            setrlimit(*resource, limit, limit)?;
        }
        self.drop_privileges()?;
        // Again, since changing the user resets it.
        die_with_parent()
    }

    fn mount(&self) -> Result<(), Errno> {
        let none: Option<&CStr> = None;
        mount(none, c"/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        let nosuid_nodev = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let tmpfs = Some(c"tmpfs");
        mount(tmpfs, self.mountpoint.as_c_str(), tmpfs, nosuid_nodev, Some(c"size=1m,mode=755"))?;
        nix::unistd::chdir(self.mountpoint.as_c_str())?;
        nix::unistd::mkdir(c"old", Mode::S_IRWXU)?;
        nix::unistd::pivot_root(c".", c"old")?;
        nix::unistd::chdir(c"/")?;
        self.entries.iter().try_for_each(RootEntry::create)?;
        umount2(OLD_ROOT, MntFlags::MNT_DETACH)?;
        // SAFETY: a NUL-terminated path.
        Errno::result(unsafe { libc::rmdir(OLD_ROOT.as_ptr()) })?;
        mount(none, c"/", none, MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | nosuid_nodev, none)
    }

    fn drop_privileges(&self) -> Result<(), Errno> {
        // The kernel has at most 64 capabilities; the first unknown one ends the loop.
        // SAFETY: only integers are passed.
        let drop =
            |capability: libc::c_ulong| unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        for capability in 0..64 {
            if drop(capability) != 0 {
                match (Errno::last(), self.identity) {
                    // A process that is not root and cannot gain privileges cannot use the others.
                    (Errno::EINVAL, _) | (Errno::EPERM, Identity::SwitchTo(..)) => break,
                    (error, _) => return Err(error),
                }
            }
        }
        if let Identity::SwitchTo(uid, gid) = self.identity {
            // Plain system calls: libc's wrappers synchronise with other threads.
            let (uid, gid) = (uid.as_raw(), gid.as_raw());
            // SAFETY: an empty list, and only integers.
            Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, 0, 0) })?;
            // SAFETY: only integers are passed.
            Errno::result(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
            // SAFETY: only integers are passed.
            Errno::result(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })?;
        }
        // SAFETY: only integers are passed.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(ignore_result)
    }
}

fn ignore_result(_: libc::c_int) {}

impl RootEntry {
    fn bind(source: &Path, path: &Path, is_dir: bool, flags: MsFlags) -> io::Result<Self> {
        // A symbolic link would have another target in the new root.
        let source = fs::canonicalize(source)?;
        let relative = |path: &Path| path.strip_prefix("/").map_or_else(|_| path.to_owned(), Path::to_owned);
        let source = c_string(&Path::new("/old").join(relative(&source)))?;
        Ok(Self::Bind { source, path: c_string(path)?, is_dir, bind_flags: MsFlags::MS_BIND, flags })
    }

    fn recursive(mut self) -> Self {
        if let Self::Bind { bind_flags, .. } = &mut self {
            bind_flags.insert(MsFlags::MS_REC);
        }
        self
    }

    fn create(&self) -> Result<(), Errno> {
        let none: Option<&CStr> = None;
        let mkdir = |path: &CString| nix::unistd::mkdir(path.as_c_str(), Mode::from_bits_truncate(0o755));
        match self {
            Self::Directory(path) => mkdir(path),
            Self::Link { target, path } => {
                // SAFETY: two NUL-terminated paths.
                Errno::result(unsafe { libc::symlink(target.as_ptr(), path.as_ptr()) }).map(ignore_result)
            }
            Self::Bind { source, path, is_dir, bind_flags, flags } => {
                if *is_dir {
                    mkdir(path)?;
                } else {
                    // SAFETY: a NUL-terminated path, and integers.
                    Errno::result(unsafe { libc::mknod(path.as_ptr(), libc::S_IFREG | 0o644, 0) })?;
                }
                mount(Some(source.as_c_str()), path.as_c_str(), none, *bind_flags, none)?;
                mount(none, path.as_c_str(), none, MsFlags::MS_REMOUNT | MsFlags::MS_BIND | *flags, none)
            }
        }
    }
}

/// Continues in a child, which is the first process of the new PID namespace. The parent becomes the supervisor, which
/// waits for it and exits with its status.
fn fork_into_pid_namespace() -> Result<(), Errno> {
    // SAFETY: a fork without libc's preparations; this process has one thread and only makes system calls.
    let child = Errno::result(unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) })?;
    if child == 0 {
        return Ok(());
    }
    // SAFETY: the files are not used after this; the caller of `spawn` waits until they are closed. Nothing of this
    // process runs after `_exit`.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0);
        let mut status = 0;
        while libc::wait4(-1, &raw mut status, 0, std::ptr::null_mut()) < 0 && Errno::last() == Errno::EINTR {
        }
        let killed = libc::WIFSIGNALED(status);
        libc::_exit(if killed { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) })
    }
}

fn die_with_parent() -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) }).map(ignore_result)
}

fn write(path: &CStr, text: &[u8]) -> Result<(), Errno> {
    // SAFETY: a NUL-terminated path, and a slice with its length.
    unsafe {
        let file = Errno::result(libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC))?;
        let written = Errno::result(libc::write(file, text.as_ptr().cast(), text.len()));
        libc::close(file);
        written.map(drop)
    }
}

fn c_string(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Returns the path of a program within the sandbox, or `None` if the sandbox does not contain it.
pub(crate) fn path_in_sandbox(program: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(program).ok()?;
    ["/usr", "/bin", "/sbin"].iter().any(|dir| path.starts_with(dir)).then_some(path)
}

#[cfg(test)]
mod tests;
