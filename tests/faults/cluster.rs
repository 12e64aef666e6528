//! Three hosts, a database and a client on one switch, and a second switch outside.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use muster_testing::{NetworkNamespace, wait, wait_for};
use serde_json::Value;

use crate::client::Client;
use crate::database::Database;
use crate::full_disk::mount_disk;
use crate::host::FaultHost;

pub(crate) const SYSTEM_KEY: &str = "the first key";
const DATABASE_ADDRESS: &str = "10.99.0.100";
pub(crate) const CLIENT_ADDRESS: &str = "10.99.0.200";
/// The address of the active network node outside, and of the observer there.
pub(crate) const VIRTUAL_ADDRESS: &str = "198.51.100.9";
pub(crate) const OBSERVER_ADDRESS: &str = "198.51.100.1";
/// The longest time after a fault until everything works again.
pub(crate) const HEAL_TIMEOUT: Duration = Duration::from_secs(120);

/// What is reported of a round.
const SLOW_HEALING: Duration = Duration::from_secs(8);

/// A cluster whose parts can fail.
#[derive(Debug)]
pub(crate) struct FaultCluster {
    pub(crate) hosts: Vec<FaultHost>,
    pub(crate) client: Client,
    pub(crate) database: Database,
    /// A host outside, which observes addresses.
    pub(crate) observer: NetworkNamespace,
    mesh: NetworkNamespace,
    outside: NetworkNamespace,
}

/// Which packets of a host are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    FromHost,
    ToHost,
    Both,
}

/// To whom the lost packets belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    Database,
    /// Everything but the database.
    Mesh,
}

fn create_switch(name: &str) -> NetworkNamespace {
    let switch = NetworkNamespace::new(name);
    switch.sh("ip link add switch type bridge && ip link set switch up");
    switch.sh("nft 'add table bridge faults; add chain bridge faults lost { type filter hook forward priority 0; }'");
    switch
}

/// Creates a namespace with an address on a switch.
fn attach(switch: &NetworkNamespace, name: &str, address: &str) -> NetworkNamespace {
    let namespace = NetworkNamespace::new(name);
    switch.connect(name, &namespace, "eth0");
    switch.sh(&format!("ip link set {name} master switch up"));
    namespace.sh(&format!("ip link set eth0 up && ip addr add {address}/24 dev eth0"));
    namespace
}

