//! Processes: a shell for a command line, and the end of all that it started.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

use crate::port::pause;
use crate::spool::Sink;

/// What tells the processes of one command from all others, whatever they do: they inherit it.
const MARK: &str = "MUSTER_AGENT";
/// How long it is waited for the rest of the output when the shell has ended and others still could write.
const REST: Duration = Duration::from_millis(200);
/// How long processes have between being asked to end and being ended.
const GRACE: Duration = Duration::from_secs(2);
/// How often it is looked whether they have; less often when they do not even end when they are ended.
const LOOK: Duration = Duration::from_millis(20);
const LOOK_LESS: Duration = Duration::from_millis(500);
/// What has not ended by then waits for a device that does not answer, and will when it does.
const GIVE_UP: Duration = Duration::from_secs(30);
/// What threads need that do little.
const STACK: usize = 256 << 10;

/// Starts a thread that is not waited for.
pub(crate) fn start(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().stack_size(STACK).spawn(work).map(drop)
}

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// In ticks since the guest booted.
    pub(crate) start: u64,
}

/// A line of `/proc/…/stat`.
struct Stat {
    process: Process,
    parent: i32,
    group: i32,
    is_dead: bool,
}

impl Stat {
    fn read(pid: i32) -> Option<Self> {
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The second field is a name of anything, in brackets.
        let after = text.iter().rposition(|byte| *byte == b')')? + 1;
        let text = String::from_utf8_lossy(&text[after..]);
        let fields: Vec<_> = text.split_ascii_whitespace().collect();
        Some(Self {
            process: Process { pid, start: fields.get(19)?.parse().ok()? },
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            is_dead: matches!(*fields.first()?, "Z" | "X"),
        })
    }
}

impl Process {
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Stat::read(pid).map(|stat| stat.process)
    }
}

/// The shell of a command and all that it started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Family {
    /// The value of [`MARK`] that only these have.
    pub(crate) mark: String,
    /// The shell, as soon as there is one.
    pub(crate) shell: Option<Process>,
}

impl Family {
    pub(crate) fn new() -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let own = Process::of(own());
        let start = own.map_or(0, |process| process.start);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Self { mark: format!("{}-{start}-{number}", std::process::id()), shell: None }
    }

    /// Starts the shell.
    pub(crate) fn start(&mut self, line: &str, output: fn() -> Stdio) -> io::Result<Child> {
        // What begins with a dash would be taken for an option.
        let space = if line.starts_with(['-', '+']) { " " } else { "" };
        let mut command = Command::new("/bin/sh");
        // It begins in `/`, where the agent is; asked for a folder, the library would copy the agent's memory first.
        command.arg("-c").arg(format!("{space}{line}")).env(MARK, &self.mark).process_group(0);
        for (name, default) in
            [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root")]
        {
            if std::env::var_os(name).is_none() {
                command.env(name, default);
            }
        }
        command.stdin(Stdio::null()).stdout(output()).stderr(output());
        // The agent waits for signals that others must not ignore, and what it starts ignores what this thread does. A
        // signal in between ends the agent at once, which is what it asks for.
        let before = SigSet::thread_get_mask();
        _ = SigSet::empty().thread_set_mask();
        let child = command.spawn();
        if let Ok(before) = before {
            _ = before.thread_set_mask();
        }
        let child = child?;
        self.shell = i32::try_from(child.id()).ok().and_then(Process::of);
        Ok(child)
    }

    /// Ends all of them and returns when they are gone, or nothing more can be done.
    pub(crate) fn end(&self) {
        let mut known: HashSet<_> = self.shell.into_iter().collect();
        let begin = Instant::now();
        let mut asked = HashSet::new();
        loop {
            let living = self.living(&mut known);
            if living.is_empty() || begin.elapsed() >= GIVE_UP {
                return;
            }
            let is_late = begin.elapsed() >= GRACE;
            for process in living {
                let signal = if is_late { Signal::SIGKILL } else { Signal::SIGTERM };
                if is_late || asked.insert(process) {
                    let pid = Pid::from_raw(process.pid);
                    _ = kill(pid, signal);
                    // One that is stopped would not notice.
                    _ = kill(pid, Signal::SIGCONT);
                }
            }
            pause(if begin.elapsed() >= GRACE * 2 { LOOK_LESS } else { LOOK });
        }
    }

    /// Who lives of them: those with the mark, of the shell's group, and what any of them started. Those that were
    /// found before are known.
    fn living(&self, known: &mut HashSet<Process>) -> Vec<Process> {
        let own = own();
        let all: Vec<_> = fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid| *pid != own && *pid != 1)
            .filter_map(Stat::read)
            .collect();
        // While the shell is there, its number is that of its group.
        let is_there = |shell: &Process| all.iter().any(|stat| stat.process == *shell);
        let group = self.shell.filter(is_there).map(|shell| shell.pid);
        for stat in &all {
            if group == Some(stat.group) || self.is_marked(stat.process.pid) {
                known.insert(stat.process);
            }
        }
        loop {
            let before = known.len();
            let members = all.iter().map(|stat| stat.process).filter(|process| known.contains(process));
            let pids: HashSet<_> = members.map(|process| process.pid).collect();
            known.extend(all.iter().filter(|stat| pids.contains(&stat.parent)).map(|stat| stat.process));
            if known.len() == before {
                break;
            }
        }
        let living = all.iter().filter(|stat| !stat.is_dead && known.contains(&stat.process));
        living.map(|stat| stat.process).collect()
    }

    fn is_marked(&self, pid: i32) -> bool {
        let mark = format!("{MARK}={}", self.mark);
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    }
}

