//! Resources that a daemon must release: unfinished operations, processes and job directories.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use rusqlite::{Connection, OpenFlags};

const UNFINISHED_OPERATIONS: &str =
    "SELECT name, target_type, target_id FROM operations WHERE state IN ('queued', 'executing')";

/// Programs that keep running while the daemon restarts. Clusters of hosts check that they end with their object.
const PERSISTENT_PROGRAMS: [&str; 3] = ["qemu-system", "dnsmasq", "muster watchdog"];

/// Returns the unfinished operations in a database; none when it cannot be read, since tests also break databases.
pub(crate) fn unfinished_operations(database_url: &str) -> Vec<String> {
    match database_url.strip_prefix("sqlite:") {
        Some(path) => query_sqlite(path).unwrap_or_default(),
        None => query_mariadb(database_url).unwrap_or_default(),
    }
}

fn query_sqlite(path: &str) -> rusqlite::Result<Vec<String>> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    connection.busy_timeout(std::time::Duration::from_secs(10))?;
    let mut statement = connection.prepare(UNFINISHED_OPERATIONS)?;
    let column = |row: &rusqlite::Row<'_>, index| row.get::<_, String>(index);
    statement
        .query_map([], |row| Ok([column(row, 0)?, column(row, 1)?, column(row, 2)?].join(" ")))?
        .collect()
}

/// Queries with the command line client. The URL has the form of [`database_url`](crate::database_url).
fn query_mariadb(url: &str) -> Option<Vec<String>> {
    let (server, name) = url.strip_prefix("mysql://root@127.0.0.1:")?.split_once('/')?;
    let name = name.split('?').next()?;
    let mut command = Command::new("mariadb");
    command.args(["--no-defaults", "--user=root", "--batch", "--skip-column-names"]);
    match url.split_once("?socket=") {
        Some((_, socket)) => command.arg(format!("--socket={socket}")),
        None => command.args(["--host=127.0.0.1", &format!("--port={server}")]),
    };
    let output = command.args([name, "-e", UNFINISHED_OPERATIONS]).output().expect("the mariadb client runs");
    output.status.success().then(|| lines(&output.stdout))
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect()
}

/// A process, with its start time because process IDs are reused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pid: u32,
    parent: u32,
    group: u32,
    started: u64,
    command_line: String,
}

/// Returns the processes of a daemon: its descendants and its process group, without itself and programs that are meant
/// to keep running.
pub(crate) fn processes_of(daemon: u32) -> Vec<Process> {
    let all = processes();
    let mut tree = BTreeSet::from([daemon]);
    loop {
        let size = tree.len();
        tree.extend(
            all.iter()
                .filter(|process| tree.contains(&process.parent))
                .map(|process| process.pid)
                .collect::<Vec<_>>(),
        );
        if tree.len() == size {
            break;
        }
    }
    let is_persistent =
        |process: &Process| PERSISTENT_PROGRAMS.iter().any(|name| process.command_line.contains(name));
    all.into_iter()
        .filter(|process| process.pid != daemon && (process.group == daemon || tree.contains(&process.pid)))
        .filter(|process| !is_persistent(process))
        .collect()
}

/// Returns those of the processes that still run.
pub(crate) fn still_running(processes: &[Process]) -> Vec<String> {
    let is_running =
        |process: &&Process| read_process(process.pid).is_some_and(|now| now.started == process.started);
    let describe = |process: &Process| format!("process {}: {}", process.pid, process.command_line);
    processes.iter().filter(is_running).map(describe).collect()
}

fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| read_process(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// Reads a process from `/proc`; `None` when it has exited.
fn read_process(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain spaces; the state follows it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    let command_line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(Process {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
        command_line: String::from_utf8_lossy(&command_line).replace('\0', " ").trim().to_owned(),
    })
}

/// Returns the job directories below the data directory of a daemon.
pub fn job_directories(data: &Path) -> Vec<String> {
    let entries =
        |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let simulated = entries(&data.join("simulated"));
    let storages = simulated.chain([data.to_owned()]);
    let jobs = storages.flat_map(|storage| entries(&storage.join("work")).collect::<Vec<_>>());
    jobs.map(|job| format!("job directory {}", job.display())).collect()
}
