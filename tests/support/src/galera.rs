//! Three MariaDB servers that replicate synchronously.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use nix::unistd::getuid;

use crate::free_port;
use crate::mariadb::{MariaDb, START_TIMEOUT, create_directory, install, server_arguments, wait};

const PROVIDER: &str = "/usr/lib/galera/libgalera_smm.so";
const SERVERS: usize = 3;
/// How often a server is started again with its data.
const MAX_RESTARTS: usize = 2;

/// Failures are detected as fast as docs/hosts.md recommends. A killed server returns as a new member: with the identity of
/// its predecessor it would be rejected, and end, until the others have excluded that.
const PROVIDER_OPTIONS: &str = "pc.recovery=no;gcache.size=32M;evs.keepalive_period=PT0.5S;evs.suspect_timeout=PT2S;evs.inactive_timeout=PT4S;evs.inactive_check_period=PT0.25S";

/// Three servers in one network namespace.
#[derive(Debug)]
pub struct Galera {
    address: String,
    servers: Vec<MariaDb>,
}

impl Galera {
    /// Starts servers that listen on an address, or returns `None` when Galera is not installed.
    ///
    /// # Panics
    /// When it is installed but does not start.
    #[must_use]
    pub fn start(address: &str) -> Option<Self> {
        let has = |program: &str| {
            Command::new(program).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
        };
        if !Path::new(PROVIDER).exists() || !has("rsync") || !has("lsof") {
            return None;
        }
        let temporary = std::env::temp_dir();
        let mut directories = vec![install(&temporary)?];
        for _ in 1..SERVERS {
            let directory = create_directory(&temporary);
            std::fs::create_dir(directory.path().join("data")).expect("a directory");
            directories.push(directory);
        }
        give_to_user(&directories.iter().map(tempfile::TempDir::path).collect::<Vec<_>>());
        let ports: Vec<u16> = (0..SERVERS).map(|_| free_port()).collect();
        let peers: Vec<String> = ports.iter().map(|port| format!("{address}:{port}")).collect();
        let peers = peers.join(",");
        let mut servers = Vec::new();
        for (directory, port) in directories.into_iter().zip(ports) {
            let (transfer, increment) = (free_port(), free_port());
            let provider_options = format!(
                "gmcast.listen_addr=tcp://{address}:{port};ist.recv_addr={address}:{increment};{PROVIDER_OPTIONS}"
            );
            let mut arguments = vec![
                "--wsrep-on=ON".into(),
                format!("--wsrep-provider={PROVIDER}"),
                "--wsrep-cluster-name=muster".into(),
                format!("--wsrep-cluster-address=gcomm://{peers}"),
                format!("--wsrep-node-address={address}"),
                format!("--wsrep-provider-options={provider_options}"),
                "--wsrep-sst-method=rsync".into(),
                format!("--wsrep-sst-receive-address={address}:{transfer}"),
                "--binlog-format=ROW".into(),
                "--innodb-autoinc-lock-mode=2".into(),
                format!("--bind-address={address}"),
            ];
            arguments.extend(user_option());
            let once = if servers.is_empty() { vec!["--wsrep-new-cluster".to_owned()] } else { vec![] };
            let server = MariaDb::spawn(directory, arguments, &once)?;
            wait_until_synced(&server);
            servers.push(server);
        }
        Some(Self { address: address.to_owned(), servers })
    }

    /// Returns a server, from 0 on.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn server(&self, number: usize) -> &MariaDb {
        &self.servers[number]
    }

    /// The number of servers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.servers.len()
    }

    /// Returns the URL of a database, with all servers in order.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        let addresses: Vec<String> =
            self.servers.iter().map(|server| format!("{}:{}", self.address, server.port())).collect();
        format!("mysql://root@{}/{database}", addresses.join(","))
    }

    /// Kills a server with SIGKILL, for [`restart`](Self::restart).
    pub fn kill(&mut self, number: usize) {
        self.servers[number].kill();
    }

    /// Starts a killed server again and waits until it has all data. Must be called in its network namespace.
    ///
    /// # Panics
    /// When it does not start.
    pub fn restart(&mut self, number: usize) {
        for _ in 0..MAX_RESTARTS {
            // Without a position the server copies all data.
            let position = self.recovered_position(number);
            let once: Vec<String> =
                position.map(|text| format!("--wsrep-start-position={text}")).into_iter().collect();
            let server = &mut self.servers[number];
            server.respawn(&once);
            if is_synced_in_time(server) {
                return;
            }
            println!("server {number} ended: {}", server.log());
            server.keep();
        }
        // What an operator does with a server that does not start.
        let server = &mut self.servers[number];
        let data = server.directory().join("data");
        std::fs::remove_dir_all(&data).expect("a directory");
        std::fs::create_dir(&data).expect("a directory");
        give_to_user(&[&data]);
        server.respawn(&[]);
        wait_until_synced(server);
    }

    /// Waits until a server has all data, and starts it again if it has ended. Must be called in its network namespace.
    ///
    /// # Panics
    /// When it does not start.
    pub fn repair(&mut self, number: usize) {
        let server = &mut self.servers[number];
        if !is_synced_in_time(server) {
            println!("server {number} ended: {}", server.log());
            server.keep();
            self.restart(number);
        }
    }

    /// Reads up to where a killed server has the data, so that it only needs what is missing.
    fn recovered_position(&self, number: usize) -> Option<String> {
        let server = &self.servers[number];
        let output = Command::new("mariadbd")
            .args(server_arguments(server.directory(), server.port()))
            .args(user_option())
            .args(["--wsrep-on=ON", &format!("--wsrep-provider={PROVIDER}"), "--wsrep-recover"])
            // Required, but not used.
            .args(["--wsrep-cluster-address=gcomm://", "--binlog-format=ROW"])
            .output()
            .expect("mariadbd");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let position = text.lines().find_map(|line| line.split_once("Recovered position:"));
        position.map(|(_, position)| position.trim().to_owned())
    }
}

/// Waits until a server has all data.
fn wait_until_synced(server: &MariaDb) {
    assert!(is_synced_in_time(server), "a server ended: {}", server.log());
}

/// Waits until a server has all data, or returns `false` when it has ended.
fn is_synced_in_time(server: &MariaDb) -> bool {
    let sql = "SHOW STATUS WHERE Variable_name IN ('wsrep_local_state_comment', 'wsrep_cluster_status')";
    let started = Instant::now();
    loop {
        let rows = server.query(sql).unwrap_or_default();
        if rows.contains("Synced") && rows.lines().any(|row| row.ends_with("\tPrimary")) {
            return true;
        }
        if server.has_ended() {
            return false;
        }
        assert!(started.elapsed() < START_TIMEOUT, "a server is not synchronized: {}", server.log());
        wait(std::time::Duration::from_millis(50));
    }
}

/// Servers of root run as another user, because the rsync that moves data between them does not write as root.
fn user_option() -> Option<String> {
    getuid().is_root().then(|| "--user=mysql".into())
}

/// Lets the user of the servers reach and own their directories.
fn give_to_user(directories: &[&Path]) {
    if !getuid().is_root() {
        return;
    }
    let parent = std::env::temp_dir();
    let mode = std::fs::metadata(&parent).expect("a directory").permissions().mode();
    std::fs::set_permissions(&parent, PermissionsExt::from_mode(mode | 0o011)).expect("a directory");
    let given = Command::new("chown").args(["-R", "mysql"]).args(directories).status();
    assert!(given.expect("chown").success(), "failed to change the owner of a directory");
}