impl FaultCluster {
    /// Starts a cluster, or returns `None` when its database is not installed.
    pub(crate) fn start(
        count: usize,
        image: &str,
        is_galera: bool,
        settings: &[(&str, &str)],
    ) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap().keep();
        // Namespaces have the file systems that are mounted before.
        mount_disk(&directory.join("database"));
        let virtual_address = format!("{VIRTUAL_ADDRESS}/24");
        let mut all = vec![
            ("SYSTEM_KEY", SYSTEM_KEY),
            ("AUTH_SECRET_SEED", "the seed of the whole cluster"),
            ("API_TOKEN_DURATION", "1440"),
            ("CPU_OVERCOMMIT_RATIO", "20"),
            ("NODE_DISK_RESERVATION_GB", "0"),
            ("SCHEDULER_DISK_OVERCOMMIT", "100"),
            ("NODE_IS_NETWORK_NODE", "true"),
            ("NETWORK_VIRTUAL_IP", virtual_address.as_str()),
        ];
        all.extend(settings);
        let mut hosts: Vec<_> = (1..=count).map(|number| FaultHost::new(number, &directory, &all)).collect();
        let (mesh, outside) = (create_switch("mesh"), create_switch("outside"));
        let database_namespace = attach(&mesh, "database", DATABASE_ADDRESS);
        let database =
            Database::start(database_namespace, DATABASE_ADDRESS, &directory.join("database"), is_galera);
        let Some(database) = database else {
            muster_testing::skipped(if is_galera { "galera-4, rsync, lsof" } else { "mariadb-server" });
            return None;
        };
        let url = database.url(DATABASE_ADDRESS);
        for host in &mut hosts {
            host.set("DATABASE_URL", &url);
        }
        let client_namespace = attach(&mesh, "client", CLIENT_ADDRESS);
        let observer = attach(&outside, "observer", OBSERVER_ADDRESS);
        let client = Client::new(client_namespace, hosts.iter().map(|host| host.address.clone()).collect());
        let mut cluster = Self { hosts, client, database, observer, mesh, outside };
        let image = format!("tiny={image}");
        cluster.hosts[0].set_arguments(&["--image", &image]);
        for number in 0..count {
            cluster.power_on(number);
        }
        cluster.client.log_in(SYSTEM_KEY);
        wait_for("the image to be published", HEAL_TIMEOUT, || {
            let artifacts = cluster.client.get(0, "/artifacts").ok()?;
            let is_image = |artifact: &Value| artifact["source_url"] == "sf://label/system/tiny";
            artifacts.as_array()?.iter().any(is_image).then_some(())
        });
        Some(cluster)
    }

    pub(crate) fn power_on(&mut self, host: usize) {
        self.hosts[host].power_on(&self.mesh, &self.outside);
    }

    /// Loses packets between a host and others until [`restore_links`](Self::restore_links).
    pub(crate) fn cut(&self, host: usize, link: Link, direction: Direction) {
        let port = self.hosts[host].switch_port("mesh");
        for (matched, peer) in [("iifname", "oifname"), ("oifname", "iifname")] {
            let is_from = matched == "iifname";
            let is_cut = match direction {
                Direction::Both => true,
                Direction::FromHost => is_from,
                Direction::ToHost => !is_from,
            };
            let operator = if link == Link::Database { "==" } else { "!=" };
            if is_cut {
                self.mesh.sh(&format!(
                    "nft 'add rule bridge faults lost {matched} {port} {peer} {operator} database drop'"
                ));
            }
        }
    }

    pub(crate) fn restore_links(&self) {
        self.mesh.sh("nft flush chain bridge faults lost");
    }

    /// Waits until every node is up and no operation is unfinished.
    pub(crate) fn wait_until_healthy(&self) {
        let (began, mut last) = (Instant::now(), None);
        while let Some(problem) = self.problem() {
            let logs = if began.elapsed() > HEAL_TIMEOUT { self.logs() } else { String::new() };
            assert!(logs.is_empty(), "not healthy after {HEAL_TIMEOUT:?}: {problem}\n{logs}");
            last = Some(problem);
            wait(Duration::from_millis(100));
        }
        if let Some(problem) = last.filter(|_| began.elapsed() > SLOW_HEALING) {
            println!("    waited for {:.1?}, at last for: {problem}", began.elapsed());
        }
    }

    /// Returns what does not work yet.
    fn problem(&self) -> Option<String> {
        const UNFINISHED: &str = "SELECT name, target_type, target_id, state, step, attempts, run_after - UNIX_TIMESTAMP(NOW(6)), \
            lease_expires - UNIX_TIMESTAMP(NOW(6)), error_report FROM operations WHERE state IN ('queued', 'executing')";
        for host in 0..self.hosts.len() {
            let nodes = match self.client.get(host, "/nodes") {
                Ok(nodes) => nodes.as_array().cloned().unwrap_or_default(),
                Err(error) => return Some(format!("{}: {error}", self.hosts[host].name)),
            };
            if let Some(down) = nodes.iter().find(|node| node["state"] != "created") {
                return Some(down.to_string());
            }
        }
        match self.database.query(UNFINISHED) {
            Some(rows) => (!rows.is_empty()).then_some(rows),
            None => Some("the database does not respond".into()),
        }
    }

    pub(crate) fn data_directories(&self) -> Vec<PathBuf> {
        self.hosts.iter().map(|host| host.data.clone()).collect()
    }

    pub(crate) fn logs(&self) -> String {
        let tail = |text: String| text.lines().rev().take(30).map(str::to_owned).collect::<Vec<_>>();
        let log = |host: &FaultHost| {
            let mut lines = tail(host.log());
            lines.reverse();
            format!("--- {}\n{}\n", host.name, lines.join("\n"))
        };
        self.hosts.iter().map(log).collect()
    }
}
