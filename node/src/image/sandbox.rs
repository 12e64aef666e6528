//! Runs one program on the bytes of a stranger, so that it reaches nothing but those and one folder.
//!
//! ```text
//! this thread ──▶ warden: new network, mounts, processes ──▶ program: another user, another root, limits
//! ```
//!
//! The warden only waits: it is the parent that the program dies with, and it dies with us. The program sees `/usr`,
//! `/dev/null`, its input as `/in`, what that lies on as `/base` and its output folder as `/out`. As root it becomes `IMAGE_USER`; otherwise a user
//! namespace is tried, in which it stays who we are without any right.

#![allow(unsafe_code, reason = "between fork and exec there are only system calls")]

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

use crate::command::wait_readable;

/// How often a running program is looked after.
const LOOK: Duration = Duration::from_millis(250);

/// Memory of a program: what unpacking may take, and as much again for threads that reserve it and never use it.
const MEMORY: u64 = 2 << 30;

/// Between fork and exec, where the old root is.
const OLD_ROOT: &CStr = c"/old";

/// A way to run programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Identity {
    /// We are root and become this user.
    Other(Uid, Gid),
    /// We are not, and stay who we are.
    Same(Uid, Gid),
}

/// Where programs of this machine run on the bytes of strangers.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    identity: Identity,
}

/// What shall run.
pub(crate) struct Order<'a> {
    pub(crate) program: &'a Path,
    pub(crate) arguments: &'a [&'a str],
    /// What it sees as `/in`.
    pub(crate) input: Option<&'a Path>,
    /// What it sees as `/base`.
    pub(crate) base: Option<&'a Path>,
    /// What it sees as `/out`.
    pub(crate) output: Option<&'a Path>,
    pub(crate) stdin: Option<File>,
    pub(crate) stdout: File,
    pub(crate) stderr: File,
    /// The most that it may write to one file.
    pub(crate) file_size: u64,
    /// How long it may take, of processors and of time.
    pub(crate) limit: Duration,
    /// Whether it shall go on; asked again and again.
    pub(crate) go_on: &'a dyn Fn() -> bool,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// By itself. A signal counts as 128 and its number.
    Code(i32),
    TooLate,
    /// It was not to go on.
    Stopped,
}

impl Sandbox {
    /// Finds a way that works here, or says why there is none.
    pub(crate) fn find(user: &str) -> Result<Self, String> {
        let (uid, gid) = (Uid::effective(), Gid::effective());
        let root = || -> Result<Self, String> {
            let found = User::from_name(user).ok().flatten();
            let found = found.ok_or_else(|| format!("the user {user} (IMAGE_USER) does not exist"))?;
            if found.uid.is_root() || found.gid.as_raw() == 0 {
                return Err(format!("the user {user} (IMAGE_USER) must have no rights"));
            }
            Self { identity: Identity::Other(found.uid, found.gid) }.tried()
        };
        let own = || Self { identity: Identity::Same(uid, gid) }.tried();
        if uid.is_root() { root() } else { own() }
    }

    fn tried(self) -> Result<Self, String> {
        let null = || File::options().read(true).write(true).open("/dev/null");
        let tried = null().and_then(|stdout| {
            self.run(Order {
                program: Path::new("/usr/bin/true"),
                arguments: &[],
                input: None,
                base: None,
                output: None,
                stdin: None,
                stdout,
                stderr: null()?,
                file_size: 0,
                limit: Duration::from_secs(20),
                go_on: &|| true,
            })
        });
        let rights = match self.identity {
            Identity::Other(..) => "namespaces, which root has with CAP_SYS_ADMIN",
            Identity::Same(..) => "root, or user namespaces for everybody",
        };
        match tried {
            Ok(End::Code(0)) => Ok(self),
            Ok(end) => Err(format!("a program cannot be locked in ({end:?})")),
            Err(error) => Err(format!("locking a program in needs {rights}: {error}")),
        }
    }

    /// The user that owns what a program writes to `/out`.
    pub(crate) fn owner(&self) -> (u32, u32) {
        let (Identity::Other(uid, gid) | Identity::Same(uid, gid)) = self.identity;
        (uid.as_raw(), gid.as_raw())
    }

