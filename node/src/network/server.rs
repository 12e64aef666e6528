//! The process that gives out addresses and names: one dnsmasq for each router that needs one.
//!
//! It outlives this program, which finds it again by its number and by its command line. The name of its settings
//! file holds a fingerprint of the text, so that the command line also says which settings it runs with.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use muster_types::ids::NetworkId;
use muster_types::{Error, Result};
use nix::sys::wait::{WaitPidFlag, waitpid};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::dnsmasq::{HOSTS, LEASES, PID, Texts};
use super::namespace;
use super::nftables::fingerprint;
use crate::command::{COMMAND_TIMEOUT, Commands, Tool, wait_readable};

/// How long a server may take to end when asked to.
const PATIENCE: Duration = Duration::from_secs(3);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What is remembered of a server.
#[derive(Debug, Default)]
pub(crate) struct Server {
    process: Option<i32>,
    /// The namespace in which the process was seen.
    seen_in: u64,
    /// Fingerprint of what it was last told to read again.
    told: Option<u64>,
    started: Option<Instant>,
    /// Starts that did not last, one after the other.
    deaths: u32,
    pause_until: Option<Instant>,
    failure: Option<String>,
}

/// What has to be done about a server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Nothing,
    /// It runs, and shall not or not so.
    Stop,
    /// It runs with old names or leases.
    Reload,
    Start {
        /// Why it is not running, if it should have been.
        died: Option<String>,
    },
    /// It died too often; it will be started, but not yet.
    Pause,
}

impl Server {
    /// Looks after the process. `space` is the number of the namespace that it must be in.
    pub(crate) fn look(&mut self, folder: &Path, texts: Option<&Texts>, space: u64) -> Need {
        if self.process.is_none() {
            self.process = read_process(folder);
        }
        let running =
            self.process.and_then(|process| settings_of(process, folder).map(|file| (process, file)));
        let Some(texts) = texts else {
            self.failure = None;
            return if running.is_some() || self.process.is_some() { Need::Stop } else { Need::Nothing };
        };
        let Some((process, file)) = running else { return self.absent() };
        if file != settings_file(texts) {
            return Need::Stop;
        }
        if self.seen_in != space {
            use std::os::unix::fs::MetadataExt;
            let found = fs::metadata(format!("/proc/{process}/ns/net")).map(|found| found.ino());
            if found.is_ok_and(|found| found != space) {
                return Need::Stop;
            }
            self.seen_in = space;
        }
        let whole = |name: &str, text: &str| {
            fs::metadata(folder.join(name)).is_ok_and(|found| found.len() == text.len() as u64)
        };
        let files = whole(LEASES, &texts.leases) && whole(HOSTS, &texts.hosts);
        if self.told == Some(told(texts)) && files && whole(&file, &texts.settings) {
            Need::Nothing
        } else {
            Need::Reload
        }
    }

    fn absent(&self) -> Need {
        match self.process {
            Some(process) => Need::Start { died: Some(format!("dnsmasq, process {process}, was gone")) },
            None if self.is_paused() => Need::Pause,
            None => Need::Start { died: None },
        }
    }

    /// Takes note that the process has died.
    pub(crate) fn bury(&mut self, folder: &Path) {
        let Some(process) = self.process.take() else { return };
        // A child of this program only if this program adopts orphans; then nobody else buries it.
        let _ = waitpid(nix::unistd::Pid::from_raw(process), Some(WaitPidFlag::WNOHANG));
        let _ = fs::remove_file(folder.join(PID));
        let now = Instant::now();
        let lasted = self.started.is_none_or(|started| now - started >= LONGEST_PAUSE);
        self.deaths = if lasted { 1 } else { self.deaths + 1 };
        self.pause_until = self.pause(now);
        self.failure = self.pause_until.map(|_| format!("process {process} was gone"));
    }

    /// The first start after a long life is free; then 1, 2, 4 … 60 seconds.
    fn pause(&self, now: Instant) -> Option<Instant> {
        let doublings = self.deaths.checked_sub(2)?;
        let pause = Duration::from_secs(1 << doublings.min(6)).min(LONGEST_PAUSE);
        Some(now + pause)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.pause_until.is_some_and(|until| until > Instant::now())
    }

    /// Why it does not run, or did not last, while it waits to be started again.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    pub(crate) fn is_failing(&self) -> bool {
        self.failure.is_some()
    }

    /// Starts the process; it must not be running.
    pub(crate) fn start(
        &mut self,
        commands: &Commands,
        network: NetworkId,
        folder: &Path,
        texts: &Texts,
        space: u64,
    ) -> Result<()> {
        let file = settings_file(texts);
        let old = settings_files(folder);
        if !old.is_empty() {
            // It ran before. If only the number was lost, the old one would be in the way.
            stop_all(folder)?;
        }
        for name in old.iter().filter(|name| **name != file) {
            let _ = fs::remove_file(folder.join(name));
        }
        write_texts(folder, texts)?;
        let _ = fs::remove_file(folder.join(PID));
        let argument = format!("--conf-file={}", folder.join(&file).display());
        let started =
            namespace::inside(network, || commands.run(Tool::Dnsmasq, &[&argument], "", COMMAND_TIMEOUT));
        if let Err(error) = started {
            self.deaths += 1;
            self.pause_until = self.pause(Instant::now());
            self.failure = Some(error.to_string());
            return Err(error);
        }
        self.failure = None;
        self.process = read_process(folder);
        self.seen_in = space;
        self.told = Some(told(texts));
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Gives the process new names and leases.
    pub(crate) fn reload(&mut self, folder: &Path, texts: &Texts) -> Result<()> {
        write_texts(folder, texts)?;
        if let Some((process, handle)) =
            self.process.and_then(|process| Some((process, proven(process, folder)?)))
        {
            // With the folder its number may have been lost.
            write(folder, PID, &format!("{process}\n"))?;
            let _ = pidfd_send_signal(&handle, Signal::HUP);
        }
        self.told = Some(told(texts));
        Ok(())
    }

    /// Ends the process, if it is ours, and waits for its end.
    pub(crate) fn stop(&mut self, folder: &Path) -> Result<()> {
        let known = self.process.take().or_else(|| read_process(folder));
        *self = Self { deaths: self.deaths, started: self.started, ..Self::default() };
        if let Some(process) = known {
            end(process, folder)?;
        }
        let _ = fs::remove_file(folder.join(PID));
        Ok(())
    }
}

