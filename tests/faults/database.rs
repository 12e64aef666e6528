//! The database of the cluster: one MariaDB server, or three with Galera.

use std::path::{Path, PathBuf};

use muster_testing::{Galera, MariaDb, NetworkNamespace, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cluster::HEAL_TIMEOUT;
use crate::full_disk::FullDisk;

/// The servers, in a network namespace.
#[derive(Debug)]
pub(crate) struct Database {
    namespace: NetworkNamespace,
    /// `Some` except while one is restarted.
    servers: Option<Servers>,
    name: String,
    /// The file system of a single server.
    directory: PathBuf,
}

#[derive(Debug)]
enum Servers {
    One(Box<MariaDb>),
    Three(Galera),
}

impl Servers {
    fn server(&self, number: usize) -> &MariaDb {
        match self {
            Self::One(server) => server,
            Self::Three(galera) => galera.server(number),
        }
    }
}

impl Database {
    /// Starts servers on an address of a namespace, a single one with its data in `directory`. Returns `None` when they
    /// are not installed.
    pub(crate) fn start(
        namespace: NetworkNamespace,
        address: &'static str,
        directory: &Path,
        is_galera: bool,
    ) -> Option<Self> {
        let directory = directory.to_owned();
        let parent = directory.clone();
        let servers = namespace.run(move || {
            if is_galera {
                return Galera::start(address).map(Servers::Three);
            }
            let server = MariaDb::start_in(&parent, &[&format!("--bind-address={address}")]);
            server.map(|server| Servers::One(Box::new(server)))
        })?;
        // The port of a killed server must not become that of an outgoing connection.
        namespace.sh("echo '10000 30000' >/proc/sys/net/ipv4/ip_local_port_range");
        let server = servers.server(0);
        server.allow_remote_clients();
        let name = server.fresh_database().rsplit('/').next().unwrap().to_owned();
        Some(Self { namespace, servers: Some(servers), name, directory })
    }

    fn servers(&self) -> &Servers {
        self.servers.as_ref().unwrap()
    }

    /// The number of servers.
    pub(crate) fn count(&self) -> usize {
        match self.servers() {
            Servers::One(_) => 1,
            Servers::Three(galera) => galera.count(),
        }
    }

    pub(crate) fn url(&self, address: &str) -> String {
        match self.servers() {
            Servers::One(server) => format!("mysql://root@{address}:{}/{}", server.port(), self.name),
            Servers::Three(galera) => galera.url(&self.name),
        }
    }

    /// Runs a statement in the database of the cluster and returns its rows as text.
    pub(crate) fn query(&self, sql: &str) -> Option<String> {
        // A server that was frozen does not know yet what the others have written.
        let sync = if self.count() > 1 { "SET SESSION wsrep_sync_wait = 1; " } else { "" };
        let sql = format!("{sync}USE {}; {sql}", self.name);
        (0..self.count()).find_map(|number| self.servers().server(number).query(&sql))
    }

    pub(crate) fn kill(&mut self, number: usize) {
        match self.servers.as_mut().unwrap() {
            Servers::One(server) => server.kill(),
            Servers::Three(galera) => galera.kill(number),
        }
    }

    pub(crate) fn restart(&mut self, number: usize) {
        self.change(move |servers| match servers {
            Servers::One(server) => server.restart(),
            Servers::Three(galera) => galera.restart(number),
        });
    }

    /// Changes the servers in their namespace, which new processes inherit.
    fn change(&mut self, change: impl FnOnce(&mut Servers) + Send + 'static) {
        let mut servers = self.servers.take().unwrap();
        self.servers = Some(self.namespace.run(move || {
            change(&mut servers);
            servers
        }));
    }

    /// Waits until every server of Galera has the writes of the others. One that was frozen may have ended because the
    /// others had excluded it.
    pub(crate) fn wait_until_current(&mut self) {
        self.change(|servers| {
            if let Servers::Three(galera) = servers {
                (0..galera.count()).for_each(|number| galera.repair(number));
            }
        });
    }

    pub(crate) fn signal(&self, number: usize, signal: Signal) {
        let pid = self.servers().server(number).pid().unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
    }

    /// Fills the disk of a single server until the result is dropped.
    pub(crate) fn fill(&self) -> FullDisk {
        FullDisk::new(&self.directory)
    }

    /// Waits until a single server works, and starts it again if it ends on its own.
    pub(crate) fn wait_until_usable(&mut self) {
        let mut successes = 0;
        // A server that fails may respond for a while.
        wait_for("the database server", HEAL_TIMEOUT, || {
            if self.servers().server(0).has_ended() {
                println!("the database server ended");
                if let Servers::One(server) = self.servers.as_mut().unwrap() {
                    server.keep();
                }
                self.restart(0);
            }
            successes = if self.query("SELECT 1").is_some() { successes + 1 } else { 0 };
            (successes > 50).then_some(())
        });
    }
}