fn own() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(0)
}

/// What a shell would say of it.
pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Takes what a command writes until it has ended.
pub(crate) fn follow(mut child: Child, sinks: &mut [Sink; 2]) -> io::Result<i32> {
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let (ended, end) = io::pipe()?;
    let waiter = thread::Builder::new().stack_size(STACK).spawn(move || {
        let status = child.wait();
        drop(end);
        status
    })?;
    let mut buffer = vec![0; 64 << 10];
    let mut last = None;
    let [first, second] = sinks;
    loop {
        let left = last.map(|last: Instant| last.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) || (left.is_some() && stdout.is_none() && stderr.is_none()) {
            break;
        }
        let timeout = left.map_or(PollTimeout::NONE, |left| {
            PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::ZERO)
        });
        let waited = [
            stdout.as_ref().map(AsFd::as_fd),
            stderr.as_ref().map(AsFd::as_fd),
            last.is_none().then(|| ended.as_fd()),
        ];
        let [can_stdout, can_stderr, has_ended] = ready(&waited, timeout);
        if can_stdout && take(&mut stdout, &mut buffer, first).is_none() {
            stdout = None;
        }
        if can_stderr && take(&mut stderr, &mut buffer, second).is_none() {
            stderr = None;
        }
        if has_ended {
            last = Some(Instant::now() + REST);
        }
    }
    waiter.join().map_err(|_| io::Error::other("nobody waited for the shell"))?.map(code)
}

/// Which of these can be read, or have ended.
fn ready(fds: &[Option<BorrowedFd>; 3], timeout: PollTimeout) -> [bool; 3] {
    let mut polled: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    if poll(&mut polled, timeout).is_err() {
        return [false; 3];
    }
    let mut polled = polled.iter();
    fds.map(|fd| fd.is_some() && polled.next().and_then(PollFd::any).unwrap_or(false))
}

/// Moves what is there; nothing at its end.
fn take(from: &mut Option<impl io::Read>, buffer: &mut [u8], to: &mut Sink) -> Option<()> {
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

/// Runs a program of the guest that says something short, for at most so long.
pub(crate) fn ask(program: &str, arguments: &[&str], time: Duration) -> Option<String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let end = Instant::now() + time;
    let mut output = child.stdout.take()?;
    let mut said = Vec::new();
    let mut buffer = [0; 1024];
    let is_whole = loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let mut fds = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(0) => break false,
            Ok(_) => match output.read(&mut buffer) {
                Ok(0) => break true,
                Ok(count) if said.len() < 16 << 10 => said.extend_from_slice(&buffer[..count]),
                Ok(_) | Err(_) => break false,
            },
            Err(_) => {}
        }
    };
    if !is_whole {
        _ = child.kill();
    }
    _ = child.wait();
    is_whole.then(|| String::from_utf8_lossy(&said).trim().to_owned())
}
