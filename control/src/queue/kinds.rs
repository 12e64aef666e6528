//! Every kind of operation, with its parameters.

use muster_types::ids::{ArtifactId, BlobId, InterfaceId, NodeId};
use muster_types::migration::{MigrationMode, MigrationSettings};
use muster_types::operation::OperationType;
use muster_types::rebalance::PlannedMove;
use serde::{Deserialize, Serialize};

use super::operation::{Lane, Operation, OperationKind};

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? } = $kind:ident, $lane:ident, $text:literal,
        $removes:literal, [$($step:literal),+ $(,)?];)+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub struct $name { $(pub $field: $type),* }

        impl Operation for $name {
            const KIND: OperationKind = OperationKind {
                operation_type: OperationType::$kind,
                name: $text,
                removes_target: $removes,
                lane: Lane::$lane,
                steps: &[$($step),+],
            };
        }
    )+};
}

// Name { parameters } = operation type, lane, name, whether it removes its target, steps.
operations! {
    /// Removes the keys, trusts and rules of a deleted namespace.
    DeleteNamespace {} = Namespace, Quick, "delete_namespace", false,
        ["namespace_delete_keys", "namespace_delete_trusts", "namespace_delete_rules"];
    /// Removes the record of a namespace that was deleted long enough ago.
    CleanNamespace {} = Namespace, Quick, "clean_namespace", true,
        ["namespace_clean_keys", "namespace_clean_claims", "namespace_clean_rules", "namespace_clean_metadata",
         "namespace_clean_events", "namespace_clean_record"];
    /// Sets up a new network on the network node.
    CreateNetwork {} = Network, Quick, "create_network", false,
        ["network_allocate_gateway", "network_apply_create_network_node"];
    /// Removes a network from all nodes and releases its addresses.
    DeleteNetwork {} = Network, Quick, "delete_network", false,
        ["network_wait_for_interfaces", "network_apply_delete_network_node", "network_release_addresses",
         "network_delete_record"];
    /// Removes the record of a network that was deleted long enough ago.
    CleanNetwork {} = Network, Quick, "clean_network", true, ["network_clean_events", "network_clean_record"];
    /// Downloads an image.
    FetchArtifact { url: String } = ArtifactFetch, Fetch, "fetch_artifact", false, ["image_fetch"];
    /// Converts an image into the format that VMs use.
    ConvertImage { node: NodeId } = ImageCache, Convert, "convert_image", false, ["image_convert"];
    /// Builds and starts the VM of a new instance.
    CreateInstance {} = Instance, Vm, "create_instance", false,
        ["instance_preflight", "network_ensure_mesh", "instance_start"];
    /// Starts the VM of an instance after its host went down.
    StartInstance {} = Instance, Vm, "start_instance", false, ["instance_start"];
    /// Creates the VM of an instance again whose host is dead.
    EvacuateInstance { from: String } = Instance, Vm, "evacuate_instance", false,
        ["instance_preflight", "network_ensure_mesh", "instance_start"];
    /// Prepares a node to receive the VM of an instance.
    PrepareMigration { generation: i64, mode: MigrationMode } = Instance, Vm, "prepare_migration", false,
        ["instance_preflight", "network_ensure_mesh", "instance_prepare_incoming"];
    /// Migrates the VM of an instance to the node that was prepared. With `restart`, it is powered off first and started there.
    MigrateInstance {
        source: NodeId, target: NodeId, generation: i64, mode: MigrationMode, restart: bool, settings: MigrationSettings,
    } = Instance, Vm, "migrate_instance", false, ["instance_migrate", "instance_remove_source"];
    /// Migrates the instances of a node to other nodes.
    DrainNode {} = Node, Quick, "drain_node", false, ["node_migrate_instances"];
    /// Migrates instances from full nodes to empty ones.
    RebalanceCluster { moves: Vec<PlannedMove> } = Node, Quick, "rebalance_cluster", false,
        ["cluster_migrate_instances"];
    /// Releases everything of an instance whose creation ended without a result.
    ReleaseInstance { reason: String } = Instance, Vm, "release_instance", false, ["instance_release"];
    /// Adds an interface to the VM of an instance.
    PlugInterface { interface: InterfaceId } = InstanceInterface, Vm, "plug_interface", false,
        ["hot_plug_instance_interface"];
    /// Copies disks of an instance into artifacts.
    SnapshotInstance { copies: Vec<DiskCopy> } = InstanceSnapshot, Convert, "snapshot_instance", false,
        ["instance_snapshot"];
    /// Removes the VM of an instance and releases its resources.
    DeleteInstance {} = Instance, Vm, "delete_instance", false,
        ["instance_power_off", "instance_delete_interfaces", "instance_delete"];
}

/// A disk that a snapshot copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCopy {
    /// The device, or `nvram` for the variables of the firmware.
    pub device: String,
    /// The artifact that gets the new version.
    pub artifact: ArtifactId,
    /// The blob that the copy becomes.
    pub blob: BlobId,
    /// The backing blob of a thin copy, which contains only the differences.
    pub base: Option<BlobId>,
}
