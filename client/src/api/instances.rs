//! `/instances`, without the calls to the agent in a guest.

use std::collections::BTreeMap;

use muster_types::blob::BlobState;
use muster_types::ids::{ArtifactId, BlobId};
use muster_types::instance::{ConfigDriveType, FencingPolicy, InstanceRecord, RestartPolicy};
use muster_types::interface::InterfaceRecord;
use muster_types::operation::OperationRecord;
use muster_types::shared_storage::StorageType;
use muster_types::spec::{DiskSpec, VideoSpec};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::{path, with_query};

/// An instance to create. The server chooses absent values.
#[derive(Debug, Clone, Serialize)]
pub struct NewInstance {
    pub name: String,
    pub cpus: u32,
    /// In megabytes.
    pub memory: u64,
    pub disk: Vec<DiskSpec>,
    pub network: Vec<NewInterface>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_key: Option<String>,
    /// As base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_on: Option<String>,
    /// The caller's own namespace if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub video: Option<VideoSpec>,
    pub uefi: bool,
    pub secure_boot: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvram_template: Option<String>,
    pub configdrive: ConfigDriveType,
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub side_channels: Option<Vec<String>>,
    /// Whether it may be created again from its images when its host is lost.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub disposable: bool,
    /// `local` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageType>,
    /// 0 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartPolicy>,
    /// The policy of the cluster if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fencing: Option<FencingPolicy>,
    /// Whether the request is only checked.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// An interface to create. The server chooses absent values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NewInterface {
    /// Name or id of the network.
    pub network_uuid: String,
    /// `none` for an interface without an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub macaddress: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    pub float: bool,
}

/// A change of the power state of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerAction {
    On,
    Off,
    Pause,
    Unpause,
    /// Asks the guest to reboot.
    RebootSoft,
    /// Resets the VM.
    RebootHard,
}

impl PowerAction {
    fn segment(self) -> &'static str {
        match self {
            Self::On => "poweron",
            Self::Off => "poweroff",
            Self::Pause => "pause",
            Self::Unpause => "unpause",
            Self::RebootSoft => "rebootsoft",
            Self::RebootHard => "reboothard",
        }
    }
}

/// Which disks to snapshot, and how.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NewSnapshot {
    /// All disks. The first disk if this is false and no device is given.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Only the differences from the base image.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub thin: bool,
    /// How many versions are kept; 0 selects the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_versions: Option<u32>,
}

/// A snapshot of a disk in progress.
#[derive(Debug, Clone, Deserialize)]
pub struct SnapshotHandle {
    pub source_url: String,
    pub artifact_uuid: ArtifactId,
    pub blob_uuid: BlobId,
}

/// A snapshot of a disk, in the state of its blob.
#[derive(Debug, Clone, Deserialize)]
pub struct SnapshotRecord {
    /// The artifact that the snapshot is a version of.
    pub uuid: ArtifactId,
    pub blob_uuid: BlobId,
    pub state: BlobState,
    #[serde(default)]
    pub size: Option<i64>,
    #[serde(default)]
    pub device: Option<String>,
    /// Unix time.
    #[serde(default)]
    pub created: Option<f64>,
}

/// Where and how an instance is migrated.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NewMigration {
    /// The node to migrate to; if unset, the scheduler chooses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_limit_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_limit_mbps: Option<u64>,
    pub auto_converge: bool,
    /// Whether it is powered off, and started on the target.
    pub stop: bool,
}

/// A URL that shows the screen of an instance for a short time.
#[derive(Debug, Clone, Deserialize)]
pub struct ScreenLink {
    pub url: String,
    /// Unix time.
    pub expires_at: i64,
}

impl Client {
    /// Lists the visible instances, with `all` including deleted ones.
    pub async fn instances(&self, all: bool, query: &ListQuery) -> Result<ApiResponse<Vec<InstanceRecord>>> {
        self.get_list(with_query(path(&["instances"])?, &[("all", all.then_some("true"))]), query).await
    }

    /// Returns an instance by name or id.
    pub async fn instance(&self, instance: &str) -> Result<ApiResponse<InstanceRecord>> {
        self.instance_in(instance, None).await
    }

    /// Returns an instance by name or id if it is in the given namespace.
    pub async fn instance_in(
        &self,
        instance: &str,
        namespace: Option<&str>,
    ) -> Result<ApiResponse<InstanceRecord>> {
        self.get(with_query(path(&["instances", instance])?, &[("namespace", namespace)])).await
    }

    /// Creates an instance. It runs once its state is `created`.
    pub async fn create_instance(&self, new: &NewInstance) -> Result<ApiResponse<InstanceRecord>> {
        self.call(Method::POST, path(&["instances"])?, Some(json!(new))).await
    }