    /// Runs a program. This thread waits for it: the program dies with the thread.
    pub(crate) fn run(&self, order: Order<'_>) -> io::Result<End> {
        let plan = Plan::new(self.identity, &order)?;
        let mut command = Command::new(order.program);
        command
            .args(order.arguments)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", "/usr/bin")
            // Each thread would reserve memory of its own otherwise, which counts.
            .env("MALLOC_ARENA_MAX", "2")
            .stdin(order.stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(order.stdout)
            .stderr(order.stderr);
        // SAFETY: `lock_in` makes system calls only; everything it needs was allocated before the fork.
        unsafe { command.pre_exec(move || plan.lock_in().map_err(io::Error::from)) };
        let mut child = command.spawn()?;
        let end = wait(&mut child, order.limit, order.go_on);
        if !matches!(end, Ok(End::Code(_))) {
            child.kill()?;
            child.wait()?;
        }
        end
    }
}

fn wait(child: &mut Child, limit: Duration, go_on: &dyn Fn() -> bool) -> io::Result<End> {
    let deadline = Instant::now() + limit;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let process = pidfd_open(pid.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    loop {
        if wait_readable(&process, LOOK)? {
            return Ok(End::Code(child.wait()?.code().unwrap_or(128)));
        }
        if Instant::now() >= deadline {
            return Ok(End::TooLate);
        }
        if !go_on() {
            return Ok(End::Stopped);
        }
    }
}

/// One thing that the new root is made of.
#[derive(Debug)]
enum Part {
    Folder(CString),
    Link { to: CString, at: CString },
    Bind { from: CString, at: CString, folder: bool, how: MsFlags, flags: MsFlags },
}

/// Everything that is needed between fork and exec.
#[derive(Debug)]
struct Plan {
    identity: Identity,
    parts: Vec<Part>,
    /// An existing folder over which the new root is mounted.
    mountpoint: CString,
    limits: Vec<(Resource, u64)>,
    /// For the user namespace.
    maps: [(&'static CStr, Vec<u8>); 3],
    parent: libc::pid_t,
}

impl Plan {
    fn new(identity: Identity, order: &Order<'_>) -> io::Result<Self> {
        let mut parts = Vec::new();
        let closed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let data = closed | MsFlags::MS_NOEXEC;
        // In a user namespace nobody may look at what is beneath another mount.
        let shallow = matches!(identity, Identity::Other(..));
        // Programs and libraries, as they are on this machine: links where folders were merged.
        for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
            let path = Path::new("/").join(name);
            match fs::symlink_metadata(&path) {
                Ok(found) if found.is_symlink() => {
                    parts.push(Part::Link { to: text(&fs::read_link(&path)?)?, at: text(&path)? });
                }
                Ok(found) if found.is_dir() => {
                    let part = Part::bind(&path, &path, true, closed | MsFlags::MS_RDONLY)?;
                    parts.push(if shallow { part } else { part.with_what_is_below() });
                }
                _ => {}
            }
        }
        let null = Path::new("/dev/null");
        parts.push(Part::Folder(text(Path::new("/dev"))?));
        parts.push(Part::bind(null, null, false, MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC)?);
        for (input, at) in [(order.input, "/in"), (order.base, "/base")] {
            if let Some(input) = input {
                parts.push(Part::bind(input, Path::new(at), false, data | MsFlags::MS_RDONLY)?);
            }
        }
        if let Some(output) = order.output {
            parts.push(Part::bind(output, Path::new("/out"), true, data)?);
        }
        let (Identity::Other(uid, gid) | Identity::Same(uid, gid)) = identity;
        Ok(Self {
            identity,
            parts,
            mountpoint: text(&fs::canonicalize("/tmp")?)?,
            limits: vec![
                (Resource::RLIMIT_AS, MEMORY),
                (Resource::RLIMIT_CPU, order.limit.as_secs().max(1)),
                (Resource::RLIMIT_FSIZE, order.file_size),
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

    /// What happens between fork and exec. Nothing here may allocate: other threads may hold the allocator's locks.
    fn lock_in(&self) -> Result<(), Errno> {
        die_with_parent()?;
        // SAFETY: always succeeds.
        if unsafe { libc::getppid() } != self.parent {
            return Err(Errno::ESRCH);
        }
        // Whatever ours is: the program is not the owner of the folders made here.
        // SAFETY: always succeeds.
        unsafe { libc::umask(0o022) };
        let own = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWPID;
        match self.identity {
            Identity::Other(..) => unshare(own)?,
            Identity::Same(..) => {
                unshare(own | CloneFlags::CLONE_NEWUSER)?;
                self.maps.iter().try_for_each(|(path, text)| write(path, text))?;
            }
        }
        leave_warden()?;
        self.mount()?;
        for (resource, limit) in &self.limits {
            let limit = getrlimit(*resource)?.1.min(*limit);
            setrlimit(*resource, limit, limit)?;
        }
        self.drop_rights()?;
        // After the rights are dropped, which would undo it.
        die_with_parent()
    }

    fn mount(&self) -> Result<(), Errno> {
        let nothing: Option<&CStr> = None;
        mount(nothing, c"/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing)?;
        let closed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let tmpfs = Some(c"tmpfs");
        mount(tmpfs, self.mountpoint.as_c_str(), tmpfs, closed, Some(c"size=1m,mode=755"))?;
        nix::unistd::chdir(self.mountpoint.as_c_str())?;
        nix::unistd::mkdir(c"old", Mode::S_IRWXU)?;
        nix::unistd::pivot_root(c".", c"old")?;
        nix::unistd::chdir(c"/")?;
        self.parts.iter().try_for_each(Part::make)?;
        umount2(OLD_ROOT, MntFlags::MNT_DETACH)?;
        // SAFETY: a path that ends with a zero.
        Errno::result(unsafe { libc::rmdir(OLD_ROOT.as_ptr()) })?;
        mount(nothing, c"/", nothing, MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | closed, nothing)
    }

    fn drop_rights(&self) -> Result<(), Errno> {
        // The kernel knows up to 64; the first that it does not know ends it.
        // SAFETY: only numbers are passed.
        let drop = |right: libc::c_ulong| unsafe { libc::prctl(libc::PR_CAPBSET_DROP, right, 0, 0, 0) };
        for right in 0..64 {
            if drop(right) != 0 {
                match (Errno::last(), self.identity) {
                    // Who is not root and gains nothing has no use for what is left.
                    (Errno::EINVAL, _) | (Errno::EPERM, Identity::Other(..)) => break,
                    (error, _) => return Err(error),
                }
            }
        }
        if let Identity::Other(uid, gid) = self.identity {
            // The plain system calls: those of the library speak with other threads.
            let (uid, gid) = (uid.as_raw(), gid.as_raw());
            // SAFETY: no list, and only numbers.
            Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, 0, 0) })?;
            // SAFETY: only numbers are passed.
            Errno::result(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
            // SAFETY: only numbers are passed.
            Errno::result(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })?;
        }
        // SAFETY: only numbers are passed.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(drop_result)
    }
}

fn drop_result(_: libc::c_int) {}

impl Part {
    fn bind(from: &Path, at: &Path, folder: bool, flags: MsFlags) -> io::Result<Self> {
        // A link would lead elsewhere once the root is another.
        let from = fs::canonicalize(from)?;
        let below = |path: &Path| path.strip_prefix("/").map_or_else(|_| path.to_owned(), Path::to_owned);
        let from = text(&Path::new("/old").join(below(&from)))?;
        Ok(Self::Bind { from, at: text(at)?, folder, how: MsFlags::MS_BIND, flags })
    }

    fn with_what_is_below(mut self) -> Self {
        if let Self::Bind { how, .. } = &mut self {
            how.insert(MsFlags::MS_REC);
        }
        self
    }

    fn make(&self) -> Result<(), Errno> {
        let nothing: Option<&CStr> = None;
        let make = |at: &CString| nix::unistd::mkdir(at.as_c_str(), Mode::from_bits_truncate(0o755));
        match self {
            Self::Folder(at) => make(at),
            Self::Link { to, at } => {
                // SAFETY: two paths that end with a zero.
                Errno::result(unsafe { libc::symlink(to.as_ptr(), at.as_ptr()) }).map(drop_result)
            }
            Self::Bind { from, at, folder, how, flags } => {
                if *folder {
                    make(at)?;
                } else {
                    // SAFETY: a path that ends with a zero, and numbers.
                    Errno::result(unsafe { libc::mknod(at.as_ptr(), libc::S_IFREG | 0o644, 0) })?;
                }
                mount(Some(from.as_c_str()), at.as_c_str(), nothing, *how, nothing)?;
                mount(
                    nothing,
                    at.as_c_str(),
                    nothing,
                    MsFlags::MS_REMOUNT | MsFlags::MS_BIND | *flags,
                    nothing,
                )
            }
        }
    }
}

/// Leaves the warden behind: goes on as its child, the first process of the new namespace. The warden ends as that
/// does.
fn leave_warden() -> Result<(), Errno> {
    // SAFETY: a fork without the library's preparations; this process has one thread and only makes system calls.
    let child = Errno::result(unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) })?;
    if child == 0 {
        return Ok(());
    }
    // SAFETY: the files are not used any more; who started us waits until they are closed. Nothing of this process
    // runs after the end.
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
    // SAFETY: only numbers are passed.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) }).map(drop_result)
}

fn write(path: &CStr, text: &[u8]) -> Result<(), Errno> {
    // SAFETY: a path that ends with a zero, and a slice with its length.
    unsafe {
        let file = Errno::result(libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC))?;
        let written = Errno::result(libc::write(file, text.as_ptr().cast(), text.len()));
        libc::close(file);
        written.map(drop)
    }
}

fn text(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Where a program is within the sandbox, if it is there at all.
pub(crate) fn inside(program: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(program).ok()?;
    ["/usr", "/bin", "/sbin"].iter().any(|folder| path.starts_with(folder)).then_some(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    /// A sandbox with an input and an output folder.
    struct Yard {
        sandbox: Sandbox,
        folder: tempfile::TempDir,
    }

    impl Yard {
        fn new() -> Option<Self> {
            let sandbox = match Sandbox::find("nobody") {
                Ok(sandbox) => sandbox,
                Err(why) => {
                    muster_testing::skipped(&why);
                    return None;
                }
            };
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            fs::write(path("input"), "the input").unwrap();
            fs::set_permissions(path("input"), fs::Permissions::from_mode(0o444)).unwrap();
            fs::write(path("secret"), "the secret").unwrap();
            fs::create_dir(path("out")).unwrap();
            let (uid, gid) = sandbox.owner();
            std::os::unix::fs::chown(path("out"), Some(uid), Some(gid)).unwrap();
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
            Some(Self { sandbox, folder })
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn run(&self, script: &str, limit: Duration, go_on: &dyn Fn() -> bool) -> (End, String) {
            let end = self.sandbox.run(Order {
                program: Path::new("/usr/bin/sh"),
                arguments: &["-c", script],
                input: Some(&self.path("input")),
                base: None,
                output: Some(&self.path("out")),
                stdin: None,
                stdout: File::create(self.path("stdout")).unwrap(),
                stderr: File::create(self.path("stderr")).unwrap(),
                file_size: 1 << 20,
                limit,
                go_on,
            });
            let said = ["stdout", "stderr"].map(|name| fs::read_to_string(self.path(name)).unwrap()).concat();
            (end.unwrap(), said)
        }

        fn says(&self, script: &str) -> String {
            let (end, said) = self.run(script, Duration::from_secs(20), &|| true);
            assert_eq!(end, End::Code(0), "{script}: {said}");
            said.trim().to_owned()
        }

        fn refuses(&self, script: &str) {
            let (end, said) = self.run(script, Duration::from_secs(20), &|| true);
            assert!(matches!(end, End::Code(1..)), "{script}: {end:?} {said}");
        }
    }

    #[test]
    fn a_program_sees_its_input_and_its_output_and_nothing_else() {
        let Some(yard) = Yard::new() else { return };
        assert_eq!(yard.says("cat /in"), "the input");
        assert_eq!(
            yard.says("ls -A /").replace("libx32\n", "").replace("lib32\n", ""),
            "bin\ndev\nin\nlib\nlib64\nout\nsbin\nusr"
        );
        yard.refuses(&format!("cat {}", yard.path("secret").display()));
        for script in ["echo x > /in", "echo x > /x", "touch /usr/x", "rm /in", "mkdir /out/../x", "ls /old"]
        {
            yard.refuses(script);
        }
        for host in ["/etc/passwd", "/proc/self/status", "/sys/kernel", "/dev/vda", "/root", "/tmp", "/run"] {
            yard.refuses(&format!("ls {host}"));
        }
        yard.says("echo made > /out/made");
        let made = fs::metadata(yard.path("out/made")).unwrap();
        assert_eq!((made.uid(), made.gid()), yard.sandbox.owner());
        assert_eq!(fs::read_to_string(yard.path("input")).unwrap(), "the input");
    }

    #[test]
    fn a_program_has_no_rights_no_network_and_no_neighbours() {
        let Some(yard) = Yard::new() else { return };
        let (uid, gid) = yard.sandbox.owner();
        assert_eq!(yard.says("id -u; id -g"), format!("{uid}\n{gid}"));
        assert_eq!(yard.says("echo $$"), "1");
        // Perl is on every Debian system, and speaks to the kernel.
        let connect = "use Socket; socket(S, PF_INET, SOCK_STREAM, 0) or exit 0; \
                       exit(connect(S, sockaddr_in(22, inet_aton('127.0.0.1'))) ? 1 : 0)";
        yard.says(&format!("perl -e \"{connect}\""));
        for script in ["mount -t tmpfs x /out", "chown 0 /out", "unshare -m true && mount -t tmpfs x /out"] {
            yard.refuses(script);
        }
        // A program that would give rights gives none.
        assert_eq!(
            yard.says("test ! -u /usr/bin/su || su -c id </dev/null 2>&1 | grep -c uid=0 || true").trim(),
            "0"
        );
        assert_eq!(yard.says("ulimit -c; ulimit -n; ulimit -v"), format!("0\n64\n{}", MEMORY / 1024));
    }

    #[test]
    fn a_program_that_takes_too_much_is_stopped() {
        let Some(yard) = Yard::new() else { return };
        let long = Duration::from_secs(20);
        let (end, _) = yard.run("exec cat /usr/bin/* > /out/large", long, &|| true);
        // The first process of a namespace is not killed by the signal, and gets an error.
        assert_eq!(end, End::Code(1));
        assert_eq!(fs::metadata(yard.path("out/large")).unwrap().len(), 1 << 20);
        let (end, _) = yard.run("exec sleep 600", Duration::from_millis(300), &|| true);
        assert_eq!(end, End::TooLate);
        let (end, _) = yard.run("sleep 600 & exec sleep 600", long, &|| false);
        assert_eq!(end, End::Stopped);
        let (end, _) = yard.run("while :; do :; done", Duration::from_secs(1), &|| true);
        assert!(matches!(end, End::TooLate | End::Code(137 | 152)), "{end:?}");
        let (end, said) = yard.run("perl -e '$x = \"x\" x (3 << 30)'", long, &|| true);
        assert!(matches!(end, End::Code(1..)), "{end:?} {said}");
    }

    #[test]
    fn a_user_without_a_name_or_with_rights_is_refused() {
        if !Uid::effective().is_root() {
            return muster_testing::skipped("root");
        }
        assert!(Sandbox::find("nobody-at-all").unwrap_err().contains("does not exist"));
        assert!(Sandbox::find("root").unwrap_err().contains("no rights"));
    }

    #[test]
    fn only_programs_of_the_system_are_inside() {
        assert_eq!(inside(Path::new("/bin/sh")).unwrap().parent(), Some(Path::new("/usr/bin")));
        assert_eq!(inside(Path::new("/etc/passwd")), None);
    }
}
