//! A temporary MariaDB server.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::server::{cpu_of, free_address, stop};

/// The timeout for starting.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The databases it is created with.
const DATABASES: [&str; 2] = ["bench", "bench_spooling"];

/// A running MariaDB, killed on drop.
#[derive(Debug)]
pub(crate) struct MariaDb {
    process: Child,
    /// The `DATABASE_URL` of each database.
    pub(crate) urls: [String; 2],
}

impl MariaDb {
    /// Starts a server with its data in `directory`. Returns `None` if MariaDB is not installed.
    pub(crate) async fn start(directory: &Path) -> anyhow::Result<Option<Self>> {
        let (Some(install), Some(program)) = (find_program("mariadb-install-db"), find_program("mariadbd"))
        else {
            return Ok(None);
        };
        let (data, log) = (directory.join("mariadb"), directory.join("mariadb.log"));
        // MariaDB refuses to run as root without this option.
        let user = nix::unistd::geteuid().is_root().then_some("--user=root");
        let data_dir = format!("--datadir={}", data.display());
        let installed = Command::new(install)
            .arg("--no-defaults")
            .args(user)
            .args([data_dir.as_str(), "--auth-root-authentication-method=normal", "--skip-test-db"])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await?;
        let log_text = String::from_utf8_lossy(&installed.stderr).into_owned();
        ensure!(installed.status.success(), "mariadb-install-db: {log_text}");

        let init_file = directory.join("first.sql");
        std::fs::write(&init_file, DATABASES.map(|name| format!("CREATE DATABASE {name};\n")).concat())?;
        let address = free_address()?;
        let mut process = Command::new(program)
            .arg("--no-defaults")
            .args(user)
            .arg(data_dir)
            .arg(format!("--socket={}", directory.join("mariadb.sock").display()))
            .arg(format!("--pid-file={}", directory.join("mariadb.pid").display()))
            .arg(format!("--init-file={}", init_file.display()))
            .arg(format!("--port={}", address.port()))
            .args(["--bind-address=127.0.0.1", "--innodb-buffer-pool-size=256M", "--performance-schema=OFF"])
            .arg("--max-connections=1000")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // The server sends its greeting first.
            if let Ok(mut stream) = TcpStream::connect(address).await
                && stream.read_u8().await.is_ok()
            {
                let urls = DATABASES.map(|name| format!("mysql://root@{address}/{name}"));
                return Ok(Some(Self { process, urls }));
            }
            if process.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("mariadbd failed to start: {}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the CPU time of the server.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let pid = self.process.id().context("MariaDB has exited")?;
        cpu_of(Pid::from_raw(i32::try_from(pid)?))
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        stop(self.process).await.context("failed to stop MariaDB")
    }
}

/// Returns the path of a program, which may be outside the PATH of unprivileged users.
fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
    directories.push("/usr/sbin".into());
    directories.into_iter().map(|directory| directory.join(program)).find(|path| path.is_file())
}