    /// Starts to delete an instance. It is deleted once its state is `deleted`.
    pub async fn delete_instance(&self, instance: &str) -> Result<ApiResponse<InstanceRecord>> {
        self.delete(path(&["instances", instance])?).await
    }

    /// Lists the interfaces of an instance in order.
    pub async fn instance_interfaces(
        &self,
        instance: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<InterfaceRecord>>> {
        self.get_list(path(&["instances", instance, "interfaces"])?, query).await
    }

    /// Adds an interface to an instance. It is attached once its state is `created`.
    pub async fn plug_interface(
        &self,
        instance: &str,
        interface: &NewInterface,
    ) -> Result<ApiResponse<InterfaceRecord>> {
        let body = json!({ "network": interface });
        self.call(Method::POST, path(&["instances", instance, "interfaces"])?, Some(body)).await
    }

    /// Changes the power state of an instance and waits for completion.
    pub async fn power(&self, instance: &str, action: PowerAction) -> Result<ApiResponse<()>> {
        self.call(Method::POST, path(&["instances", instance, action.segment()])?, None).await
    }

    /// Replaces what happens when the host of an instance is lost or cannot reach the database. Absent policies have their
    /// defaults.
    pub async fn set_fencing(
        &self,
        instance: &str,
        fencing: Option<FencingPolicy>,
        restart: Option<RestartPolicy>,
    ) -> Result<ApiResponse<InstanceRecord>> {
        let body = json!({ "fencing": fencing, "restart": restart });
        self.call(Method::PUT, path(&["instances", instance, "fencing"])?, Some(body)).await
    }

    /// Starts to migrate an instance. It is on the target once the returned operation is complete.
    pub async fn migrate_instance(
        &self,
        instance: &str,
        new: &NewMigration,
    ) -> Result<ApiResponse<OperationRecord>> {
        self.call(Method::POST, path(&["instances", instance, "migrate"])?, Some(json!(new))).await
    }

    /// Cancels the migration of an instance.
    pub async fn cancel_migration(&self, instance: &str) -> Result<ApiResponse<()>> {
        self.call(Method::POST, path(&["instances", instance, "migrate", "cancel"])?, None).await
    }

    /// Returns the last `max_bytes` bytes of the serial console log, or all of it.
    pub async fn console_data(&self, instance: &str, max_bytes: Option<u64>) -> Result<Vec<u8>> {
        let length = max_bytes.map_or_else(|| "-1".to_owned(), |length| length.to_string());
        let path = path(&["instances", instance, "consoledata"])?;
        self.get_bytes(with_query(path, &[("length", Some(&length))])).await
    }

    /// Clears the serial console log.
    pub async fn clear_console_data(&self, instance: &str) -> Result<ApiResponse<()>> {
        self.delete(path(&["instances", instance, "consoledata"])?).await
    }

    /// Returns the connection file for a viewer such as remote-viewer, which connects to the node itself.
    pub async fn viewer_file(&self, instance: &str) -> Result<String> {
        let file = self.get_bytes(path(&["instances", instance, "vdiconsolehelper"])?).await?;
        Ok(String::from_utf8_lossy(&file).into_owned())
    }

    /// Returns a URL that shows the screen for a short time.
    pub async fn screen_link(&self, instance: &str) -> Result<ApiResponse<ScreenLink>> {
        self.get(path(&["instances", instance, "vdiconsoleproxy"])?).await
    }

    /// Stores a screenshot as a PNG blob.
    pub async fn screenshot(&self, instance: &str) -> Result<ApiResponse<BlobId>> {
        self.get(path(&["instances", instance, "screenshot"])?).await
    }

    /// Starts snapshots of disks, returned by device. A snapshot is complete once its state is `created`.
    pub async fn create_snapshot(
        &self,
        instance: &str,
        new: &NewSnapshot,
    ) -> Result<ApiResponse<BTreeMap<String, SnapshotHandle>>> {
        self.call(Method::POST, path(&["instances", instance, "snapshot"])?, Some(json!(new))).await
    }

    /// Lists the snapshots of an instance's disks.
    pub async fn snapshots(
        &self,
        instance: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<SnapshotRecord>>> {
        self.get_list(path(&["instances", instance, "snapshot"])?, query).await
    }

    /// Lists the unfinished operations on an instance, or all of them, newest first.
    pub async fn instance_operations(
        &self,
        instance: &str,
        all: bool,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<OperationRecord>>> {
        let path = path(&["instances", instance, "clusteroperations"])?;
        self.get_list(with_query(path, &[("all", Some(if all { "true" } else { "false" }))]), query).await
    }
}
