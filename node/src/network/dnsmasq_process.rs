//! The dnsmasq processes that serve DHCP and DNS, one for each router that needs it.
//!
//! A process outlives this program, which re-attaches to it by its process id and command line. The name of its
//! configuration file contains a fingerprint of the content, so that the command line also identifies the configuration.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use muster_types::ids::NetworkId;
use muster_types::{Error, Result};
use nix::sys::wait::{WaitPidFlag, waitpid};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::dnsmasq_config::{DnsmasqConfig, HOSTS, LEASES, PID};
use super::namespace;
use super::nftables::fingerprint;
use crate::command::{COMMAND_TIMEOUT, Commands, Tool, wait_readable};

/// The time that a process gets to exit after SIGTERM, and again after SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// In-memory state of a dnsmasq process.
#[derive(Debug, Default)]
pub(crate) struct DnsmasqProcess {
    process: Option<i32>,
    /// The inode of the namespace that the process was last seen in.
    netns: Option<u64>,
    /// Fingerprint of the leases and host names that it last loaded.
    loaded: Option<u64>,
    started: Option<Instant>,
    /// The number of consecutive starts after which the process died early.
    deaths: u32,
    backoff_until: Option<Instant>,
    failure: Option<String>,
}

/// The action that brings a process in line with its configuration.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProcessAction {
    Nothing,
    /// It runs, but must not, or with another configuration.
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
        folder: &Path,
        config: Option<&DnsmasqConfig>,
        netns: Option<u64>,
    ) -> ProcessAction {
        if self.process.is_none() {
            self.process = read_process(folder);
        }
        let running =
            self.process.and_then(|process| settings_of(process, folder).map(|file| (process, file)));
        let Some(config) = config else {
            self.failure = None;
            return if running.is_some() || self.process.is_some() {
                ProcessAction::Stop
            } else {
                ProcessAction::Nothing
            };
        };
        let Some((process, file)) = running else { return self.when_absent() };
        if file != settings_file(config) {
            return ProcessAction::Stop;
        }
        if self.netns != netns {
            use std::os::unix::fs::MetadataExt;
            let found = fs::metadata(format!("/proc/{process}/ns/net")).map(|found| found.ino());
            if found.is_ok_and(|found| Some(found) != netns) {
                return ProcessAction::Stop;
            }
            self.netns = netns;
        }
        let has_content = |name: &str, text: &str| {
            fs::metadata(folder.join(name)).is_ok_and(|found| found.len() == text.len() as u64)
        };
        let files_match = has_content(LEASES, &config.leases) && has_content(HOSTS, &config.hosts);
        if self.loaded == Some(reload_fingerprint(config))
            && files_match
            && has_content(&file, &config.settings)
        {
            ProcessAction::Nothing
        } else {
            ProcessAction::Reload
        }
    }

    fn when_absent(&self) -> ProcessAction {
        match self.process {
            Some(process) => ProcessAction::Start { died: Some(format!("dnsmasq process {process} died")) },
            None if self.is_backing_off() => ProcessAction::Backoff,
            None => ProcessAction::Start { died: None },
        }
    }

    /// Records that the process has died.
    pub(crate) fn record_death(&mut self, folder: &Path) {
        let Some(process) = self.process.take() else { return };
        // It is our child only if this program is a subreaper; then nobody else reaps it.
        let _ = waitpid(nix::unistd::Pid::from_raw(process), Some(WaitPidFlag::WNOHANG));
        let _ = fs::remove_file(folder.join(PID));
        let now = Instant::now();
        let lasted = self.started.is_none_or(|started| now - started >= MAX_BACKOFF);
        self.deaths = if lasted { 1 } else { self.deaths + 1 };
        self.backoff_until = self.backoff(now);
        self.failure = self.backoff_until.map(|_| format!("process {process} died"));
    }

    /// The first restart after a long run is immediate; then the backoff is 1, 2, 4 … 60 seconds.
    fn backoff(&self, now: Instant) -> Option<Instant> {
        let doublings = self.deaths.checked_sub(2)?;
        let pause = Duration::from_secs(1 << doublings.min(6)).min(MAX_BACKOFF);
        Some(now + pause)
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
        folder: &Path,
        config: &DnsmasqConfig,
        netns: Option<u64>,
    ) -> Result<()> {
        let file = settings_file(config);
        let old = settings_files(folder);
        if !old.is_empty() {
            // It ran before: if only its process id was lost, it would still occupy the ports.
            stop_all(folder)?;
        }
        for name in old.iter().filter(|name| **name != file) {
            let _ = fs::remove_file(folder.join(name));
        }
        write_config(folder, config)?;
        let _ = fs::remove_file(folder.join(PID));
        let argument = format!("--conf-file={}", folder.join(&file).display());
        let started =
            namespace::inside(network, || commands.run(Tool::Dnsmasq, &[&argument], "", COMMAND_TIMEOUT));
        if let Err(error) = started {
            self.deaths += 1;
            self.backoff_until = self.backoff(Instant::now());
            self.failure = Some(error.to_string());
            return Err(error);
        }
        self.failure = None;
        self.process = read_process(folder);
        self.netns = netns;
        self.loaded = Some(reload_fingerprint(config));
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Makes the process load new leases and host names.
    pub(crate) fn reload(&mut self, folder: &Path, config: &DnsmasqConfig) -> Result<()> {
        write_config(folder, config)?;
        if let Some((process, handle)) =
            self.process.and_then(|process| Some((process, pidfd_of_server(process, folder)?)))
        {
            // The file with its process id may have been deleted together with the directory.
            write(folder, PID, &format!("{process}\n"))?;
            let _ = pidfd_send_signal(&handle, Signal::HUP);
        }
        self.loaded = Some(reload_fingerprint(config));
        Ok(())
    }

    /// Stops the process and waits until it has exited.
    pub(crate) fn stop(&mut self, folder: &Path) -> Result<()> {
        let process = self.process.take().or_else(|| read_process(folder));
        *self = Self { deaths: self.deaths, started: self.started, ..Self::default() };
        if let Some(process) = process {
            terminate(process, folder)?;
        }
        let _ = fs::remove_file(folder.join(PID));
        Ok(())
    }
}

