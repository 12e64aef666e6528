//! Creates instances. The whole request is checked before anything is written, and one transaction writes everything.
//! See docs/decisions/0021.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use muster_types::capacity::Capacity;
use muster_types::event::{Event, EventType};
use muster_types::event_message::EventMessage;
use muster_types::ids::{BlobId, InstanceId, NodeId};
use muster_types::instance::{
    ConfigDriveType, DiskSpecRecord, InstanceRecord, InstanceState, MachineType, SideChannel,
};
use muster_types::namespace::NamespaceState;
use muster_types::network::NetworkState;
use muster_types::node::NodeState;
use muster_types::object::{NameOrId, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::shared_storage::StorageType;
use muster_types::spec::{self, AddressSpec, Affinity, DiskBus, DiskSpec, NetworkSpec, VideoSpec};
use muster_types::{Error, Result};
use serde_json::{Map, Value};

use super::image::{self, ImageSource};
use super::placement::{self, Allocation, Candidates, RefusedNodes};
use super::{DISK, NVRAM_TEMPLATE, fence, object, operation_on, replica, to_record, user_data};
use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;
use crate::objects::interface::{self, NewInterface, WantedAddress};
use crate::objects::network::address_pool::require_within;
use crate::objects::network::state::require_state;
use crate::objects::{blob, metadata, network, quota};
use crate::queue::CreateInstance;
use crate::scheduler::{PlacementRequest, StorageRequest};
use muster_store::instances::{self, InstanceRow, InstanceSpec, NewInstance};
use muster_store::interfaces::InterfaceRow;
use muster_store::networks::NetworkRow;
use muster_store::{
    StoreError, Tx, TxError, blobs, is_dry_run, metadata as metadata_rows, namespaces, nodes, references,
    transaction,
};

/// The maximum number of disks of an instance.
const MAX_DISKS: usize = 24;
/// The maximum number of devices of an instance that need a PCI slot.
pub(super) const MAX_SLOTS: usize = 20;

/// A request to create an instance, with parsed specifications.
#[derive(Debug, Clone)]
pub struct InstanceRequest {
    pub name: Option<String>,
    pub cpus: Option<i64>,
    pub memory: Option<i64>,
    pub disks: Vec<DiskSpec>,
    pub networks: Vec<NetworkSpec>,
    pub video: VideoSpec,
    pub ssh_key: Option<String>,
    pub user_data: Option<String>,
    pub placed_on: Option<String>,
    pub namespace: Option<String>,
    pub uefi: bool,
    pub secure_boot: bool,
    pub nvram_template: Option<String>,
    pub configdrive: Option<String>,
    pub metadata: Option<Value>,
    pub side_channels: Option<Vec<String>>,
    pub disposable: bool,
    pub storage: Option<String>,
    pub replicas: Option<i64>,
    pub restart: Option<String>,
    pub fencing: Option<String>,
}

/// A request whose fields are valid on their own.
struct CheckedRequest {
    name: String,
    spec: InstanceSpec,
    networks: Vec<NetworkSpec>,
    metadata: Map<String, Value>,
    affinity: Affinity,
    deprecated_affinity: bool,
    placed_on: Option<String>,
    nvram_template: Option<String>,
}

/// A request that was validated against the cluster.
struct ValidatedRequest {
    id: InstanceId,
    name: String,
    namespace: String,
    spec: InstanceSpec,
    networks: Vec<(NetworkRow, NetworkSpec, WantedAddress)>,
    metadata: Map<String, Value>,
    placement: PlacementRequest,
    /// The URLs to fetch, by disk number.
    fetch: BTreeMap<usize, String>,
}

/// Why an instance could not be created.
enum CreateFailure {
    /// No node can run it.
    Scheduling(Error),
    /// An interface could not be created: its number.
    Interface(usize, Error),
    Other(Error),
}

impl CreateFailure {
    fn error(&self) -> &Error {
        match self {
            Self::Scheduling(error) | Self::Interface(_, error) | Self::Other(error) => error,
        }
    }

    fn into_error(self) -> Error {
        match self {
            Self::Scheduling(error) | Self::Interface(_, error) | Self::Other(error) => error,
        }
    }

    /// Returns the reason that the record of the failed instance shows. `None`: the request is invalid, and no record
    /// is kept.
    fn reason(&self, request: &ValidatedRequest) -> Option<String> {
        match self {
            Self::Scheduling(_) => Some("scheduling failed".into()),
            Self::Interface(number, Error::AddressInUse(_)) => {
                let (network, ..) = request.networks.get(*number)?;
                Some(format!("failed to reserve an IP on network {}", network.id))
            }
            Self::Interface(_, Error::InsufficientCapacity(_)) => Some("cannot allocate address".into()),
            Self::Interface(_, Error::NotFound(_)) => Some("missing network".into()),
            Self::Interface(..) | Self::Other(_) => None,
        }
    }
}

/// Creates an instance. An operation builds its VM.
pub async fn create(app: &App, caller: &Caller, request: InstanceRequest) -> Result<InstanceRecord> {
    let namespace = request.namespace.clone().filter(|name| !name.is_empty());
    let namespace = namespace.unwrap_or_else(|| caller.namespace.clone());
    let checked = check(request)?;
    fence::check_restart(app, &checked.spec)?;
    for (number, disk) in checked.spec.disks.iter().enumerate() {
        let base = disk.spec.base.as_deref();
        if let Some(base) = base.filter(|base| !image::is_cluster_reference(base)) {
            crate::fetch::check(&app.settings, &base_field(number), base)?;
        }
    }
    let deprecated = checked.deprecated_affinity;
    let mut request = validate(app, caller, namespace, checked).await?;
    for (number, url) in std::mem::take(&mut request.fetch) {
        let artifact = image::fetch(app, caller, &request.namespace, &url).await?;
        request.spec.awaited.insert(number, artifact);
    }
    let mut candidates = placement::find(app, &request.namespace, &request.placement).await?;
    let mut outcome = write(app, caller, &request, &candidates).await;
    if matches!(outcome, Ok(Err(_))) {
        // The cached capacity was stale.
        candidates = placement::find_uncached(app, &request.namespace, &request.placement).await?;
        outcome = write(app, caller, &request, &candidates).await;
    }
    let (failure, refused) = match outcome {
        Ok(Ok((row, allocation, interfaces))) if is_dry_run() => {
            // What the transaction has written cannot be read.
            let record = to_record(app, &*app.store, row).await?;
            let interfaces = interface::records(&*app.store, interfaces).await?;
            let node = Some(allocation.name);
            return Ok(InstanceRecord { node, metadata: request.metadata, interfaces, ..record });
        }
        Ok(Ok((row, allocation, _))) => {
            placement::update_cache(app, &allocation);
            app.networks.notify_changed();
            app.queue.wake();
            record_created(app, caller, &row, deprecated);
            placement::record_scheduling(
                app,
                caller,
                row.id,
                &request.placement,
                &candidates,
                Ok(&allocation),
            );
            return to_record(app, &*app.store, row).await;
        }
        Ok(Err(refused)) => (CreateFailure::Scheduling(placement::no_capacity(&refused)), refused),
        Err(failure) => (failure, vec![]),
    };
    if let Some(reason) = failure.reason(&request).filter(|_| !is_dry_run()) {
        let row = insert_failed(app, caller, &request, &format!("{reason}: {}", failure.error())).await?;
        placement::record_scheduling(app, caller, request.id, &request.placement, &candidates, Err(&refused));
        record_failed(app, caller, &row);
        return Err(Error::InstanceFailed { instance: row.id, error: Box::new(failure.into_error()) });
    }
    Err(failure.into_error())
}

/// Validates the fields of a request without the database.
fn check(request: InstanceRequest) -> Result<CheckedRequest> {
    let missing = |name: &str| Error::Invalid(format!("{name}: Missing data for required field."));
    let name = request.name.ok_or_else(|| missing("name"))?;
    spec::check_instance_name(&name)?;
    let cpus = positive("cpus", request.cpus.ok_or_else(|| missing("cpus"))?, 1024)?;
    let memory = positive("memory", request.memory.ok_or_else(|| missing("memory"))?, 64 << 20)?;
    if request.disks.len() > MAX_DISKS {
        return Err(Error::Invalid(format!("disk: Must not have more than {MAX_DISKS} elements.")));
    }
    let disks: Vec<DiskSpecRecord> =
        request.disks.into_iter().map(|spec| DiskSpecRecord { spec, blob_uuid: None }).collect();
    if slots(&disks, request.networks.len()) > MAX_SLOTS {
        let text = format!(
            "disk: Must not have more than {MAX_SLOTS} elements on the buses virtio and nvme, including interfaces."
        );
        return Err(Error::Invalid(text));
    }
    if request.secure_boot && !request.uefi {
        return Err(Error::Invalid("secure boot requires UEFI be enabled".into()));
    }
    let configdrive = match request.configdrive.as_deref().filter(|text| !text.is_empty()) {
        None => ConfigDriveType::OpenStackDisk,
        Some(text) => {
            text.parse().map_err(|_| Error::Invalid(format!("invalid config drive type: \"{text}\"")))?
        }
    };
    let user_data = user_data::check(request.user_data)?;
    let (metadata, affinity, deprecated_affinity) = check_all_metadata(request.metadata)?;
    let side_channels = match request.side_channels {
        None => vec![SideChannel::Agent, SideChannel::Agent2],
        Some(names) => side_channels(&names)?,
    };
    let (restart, fencing) = fence::parse_policies(request.restart.as_deref(), request.fencing.as_deref())?;
    let machine_type = if request.secure_boot { MachineType::Q35 } else { MachineType::Pc };
    let storage = parse_storage(request.storage.as_deref())?;
    let replicas = replica::parse(request.replicas, storage, request.disposable, &disks)?;
    Ok(CheckedRequest {
        name,
        spec: InstanceSpec {
            cpus,
            memory,
            disks,
            awaited: BTreeMap::new(),
            video: request.video,
            ssh_key: request.ssh_key.filter(|text| !text.is_empty()),
            user_data,
            uefi: request.uefi,
            secure_boot: request.secure_boot,
            configdrive,
            nvram_template: None,
            machine_type,
            side_channels,
            requested_placement: None,
            disposable: request.disposable,
            storage,
            storage_uuid: None,
            has_shared_disks: false,
            replicas,
            restore_from: None,
            restart,
            fencing,
            unfenced: None,
            earlier_unfenced: Vec::new(),
        },
        networks: request.networks,
        metadata,
        affinity,
        deprecated_affinity,
        placed_on: request.placed_on.filter(|text| !text.is_empty()),
        nvram_template: request.nvram_template.filter(|text| !text.is_empty()),
    })
}

/// Returns the number of PCI slots that disks and interfaces need.
pub(super) fn slots(disks: &[DiskSpecRecord], interfaces: usize) -> usize {
    let slotted = |disk: &&DiskSpecRecord| matches!(disk.spec.bus, DiskBus::Virtio | DiskBus::Nvme);
    disks.iter().filter(slotted).count() + interfaces
}

fn parse_storage(storage: Option<&str>) -> Result<StorageType> {
    let Some(text) = storage.filter(|text| !text.is_empty()) else { return Ok(StorageType::Local) };
    text.parse().map_err(|_| Error::Invalid(format!("storage: {text:?} is neither \"local\" nor \"shared\"")))
}

fn base_field(number: usize) -> String {
    format!("disk[{number}].base")
}

fn positive(field: &str, number: i64, max: i64) -> Result<i64> {
    if (1..=max).contains(&number) {
        return Ok(number);
    }
    let text = format!("{field}: Must be greater than or equal to 1 and less than or equal to {max}.");
    Err(Error::Invalid(text))
}

fn side_channels(names: &[String]) -> Result<Vec<SideChannel>> {
    let mut found = Vec::new();
    for name in names {
        let channel: SideChannel =
            name.parse().map_err(|_| Error::Invalid(format!("{name} is not a known side channel type")))?;
        if !found.contains(&channel) {
            found.push(channel);
        }
    }
    Ok(found)
}

fn check_all_metadata(given: Option<Value>) -> Result<(Map<String, Value>, Affinity, bool)> {
    let map = match given {
        None => Map::new(),
        Some(Value::Object(map)) => map,
        // Newer Go clients send it when nothing is set.
        Some(Value::String(text)) if text.is_empty() => Map::new(),
        Some(_) => return Err(Error::Invalid("metadata must be a dictionary".into())),
    };
    let (mut affinity, mut deprecated) = (Affinity::default(), false);
    for (key, value) in &map {
        metadata::check(Some(key), Some(value))?;
        metadata::check_instance_key(key, value)?;
        if key == "affinity" {
            (affinity, deprecated) = spec::parse_affinity(value)?;
        }
    }
    metadata::check_size(&map)?;
    Ok((map, affinity, deprecated))
}

/// Validates a request against the cluster, in the same order as the existing service.
async fn validate(
    app: &App,
    caller: &Caller,
    namespace: String,
    checked: CheckedRequest,
) -> Result<ValidatedRequest> {
    let row = namespaces::get(&*app.store, &namespace).await?;
    if row.is_none_or(|row| row.state != NamespaceState::Created)
        || !caller.may_see(&*app.store, &namespace).await?
    {
        return Err(Error::not_found("namespace"));
    }
    let CheckedRequest { name, mut spec, networks, metadata, affinity, placed_on, nvram_template, .. } =
        checked;
    let only = match placed_on {
        None => None,
        Some(node) => Some(requested_node(app, &node, &mut spec).await?),
    };
    let mut fetch = BTreeMap::new();
    for (number, disk) in spec.disks.iter_mut().enumerate() {
        let Some(base) = &disk.spec.base else { continue };
        match image::resolve(app, caller, &namespace, &base_field(number), base).await? {
            ImageSource::Blob(blob) => {
                disk.blob_uuid = Some(blob);
            }
            ImageSource::Url(url) => {
                fetch.insert(number, url);
            }
        }
    }
    if let Some(template) = nvram_template {
        spec.nvram_template = Some(resolve_template(app, caller, &namespace, &template).await?);
    }
    let mut found = Vec::with_capacity(networks.len());
    for (number, wanted) in networks.into_iter().enumerate() {
        found.push(find_network(app, &namespace, wanted, &format!("network[{number}]")).await?);
    }
    let placement = PlacementRequest {
        cpus: spec.cpus,
        memory_mb: spec.memory,
        disk_gb: image::disk_gb(app, &spec).await?,
        required_node: only,
        affinity,
        storage: match spec.storage {
            StorageType::Local => StorageRequest::Local,
            StorageType::Shared => StorageRequest::AnyShared,
        },
    };
    Ok(ValidatedRequest {
        id: InstanceId::new(),
        name,
        namespace,
        spec,
        networks: found,
        metadata,
        placement,
        fetch,
    })
}

async fn requested_node(app: &App, node: &str, spec: &mut InstanceSpec) -> Result<NodeId> {
    let row = nodes::get(&*app.store, &NameOrId::parse(node)).await?;
    let row = row.filter(|row| row.state != NodeState::Deleted);
    let row = row.ok_or_else(|| Error::NotFound(format!("Specified node {node} does not exist")))?;
    if row.state != NodeState::Created {
        return Err(Error::NotFound(format!("Specified node {node} not ready")));
    }
    spec.requested_placement = Some(row.identity.name);
    Ok(row.identity.id)
}

async fn resolve_template(app: &App, caller: &Caller, namespace: &str, template: &str) -> Result<BlobId> {
    if image::is_cluster_reference(template)
        && let ImageSource::Blob(blob) =
            image::resolve(app, caller, namespace, "nvram_template", template).await?
    {
        return Ok(blob);
    }
    Err(Error::Invalid(format!("nvram_template: {template:?} is neither label:<name> nor sf://blob/<uuid>")))
}

/// Returns a network of the instance's namespace that is ready for an interface.
pub(super) async fn find_network(
    app: &App,
    namespace: &str,
    wanted: NetworkSpec,
    path: &str,
) -> Result<(NetworkRow, NetworkSpec, WantedAddress)> {
    let row = network::find_for_instances(app, namespace, &wanted.network).await?;
    let address = match &wanted.address {
        AddressSpec::Any => WantedAddress::Any,
        AddressSpec::None => WantedAddress::None,
        AddressSpec::Fixed(text) => {
            let address: Ipv4Addr = text
                .parse()
                .map_err(|_| Error::Invalid(format!("{path}.address: Not a valid IPv4 address.")))?;
            require_within(&row, address).map_err(|_| {
                let text = "network specification requests an address outside the range of the network";
                Error::Invalid(text.into())
            })?;
            WantedAddress::Exactly(address)
        }
    };
    if wanted.float && address == WantedAddress::None {
        return Err(Error::Invalid(format!("{path}.float: an interface without an address cannot float")));
    }
    require_state(&row, &[NetworkState::Created])?;
    Ok((row, wanted, address))
}

/// Writes the instance, its interfaces, its addresses, its placement and its operation in one transaction. If no
/// candidate has capacity, returns their reasons.
async fn write(
    app: &App,
    caller: &Caller,
    request: &ValidatedRequest,
    candidates: &Candidates,
) -> Result<Result<(InstanceRow, Allocation, Vec<InterfaceRow>), RefusedNodes>, CreateFailure> {
    candidates.nodes().map_err(CreateFailure::Scheduling)?;
    let of_instance = quota::of_instance(&request.placement);
    let floating = request.networks.iter().filter(|(_, wanted, _)| wanted.float);
    let floating = i64::try_from(floating.count()).expect("at most MAX_SLOTS interfaces");
    let added = [&of_instance[..], &[(QuotaName::FloatingAddresses, floating)]].concat();
    // The number of the interface that the transaction is creating, to classify a failure.
    let mut current = None;
    let outcome = transaction!(app.store, |tx| {
        current = None;
        let admission = quota::Admission::begin(app, tx, &request.namespace, &added).await?;
        admission.reject_early(tx, &of_instance.map(|(name, _)| name)).await?;
        let placed =
            placement::allocate_in(app, tx, &request.namespace, &request.placement, candidates).await?;
        let allocation = match placed {
            Ok(allocation) => allocation,
            Err(refused) => return Ok(Err(refused)),
        };
        let row = insert(tx, request, InstanceState::Initial, None, Some(&allocation)).await?;
        let mut interfaces = Vec::new();
        for (number, (network, wanted, address)) in request.networks.iter().enumerate() {
            current = Some(number);
            let new = NewInterface {
                network: network.id,
                instance: row.id,
                namespace: row.namespace.clone(),
                hostname: row.name.clone(),
                node: row.node,
                mac: wanted.mac,
                address: *address,
                float: wanted.float,
                model: wanted.model.clone(),
                order: i64::try_from(number).expect("at most MAX_SLOTS interfaces"),
            };
            interfaces.push(interface::create_in(app, tx, &new).await?);
        }
        current = None;
        reference_blobs_in(tx, row.id, &request.spec).await?;
        let handle = operation_on(&row, CreateInstance {}, Some(&caller.request_id)).enqueue(tx).await?;
        instances::set_operation(tx, row.id, &handle).await?;
        // The lock keeps a concurrently deleted namespace from leaving the instance behind.
        admission.finish(tx).await?;
        let row = InstanceRow { last_operation: Some(handle), ..row };
        Ok(Ok((row, allocation, interfaces)))
    });
    outcome.map_err(|error| match current {
        Some(number) => CreateFailure::Interface(number, error),
        None => CreateFailure::Other(error),
    })
}

async fn insert(
    tx: &mut Tx,
    request: &ValidatedRequest,
    state: InstanceState,
    error: Option<&str>,
    allocation: Option<&Allocation>,
) -> Result<InstanceRow, StoreError> {
    let new = NewInstance {
        id: request.id,
        name: request.name.clone(),
        namespace: request.namespace.clone(),
        state,
        error_message: error.map(str::to_owned),
        spec: InstanceSpec {
            storage_uuid: allocation.and_then(|allocation| allocation.shared_storage),
            ..request.spec.clone()
        },
        node: allocation.map(|allocation| allocation.node),
        committed: allocation.map_or_else(Capacity::default, |allocation| allocation.allocated),
    };
    let row = instances::insert(tx, &new).await?;
    for (key, value) in &request.metadata {
        metadata_rows::set(tx, ObjectType::Instance, &row.id.to_string(), key, value).await?;
    }
    Ok(row)
}

/// References the blobs that an instance uses as part of a transaction, which protects them from deletion.
pub(crate) async fn reference_blobs_in(
    tx: &mut Tx,
    id: InstanceId,
    spec: &InstanceSpec,
) -> Result<(), TxError> {
    let source = object(id);
    references::remove_from(tx, &source).await?;
    for (number, disk) in spec.disks.iter().enumerate() {
        if let Some(blob) = disk.blob_uuid {
            reference_blob_in(tx, &source, DISK, Some(&number.to_string()), blob).await?;
        }
    }
    if let Some(blob) = spec.nvram_template {
        reference_blob_in(tx, &source, NVRAM_TEMPLATE, None, blob).await?;
    }
    Ok(())
}

async fn reference_blob_in(
    tx: &mut Tx,
    source: &muster_types::object::ObjectRef,
    relationship: &str,
    value: Option<&str>,
    id: BlobId,
) -> Result<(), TxError> {
    if !blobs::lock(tx, id).await? {
        return Err(Error::not_found("blob").into());
    }
    blobs::set_used(tx, id).await?;
    Ok(references::insert(tx, source, relationship, value, &blob::object(id)).await?)
}

fn record_created(app: &App, caller: &Caller, row: &InstanceRow, deprecated: bool) {
    app.record(
        caller,
        Event::audit(object(row.id), EventMessage::RecordCreated)
            .with("name", row.name.clone())
            .with("namespace", row.namespace.clone())
            .with("cpus", row.spec.cpus)
            .with("memory", row.spec.memory),
    );
    app.record(caller, with_caller(caller, Event::audit(object(row.id), EventMessage::CreationRequested)));
    if deprecated {
        app.record(caller, Event::audit(object(row.id), metadata::DEPRECATED_AFFINITY));
    }
}

/// Keeps a record of an instance that could not be created and exceeds no quota, until it is deleted or cleaned.
async fn insert_failed(
    app: &App,
    caller: &Caller,
    request: &ValidatedRequest,
    message: &str,
) -> Result<InstanceRow> {
    let row = transaction!(app.store, |tx| {
        if !namespaces::lock(tx, &request.namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        quota::require_in(app, tx, &request.namespace, &quota::of_instance(&request.placement)).await?;
        Ok(insert(tx, request, InstanceState::Error, Some(message), None).await?)
    })?;
    record_created(app, caller, &row, false);
    Ok(row)
}

fn record_failed(app: &App, caller: &Caller, row: &InstanceRow) {
    let event =
        Event::new(EventType::Mutate, object(row.id), EventMessage::InstanceState(InstanceState::Error));
    app.record(caller, event.with("reason", row.error_message.clone()));
}
