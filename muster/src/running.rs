//! A cluster that `muster up` started: its process, its files and its own commands.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use muster_client::{default_data_dir, write_private};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Pid;

/// The data directory of a cluster on this host.
#[derive(Debug)]
pub(crate) struct ClusterDir(PathBuf);

impl ClusterDir {
    pub(crate) fn new(path: &Path) -> Self {
        Self(path.canonicalize().unwrap_or_else(|_| path.to_owned()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn log_file(&self) -> PathBuf {
        self.0.join("muster.log")
    }

    pub(crate) fn credentials(&self) -> PathBuf {
        self.0.join("credentials.json")
    }

    /// Returns the socket through which `muster forward` reaches the network of a rootless cluster. It exists while such a
    /// cluster runs.
    pub(crate) fn forward_socket(&self) -> PathBuf {
        self.0.join("forward.sock")
    }

    fn pid_file(&self) -> PathBuf {
        self.0.join("muster.pid")
    }

    /// Returns whether a daemon uses the directory.
    pub(crate) fn is_running(&self) -> bool {
        let Ok(file) = File::open(self.0.join("lock")) else { return false };
        // The lock is released immediately. A daemon that starts meanwhile tries again.
        Flock::lock(file, FlockArg::LockSharedNonblock).is_err()
    }

    pub(crate) fn save_pid(&self, pid: u32) -> anyhow::Result<()> {
        write_private(&self.pid_file(), &format!("{pid}\n"))
    }

    /// Returns the process that `muster up` started.
    pub(crate) fn pid(&self) -> Option<Pid> {
        let pid: i32 = fs::read_to_string(self.pid_file()).ok()?.trim().parse().ok()?;
        (pid > 1).then(|| Pid::from_raw(pid))
    }

    pub(crate) fn remove_pid(&self) {
        let _ = fs::remove_file(self.pid_file());
    }

    /// Returns a command of the command line for this cluster.
    pub(crate) fn command(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(program()?);
        command.args(arguments).env("MUSTER_CREDENTIALS", self.credentials());
        for name in ["MUSTER_API_URL", "MUSTER_NAMESPACE", "MUSTER_KEY"] {
            command.env_remove(name);
        }
        Ok(command)
    }

    /// Returns the option that names the directory, if it is not the default.
    pub(crate) fn option(&self) -> String {
        if self.0 == default_data_dir() { String::new() } else { format!(" --data-dir {}", self.0.display()) }
    }
}

/// Returns whether a process runs. One that has ended may wait for its parent.
pub(crate) fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the process, in parentheses, may contain anything.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

/// Returns the path of this program.
pub(crate) fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("path of this program")
}

/// Runs a command for a cluster and returns its output.
pub(crate) async fn muster(dir: &ClusterDir, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = tokio::process::Command::from(dir.command(arguments)?);
    let output = command.stdin(Stdio::null()).output().await.context("muster")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        bail!("muster {}: {}", arguments.join(" "), text(&output.stderr));
    }
    Ok(text(&output.stdout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_of_the_daemon_tells_whether_it_runs() {
        let folder = tempfile::tempdir().unwrap();
        let dir = ClusterDir::new(folder.path());
        assert!(!dir.is_running() && dir.pid().is_none());
        let file = File::create(folder.path().join("lock")).unwrap();
        assert!(!dir.is_running());
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        assert!(dir.is_running());
        drop(lock);
        assert!(!dir.is_running());
    }

    #[test]
    fn ended_process_is_not_alive() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id().try_into().unwrap());
        assert!(is_alive(pid));
        drop(child.stdin.take());
        let id = nix::sys::wait::Id::Pid(pid);
        let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
        nix::sys::wait::waitid(id, flags).unwrap();
        assert!(!is_alive(pid), "its parent has not waited");
        child.wait().unwrap();
        assert!(!is_alive(pid));
    }

    #[test]
    fn pid_file_with_another_content_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let dir = ClusterDir::new(folder.path());
        dir.save_pid(4711).unwrap();
        assert_eq!(dir.pid(), Some(Pid::from_raw(4711)));
        for text in ["", "nonsense", "1", "-5"] {
            fs::write(dir.pid_file(), text).unwrap();
            assert_eq!(dir.pid(), None, "{text}");
        }
        dir.remove_pid();
        assert!(!dir.pid_file().exists());
    }
}
