//! The node that manages the host it runs on.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muster_types::guest::GuestApi;
use muster_types::ids::{ClusterId, NetworkId, StorageId};
use muster_types::instance::FencingPolicy;
use muster_types::network::{NetworkPlan, NetworkReport, NetworkUsage, PingResult};
use muster_types::node::{
    FoundNetwork, HostFeature, NodeApi, NodeFuture, NodeIdentity, NodeReport, RouterGate,
};
use muster_types::settings::Settings;
use muster_types::shared_storage::SharedStorageRecord;
use muster_types::storage::StorageApi;
use muster_types::time::BootTime;
use muster_types::vm::VmApi;
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, oneshot};

use crate::command::Commands;
use crate::fencing::FencingLease;
use crate::guest::{GuestRegistry, LocalGuests};
use crate::host_checks::{FeatureFacts, StateFacts};
use crate::image::Images;
use crate::network::{self, Networks};
use crate::storage::{FileStorage, SharedStorage};
use crate::vm::{ConsoleArchive, LocalVms, NodeAddress};
use crate::{host, host_checks};

/// The maximum number of concurrent pings; further ones wait.
const MAX_CONCURRENT_PINGS: usize = 16;

/// The node of this host.
#[derive(Debug)]
pub struct LocalNode {
    identity: NodeIdentity,
    storage_dir: PathBuf,
    storage: Arc<FileStorage>,
    vms: LocalVms,
    guests: LocalGuests,
    reserved_memory_mb: u64,
    reserved_disk_gb: f64,
    reserved_cpus: u64,
    networks: Arc<Networks>,
    pings: Arc<Semaphore>,
    features: FeatureFacts,
    missing_features: BTreeMap<HostFeature, String>,
    mesh_nic: String,
    api_url: String,
    console_address: Ipv4Addr,
    /// What happens to VMs whose instances have no policy when the node cannot reach the database.
    fencing: FencingPolicy,
    fencing_lease: Arc<FencingLease>,
}

