//! The first process of the PID namespace: prepares the other namespaces, starts pasta and the daemon, and reaps orphans.

use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::{Arguments, PASTA, RESOLVER, exit_code, relay};
use crate::running::{ClusterDir, program};

/// Our files in the private `/run`.
const RUN_DIR: &str = "/run/muster-rootless";
/// The network namespace of the daemon, as a file for pasta.
const NETNS_FILE: &str = "/run/muster-rootless/netns";
const RESOLVER_FILE: &str = "/run/muster-rootless/resolv.conf";
const PASTA_LOG: &str = "/run/muster-rootless/pasta.log";

/// The MTU of the uplink: that of Ethernet for guests, and the overhead of VXLAN. pasta terminates connections, so it need
/// not be that of the host.
const UPLINK_MTU: &str = "1550";

const UPLINK_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// pasta is not restarted if it ends earlier than this.
const MIN_PASTA_AGE: Duration = Duration::from_secs(5);

/// Runs the daemon and returns its exit code.
pub(super) fn run(arguments: &Arguments, listener: TcpListener, signals: &SigSet) -> anyhow::Result<u8> {
    // Nothing outlives `muster rootless`, even if that is killed.
    set_pdeathsig(Signal::SIGKILL)?;
    detach_mounts()?;
    mount_proc()?;
    replace_run()?;
    let socket = ClusterDir::new(&arguments.data_dir).forward_socket();
    let (created, namespace) = mpsc::channel();
    let (started, daemon) = mpsc::channel();
    let is_online = !arguments.offline && has_uplink();
    let thread = NetworkNamespaceThread {
        serve: arguments.serve.clone(),
        listener,
        socket: socket.clone(),
        is_online,
        signals: *signals,
    };
    std::thread::Builder::new().name("namespace".into()).spawn(move || {
        // The receiver has ended if this fails.
        let _ = started.send(thread.run(&created));
    })?;
    // An error is reported by the other channel.
    let _ = namespace.recv();
    let mut pasta = match is_online {
        true => Some(Pasta::start(&arguments.interface, *signals)?),
        false if arguments.offline => None,
        false => {
            muster_client::message!("this host has no route to other hosts: guests reach only each other");
            None
        }
    };
    let daemon = wait_for_daemon(&daemon, pasta.as_mut())?;
    let code = loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                if let Some(code) = reap(daemon, &mut pasta, &arguments.interface, *signals) {
                    break code;
                }
            }
            signal => {
                // Fails only if the daemon has ended.
                let _ = kill(daemon, signal);
            }
        }
    };
    let _ = fs::remove_file(socket);
    Ok(code)
}

/// Waits until the daemon has started, or pasta has failed.
fn wait_for_daemon(
    daemon: &Receiver<anyhow::Result<Pid>>,
    mut pasta: Option<&mut Pasta>,
) -> anyhow::Result<Pid> {
    loop {
        match daemon.recv_timeout(POLL_INTERVAL) {
            Ok(started) => return started,
            Err(RecvTimeoutError::Disconnected) => bail!("the daemon was not started"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(pasta) = &mut pasta
            && let Some(status) = pasta.child.try_wait()?
        {
            bail!("pasta ended with {status}: {}", pasta_error());
        }
    }
}

/// Reaps all children that have ended: the daemon, pasta and orphans. Returns the exit code of the daemon if it has ended.
fn reap(daemon: Pid, pasta: &mut Option<Pasta>, interface: &str, signals: SigSet) -> Option<u8> {
    // Fails when no child is left.
    while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
        let pid = status.pid()?;
        let Some(code) = exit_code(status) else { continue };
        if pid == daemon {
            return Some(code);
        }
        if let Some(ended) = pasta.take_if(|pasta| i32::try_from(pasta.child.id()) == Ok(pid.as_raw())) {
            let can_restart = ended.started.elapsed() >= MIN_PASTA_AGE;
            muster_client::message!("pasta ended with exit code {code}: {}", pasta_error());
            *pasta = can_restart.then(|| Pasta::start(interface, signals)).and_then(|restarted| {
                restarted
                    .inspect_err(|error| muster_client::message!("failed to restart pasta: {error:#}"))
                    .ok()
            });
        }
    }
    None
}

/// Lets a child receive signals that this process has blocked to wait for them.
fn unblocked(mut command: Command, signals: SigSet) -> Command {
    #[expect(unsafe_code, reason = "children inherit the signal mask")]
    // SAFETY: the closure makes one system call, and allocates nothing.
    unsafe {
        command.pre_exec(move || Ok(signals.thread_unblock()?));
    }
    command
}

/// The process that connects the network namespace to the host.
#[derive(Debug)]
struct Pasta {
    child: Child,
    started: Instant,
}

impl Pasta {
    /// Starts it in the network namespace of the host. It forwards no ports by itself, and does not make the loopback address
    /// of the host reachable.
    fn start(interface: &str, signals: SigSet) -> anyhow::Result<Self> {
        let ports = ["-t", "none", "-u", "none", "-T", "none", "-U", "none", "--no-map-gw"];
        let mut command = Command::new(PASTA);
        command
            .args(["--foreground", "--quiet", "--stderr", "--ipv4-only", "--config-net"])
            .args(["--mtu", UPLINK_MTU, "--ns-ifname", interface, "--dns-forward", &RESOLVER.to_string()])
            .args(ports)
            .args(["--no-netns-quit", "--netns", NETNS_FILE])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(PASTA_LOG)?);
        let child = unblocked(command, signals).spawn().context("failed to start pasta")?;
        Ok(Self { child, started: Instant::now() })
    }
}

