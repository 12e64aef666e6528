//! Rootless mode: the daemon and everything that it starts run in their own user, mount, PID and network namespaces, with
//! pasta as the uplink. See docs/decisions/0093.
//!
//! ```text
//! muster up ── muster rootless ── init ─┬─ pasta          moves packets between the namespace and the host
//!              (waits; in the host's    ├─ muster serve   in the network namespace; its API socket is the host's
//!              PID namespace)           └─ orphans        VMs and DHCP servers, when the daemon has ended
//! ```
//!
//! Init is the first process of the PID namespace: when it ends, the kernel kills everything else in it.

mod init;
mod relay;

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use muster_types::host_check::{CheckState, HostCheck};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getegid, geteuid};

use crate::running::program;
use crate::serve;

/// The address at which guests and the daemon reach the name server of the host, through pasta. It is from a range that networks do
/// not use; guests cannot reach link-local addresses.
pub(crate) const RESOLVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 53);

const TUN_DEVICE: &str = "/dev/net/tun";
const PASTA: &str = "pasta";

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only check whether the namespaces can be created
    #[arg(long, exclusive = true)]
    probe: bool,
    #[arg(long, default_value = ".")]
    data_dir: PathBuf,
    /// The name of the uplink in the namespace
    #[arg(long, default_value = "eth0")]
    interface: String,
    /// Give the namespace no uplink
    #[arg(long)]
    offline: bool,
    /// The arguments of `muster serve`
    #[arg(last = true)]
    serve: Vec<std::ffi::OsString>,
}

/// Runs a daemon in its own namespaces until it ends. The process must have one thread. Standard input is the listening socket
/// of the API, because the namespace has another loopback address.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.probe {
        enter_namespaces()?;
        init::detach_mounts()?;
        return Ok(ExitCode::SUCCESS);
    }
    let listener = serve::inherited_socket()?;
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGCHLD].into_iter().collect();
    signals.thread_block()?;
    enter_namespaces()?;
    #[expect(
        unsafe_code,
        reason = "the first process of a PID namespace is a child of the one that creates it"
    )]
    // SAFETY: this process has one thread, so the child may do anything.
    let forked = unsafe { fork() };
    match forked.context("failed to create a process")? {
        ForkResult::Parent { child } => {
            drop(listener);
            loop {
                if let Some(code) = next_exit(child, &signals)? {
                    return Ok(ExitCode::from(code));
                }
            }
        }
        ForkResult::Child => {
            let code = init::run(arguments, listener, &signals).unwrap_or_else(|error| {
                muster_client::message!("error: {error:#}");
                1
            });
            std::process::exit(code.into())
        }
    }
}

/// Waits for a signal, and forwards it to a child. Returns its exit code if it has ended.
fn next_exit(child: Pid, signals: &SigSet) -> nix::Result<Option<u8>> {
    match signals.wait()? {
        Signal::SIGCHLD => waitpid(child, Some(WaitPidFlag::WNOHANG)).map(exit_code),
        signal => {
            // Fails only if it has ended.
            let _ = kill(child, signal);
            Ok(None)
        }
    }
}

/// Returns the exit code of a process, if it has ended. A signal counts as 128 plus its number.
fn exit_code(status: WaitStatus) -> Option<u8> {
    match status {
        WaitStatus::Exited(_, code) => Some(u8::try_from(code).unwrap_or(1)),
        WaitStatus::Signaled(_, signal, _) => Some(u8::try_from(128 + signal as i32).unwrap_or(1)),
        _ => None,
    }
}