impl LocalNode {
    /// Creates the node. `id` is persistent across restarts; `storage` is the directory of disks and images;
    /// `api_address` is the address at which the API listens.
    #[must_use]
    pub fn new(
        id: muster_types::ids::NodeId,
        settings: &Settings,
        storage: &Path,
        api_address: IpAddr,
    ) -> Self {
        let or_default =
            |set: &str, default: fn() -> String| if set.is_empty() { default() } else { set.to_owned() };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the value is not negative and far below the range of u64"
        )]
        let reserved_memory_mb = (settings.node_ram_reservation_gb.max(0.0) * 1024.0) as u64;
        let commands = Commands::find();
        let images = Images::new(&commands, settings);
        let missing_images = images.missing_requirement();
        let files = Arc::new(FileStorage::new(storage, images));
        if !settings.shared_storage.is_empty() {
            let path = PathBuf::from(&settings.shared_storage);
            files.set_shared(Some(SharedStorage::new(path, id, false)));
        }
        let name = or_default(&settings.node_name, host::hostname);
        let ip = settings.node_mesh_ip.unwrap_or_else(host::primary_address);
        let guest_registry = Arc::new(GuestRegistry::default());
        let archive = ConsoleArchive::new(storage, settings.archive_instance_console_duration);
        let console_address = console_address(ip, api_address);
        let address = NodeAddress {
            name: &name,
            ip,
            console_address: settings.console_ports.then_some(console_address),
        };
        let fencing_lease = Arc::new(FencingLease::new(storage, Duration::from_secs(settings.fencing_lease)));
        let vms = LocalVms::new(
            storage,
            files.clone(),
            &commands,
            &address,
            guest_registry.clone(),
            archive,
            fencing_lease.clone(),
        );
        let features = FeatureFacts::read(&commands, missing_images, vms.missing_kvm());
        let missing_features = features.limits();
        for (feature, reason) in &missing_features {
            tracing::warn!(%feature, %reason, "host lacks an optional feature");
        }
        Self {
            identity: NodeIdentity {
                id,
                name,
                ip,
                release: format!("muster {}", env!("CARGO_PKG_VERSION")),
                simulated: false,
                is_hypervisor: settings.node_is_hypervisor,
                is_network_node: settings.node_is_network_node,
                is_database_node: settings.node_is_database_node,
            },
            storage_dir: storage.to_owned(),
            storage: files,
            vms,
            guests: LocalGuests::new(guest_registry),
            reserved_memory_mb,
            reserved_disk_gb: settings.node_disk_reservation_gb,
            reserved_cpus: settings.node_cpu_reservation_threads,
            networks: Arc::new(Networks::new(commands.with_own_counter(), settings)),
            pings: Arc::new(Semaphore::new(MAX_CONCURRENT_PINGS)),
            features,
            missing_features,
            mesh_nic: settings.node_mesh_nic.clone(),
            api_url: String::new(),
            console_address,
            fencing: settings.fencing,
            fencing_lease,
        }
    }

    /// Sets the URL at which the daemon serves the API to the other nodes.
    #[must_use]
    pub fn with_api_url(self, url: String) -> Self {
        if let Some(port) = port(&url) {
            self.networks.set_api_port(port);
        }
        Self { api_url: url, ..self }
    }

    /// Returns how many commands were run for networks so far. None are run while all networks are in sync.
    #[must_use]
    pub fn commands_run(&self) -> u64 {
        self.networks.commands().spawn_count()
    }

    /// Runs blocking work on networks.
    fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Networks) -> Result<T> + Send + 'static,
    ) -> NodeFuture<'_, T> {
        let networks = self.networks.clone();
        Box::pin(async move {
            tokio::task::spawn_blocking(move || work(&networks))
                .await
                .map_err(|error| Error::Internal(format!("network task failed: {error}")))?
        })
    }

    fn require_networks(&self) -> Result<()> {
        self.missing_features
            .get(&HostFeature::Networks)
            .map_or(Ok(()), |reason| Err(Error::Conflict(reason.clone())))
    }

    fn inspect_host(&self) -> std::io::Result<NodeReport> {
        let (cpus, load, memory, disk) =
            (host::cpus(), host::load()?, host::memory()?, host::disk_space(&self.storage_dir));
        let (received, sent) = host::network_bytes()?;
        let process = host::process_usage()?;
        let mut resources = role_flags(&self.identity);
        let facts = json!({
            "cpu_max": cpus,
            "cpu_available": cpus,
            "cpu_max_per_instance": cpus,
            "cpu_schedulable": (cpus as u64).saturating_sub(self.reserved_cpus).max(1),
            "cpu_load_1": load[0],
            "cpu_load_5": load[1],
            "cpu_load_15": load[2],
            "memory_max": memory.total,
            "memory_available": memory.available,
            "memory_reserved_mb": self.reserved_memory_mb,
            "disk_total": disk.total,
            "disk_free": disk.free,
            "disk_used": disk.total.saturating_sub(disk.free),
            "disk_reservation_gb": self.reserved_disk_gb,
            "network_read_bytes": received,
            "network_write_bytes": sent,
        });
        let Value::Object(facts) = facts else { unreachable!("the literal is an object") };
        resources.extend(facts);
        resources.extend(self.vms.resources());
        let mesh_mtu = network::mesh_mtu(self.identity.ip, &self.mesh_nic);
        let state = StateFacts::read(&self.storage_dir, self.reserved_disk_gb, self.identity.ip);
        Ok(NodeReport {
            resources,
            process_metrics: process_metrics(process),
            limits: self.missing_features.clone(),
            checks: host_checks::problems(&self.features, &state),
            mesh_mtu: mesh_mtu
                .inspect_err(|error| tracing::warn!(%error, "failed to determine the MTU of the mesh"))
                .ok(),
            api_url: self.api_url.clone(),
            display: self.vms.display_identity(),
            console_address: Some(self.console_address),
            ..NodeReport::default()
        })
    }
}

/// Returns the address of the TCP ports of consoles: the loopback address if the API listens on it too or the host does
/// not have the address of the node, else the latter.
fn console_address(ip: Ipv4Addr, api_address: IpAddr) -> Ipv4Addr {
    if api_address.is_loopback() || TcpListener::bind((ip, 0)).is_err() { Ipv4Addr::LOCALHOST } else { ip }
}

/// Returns the port of a URL.
fn port(url: &str) -> Option<u16> {
    let (scheme, rest) = url.split_once("://")?;
    let host = rest.split('/').next()?;
    // Colons within brackets belong to an IPv6 address.
    match host.rsplit(']').next()?.rsplit_once(':') {
        Some((_, port)) => port.parse().ok(),
        None => {
            [("http", 80), ("https", 443)].into_iter().find(|(name, _)| *name == scheme).map(|(_, port)| port)
        }
    }
}

/// Returns the roles of a node as fields of the `resources` event.
pub(crate) fn role_flags(identity: &NodeIdentity) -> Map<String, Value> {
    let mut flags = Map::new();
    flags.insert("is_hypervisor".into(), identity.is_hypervisor.into());
    flags.insert("is_network_node".into(), identity.is_network_node.into());
    flags.insert("is_database_node".into(), identity.is_database_node.into());
    flags
}

