//! The programs that this node runs: the one place that starts them, waits for them and reads what they say.
//! None may hang: each has a time limit.

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

/// Where programs are looked for beside `PATH`, which often lacks the administrator's folders.
const FURTHER_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// How much of what a program said is repeated to callers.
const LONGEST_WORDS: usize = 200;

/// How long a program may take that only speaks with the kernel.
pub(crate) const QUICK: Duration = Duration::from_secs(20);

/// A program that the node needs.
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
    /// What carrying networks takes.
    pub(crate) const NETWORKS: [Self; 5] = [Self::Ip, Self::Bridge, Self::Nft, Self::Dnsmasq, Self::Ping];

    /// What looking at images takes.
    pub(crate) const IMAGES: [Self; 3] = [Self::QemuImg, Self::Gzip, Self::Xz];

    /// What running machines takes.
    pub(crate) const MACHINES: [Self; 1] = [Self::QemuSystem];

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

    /// The Debian package that has it.
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

/// What a program left.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The programs of this machine.
#[derive(Debug)]
pub(crate) struct Commands {
    found: BTreeMap<Tool, PathBuf>,
    started: AtomicU64,
}

impl Commands {
    /// Looks where the programs are.
    pub(crate) fn find() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders: Vec<PathBuf> =
            std::env::split_paths(&path).chain(FURTHER_FOLDERS.iter().map(PathBuf::from)).collect();
        let find =
            |tool: Tool| folders.iter().map(|folder| folder.join(tool.name())).find(|file| is_program(file));
        let tools = Tool::NETWORKS.into_iter().chain(Tool::IMAGES).chain(Tool::MACHINES);
        let found = tools.filter_map(|tool| Some((tool, find(tool)?))).collect();
        Self { found, started: AtomicU64::new(0) }
    }

    pub(crate) fn has(&self, tool: Tool) -> bool {
        self.found.contains_key(&tool)
    }

    /// Where a program is.
    pub(crate) fn path(&self, tool: Tool) -> Option<&Path> {
        self.found.get(&tool).map(PathBuf::as_path)
    }

    /// How many programs were started so far.
    pub(crate) fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    /// The same programs, of which none was started.
    pub(crate) fn afresh(&self) -> Self {
        Self { found: self.found.clone(), started: AtomicU64::new(0) }
    }

    /// Runs a program in the namespaces of this thread and refuses what it refuses, in its own words: the first of
    /// them for the caller, all for the log.
    pub(crate) fn run(&self, tool: Tool, arguments: &[&str], input: &str, limit: Duration) -> Result<Output> {
        let output = self.try_run(tool, arguments, input, limit)?;
        if output.status.success() {
            return Ok(output);
        }
        let words = if output.stderr.trim().is_empty() { &output.stdout } else { &output.stderr };
        let words: Vec<&str> = words.lines().map(str::trim).filter(|line| !line.is_empty()).take(4).collect();
        let (program, said) = (tool.name(), words.join("; "));
        tracing::info!(program, said, line = culprit(input, &words), "a program failed");
        let first = words.first().map_or_else(|| output.status.to_string(), |word| (*word).to_owned());
        let first = first.strip_prefix(&format!("{program}: ")).unwrap_or(&first);
        Err(Error::Unavailable(format!(
            "{program}: {}",
            first.chars().take(LONGEST_WORDS).collect::<String>()
        )))
    }

    /// Runs a program; that it fails is not an error here.
    pub(crate) fn try_run(
        &self,
        tool: Tool,
        arguments: &[&str],
        input: &str,
        limit: Duration,
    ) -> Result<Output> {
        let name = tool.name();
        let program = self.found.get(&tool).ok_or_else(|| {
            Error::Conflict(format!("the program {name} is missing (Debian package {})", tool.package()))
        })?;
        // Memory files rather than pipes: neither side can ever wait for the other.
        let failed = |error: std::io::Error| Error::Unavailable(format!("{name}: cannot be run: {error}"));
        let mut stdin = memory_file().map_err(failed)?;
        stdin.write_all(input.as_bytes()).map_err(failed)?;
        stdin.rewind().map_err(failed)?;
        let mut stdout = memory_file().map_err(failed)?;
        let mut stderr = memory_file().map_err(failed)?;
        self.started.fetch_add(1, Ordering::Relaxed);
        let mut child = Command::new(program)
            .args(arguments)
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::from(stdin))
            .stdout(stdout.try_clone().map_err(failed)?)
            .stderr(stderr.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let status = wait(&mut child, limit).map_err(failed)?;
        let read = |file: &mut File| -> Result<String> {
            let mut bytes = Vec::new();
            file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(failed)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let output = |status, stdout, stderr| Output { status, stdout, stderr };
        match status {
            Some(status) => Ok(output(status, read(&mut stdout)?, read(&mut stderr)?)),
            None => Err(Error::Unavailable(format!("{name}: did not end within {} s", limit.as_secs()))),
        }
    }
}

