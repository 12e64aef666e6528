//! The dnsmasq processes that serve DHCP and DNS, one for each router that needs it.
//!
//! A process outlives the daemon, which re-attaches to it by its PID and command line. The name of its
//! configuration file contains a fingerprint of the content, so that the command line also identifies the configuration.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use muster_types::ids::NetworkId;
use muster_types::{Error, Result};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::User;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::dnsmasq_config::{DnsmasqConfig, HOSTS_FILE, LEASES_FILE, PID_FILE};
use super::namespace;
use super::nftables::fingerprint;
use crate::command::{COMMAND_TIMEOUT, Commands, Tool, wait_readable};
use crate::user_ids;

/// The time that a process gets to exit after SIGTERM, and again after SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// In-memory state of a dnsmasq process.
#[derive(Debug, Default)]
pub(crate) struct DnsmasqProcess {
    pid: Option<i32>,
    /// The inode of the namespace that the process was last seen in.
    netns: Option<u64>,
    /// Fingerprint of the leases and host names that it last loaded.
    loaded_fingerprint: Option<u64>,
    started: Option<Instant>,
    /// The number of consecutive starts after which the process exited early.
    early_exits: u32,
    backoff_until: Option<Instant>,
    failure: Option<String>,
}

/// The action that brings a process in line with its configuration.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProcessAction {
    Nothing,
    /// It must not run, or runs with another configuration.
    Stop,
    /// It runs with stale leases or host names.
    Reload,
    Start {
        /// Why it is not running, if it was running before.
        died: Option<String>,
    },
    /// It died repeatedly and is not started before the backoff has passed.
    Backoff,
}

impl DnsmasqProcess {
    /// Inspects the process. `netns` is the inode of the namespace that it must be in.
    pub(crate) fn inspect(
        &mut self,
        dir: &Path,
        config: Option<&DnsmasqConfig>,
        netns: Option<u64>,
    ) -> ProcessAction {
        if self.pid.is_none() {
            self.pid = read_pid(dir);
        }
        let running = self.pid.and_then(|pid| config_file_of(pid, dir).map(|file| (pid, file)));
        let Some(config) = config else {
            self.failure = None;
            return if running.is_some() || self.pid.is_some() {
                ProcessAction::Stop
            } else {
                ProcessAction::Nothing
            };
        };
        let Some((pid, file)) = running else { return self.action_when_not_running() };
        if file != config_file(config) {
            return ProcessAction::Stop;
        }
        if self.netns != netns {
            use std::os::unix::fs::MetadataExt;
            let inode = fs::metadata(format!("/proc/{pid}/ns/net")).map(|metadata| metadata.ino());
            if inode.is_ok_and(|inode| Some(inode) != netns) {
                return ProcessAction::Stop;
            }
            self.netns = netns;
        }
        let has_content = |name: &str, text: &str| {
            fs::metadata(dir.join(name)).is_ok_and(|metadata| metadata.len() == text.len() as u64)
        };
        let files_match = has_content(LEASES_FILE, &config.leases) && has_content(HOSTS_FILE, &config.hosts);
        if self.loaded_fingerprint == Some(reload_fingerprint(config))
            && files_match
            && has_content(&file, &config.settings)
        {
            ProcessAction::Nothing
        } else {
            ProcessAction::Reload
        }
    }

    fn action_when_not_running(&self) -> ProcessAction {
        match self.pid {
            Some(pid) => ProcessAction::Start { died: Some(format!("dnsmasq process {pid} died")) },
            None if self.is_backing_off() => ProcessAction::Backoff,
            None => ProcessAction::Start { died: None },
        }
    }

    /// Records that the process has exited unexpectedly.
    pub(crate) fn record_exit(&mut self, dir: &Path) {
        let Some(pid) = self.pid.take() else { return };
        // Only a child if this program is a subreaper; then no other process reaps it.
        let _ = waitpid(nix::unistd::Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
        let _ = fs::remove_file(dir.join(PID_FILE));
        let now = Instant::now();
        let ran_long_enough = self.started.is_none_or(|started| now - started >= MAX_BACKOFF);
        self.early_exits = if ran_long_enough { 1 } else { self.early_exits + 1 };
        self.backoff_until = self.backoff(now);
        self.failure = self.backoff_until.map(|_| format!("process {pid} died"));
    }

    /// The first restart after a long run is immediate; then the backoff is 1, 2, 4 … 60 seconds.
    fn backoff(&self, now: Instant) -> Option<Instant> {
        let doublings = self.early_exits.checked_sub(2)?;
        let delay = Duration::from_secs(1 << doublings.min(6)).min(MAX_BACKOFF);
        Some(now + delay)
    }

    pub(crate) fn is_backing_off(&self) -> bool {
        self.backoff_until.is_some_and(|until| until > Instant::now())
    }

    /// Returns why the process is not running or died, until it has been restarted.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    pub(crate) fn is_failing(&self) -> bool {
        self.failure.is_some()
    }