pub(crate) fn process_metrics(process: host::ProcessUsage) -> Map<String, Value> {
    let fraction = if process.age_seconds > 0.0 { process.cpu_seconds / process.age_seconds } else { 0.0 };
    let mut metrics = Map::new();
    metrics.insert("process_cpu_time_muster".into(), process.cpu_seconds.into());
    metrics.insert("process_age_muster".into(), process.age_seconds.into());
    metrics.insert("process_cpu_fraction_muster".into(), fraction.into());
    metrics
}

impl NodeApi for LocalNode {
    fn identity(&self) -> &NodeIdentity {
        &self.identity
    }

    fn report(&self) -> NodeFuture<'_, NodeReport> {
        Box::pin(async {
            // The scheduler must know all VMs that run here.
            self.vms.recovered().await;
            let report = self
                .inspect_host()
                .map_err(|error| Error::Internal(format!("failed to inspect the host: {error}")))?;
            let is_default = self.fencing == FencingPolicy::Own;
            let lease = self.fencing_lease.check(is_default).await;
            Ok(NodeReport {
                fencing_lease: lease.filter(|_| is_default),
                instance_fencing_lease: lease,
                ..report
            })
        })
    }

    fn inspect_shared_storage(
        &self,
        cluster: ClusterId,
        registered: Option<StorageId>,
    ) -> NodeFuture<'_, Option<SharedStorageRecord>> {
        Box::pin(self.storage.inspect_shared(cluster, registered))
    }

    fn renew_fencing_lease(&self, began: BootTime) -> Result<()> {
        self.fencing_lease.renew(began)
    }

    fn end_fencing_lease(&self) -> Result<()> {
        self.fencing_lease.end()
    }

    fn ensure_networks<'a>(&'a self, plans: &'a [NetworkPlan]) -> NodeFuture<'a, Vec<Result<NetworkReport>>> {
        if self.require_networks().is_err() {
            let errors = plans.iter().map(|_| self.require_networks().map(|()| NetworkReport::default()));
            let errors = errors.collect();
            return Box::pin(async { Ok(errors) });
        }
        let plans = plans.to_vec();
        self.blocking(move |networks| networks.ensure(&plans))
    }

    fn set_router_gate(&self, gate: RouterGate) -> NodeFuture<'_, ()> {
        if let Err(error) = self.require_networks() {
            // Such a host has no routers.
            let result = if gate == RouterGate::Closed { Ok(()) } else { Err(error) };
            return Box::pin(async { result });
        }
        self.blocking(move |networks| networks.set_gate(gate))
    }

    fn remove_network(&self, network: FoundNetwork) -> NodeFuture<'_, ()> {
        if self.missing_features.contains_key(&HostFeature::Networks) {
            // There is nothing to remove, unless the host once had the feature.
            let result = if Networks::has_files(network.id) { self.require_networks() } else { Ok(()) };
            return Box::pin(async { result });
        }
        self.blocking(move |networks| networks.remove(network))
    }

    fn list_networks(&self) -> NodeFuture<'_, Vec<FoundNetwork>> {
        if self.missing_features.contains_key(&HostFeature::Networks) {
            return Box::pin(async { Ok(Vec::new()) });
        }
        self.blocking(Networks::find)
    }

    fn ping(&self, network: NetworkId, address: Ipv4Addr) -> NodeFuture<'_, PingResult> {
        Box::pin(async move {
            self.require_networks()?;
            let failed =
                |error: &dyn std::fmt::Display| Error::Internal(format!("ping task failed: {error}"));
            let permit = self.pings.clone().acquire_owned().await.map_err(|error| failed(&error))?;
            let (networks, (sender, receiver)) = (self.networks.clone(), oneshot::channel());
            // On a separate thread, because slow pings would exhaust the blocking pool that reconciles networks. The
            // thread owns the permit, because it continues when the caller gives up.
            let work = move || {
                let result = networks.ping(network, address);
                drop(permit);
                let _ = sender.send(result);
            };
            std::thread::Builder::new().name("ping".into()).spawn(work).map_err(|error| failed(&error))?;
            receiver.await.map_err(|error| failed(&error))?
        })
    }

    fn storage(&self) -> &dyn StorageApi {
        &*self.storage
    }

    fn vms(&self) -> &dyn VmApi {
        &self.vms
    }

    fn guests(&self) -> &dyn GuestApi {
        &self.guests
    }

    fn network_usage(&self, network: FoundNetwork) -> NodeFuture<'_, Option<NetworkUsage>> {
        self.blocking(move |_| Networks::usage(network))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_port_of_a_url() {
        for (url, expected) in [
            ("http://10.0.0.1:13000", Some(13000)),
            ("https://[fd00::1]:13001/x:2", Some(13001)),
            ("https://[fd00::1]", Some(443)),
            ("http://node", Some(80)),
            ("", None),
            ("http://node:none", None),
        ] {
            assert_eq!(port(url), expected, "{url}");
        }
    }
}
