//! Runs shells for command lines and terminates them with all their descendants.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{Pid, getpid};

use crate::os::{sleep, spawn_thread};
use crate::output_file::OutputFile;

/// The option by which the agent starts itself as the first process of a terminal.
pub(crate) const SHELL_OPTION: &str = "--terminal-shell";
/// The environment variable that identifies the processes of a command. They inherit it even if they leave the session.
const MARK_VARIABLE: &str = "MUSTER_AGENT";
/// How long output is read after the shell has exited, while other processes keep its streams open.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// The time between SIGTERM and SIGKILL.
const TERMINATION_GRACE: Duration = Duration::from_secs(2);
/// How often terminating processes are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often processes that survive SIGKILL are checked.
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// When to stop waiting: a process in uninterruptible sleep exits only when its device responds.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum output of a helper program.
const MAX_HELPER_OUTPUT: usize = 16 << 10;

/// A process ID that cannot be confused with a later process of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProcessId {
    pub(crate) pid: i32,
    /// The start time in clock ticks since boot.
    pub(crate) start: u64,
}

/// The used fields of `/proc/PID/stat`.
struct ProcessStat {
    id: ProcessId,
    parent: i32,
    group: i32,
    is_dead: bool,
}

impl ProcessStat {
    fn read(pid: i32) -> Option<Self> {
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The second field is the program's name in parentheses, which may contain anything.
        let after = text.iter().rposition(|byte| *byte == b')')? + 1;
        let text = String::from_utf8_lossy(&text[after..]);
        let fields: Vec<_> = text.split_ascii_whitespace().collect();
        Some(Self {
            id: ProcessId { pid, start: fields.get(19)?.parse().ok()? },
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            is_dead: matches!(*fields.first()?, "Z" | "X"),
        })
    }
}

impl ProcessId {
    fn of(pid: i32) -> Option<Self> {
        ProcessStat::read(pid).map(|stat| stat.id)
    }
}

/// The shell of a command and its descendants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessTree {
    /// The value of [`MARK_VARIABLE`], unique to this command.
    pub(crate) mark: String,
    /// Set once the shell has started.
    pub(crate) shell: Option<ProcessId>,
}

impl ProcessTree {
    pub(crate) fn new() -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let pid = getpid().as_raw();
        // Without /proc there is no start time, and descendants cannot be found anyway.
        let start = ProcessId::of(pid).map_or(0, |id| id.start);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Self { mark: format!("{pid}-{start}-{number}"), shell: None }
    }

    /// Starts the shell.
    pub(crate) fn start(&mut self, command_line: &str, output: fn() -> Stdio) -> io::Result<Child> {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(shell_line(command_line)).process_group(0);
        command.stdin(Stdio::null()).stdout(output()).stderr(output());
        self.spawn(command)
    }

    /// Starts the shell in a terminal, of which `shell_end` is its end.
    pub(crate) fn start_in_terminal(
        &mut self,
        command_line: &str,
        term: &str,
        shell_end: OwnedFd,
    ) -> io::Result<Child> {
        // Also if the agent's file was replaced.
        let mut command = Command::new("/proc/self/exe");
        command.arg(SHELL_OPTION).arg(command_line).env("TERM", term);
        command.stdin(shell_end.try_clone()?).stdout(shell_end.try_clone()?).stderr(shell_end);
        self.spawn(command)
    }

    fn spawn(&mut self, mut command: Command) -> io::Result<Child> {
        // The agent's working directory is already `/`. Setting it here would make the library use fork, which copies
        // the agent's page tables, instead of posix_spawn.
        command.env(MARK_VARIABLE, &self.mark);
        for (name, default) in
            [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root")]
        {
            if std::env::var_os(name).is_none() {
                command.env(name, default);
            }
        }
        // The child inherits this thread's signal mask, which blocks the signals that the agent waits for, so they are
        // unblocked meanwhile. A signal in between terminates the agent, which is its purpose.
        let mask = SigSet::thread_get_mask();
        _ = SigSet::empty().thread_set_mask();
        let child = command.spawn();
        if let Ok(mask) = mask {
            _ = mask.thread_set_mask();
        }
        let child = child?;
        self.shell = ProcessId::of(child.id().cast_signed());
        Ok(child)
    }

    /// Terminates all processes. Returns when they have exited, or after [`TERMINATION_TIMEOUT`].
    pub(crate) fn terminate(&self) {
        let mut known: HashSet<_> = self.shell.into_iter().collect();
        let begin = Instant::now();
        let mut signalled = HashSet::new();
        loop {
            let living = self.living(&mut known);
            if living.is_empty() || begin.elapsed() >= TERMINATION_TIMEOUT {
                return;
            }
            let is_grace_over = begin.elapsed() >= TERMINATION_GRACE;
            for process in living {
                let signal = if is_grace_over { Signal::SIGKILL } else { Signal::SIGTERM };
                if is_grace_over || signalled.insert(process) {
                    let pid = Pid::from_raw(process.pid);
                    _ = kill(pid, signal);
                    // A stopped process does not handle SIGTERM.
                    _ = kill(pid, Signal::SIGCONT);
                }
            }
            let is_slow = begin.elapsed() >= TERMINATION_GRACE * 2;
            sleep(if is_slow { SLOW_POLL_INTERVAL } else { POLL_INTERVAL });
        }
    }

    /// Returns the living processes: those with the mark, those in the shell's process group, and their descendants.
    /// `known` keeps the processes of earlier calls, whose parents may have exited since.
    fn living(&self, known: &mut HashSet<ProcessId>) -> Vec<ProcessId> {
        let own_pid = getpid().as_raw();
        let all: Vec<_> = fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid| *pid != own_pid && *pid != 1)
            .filter_map(ProcessStat::read)
            .collect();
        // The process group's ID may be reused once the shell has exited.
        let exists = |shell: &ProcessId| all.iter().any(|stat| stat.id == *shell);
        let group = self.shell.filter(exists).map(|shell| shell.pid);
        for stat in &all {
            if group == Some(stat.group) || self.is_marked(stat.id.pid) {
                known.insert(stat.id);
            }
        }
        loop {
            let before = known.len();
            let members = all.iter().map(|stat| stat.id).filter(|id| known.contains(id));
            let pids: HashSet<_> = members.map(|id| id.pid).collect();
            known.extend(all.iter().filter(|stat| pids.contains(&stat.parent)).map(|stat| stat.id));
            if known.len() == before {
                break;
            }
        }
        all.iter().filter(|stat| !stat.is_dead && known.contains(&stat.id)).map(|stat| stat.id).collect()
    }

    fn is_marked(&self, pid: i32) -> bool {
        let mark = format!("{MARK_VARIABLE}={}", self.mark);
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    }
}