/// Ends every process that serves from this folder, whatever is remembered of it.
pub(crate) fn stop_all(folder: &Path) -> Result<()> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for process in processes {
        if settings_of(process, folder).is_some() {
            end(process, folder)?;
        }
    }
    Ok(())
}

fn end(process: i32, folder: &Path) -> Result<()> {
    let Some(handle) = proven(process, folder) else { return Ok(()) };
    for signal in [Signal::TERM, Signal::KILL] {
        let _ = pidfd_send_signal(&handle, signal);
        if wait_readable(&handle, PATIENCE).unwrap_or(false) {
            let _ = waitpid(nix::unistd::Pid::from_raw(process), Some(WaitPidFlag::WNOHANG));
            return Ok(());
        }
    }
    Err(Error::Internal(format!("dnsmasq, process {process}, does not end")))
}

/// A handle of a process that is proven to serve from this folder: it cannot become another's while it is held.
fn proven(process: i32, folder: &Path) -> Option<OwnedFd> {
    let handle = pidfd_open(Pid::from_raw(process)?, PidfdFlags::empty()).ok()?;
    settings_of(process, folder).map(|_| handle)
}

/// The name of the settings file of a process, if it is a living server from this folder.
fn settings_of(process: i32, folder: &Path) -> Option<String> {
    // Of a process that has ended but was not buried yet this is empty.
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

fn settings_file(texts: &Texts) -> String {
    format!("dnsmasq-{:016x}.conf", fingerprint(&texts.settings))
}

fn settings_files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("dnsmasq-")).collect()
}

fn told(texts: &Texts) -> u64 {
    fingerprint(&format!("{}\n{}", texts.leases, texts.hosts))
}

fn write_texts(folder: &Path, texts: &Texts) -> Result<()> {
    write(folder, &settings_file(texts), &texts.settings)?;
    write(folder, LEASES, &texts.leases)?;
    write(folder, HOSTS, &texts.hosts)
}

/// Replaces a file in one step. The server reads it again after it has given up its rights, so everybody may.
pub(crate) fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let new = folder.join(format!("{name}.new"));
    let write = || {
        fs::write(&new, text)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
        fs::rename(&new, folder.join(name))
    };
    write().map_err(|error| Error::Internal(format!("cannot write {}: {error}", new.display())))
}

/// Makes the network's folder, into which the server must get when it has given up its rights.
pub(crate) fn make_folder(folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let make = || {
        fs::create_dir_all(folder)?;
        for folder in folder.ancestors().take(3) {
            let mode = fs::metadata(folder)?.permissions().mode();
            // Others may have a reason that nobody reads what else is there.
            fs::set_permissions(folder, fs::Permissions::from_mode(mode | 0o011))?;
        }
        Ok(())
    };
    make().map_err(|error: std::io::Error| {
        Error::Internal(format!("cannot make {}: {error}", folder.display()))
    })
}

/// Removes the network's folder.
pub(crate) fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::Internal(format!("cannot remove {}: {error}", folder.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> Texts {
        Texts { settings: "port=0\n".into(), leases: String::new(), hosts: String::new() }
    }

    #[test]
    fn a_server_that_keeps_dying_is_started_less_and_less_often() {
        let folder = tempfile::tempdir().unwrap();
        let mut server = Server::default();
        let now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            (server.process, server.started) = (Some(i32::MAX), Some(now));
            let need = server.look(folder.path(), Some(&texts()), 1);
            assert!(matches!(need, Need::Start { died: Some(_) }), "{need:?}");
            server.bury(folder.path());
            pauses.push(server.pause(now).map_or(0, |until| (until - now).as_secs()));
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(server.look(folder.path(), Some(&texts()), 1), Need::Pause);
        assert_eq!(server.failure(), Some("process 2147483647 was gone"));
        // One that lived long is started at once.
        (server.process, server.started) = (Some(i32::MAX), None);
        server.bury(folder.path());
        assert_eq!(server.failure(), None);
        assert_eq!(server.look(folder.path(), Some(&texts()), 1), Need::Start { died: None });
    }

    #[test]
    fn another_process_is_never_taken_for_a_server() {
        let folder = tempfile::tempdir().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        fs::write(folder.path().join(PID), own.to_string()).unwrap();
        let mut server = Server::default();
        assert!(matches!(server.look(folder.path(), Some(&texts()), 1), Need::Start { died: Some(_) }));
        server.stop(folder.path()).unwrap();
        stop_all(folder.path()).unwrap();
    }
}