    /// Starts the process, which must not be running.
    pub(crate) fn start(
        &mut self,
        commands: &Commands,
        network: NetworkId,
        dir: &Path,
        config: &DnsmasqConfig,
        netns: Option<u64>,
    ) -> Result<()> {
        let file = config_file(config);
        let old = config_files(dir);
        if !old.is_empty() {
            // It ran before: if only its PID file was lost, it would still occupy the ports.
            stop_all(dir)?;
        }
        for name in old.iter().filter(|name| **name != file) {
            let _ = fs::remove_file(dir.join(name));
        }
        write_config(dir, config)?;
        let _ = fs::remove_file(dir.join(PID_FILE));
        let argument = format!("--conf-file={}", dir.join(&file).display());
        let started =
            namespace::inside(network, || commands.run(Tool::Dnsmasq, &[&argument], "", COMMAND_TIMEOUT));
        if let Err(error) = started {
            self.early_exits += 1;
            self.backoff_until = self.backoff(Instant::now());
            self.failure = Some(error.to_string());
            return Err(error);
        }
        self.failure = None;
        self.pid = read_pid(dir);
        self.netns = netns;
        self.loaded_fingerprint = Some(reload_fingerprint(config));
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Makes the process load new leases and host names.
    pub(crate) fn reload(&mut self, dir: &Path, config: &DnsmasqConfig) -> Result<()> {
        write_config(dir, config)?;
        if let Some((pid, pidfd)) = self.pid.and_then(|pid| Some((pid, pidfd_of_server(pid, dir)?))) {
            // The PID file may have been deleted together with the directory.
            write(dir, PID_FILE, &format!("{pid}\n"))?;
            let _ = pidfd_send_signal(&pidfd, Signal::HUP);
        }
        self.loaded_fingerprint = Some(reload_fingerprint(config));
        Ok(())
    }

    /// Stops the process and waits until it has exited.
    pub(crate) fn stop(&mut self, dir: &Path) -> Result<()> {
        let pid = self.pid.take().or_else(|| read_pid(dir));
        *self = Self { early_exits: self.early_exits, started: self.started, ..Self::default() };
        if let Some(pid) = pid {
            terminate(pid, dir)?;
        }
        let _ = fs::remove_file(dir.join(PID_FILE));
        Ok(())
    }
}

/// Stops every dnsmasq process that serves from this directory, including those without a PID file.
pub(crate) fn stop_all(dir: &Path) -> Result<()> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for pid in pids {
        if config_file_of(pid, dir).is_some() {
            terminate(pid, dir)?;
        }
    }
    Ok(())
}

fn terminate(pid: i32, dir: &Path) -> Result<()> {
    let Some(pidfd) = pidfd_of_server(pid, dir) else { return Ok(()) };
    for signal in [Signal::TERM, Signal::KILL] {
        let _ = pidfd_send_signal(&pidfd, signal);
        if wait_readable(&pidfd, STOP_TIMEOUT).unwrap_or(false) {
            let _ = waitpid(nix::unistd::Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            return Ok(());
        }
    }
    Err(Error::Internal(format!("dnsmasq process {pid} does not exit")))
}

/// Returns a pidfd of a process that serves from this directory. The PID cannot be reused while the pidfd is open.
fn pidfd_of_server(pid: i32, dir: &Path) -> Option<OwnedFd> {
    let pidfd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    config_file_of(pid, dir).map(|_| pidfd)
}

/// Returns the configuration file name of a process, if it is a running dnsmasq of this directory.
fn config_file_of(pid: i32, dir: &Path) -> Option<String> {
    // The command line of a zombie is empty.
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let program = words.next()?;
    let file = words.next()?.strip_prefix("--conf-file=")?.to_owned();
    let file = Path::new(&file);
    let is_ours = program.ends_with("dnsmasq") && file.parent() == Some(dir);
    is_ours.then(|| file.file_name()?.to_str().map(str::to_owned)).flatten()
}

fn read_pid(dir: &Path) -> Option<i32> {
    fs::read_to_string(dir.join(PID_FILE)).ok()?.trim().parse().ok().filter(|pid| *pid > 1)
}

fn config_file(config: &DnsmasqConfig) -> String {
    format!("dnsmasq-{:016x}.conf", fingerprint(&config.settings))
}

fn config_files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("dnsmasq-")).collect()
}