/// Stops every dnsmasq process that serves from this directory, whether it is known or not.
pub(crate) fn stop_all(folder: &Path) -> Result<()> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for process in processes {
        if settings_of(process, folder).is_some() {
            terminate(process, folder)?;
        }
    }
    Ok(())
}

fn terminate(process: i32, folder: &Path) -> Result<()> {
    let Some(handle) = pidfd_of_server(process, folder) else { return Ok(()) };
    for signal in [Signal::TERM, Signal::KILL] {
        let _ = pidfd_send_signal(&handle, signal);
        if wait_readable(&handle, STOP_TIMEOUT).unwrap_or(false) {
            let _ = waitpid(nix::unistd::Pid::from_raw(process), Some(WaitPidFlag::WNOHANG));
            return Ok(());
        }
    }
    Err(Error::Internal(format!("dnsmasq process {process} does not exit")))
}

/// Returns a pidfd of a process that serves from this directory. The process id cannot be reused while the pidfd is open.
fn pidfd_of_server(process: i32, folder: &Path) -> Option<OwnedFd> {
    let handle = pidfd_open(Pid::from_raw(process)?, PidfdFlags::empty()).ok()?;
    settings_of(process, folder).map(|_| handle)
}

/// Returns the configuration file name of a process, if it is a running dnsmasq of this directory.
fn settings_of(process: i32, folder: &Path) -> Option<String> {
    // The command line of a zombie is empty.
    let line = fs::read(format!("/proc/{process}/cmdline")).ok()?;
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let program = words.next()?;
    let file = words.next()?.strip_prefix("--conf-file=")?.to_owned();
    let file = Path::new(&file);
    let ours = program.ends_with("dnsmasq") && file.parent() == Some(folder);
    ours.then(|| file.file_name()?.to_str().map(str::to_owned)).flatten()
}

fn read_process(folder: &Path) -> Option<i32> {
    fs::read_to_string(folder.join(PID)).ok()?.trim().parse().ok().filter(|process| *process > 1)
}

fn settings_file(config: &DnsmasqConfig) -> String {
    format!("dnsmasq-{:016x}.conf", fingerprint(&config.settings))
}

fn settings_files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("dnsmasq-")).collect()
}

fn reload_fingerprint(config: &DnsmasqConfig) -> u64 {
    fingerprint(&format!("{}\n{}", config.leases, config.hosts))
}

fn write_config(folder: &Path, config: &DnsmasqConfig) -> Result<()> {
    write(folder, &settings_file(config), &config.settings)?;
    write(folder, LEASES, &config.leases)?;
    write(folder, HOSTS, &config.hosts)
}

/// Replaces a file atomically. It is readable for all users: dnsmasq rereads it after dropping its privileges.
pub(crate) fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let new = folder.join(format!("{name}.new"));
    let write = || {
        fs::write(&new, text)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
        fs::rename(&new, folder.join(name))
    };
    write().map_err(|error| Error::Internal(format!("failed to write {}: {error}", new.display())))
}

/// Creates the network's directory, which dnsmasq accesses after dropping its privileges.
pub(crate) fn make_folder(folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let make = || {
        fs::create_dir_all(folder)?;
        for folder in folder.ancestors().take(3) {
            let mode = fs::metadata(folder)?.permissions().mode();
            // Only the execute bit is added: the operator may have reasons not to let others list a parent.
            fs::set_permissions(folder, fs::Permissions::from_mode(mode | 0o011))?;
        }
        Ok(())
    };
    make().map_err(|error: std::io::Error| {
        Error::Internal(format!("failed to create {}: {error}", folder.display()))
    })
}

/// Removes the network's directory.
pub(crate) fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Internal(format!("failed to remove {}: {error}", folder.display())))
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
        let folder = tempfile::tempdir().unwrap();
        let mut server = DnsmasqProcess::default();
        let now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            (server.process, server.started) = (Some(i32::MAX), Some(now));
            let need = server.inspect(folder.path(), Some(&config()), Some(1));
            assert!(matches!(need, ProcessAction::Start { died: Some(_) }), "{need:?}");
            server.record_death(folder.path());
            pauses.push(server.backoff(now).map_or(0, |until| (until - now).as_secs()));
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(server.inspect(folder.path(), Some(&config()), Some(1)), ProcessAction::Backoff);
        assert_eq!(server.failure(), Some("process 2147483647 died"));
        // After a long run it is restarted immediately.
        (server.process, server.started) = (Some(i32::MAX), None);
        server.record_death(folder.path());
        assert_eq!(server.failure(), None);
        assert_eq!(
            server.inspect(folder.path(), Some(&config()), Some(1)),
            ProcessAction::Start { died: None }
        );
    }

    #[test]
    fn another_process_is_never_taken_for_dnsmasq() {
        let folder = tempfile::tempdir().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        fs::write(folder.path().join(PID), own.to_string()).unwrap();
        let mut server = DnsmasqProcess::default();
        assert!(matches!(
            server.inspect(folder.path(), Some(&config()), Some(1)),
            ProcessAction::Start { died: Some(_) }
        ));
        server.stop(folder.path()).unwrap();
        stop_all(folder.path()).unwrap();
    }
}
