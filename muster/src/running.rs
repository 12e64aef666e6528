//! A cluster that `muster up` started: its process, its files and its own commands.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use muster_client::{default_data_dir, write_private};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;

/// The variables that select another cluster, besides `MUSTER_CREDENTIALS`.
pub(crate) const CLIENT_VARIABLES: [&str; 4] =
    ["MUSTER_API_URL", "MUSTER_NAMESPACE", "MUSTER_KEY", "MUSTER_PROFILE"];

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

    /// Returns the socket through which `muster forward` reaches the network of a rootless cluster.
    pub(crate) fn forward_socket(&self) -> PathBuf {
        self.0.join("forward.sock")
    }

    /// Returns whether the running cluster is rootless. The socket of a cluster that was killed does not count.
    pub(crate) fn is_rootless(&self) -> bool {
        UnixStream::connect(self.forward_socket()).is_ok()
    }

    fn pid_file(&self) -> PathBuf {
        self.0.join("muster.pid")
    }

    /// Returns whether a daemon uses the directory.
    pub(crate) fn is_running(&self) -> anyhow::Result<bool> {
        let path = self.0.join("lock");
        match File::open(&path) {
            // The lock is released immediately. A daemon that starts meanwhile tries again.
            Ok(file) => Ok(Flock::lock(file, FlockArg::LockSharedNonblock).is_err()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// Locks the directory against other `muster up` and `muster down` until the lock is dropped. Returns `None` if one of
    /// them has the lock.
    pub(crate) fn lock(&self) -> anyhow::Result<Option<Flock<File>>> {
        let path = self.0.join("up.lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.with_context(|| path.display().to_string())?;
        Ok(Flock::lock(file, FlockArg::LockExclusiveNonblock).ok())
    }

    /// Records the process that `muster up` has started.
    pub(crate) fn save_process(&self, pid: Pid) -> anyhow::Result<()> {
        let identity = process_identity(pid).context("the daemon has ended")?;
        write_private(&self.pid_file(), &format!("{pid}\n{identity}\n"))
    }

    /// Returns the process that `muster up` started, if it still runs. Another process may have its id by now.
    pub(crate) fn process(&self) -> Option<Pid> {
        let text = fs::read_to_string(self.pid_file()).ok()?;
        let (pid, identity) = text.split_once('\n')?;
        let pid = Pid::from_raw(pid.parse().ok().filter(|pid: &i32| *pid > 1)?);
        (process_identity(pid)? == identity.trim()).then_some(pid)
    }

    /// Removes the record of a process, unless another one has replaced it.
    pub(crate) fn remove_process(&self, pid: Pid) {
        let text = fs::read_to_string(self.pid_file()).unwrap_or_default();
        if text.lines().next() == Some(pid.to_string().as_str()) {
            self.remove_pid_file();
        }
    }

    pub(crate) fn remove_pid_file(&self) {
        let _ = fs::remove_file(self.pid_file());
    }

    /// Returns whether the API has no certificate.
    pub(crate) fn is_plain_http(&self) -> bool {
        let text = fs::read_to_string(self.credentials()).unwrap_or_default();
        let credentials: Value = serde_json::from_str(&text).unwrap_or_default();
        credentials["apiurl"].as_str().is_some_and(|url| url.starts_with("http:"))
    }

    /// Returns a command of the command line for this cluster, whatever the environment selects.
    pub(crate) fn command(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(program()?);
        command.args(arguments).env("MUSTER_CREDENTIALS", self.credentials());
        for name in CLIENT_VARIABLES {
            command.env_remove(name);
        }
        if self.is_plain_http() {
            command.env_remove("MUSTER_CACERT");
        }
        Ok(command)
    }

    /// Returns the option that names the directory, if it is not the default.
    pub(crate) fn option(&self) -> String {
        if self.0 == default_data_dir() { String::new() } else { format!(" --data-dir {}", quoted(&self.0)) }
    }
}

/// Returns a path as a word of a shell.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |character: char| character.is_alphanumeric() || "/._-+,:@%".contains(character);
    if text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// Returns what distinguishes a running process from others that get its id later: the boot of the host, and its start time
/// since then. One that has ended may wait for its parent.
pub(crate) fn process_identity(pid: Pid) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the process, in parentheses, may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    (!matches!(state, "Z" | "X")).then(|| format!("{} {started}", boot.trim()))
}

/// Lets a child process end with this one, even if this one is killed. The main thread must start it.
pub(crate) fn end_with_this_process(command: &mut tokio::process::Command) {
    #[expect(unsafe_code, reason = "the kernel ends a child with its parent only if the child requests it")]
    // SAFETY: the closure makes one system call, and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGINT)?));
    }
}

/// Returns the path of this program.
pub(crate) fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("path of this program")
}

