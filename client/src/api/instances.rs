//! `/instances`. The calls about the agent in a guest are not here.

use std::collections::BTreeMap;

use muster_types::ids::{ArtifactId, BlobId, InstanceId};
use muster_types::instance::{ConfigDriveType, InstanceRecord};
use muster_types::interface::InterfaceRecord;
use muster_types::operation::OperationRecord;
use muster_types::spec::{DiskSpec, VideoSpec};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Answer, Client, Result, path, with_query};

/// A virtual machine to make. What is absent the server decides.
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
    /// The caller's own when absent.
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
}

/// An interface to make. What is absent the server decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NewInterface {
    /// Name or id of the network.
    pub network_uuid: String,
    /// `none`: it has no address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub macaddress: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    pub float: bool,
}

/// What to do with the power of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerCall {
    On,
    Off,
    Pause,
    Unpause,
    /// The guest is asked to start again.
    RebootSoft,
    /// The reset switch is pressed.
    RebootHard,
}

impl PowerCall {
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

/// Which disks to copy, and how.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NewSnapshot {
    /// Every disk. Without this and without a device it is the first one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Only what differs from what the disk began as.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub thin: bool,
    /// How many are kept; 0 is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_versions: Option<u32>,
}

/// A copy of a disk that is being made.
#[derive(Debug, Clone, Deserialize)]
pub struct SnapshotHandle {
    pub source_url: String,
    pub artifact_uuid: ArtifactId,
    pub blob_uuid: BlobId,
}

/// A copy of a disk. Its state is that of its content.
#[derive(Debug, Clone, Deserialize)]
pub struct SnapshotRecord {
    /// The artifact that it is a version of.
    pub uuid: ArtifactId,
    pub blob_uuid: BlobId,
    pub state: String,
    #[serde(default)]
    pub size: Option<i64>,
    #[serde(default)]
    pub device: Option<String>,
    /// Unix time.
    #[serde(default)]
    pub created: Option<f64>,
}

/// Where a screen can be seen from anywhere, for a short time.
#[derive(Debug, Clone, Deserialize)]
pub struct ScreenLink {
    pub url: String,
    /// Unix time.
    pub expires_at: i64,
}

impl Client {
    /// The instances that can be seen, on request with those that are deleted.
    pub async fn instances(&self, all: bool) -> Result<Answer<Vec<InstanceRecord>>> {
        self.get(with_query(path(&["instances"])?, &[("all", all.then_some("true"))])).await
    }

    /// One instance by name or id.
    pub async fn instance(&self, instance: &str) -> Result<Answer<InstanceRecord>> {
        self.get(path(&["instances", instance])?).await
    }

    /// Makes an instance. It runs once its state is `created`.
    pub async fn create_instance(&self, new: &NewInstance) -> Result<Answer<InstanceRecord>> {
        self.call(Method::POST, path(&["instances"])?, Some(json!(new))).await
    }

    /// Deletes an instance. It is gone once its state is `deleted`.
    pub async fn delete_instance(&self, instance: &str) -> Result<Answer<InstanceRecord>> {
        self.delete(path(&["instances", instance])?).await
    }

    /// Deletes every instance of a namespace. The answer names those that are being deleted.
    pub async fn delete_instances(&self, namespace: Option<&str>) -> Result<Answer<Vec<InstanceId>>> {
        let body = json!({ "confirm": true, "namespace": namespace });
        self.call(Method::DELETE, path(&["instances"])?, Some(body)).await
    }

    /// The interfaces of an instance, in their order.
    pub async fn instance_interfaces(&self, instance: &str) -> Result<Answer<Vec<InterfaceRecord>>> {
        self.get(path(&["instances", instance, "interfaces"])?).await
    }

    /// Gives an instance one more interface. It is there once its state is `created`.
    pub async fn plug_interface(
        &self,
        instance: &str,
        interface: &NewInterface,
    ) -> Result<Answer<InterfaceRecord>> {
        let body = json!({ "network": interface });
        self.call(Method::POST, path(&["instances", instance, "interfaces"])?, Some(body)).await
    }

    /// Switches an instance on or off, and so on. The answer comes when that is done.
    pub async fn power(&self, instance: &str, call: PowerCall) -> Result<Answer<()>> {
        self.call(Method::POST, path(&["instances", instance, call.segment()])?, None).await
    }

    /// The last bytes of what the serial console showed, at most `most`, or all of it.
    pub async fn console_data(&self, instance: &str, most: Option<u64>) -> Result<Vec<u8>> {
        let most = most.map_or_else(|| "-1".to_owned(), |most| most.to_string());
        let path = path(&["instances", instance, "consoledata"])?;
        self.content(with_query(path, &[("length", Some(&most))])).await
    }

    /// Forgets what the serial console showed.
    pub async fn clear_console_data(&self, instance: &str) -> Result<Answer<()>> {
        self.delete(path(&["instances", instance, "consoledata"])?).await
    }

    /// A file that tells a viewer where the screen is.
    pub async fn screen_file(&self, instance: &str) -> Result<String> {
        let file = self.content(path(&["instances", instance, "vdiconsolehelper"])?).await?;
        Ok(String::from_utf8_lossy(&file).into_owned())
    }

    /// An address at which the screen is shown, for a short time.
    pub async fn screen_link(&self, instance: &str) -> Result<Answer<ScreenLink>> {
        self.get(path(&["instances", instance, "vdiconsoleproxy"])?).await
    }

    /// Makes a blob of what the screen shows now, as PNG.
    pub async fn screenshot(&self, instance: &str) -> Result<Answer<BlobId>> {
        self.get(path(&["instances", instance, "screenshot"])?).await
    }

    /// Copies disks into artifacts. The answer is by device; a copy is whole once its state is `created`.
    pub async fn create_snapshot(
        &self,
        instance: &str,
        new: &NewSnapshot,
    ) -> Result<Answer<BTreeMap<String, SnapshotHandle>>> {
        self.call(Method::POST, path(&["instances", instance, "snapshot"])?, Some(json!(new))).await
    }

    /// The copies of an instance's disks.
    pub async fn snapshots(&self, instance: &str) -> Result<Answer<Vec<SnapshotRecord>>> {
        self.get(path(&["instances", instance, "snapshot"])?).await
    }

    /// The operations on an instance, newest first: those that have not ended, or all.
    pub async fn instance_operations(
        &self,
        instance: &str,
        all: bool,
    ) -> Result<Answer<Vec<OperationRecord>>> {
        let path = path(&["instances", instance, "clusteroperations"])?;
        self.get(with_query(path, &[("all", all.then_some("true"))])).await
    }
}