fn reload_fingerprint(config: &DnsmasqConfig) -> u64 {
    fingerprint(&format!("{}\n{}", config.leases, config.hosts))
}

fn write_config(dir: &Path, config: &DnsmasqConfig) -> Result<()> {
    write(dir, &config_file(config), &config.settings)?;
    // dnsmasq rereads them after dropping its privileges.
    let reader = dnsmasq_user().map(|user| user.uid.as_raw());
    replace(dir, LEASES_FILE, &config.leases, reader)?;
    replace(dir, HOSTS_FILE, &config.hosts, reader)
}

/// Returns the user that dnsmasq runs as, or `None` if it keeps running as ours, because no other user exists.
pub(crate) fn dnsmasq_user() -> Option<&'static User> {
    static USER: OnceLock<Option<User>> = OnceLock::new();
    let find = || ["dnsmasq", "nobody"].iter().find_map(|name| User::from_name(name).ok().flatten());
    USER.get_or_init(|| user_ids::can_switch().then(find).flatten()).as_ref()
}

/// Replaces a file, which only root can read, atomically.
pub(crate) fn write(dir: &Path, name: &str, text: &str) -> Result<()> {
    replace(dir, name, text, None)
}

/// Replaces a file atomically. Only root and the owner, if one is given, can read it.
fn replace(dir: &Path, name: &str, text: &str, owner: Option<u32>) -> Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
    let new = dir.join(format!("{name}.new"));
    let write = || {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        // It may have remained from an interrupted write.
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        file.write_all(text.as_bytes())?;
        if owner.is_some() {
            chown(&new, owner, None)?;
        }
        fs::rename(&new, dir.join(name))
    };
    write().map_err(|error| Error::Internal(format!("failed to write {}: {error}", new.display())))
}

/// Creates the network's directory, which dnsmasq accesses after dropping its privileges.
pub(crate) fn create_dir(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let create = || {
        fs::create_dir_all(dir)?;
        for dir in dir.ancestors().take(3) {
            let mode = fs::metadata(dir)?.permissions().mode();
            // Only the execute bit is added: the operator may have reasons not to let others list a parent.
            fs::set_permissions(dir, fs::Permissions::from_mode(mode | 0o011))?;
        }
        Ok(())
    };
    create().map_err(|error: std::io::Error| {
        Error::Internal(format!("failed to create {}: {error}", dir.display()))
    })
}

/// Removes the network's directory.
pub(crate) fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Internal(format!("failed to remove {}: {error}", dir.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DnsmasqConfig {
        DnsmasqConfig { settings: "port=0\n".into(), leases: String::new(), hosts: String::new() }
    }

    #[test]
    fn backs_off_when_the_process_keeps_dying() {
        let dir = tempfile::tempdir().unwrap();
        let mut server = DnsmasqProcess::default();
        let now = Instant::now();
        let mut delays = Vec::new();
        for _ in 0..10 {
            (server.pid, server.started) = (Some(i32::MAX), Some(now));
            let action = server.inspect(dir.path(), Some(&config()), Some(1));
            assert!(matches!(action, ProcessAction::Start { died: Some(_) }), "{action:?}");
            server.record_exit(dir.path());
            delays.push(server.backoff(now).map_or(0, |until| (until - now).as_secs()));
        }
        assert_eq!(delays, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(server.inspect(dir.path(), Some(&config()), Some(1)), ProcessAction::Backoff);
        assert_eq!(server.failure(), Some("process 2147483647 died"));
        // After a long run it is restarted immediately.
        (server.pid, server.started) = (Some(i32::MAX), None);
        server.record_exit(dir.path());
        assert_eq!(server.failure(), None);
        assert_eq!(server.inspect(dir.path(), Some(&config()), Some(1)), ProcessAction::Start { died: None });
    }

    #[test]
    fn does_not_mistake_another_process_for_dnsmasq() {
        let dir = tempfile::tempdir().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        fs::write(dir.path().join(PID_FILE), own.to_string()).unwrap();
        let mut server = DnsmasqProcess::default();
        assert!(matches!(
            server.inspect(dir.path(), Some(&config()), Some(1)),
            ProcessAction::Start { died: Some(_) }
        ));
        server.stop(dir.path()).unwrap();
        stop_all(dir.path()).unwrap();
    }
}