/// Returns a command line as an argument of the shell, which would parse a leading dash or plus as an option.
pub(crate) fn shell_line(command_line: &str) -> String {
    let space = if command_line.starts_with(['-', '+']) { " " } else { "" };
    format!("{space}{command_line}")
}

/// Returns the exit code as a shell reports it: 128 plus the signal's number for a process killed by a signal.
pub(crate) fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| {
        128 + status.signal().expect("wait returns only processes that exited or were killed by a signal")
    })
}

/// Stores the output of a command until it has exited, and returns its exit code.
pub(crate) fn collect_output(mut child: Child, outputs: &mut [OutputFile; 2]) -> io::Result<i32> {
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let (exited, exit_signal) = io::pipe()?;
    let waiter = spawn_thread(move || {
        let status = child.wait();
        drop(exit_signal);
        status
    })?;
    let mut buffer = vec![0; 64 << 10];
    let mut deadline = None;
    let [stdout_file, stderr_file] = outputs;
    loop {
        let remaining = deadline.map(|deadline: Instant| deadline.saturating_duration_since(Instant::now()));
        if remaining == Some(Duration::ZERO) || (remaining.is_some() && stdout.is_none() && stderr.is_none())
        {
            break;
        }
        let timeout = remaining
            .map_or(PollTimeout::NONE, |remaining| poll_timeout(remaining + Duration::from_millis(1)));
        let fds = [
            stdout.as_ref().map(AsFd::as_fd),
            stderr.as_ref().map(AsFd::as_fd),
            deadline.is_none().then(|| exited.as_fd()),
        ];
        let [is_stdout_ready, is_stderr_ready, has_exited] = poll_readable(&fds, timeout);
        if is_stdout_ready && copy_available(&mut stdout, &mut buffer, stdout_file).is_none() {
            stdout = None;
        }
        if is_stderr_ready && copy_available(&mut stderr, &mut buffer, stderr_file).is_none() {
            stderr = None;
        }
        if has_exited {
            deadline = Some(Instant::now() + OUTPUT_DRAIN_TIMEOUT);
        }
    }
    waiter.join().map_err(|_| io::Error::other("failed to wait for the shell"))?.map(exit_code)
}

fn poll_timeout(duration: Duration) -> PollTimeout {
    PollTimeout::try_from(duration).expect("all timeouts are a few seconds")
}

/// Waits until a file descriptor is readable or closed, and returns which ones are.
fn poll_readable(fds: &[Option<BorrowedFd>; 3], timeout: PollTimeout) -> [bool; 3] {
    let mut polled: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    if poll(&mut polled, timeout).is_err() {
        return [false; 3];
    }
    let mut polled = polled.iter();
    fds.map(|fd| fd.is_some() && polled.next().and_then(PollFd::any).unwrap_or(false))
}

/// Reads once and stores the data. Returns `None` at the end of the stream.
fn copy_available(from: &mut Option<impl io::Read>, buffer: &mut [u8], to: &mut OutputFile) -> Option<()> {
    match from.as_mut()?.read(buffer) {
        Ok(0) => None,
        Ok(count) => {
            to.write(&buffer[..count]);
            Some(())
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Some(()),
        Err(_) => None,
    }
}

/// Runs a program of the guest and returns its trimmed output, or `None` if it fails to start, exceeds the timeout or
/// writes too much. The exit code does not matter.
pub(crate) fn helper_output(program: &str, arguments: &[&str], timeout: Duration) -> Option<String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let deadline = Instant::now() + timeout;
    let mut stdout = child.stdout.take()?;
    let mut output = Vec::new();
    let mut buffer = [0; 1024];
    let is_complete = loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, poll_timeout(remaining)) {
            Ok(0) => break false,
            Ok(_) => match stdout.read(&mut buffer) {
                Ok(0) => break true,
                Ok(count) if output.len() < MAX_HELPER_OUTPUT => output.extend_from_slice(&buffer[..count]),
                Ok(_) | Err(_) => break false,
            },
            Err(_) => {}
        }
    };
    if !is_complete {
        _ = child.kill();
    }
    _ = child.wait();
    is_complete.then(|| String::from_utf8_lossy(&output).trim().to_owned())
}