/// Moves this process into new user and mount namespaces, in which the current user is root, and its children into a new
/// PID namespace.
fn enter_namespaces() -> anyhow::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    let namespaces = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID;
    unshare(namespaces).context("failed to create a user namespace")?;
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("0 {uid} 1")),
        ("gid_map", format!("0 {gid} 1")),
    ] {
        let path = Path::new("/proc/self").join(file);
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

/// Fails with the reasons if this host does not permit rootless mode.
pub(crate) async fn require() -> anyhow::Result<()> {
    let failed: Vec<HostCheck> =
        checks().await?.into_iter().filter(|check| check.state == CheckState::Failed).collect();
    if failed.is_empty() {
        return Ok(());
    }
    bail!(
        "this host does not permit a cluster without root:{}\nrun `sudo muster up`, or `muster up --simulate 3`, which needs \
         no privileges",
        failed.iter().map(line).collect::<String>()
    )
}

/// Fails with the reasons if this host does not permit guests in a namespace without an uplink.
pub(crate) async fn require_isolated() -> anyhow::Result<()> {
    let failed: Vec<HostCheck> = checks().await?.into_iter().filter(is_failed_without_uplink).collect();
    if failed.is_empty() {
        return Ok(());
    }
    let lines: String = failed.iter().map(line).collect();
    bail!("a drill is impossible here, because this host does not permit an isolated cluster:{lines}")
}

fn is_failed_without_uplink(check: &HostCheck) -> bool {
    check.state == CheckState::Failed && check.name != PASTA
}

/// Returns the line of a check that failed.
fn line(check: &HostCheck) -> String {
    let fix = check.fix.as_ref().map(|fix| format!(" (fix, as root: {fix})")).unwrap_or_default();
    format!("\n  {}: {}{fix}", check.name, check.detail)
}

/// Checks whether this host permits rootless mode.
pub(crate) async fn checks() -> anyhow::Result<Vec<HostCheck>> {
    let probe = tokio::process::Command::new(program()?).args(["rootless", "--probe"]).output().await?;
    let reason = (!probe.status.success()).then(|| {
        let text = String::from_utf8_lossy(&probe.stderr);
        text.trim().trim_start_matches("error: ").to_owned()
    });
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has_pasta = std::env::split_paths(&path).any(|dir| dir.join(PASTA).is_file());
    let tun = fs::OpenOptions::new().read(true).write(true).open(TUN_DEVICE).map(drop);
    Ok(checks_of(reason, &|name| sysctl(name), has_pasta, tun))
}

/// Returns a kernel setting, if the kernel has it.
fn sysctl(name: &str) -> Option<i64> {
    let path = Path::new("/proc/sys").join(name.replace('.', "/"));
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Checks facts about the host: why a user namespace cannot be created, the kernel settings, and devices and programs.
fn checks_of(
    reason: Option<String>,
    sysctl: &dyn Fn(&str) -> Option<i64>,
    has_pasta: bool,
    tun: io::Result<()>,
) -> Vec<HostCheck> {
    const AFFECTS: &str = "clusters without root";
    // Each setting with the value that forbids user namespaces and the one that permits them.
    const SETTINGS: [(&str, i64, i64); 3] = [
        ("user.max_user_namespaces", 0, 10_000),
        ("kernel.unprivileged_userns_clone", 0, 1),
        ("kernel.apparmor_restrict_unprivileged_userns", 1, 0),
    ];
    let namespaces = match reason {
        None => HostCheck::passed("user-namespaces", AFFECTS, "users may create user namespaces"),
        Some(reason) => {
            let mut settings =
                SETTINGS.iter().filter(|(name, forbidden, _)| sysctl(name) == Some(*forbidden));
            match settings.next() {
                Some((name, forbidden, permitted)) => {
                    let detail = format!("the kernel setting {name} is {forbidden}: {reason}");
                    HostCheck::failed("user-namespaces", AFFECTS, detail)
                        .with_fix(format!("sysctl -w {name}={permitted}"))
                }
                None => HostCheck::failed(
                    "user-namespaces",
                    AFFECTS,
                    format!("{reason}; a container runtime or a security module forbids it"),
                ),
            }
        }
    };
    let pasta = if has_pasta {
        HostCheck::passed("pasta", AFFECTS, "pasta is installed")
    } else {
        HostCheck::failed("pasta", AFFECTS, "the program pasta (Debian package passt) is not installed")
            .with_fix("apt-get install passt")
    };
    let tun = match tun {
        Ok(()) => HostCheck::passed("tun-for-users", AFFECTS, format!("{TUN_DEVICE} can be opened")),
        Err(error) => {
            let fix = match error.kind() {
                io::ErrorKind::NotFound => "modprobe tun".to_owned(),
                _ => format!("chmod 666 {TUN_DEVICE}"),
            };
            HostCheck::failed("tun-for-users", AFFECTS, format!("failed to open {TUN_DEVICE}: {error}"))
                .with_fix(fix)
        }
    };
    vec![namespaces, pasta, tun]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_setting_or_device_that_forbids_it() {
        let none = |_: &str| None;
        let all = checks_of(None, &none, true, Ok(()));
        assert!(all.iter().all(|check| check.state == CheckState::Passed), "{all:?}");

        let restricted = |name: &str| (name == "kernel.apparmor_restrict_unprivileged_userns").then_some(1);
        let found = checks_of(Some("EACCES".into()), &restricted, true, Ok(())).remove(0);
        assert_eq!(found.fix.as_deref(), Some("sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"));
        assert!(found.detail.contains("unprivileged_userns is 1: EACCES"), "{found:?}");
        let disabled = |name: &str| Some(i64::from(name == "kernel.unprivileged_userns_clone"));
        let found = checks_of(Some("ENOSPC".into()), &disabled, true, Ok(())).remove(0);
        assert_eq!(found.fix.as_deref(), Some("sysctl -w user.max_user_namespaces=10000"));
        let found = checks_of(Some("EPERM".into()), &none, true, Ok(())).remove(0);
        assert!(found.fix.is_none() && found.detail.contains("container runtime"), "{found:?}");

        let denied = Err(io::ErrorKind::PermissionDenied.into());
        let found = checks_of(None, &none, false, denied);
        assert_eq!(found[1].fix.as_deref(), Some("apt-get install passt"));
        assert_eq!(found[2].fix.as_deref(), Some("chmod 666 /dev/net/tun"));
        let missing = Err(io::ErrorKind::NotFound.into());
        assert_eq!(checks_of(None, &none, true, missing)[2].fix.as_deref(), Some("modprobe tun"));
    }

    #[test]
    fn exit_code_of_a_signal_is_that_of_a_shell() {
        let pid = Pid::from_raw(7);
        assert_eq!(exit_code(WaitStatus::Exited(pid, 3)), Some(3));
        assert_eq!(exit_code(WaitStatus::Signaled(pid, Signal::SIGKILL, false)), Some(137));
        assert_eq!(exit_code(WaitStatus::StillAlive), None);
    }
}