/// The line of a batch that a program complained about, for the log.
fn culprit<'a>(input: &'a str, words: &[&str]) -> &'a str {
    let line = words.iter().find_map(|word| word.strip_prefix("Command failed -:")?.parse::<usize>().ok());
    let text = line.and_then(|number| input.lines().nth(number.checked_sub(1)?));
    text.unwrap_or_default()
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

fn memory_file() -> std::io::Result<File> {
    Ok(File::from(memfd_create(c"muster", MFdFlags::MFD_CLOEXEC)?))
}

/// Waits for a child, which is killed when its time is over.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let ended = i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .map(|pid| pidfd_open(pid, PidfdFlags::empty()))
        .transpose();
    let ended = match ended {
        Ok(Some(process)) => wait_readable(&process, limit),
        Ok(None) => Ok(true),
        Err(error) => Err(error.into()),
    };
    if matches!(ended, Ok(true)) {
        return child.wait().map(Some);
    }
    child.kill()?;
    child.wait()?;
    ended.map(|_| None)
}

/// Waits until a file has something to say; of a process that is its end.
pub(crate) fn wait_readable(file: &impl AsFd, limit: Duration) -> std::io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left.as_millis().min(60_000)).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], left) {
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

    fn with(tool: Tool, program: &str) -> Commands {
        Commands { found: [(tool, PathBuf::from(program))].into(), started: AtomicU64::new(0) }
    }

    #[test]
    fn what_a_program_says_comes_back() {
        let commands = with(Tool::Ip, "/bin/cat");
        let long = "x".repeat(1 << 20);
        assert_eq!(commands.run(Tool::Ip, &["-"], &long, QUICK).unwrap().stdout, long);
        assert_eq!(commands.started(), 1);
        let refusal = commands.run(Tool::Ip, &["/nonsense"], "", QUICK).unwrap_err();
        assert!(matches!(refusal, Error::Unavailable(_)), "{refusal:?}");
        let refusal = refusal.to_string();
        assert!(refusal.starts_with("ip: ") && refusal.contains("No such file"), "{refusal}");
        let refusal = commands.run(Tool::Nft, &[], "", QUICK).unwrap_err().to_string();
        assert!(refusal.contains("Debian package nftables"), "{refusal}");
    }

    #[test]
    fn only_the_first_line_of_a_failure_is_repeated_and_not_at_any_length() {
        let commands = with(Tool::Dnsmasq, "/bin/sh");
        let refusal = |script: &str| {
            let refusal = commands.run(Tool::Dnsmasq, &["-c", script], "", QUICK).unwrap_err();
            assert!(matches!(refusal, Error::Unavailable(_)), "{refusal:?}");
            refusal.to_string()
        };
        assert_eq!(refusal("echo >&2; echo 'dnsmasq: no' >&2; echo more >&2; exit 1"), "dnsmasq: no");
        assert_eq!(
            refusal("printf %5000s x | tr ' ' y >&2; exit 1").len(),
            "dnsmasq: ".len() + LONGEST_WORDS
        );
        assert_eq!(refusal("exit 3"), "dnsmasq: exit status: 3");
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let commands = with(Tool::Ping, "/bin/sleep");
        let refusal = commands.run(Tool::Ping, &["600"], "", Duration::from_millis(50)).unwrap_err();
        assert!(refusal.to_string().contains("did not end"), "{refusal}");
    }

    #[test]
    fn the_line_of_a_batch_that_failed_is_named() {
        let input = "link add a type bridge\nlink set b up\n";
        assert_eq!(culprit(input, &["Cannot find device \"b\"", "Command failed -:2"]), "link set b up");
        assert_eq!(culprit(input, &["Command failed -:9"]), "");
    }
}
