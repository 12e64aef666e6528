//! A MariaDB of our own, in a folder that goes away with it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::server::{free_address, stop};

const PATIENCE: Duration = Duration::from_secs(60);
/// The empty databases that it begins with.
const DATABASES: [&str; 2] = ["bench", "bench_spooling"];

/// A running MariaDB. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct MariaDb {
    process: Child,
    /// `DATABASE_URL` of each of its databases.
    pub(crate) urls: [String; 2],
}

impl MariaDb {
    /// Starts one below `folder`. `None`: it is not installed.
    pub(crate) async fn start(folder: &Path) -> anyhow::Result<Option<Self>> {
        let (Some(install), Some(program)) = (find("mariadb-install-db"), find("mariadbd")) else {
            return Ok(None);
        };
        let (data, log) = (folder.join("mariadb"), folder.join("mariadb.log"));
        // As root it refuses to run unless told to; as anyone else it needs no telling.
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
        let said = String::from_utf8_lossy(&installed.stderr).into_owned();
        ensure!(installed.status.success(), "mariadb-install-db: {said}");

        let first = folder.join("first.sql");
        std::fs::write(&first, DATABASES.map(|name| format!("CREATE DATABASE {name};\n")).concat())?;
        let address = free_address()?;
        let mut process = Command::new(program)
            .arg("--no-defaults")
            .args(user)
            .arg(data_dir)
            .arg(format!("--socket={}", folder.join("mariadb.sock").display()))
            .arg(format!("--pid-file={}", folder.join("mariadb.pid").display()))
            .arg(format!("--init-file={}", first.display()))
            .arg(format!("--port={}", address.port()))
            .args(["--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M", "--performance-schema=OFF"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            // It greets first.
            if let Ok(mut stream) = TcpStream::connect(address).await
                && stream.read_u8().await.is_ok()
            {
                let urls = DATABASES.map(|name| format!("mysql://root@{address}/{name}"));
                return Ok(Some(Self { process, urls }));
            }
            if process.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("mariadbd does not answer: {}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        stop(self.process).await.context("stopping MariaDB")
    }
}

/// A program, also where only root looks for it.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.push("/usr/sbin".into());
    folders.into_iter().map(|folder| folder.join(program)).find(|path| path.is_file())
}
