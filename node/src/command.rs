//! External commands: the one place that spawns them, waits for them and reads their output. Each has a timeout.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muster_types::{Error, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Directories to search after `PATH`, which often lacks them.
const EXTRA_PATH: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// The maximum length of command output in an error, in characters.
const MAX_ERROR_LEN: usize = 200;

/// The timeout of commands that only talk to the kernel.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);

/// An external command that the node uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tool {
    Ip,
    Bridge,
    Nft,
    Dnsmasq,
    Ping,
    QemuImg,
    Gzip,
    Xz,
    QemuSystem,
}

impl Tool {
    /// Required for networks.
    pub(crate) const NETWORKS: [Self; 5] = [Self::Ip, Self::Bridge, Self::Nft, Self::Dnsmasq, Self::Ping];

    /// Required for inspecting and converting images.
    pub(crate) const IMAGES: [Self; 3] = [Self::QemuImg, Self::Gzip, Self::Xz];

    /// Required for running VMs.
    pub(crate) const VMS: [Self; 1] = [Self::QemuSystem];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Bridge => "bridge",
            Self::Nft => "nft",
            Self::Dnsmasq => "dnsmasq",
            Self::Ping => "ping",
            Self::QemuImg => "qemu-img",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::QemuSystem => "qemu-system-x86_64",
        }
    }

    /// Returns the Debian package that contains it.
    pub(crate) fn package(self) -> &'static str {
        match self {
            Self::Ip | Self::Bridge => "iproute2",
            Self::Nft => "nftables",
            Self::Dnsmasq => "dnsmasq-base",
            Self::Ping => "iputils-ping",
            Self::QemuImg => "qemu-utils",
            Self::Gzip => "gzip",
            Self::Xz => "xz-utils",
            Self::QemuSystem => "qemu-system-x86",
        }
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct ToolOutput {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The commands that are installed on this host.
#[derive(Debug)]
pub(crate) struct Commands {
    paths: BTreeMap<Tool, PathBuf>,
    spawn_count: AtomicU64,
}

impl Commands {
    /// Searches for all commands.
    pub(crate) fn find() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs: Vec<PathBuf> =
            std::env::split_paths(&path).chain(EXTRA_PATH.iter().map(PathBuf::from)).collect();
        let find = |tool: Tool| dirs.iter().map(|dir| dir.join(tool.name())).find(|file| is_executable(file));
        let tools = Tool::NETWORKS.into_iter().chain(Tool::IMAGES).chain(Tool::VMS);
        let paths = tools.filter_map(|tool| Some((tool, find(tool)?))).collect();
        Self { paths, spawn_count: AtomicU64::new(0) }
    }

    pub(crate) fn is_installed(&self, tool: Tool) -> bool {
        self.paths.contains_key(&tool)
    }

    /// Returns the path of a command, if it is installed.
    pub(crate) fn path(&self, tool: Tool) -> Option<&Path> {
        self.paths.get(&tool).map(PathBuf::as_path)
    }

    /// Returns how many processes were spawned so far.
    pub(crate) fn spawn_count(&self) -> u64 {
        self.spawn_count.load(Ordering::Relaxed)
    }

    /// Returns a copy with its own counter of spawned processes.
    pub(crate) fn with_own_counter(&self) -> Self {
        Self { paths: self.paths.clone(), spawn_count: AtomicU64::new(0) }
    }

    /// Runs a command in the namespaces of this thread. On failure, the error contains the first line of its output and
    /// the line of the batch that failed. The caller logs it if it cannot handle it: some failures are expected, such as
    /// removing a device that disappeared meanwhile.
    pub(crate) fn run(
        &self,
        tool: Tool,
        arguments: &[&str],
        input: &str,
        timeout: Duration,
    ) -> Result<ToolOutput> {
        let output = self.try_run(tool, arguments, input, timeout)?;
        if output.status.success() {
            return Ok(output);
        }
        let text = if output.stderr.trim().is_empty() { &output.stdout } else { &output.stderr };
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).take(4).collect();
        let (program, messages, line) = (tool.name(), lines.join("; "), failed_line(input, &lines));
        tracing::debug!(program, messages, line, "command failed");
        let first = lines.first().map_or_else(|| output.status.to_string(), |line| (*line).to_owned());
        let first = first.strip_prefix(&format!("{program}: ")).unwrap_or(&first);
        let first: String = first.chars().take(MAX_ERROR_LEN).collect();
        let line = if line.is_empty() { String::new() } else { format!(" (in: {line})") };
        Err(Error::Unavailable(format!("{program}: {first}{line}")))
    }

    /// Runs a command; a nonzero exit status is not an error.
    pub(crate) fn try_run(
        &self,
        tool: Tool,
        arguments: &[&str],
        input: &str,
        timeout: Duration,
    ) -> Result<ToolOutput> {
        let name = tool.name();
        let program = self.paths.get(&tool).ok_or_else(|| {
            Error::Conflict(format!("the program {name} is missing (Debian package {})", tool.package()))
        })?;
        // Memory files rather than pipes: neither side can block the other.
        let failed = |error: std::io::Error| Error::Unavailable(format!("failed to run {name}: {error}"));
        let mut stdin = memory_file().map_err(failed)?;
        stdin.write_all(input.as_bytes()).map_err(failed)?;
        stdin.rewind().map_err(failed)?;
        let mut stdout = memory_file().map_err(failed)?;
        let mut stderr = memory_file().map_err(failed)?;
        self.spawn_count.fetch_add(1, Ordering::Relaxed);
        let mut child = Command::new(program)
            .args(arguments)
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::from(stdin))
            .stdout(stdout.try_clone().map_err(failed)?)
            .stderr(stderr.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let status = wait(&mut child, timeout).map_err(failed)?;
        let read = |file: &mut File| -> Result<String> {
            let mut bytes = Vec::new();
            file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(failed)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let output = |status, stdout, stderr| ToolOutput { status, stdout, stderr };
        match status {
            Some(status) => Ok(output(status, read(&mut stdout)?, read(&mut stderr)?)),
            None => Err(Error::Unavailable(format!("{name}: timed out after {} s", timeout.as_secs()))),
        }
    }
}