/// Runs a command for a cluster and returns its output.
pub(crate) async fn muster(dir: &ClusterDir, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = tokio::process::Command::from(dir.command(arguments)?);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await.context("muster")?;
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
        assert!(!dir.is_running().unwrap() && dir.process().is_none());
        let file = File::create(folder.path().join("lock")).unwrap();
        assert!(!dir.is_running().unwrap());
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        assert!(dir.is_running().unwrap());
        drop(lock);
        assert!(!dir.is_running().unwrap());
    }

    #[test]
    fn one_command_at_a_time_has_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let dir = ClusterDir::new(folder.path());
        let lock = dir.lock().unwrap();
        assert!(lock.is_some() && dir.lock().unwrap().is_none());
        drop(lock);
        assert!(dir.lock().unwrap().is_some());
    }

    #[test]
    fn ended_process_has_no_identity() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id().try_into().unwrap());
        assert_eq!(process_identity(pid), process_identity(pid));
        assert!(process_identity(pid).is_some());
        drop(child.stdin.take());
        let id = nix::sys::wait::Id::Pid(pid);
        let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
        nix::sys::wait::waitid(id, flags).unwrap();
        assert_eq!(process_identity(pid), None, "its parent has not waited");
        child.wait().unwrap();
        assert_eq!(process_identity(pid), None);
    }

    #[test]
    fn pid_file_of_another_process_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let dir = ClusterDir::new(folder.path());
        let own = Pid::this();
        dir.save_process(own).unwrap();
        assert_eq!(dir.process(), Some(own));
        dir.remove_process(Pid::parent());
        assert_eq!(dir.process(), Some(own));
        let text = fs::read_to_string(dir.pid_file()).unwrap();
        // A later process with the same id has another start time, or runs since another boot.
        let later = text.trim().to_owned() + "1\n";
        for text in ["", "nonsense", "1\n", "-5\n", &format!("{own}\n"), &later] {
            fs::write(dir.pid_file(), text).unwrap();
            assert_eq!(dir.process(), None, "{text}");
        }
        dir.remove_process(own);
        assert!(!dir.pid_file().exists());
    }

    #[test]
    fn paths_are_words_of_a_shell() {
        assert_eq!(quoted(Path::new("/var/lib/muster")), "/var/lib/muster");
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }

    #[test]
    fn environment_does_not_select_another_cluster() {
        let folder = tempfile::tempdir().unwrap();
        let dir = ClusterDir::new(folder.path());
        let removed = || {
            let command = dir.command(&["whoami"]).unwrap();
            let removed = command.get_envs().filter(|(_, value)| value.is_none());
            removed.map(|(name, _)| name.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert!(CLIENT_VARIABLES.iter().all(|name| removed().contains(&(*name).to_owned())));
        // The certificates for https may be those of this cluster.
        for (url, is_removed) in [("http://localhost:1", true), ("https://localhost:1", false)] {
            fs::write(dir.credentials(), format!("{{\"apiurl\": \"{url}\"}}")).unwrap();
            assert_eq!(removed().contains(&"MUSTER_CACERT".to_owned()), is_removed, "{url}");
        }
    }
}