/// Returns the last line that pasta wrote, except about the system log, which it cannot reach.
fn pasta_error() -> String {
    let text = fs::read_to_string(PASTA_LOG).unwrap_or_default();
    let line = text.lines().rev().find(|line| !line.trim().is_empty() && !line.contains("syslog"));
    line.unwrap_or("no message").to_owned()
}

/// What the thread inside the network namespace needs. Processes and threads that it creates are inside as well.
struct NetworkNamespaceThread {
    serve: Vec<std::ffi::OsString>,
    listener: TcpListener,
    socket: PathBuf,
    is_online: bool,
    signals: SigSet,
}

impl NetworkNamespaceThread {
    /// Creates the namespace, waits until pasta has configured it, and starts the daemon.
    fn run(self, created: &Sender<()>) -> anyhow::Result<Pid> {
        let none: Option<&str> = None;
        unshare(CloneFlags::CLONE_NEWNET).context("failed to create a network namespace")?;
        File::create(NETNS_FILE)?;
        mount(Some("/proc/thread-self/ns/net"), NETNS_FILE, none, MsFlags::MS_BIND, none)?;
        // pasta must see the name servers of the host.
        unshare(CloneFlags::CLONE_NEWNS)?;
        replace_resolver()?;
        let status = Command::new("ip").args(["link", "set", "lo", "up"]).status();
        if !status.context("ip (Debian package iproute2)")?.success() {
            bail!("failed to set up the loopback device");
        }
        let _ = created.send(());
        self.wait_for_uplink()?;
        let _ = fs::remove_file(&self.socket);
        relay::start(&self.socket).with_context(|| self.socket.display().to_string())?;
        let mut command = Command::new(program()?);
        command
            .args(["serve", "--listen-stdin"])
            .args(&self.serve)
            .stdin(Stdio::from(OwnedFd::from(self.listener)));
        let daemon = unblocked(command, self.signals).spawn().context("failed to start the daemon")?;
        Ok(Pid::from_raw(i32::try_from(daemon.id())?))
    }

    fn wait_for_uplink(&self) -> anyhow::Result<()> {
        // Never sent to: receiving is the way to wait.
        let (_sender, timer) = mpsc::channel::<()>();
        let started = Instant::now();
        while self.is_online && !has_uplink() {
            if started.elapsed() > UPLINK_TIMEOUT {
                return Err(anyhow!("pasta did not configure the network"));
            }
            let _ = timer.recv_timeout(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Returns whether there is a route to other hosts in the network namespace of this thread.
fn has_uplink() -> bool {
    // Connecting a datagram socket sends nothing; it only looks up a route.
    let routed = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    matches!(routed, Ok(SocketAddr::V4(address)) if !address.ip().is_loopback())
}

/// Keeps the changes of mounts in this namespace.
pub(super) fn detach_mounts() -> anyhow::Result<()> {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("failed to detach the mounts of the host")
}

fn mount_proc() -> anyhow::Result<()> {
    let (kind, none): (Option<&str>, Option<&str>) = (Some("proc"), None);
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(kind, "/proc", kind, flags, none)
        .context("failed to mount /proc, which container runtimes forbid unless /proc is unmasked")
}

/// Replaces `/run` by a directory to which the daemon may write, with everything that the host has there.
fn replace_run() -> anyhow::Result<()> {
    let none: Option<&str> = None;
    let host = File::open("/run")?;
    let host_dir = PathBuf::from(format!("/proc/self/fd/{}", host.as_raw_fd()));
    let tmpfs = Some("tmpfs");
    let options = Some("mode=755");
    mount(tmpfs, "/run", tmpfs, MsFlags::MS_NOSUID | MsFlags::MS_NODEV, options)
        .context("failed to mount /run")?;
    for entry in fs::read_dir(&host_dir)?.flatten() {
        let name = entry.file_name();
        // What the daemon of the host has there is not ours.
        if ["muster", "netns"].iter().any(|ours| name == **ours) {
            continue;
        }
        let (source, path) = (host_dir.join(&name), Path::new("/run").join(&name));
        let Ok(kind) = entry.file_type() else { continue };
        let created = if kind.is_symlink() {
            fs::read_link(&source)
                .and_then(|target| std::os::unix::fs::symlink(target, &path))
                .map(|()| false)
        } else if kind.is_dir() {
            fs::create_dir(&path).map(|()| true)
        } else {
            File::create(&path).map(|_| true)
        };
        // A directory that cannot be mounted again stays empty.
        if created.is_ok_and(|is_mounted| is_mounted) {
            let source = CString::new(source.into_os_string().into_encoded_bytes())?;
            let _ = mount(Some(source.as_c_str()), &path, none, MsFlags::MS_BIND | MsFlags::MS_REC, none);
        }
    }
    DirBuilder::new().mode(0o700).create(RUN_DIR)?;
    Ok(())
}

/// Lets processes in this mount namespace resolve names through pasta.
fn replace_resolver() -> anyhow::Result<()> {
    let none: Option<&str> = None;
    let Ok(path) = Path::new("/etc/resolv.conf").canonicalize() else { return Ok(()) };
    fs::write(RESOLVER_FILE, format!("nameserver {RESOLVER}\n"))?;
    mount(Some(RESOLVER_FILE), &path, none, MsFlags::MS_BIND, none)
        .with_context(|| format!("failed to replace {}", path.display()))
}