/// Returns the line of a batch that failed according to the command's messages, or an empty string.
fn failed_line<'a>(input: &'a str, messages: &[&str]) -> &'a str {
    let number =
        messages.iter().find_map(|message| message.strip_prefix("Command failed -:")?.parse::<usize>().ok());
    let line = number.and_then(|number| input.lines().nth(number.checked_sub(1)?));
    line.unwrap_or_default()
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn memory_file() -> std::io::Result<File> {
    Ok(File::from(memfd_create(c"muster", MFdFlags::MFD_CLOEXEC)?))
}

/// Waits for a child, and kills it after the timeout.
fn wait(child: &mut Child, timeout: Duration) -> std::io::Result<Option<ExitStatus>> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty());
    let exited = pidfd.map_err(std::io::Error::from).and_then(|pidfd| wait_readable(&pidfd, timeout));
    if matches!(exited, Ok(true)) {
        return child.wait().map(Some);
    }
    child.kill()?;
    child.wait()?;
    exited.map(|_| None)
}

/// Waits until a file descriptor is readable, which a pidfd is when its process has exited. Returns `false` after the
/// timeout.
pub(crate) fn wait_readable(file: &impl AsFd, timeout: Duration) -> std::io::Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let remaining = PollTimeout::try_from(remaining.as_millis().min(60_000))
            .expect("a minute in milliseconds fits into poll's timeout");
        match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], remaining) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(nix::Error::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands_with(tool: Tool, program: &str) -> Commands {
        Commands { paths: [(tool, PathBuf::from(program))].into(), spawn_count: AtomicU64::new(0) }
    }

    #[test]
    fn returns_output_and_reports_failures() {
        let commands = commands_with(Tool::Ip, "/bin/cat");
        let long = "x".repeat(1 << 20);
        assert_eq!(commands.run(Tool::Ip, &["-"], &long, COMMAND_TIMEOUT).unwrap().stdout, long);
        assert_eq!(commands.spawn_count(), 1);
        let error = commands.run(Tool::Ip, &["/nonsense"], "", COMMAND_TIMEOUT).unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
        let error = error.to_string();
        assert!(error.starts_with("ip: ") && error.contains("No such file"), "{error}");
        let error = commands.run(Tool::Nft, &[], "", COMMAND_TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("Debian package nftables"), "{error}");
    }

    #[test]
    fn error_contains_the_truncated_first_line_of_output() {
        let commands = commands_with(Tool::Dnsmasq, "/bin/sh");
        let error = |script: &str| {
            let error = commands.run(Tool::Dnsmasq, &["-c", script], "", COMMAND_TIMEOUT).unwrap_err();
            assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
            error.to_string()
        };
        assert_eq!(error("echo >&2; echo 'dnsmasq: no' >&2; echo more >&2; exit 1"), "dnsmasq: no");
        assert_eq!(error("printf %5000s x | tr ' ' y >&2; exit 1").len(), "dnsmasq: ".len() + MAX_ERROR_LEN);
        assert_eq!(error("exit 3"), "dnsmasq: exit status: 3");
        let commands = commands_with(Tool::Ip, "/bin/sh");
        let script = "echo no such device >&2; echo Command failed -:2 >&2; exit 1";
        let failed = commands.run(Tool::Ip, &["-c", script], "one\ntwo\n", COMMAND_TIMEOUT).unwrap_err();
        assert_eq!(failed.to_string(), "ip: no such device (in: two)");
    }

    #[test]
    fn kills_command_after_timeout() {
        let commands = commands_with(Tool::Ping, "/bin/sleep");
        let error = commands.run(Tool::Ping, &["600"], "", Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("timed out"), "{error}");
    }

    #[test]
    fn finds_the_failed_line_of_a_batch() {
        let input = "link add a type bridge\nlink set b up\n";
        assert_eq!(failed_line(input, &["Cannot find device \"b\"", "Command failed -:2"]), "link set b up");
        assert_eq!(failed_line(input, &["Command failed -:9"]), "");
    }
}
