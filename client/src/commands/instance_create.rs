//! `muster instance create`: creates an instance and waits until it runs.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::bail;
use clap::Args;
use muster_types::instance::{ConfigDriveType, FencingPolicy, InstanceRecord, InstanceState, RestartPolicy};
use muster_types::operation::{OperationProgress, OperationRecord, OperationState, OperationType};
use muster_types::shared_storage::StorageType;
use muster_types::spec::{DiskSpec, VideoSpec};
use serde_json::Value;

use super::arguments::path_parser;
use super::instance_refusal::{node_rejections, stage_advice, stage_reason};
use super::instance_specs as specs;
use super::instance_tables::{details, pending_images};
use super::lookup::{NamedType, resolve, warn_if_name_exists};
use super::session::Session;
use super::wait::{LongWaitOptions, PollTimer};
use crate::api::{ApiResponse, Client, Error, EventQuery, ListQuery, NewInstance, NewInterface, ObjectPath};
use crate::exit_code::{Outcome, error_with_outcome, timed_out};
use crate::output::{self, escape_control};
use crate::progress::{ProgressMeter, show_progress};
use crate::transfer::{Retries, RetryPolicy, unless_interrupted};

/// Arguments of `muster instance create`.
#[derive(Debug, Args)]
#[command(after_help = "\
Disks:     --disk 20                    20 GB, empty
           --disk 8@tiny                8 GB from the label, artifact or image of that name
           --disk @debian:12            as large as the image
           --disk @cd,type=cdrom        a CD-ROM drive with the image
Networks:  --network lan                any address of the network
           --network lan@10.0.0.7       this address; @none for no address
           --network lan,float          with a floating address
           --network lan,model=e1000,mac=02:00:00:00:00:07")]
pub struct Arguments {
    /// Name of the instance, which is also its host name
    name: String,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// Memory in megabytes, or with a unit such as 2G
    #[arg(long, value_name = "SIZE", value_parser = specs::parse_memory, default_value = "1024")]
    memory: u64,
    /// Disk: SIZE, @IMAGE or SIZE@IMAGE, followed by ,bus=BUS or ,type=cdrom; may be repeated
    #[arg(long, value_name = "DISK", value_parser = specs::parse_disk, required = true)]
    disk: Vec<DiskSpec>,
    /// Interface: NETWORK or NETWORK@ADDRESS, followed by ,float ,model=MODEL or ,mac=MAC; may be repeated
    #[arg(long, value_name = "NETWORK", value_parser = specs::parse_network)]
    network: Vec<NewInterface>,
    /// SSH public key for the guest, or a file that contains it
    #[arg(long, value_name = "FILE|KEY")]
    ssh_key: Option<String>,
    /// File with user data for cloud-init; - is standard input
    #[arg(long, value_name = "FILE", value_parser = path_parser())]
    user_data: Option<PathBuf>,
    /// Node to place it on
    #[arg(long, value_name = "NODE")]
    placed_on: Option<String>,
    /// Namespace to create it in, if not your own
    #[arg(long, value_name = "NAMESPACE")]
    in_namespace: Option<String>,
    /// Boot with UEFI instead of BIOS
    #[arg(long)]
    uefi: bool,
    /// Enable Secure Boot
    #[arg(long, requires = "uefi")]
    secure_boot: bool,
    /// Template of the UEFI variables: label:NAME or sf://blob/UUID
    #[arg(long, value_name = "IMAGE", requires = "uefi")]
    nvram_template: Option<String>,
    /// Do not attach a config drive
    #[arg(long)]
    no_config_drive: bool,
    /// Create it again from its images if its host is lost, without the content of its disks
    #[arg(long)]
    disposable: bool,
    /// Where its disks are: local, on its node, or shared, on storage that several nodes have mounted
    #[arg(long, value_name = "STORAGE")]
    storage: Option<StorageType>,
    /// Number of replicas of its disks on other nodes, from which it restarts if its host is lost: 0 or 1
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(0..=1))]
    replicas: Option<i64>,
    #[command(flatten)]
    policies: Policies,
    /// Video device: model=MODEL,memory=KIB,vdi=VDI
    #[arg(long, value_name = "VIDEO", value_parser = specs::parse_video)]
    video: Option<VideoSpec>,
    /// Metadata key; a value that is not JSON is a string
    #[arg(long, value_name = "KEY=VALUE", value_parser = specs::parse_metadata)]
    metadata: Vec<(String, Value)>,
    /// Tag for the affinity rules of other instances
    #[arg(long, value_name = "TAG")]
    tag: Vec<String>,
    /// Affinity rule: require-with, require-without, prefer-with or prefer-without, and the tag of other instances
    #[arg(long, value_name = "RULE=TAG", value_parser = specs::parse_affinity)]
    affinity: Vec<(&'static str, String)>,
    /// Side channel to the guest, such as sf-agent; `none` disables them
    #[arg(long, value_name = "NAME")]
    side_channel: Vec<String>,
    /// Check the request and the placement without creating the instance
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    wait: LongWaitOptions,
}

/// What happens to an instance when its host is lost or cannot reach the database.
#[derive(Debug, Args)]
pub struct Policies {
    /// Restart it on another node when its host is lost: needs self-fencing, and --replicas 1, --storage shared, snapshots or
    /// --disposable
    #[arg(long)]
    restart_elsewhere: bool,
    /// Whether its host stops it when the host cannot reach the database (self) or not (none); default: FENCING
    #[arg(long, value_name = "POLICY")]
    pub(super) fencing: Option<FencingPolicy>,
}

impl Policies {
    pub(super) fn restart(&self) -> Option<RestartPolicy> {
        self.restart_elsewhere.then_some(RestartPolicy::Elsewhere)
    }
}

impl Arguments {
    /// Returns the API request.
    async fn request(self, client: &Client) -> anyhow::Result<NewInstance> {
        let mut disk = self.disk;
        for base in disk.iter_mut().filter_map(|disk| disk.base.as_mut()) {
            *base = specs::resolve_image(client, base).await?;
        }
        Ok(NewInstance {
            name: self.name,
            cpus: self.cpus,
            memory: self.memory,
            disk,
            network: self.network,
            ssh_key: self.ssh_key.as_deref().map(specs::read_ssh_key).transpose()?,
            user_data: self.user_data.as_deref().map(specs::read_user_data).transpose()?,
            placed_on: self.placed_on,
            namespace: self.in_namespace,
            video: self.video,
            uefi: self.uefi,
            secure_boot: self.secure_boot,
            nvram_template: self.nvram_template,
            configdrive: if self.no_config_drive {
                ConfigDriveType::None
            } else {
                ConfigDriveType::OpenStackDisk
            },
            metadata: specs::build_metadata(self.metadata, &self.tag, self.affinity)?,
            side_channels: specs::check_side_channels(self.side_channel)?,
            disposable: self.disposable,
            storage: self.storage,
            replicas: self.replicas,
            restart: self.policies.restart(),
            fencing: self.policies.fencing,
            dry_run: self.dry_run,
        })
    }
}

/// Creates an instance and waits until it runs.
pub(super) async fn create(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let wait = arguments.wait;
    let started = Instant::now();
    let mut new = arguments.request(&session.client).await?;
    let client = &session.client;
    let namespace = new.namespace.as_deref().unwrap_or(client.own_namespace());
    for network in &mut new.network {
        resolve(client, NamedType::Network, &mut network.network_uuid, Some(namespace)).await?;
    }
    warn_if_name_exists(client, NamedType::Instance, &new.name, Some(namespace)).await;
    let response = match session.client.create_instance(&new).await {
        Ok(response) => response,
        Err(error) => return Err(explain_refusal(session, &new, error).await),
    };
    if new.dry_run {
        return session.show_created(response, true, details);
    }
    let Some(timer) = wait.timer() else { return session.show(response, details) };
    let id = response.clone().value()?.uuid;
    let consequence = || format!("the creation continues: see `muster instance why {id}`");
    let response = unless_interrupted(watch(session, response, timer), consequence).await?;
    let record = response.clone().value()?;
    if let Some(reason) = failure(&record) {
        if session.is_structured() {
            session.print_value(response.json())?;
        }
        bail!(
            "instance {} failed: {}; see `muster instance why {id}`, or delete it with `muster instance delete {id}`",
            escape_control(&record.name),
            escape_control(&reason)
        );
    }
    session.show(response, details)?;
    let seconds = started.elapsed().as_secs_f64();
    output::status(&format!("instance {} is running after {seconds:.1} s", record.name));
    Ok(())
}

/// Explains why the server refused to create an instance.
async fn explain_refusal(session: &Session, new: &NewInstance, error: Error) -> anyhow::Error {
    let Error::NotPlaced { stage, transient, .. } = &error else { return error.into() };
    let transient = *transient;
    let known_stage = stage.parse().ok();
    crate::message!("not placed: {} (stage {stage})", stage_reason(known_stage, transient));
    let record = find_failed_record(session, new).await;
    let id = record.as_ref().map(|record| record.uuid.to_string());
    if let Some(id) = &id {
        for line in node_rejections(session, id).await {
            crate::message!("  {}", escape_control(&line));
        }
    }
    let retry = if transient { "; a later attempt may succeed" } else { "" };
    let delete = id.map_or_else(String::new, |id| {
        format!("; delete the failed instance with `muster instance delete {id}`")
    });
    let text = format!("{error}: {}{retry}{delete}", stage_advice(known_stage, transient));
    error_with_outcome(Outcome::of(&error.into()), text)
}

/// Returns the newest failed record with the name of a refused instance.
async fn find_failed_record(session: &Session, new: &NewInstance) -> Option<InstanceRecord> {
    let client = &session.client;
    let namespace = new.namespace.as_deref().unwrap_or(client.own_namespace());
    let all = client.instances(false, &ListQuery::default()).await.and_then(ApiResponse::value).ok()?;
    let named = all.into_iter().filter(|record| record.name == new.name && record.namespace == namespace);
    let mut failed: Vec<InstanceRecord> = named.filter(|record| !record.state.is_active()).collect();
    if failed.len() > 1 {
        // Only the events tell which of several failed records is the newest.
        let mut newest: Option<(f64, InstanceRecord)> = None;
        for record in failed.drain(..) {
            let id = record.uuid.to_string();
            let query = EventQuery { limit: Some(1), ..EventQuery::default() };
            let events = client.events(ObjectPath::Instance(&id), &query).await;
            let time = events.and_then(ApiResponse::value).ok()?;
            // A record without events is so new that they have not been written yet.
            let time = time.first().map_or(f64::INFINITY, |event| event.timestamp);
            if newest.as_ref().is_none_or(|(newest, _)| time > *newest) {
                newest = Some((time, record));
            }
        }
        return newest.map(|(_, record)| record);
    }
    failed.pop()
}

/// Returns why an instance will not run, if it has failed.
fn failure(record: &InstanceRecord) -> Option<String> {
    match record.state {
        InstanceState::Initial
        | InstanceState::Preflight
        | InstanceState::Creating
        | InstanceState::Created => None,
        InstanceState::DeleteWait | InstanceState::Deleted => Some("it was deleted".to_owned()),
        InstanceState::Error
        | InstanceState::InitialError
        | InstanceState::PreflightError
        | InstanceState::CreatingError
        | InstanceState::CreatedError
        | InstanceState::DeleteWaitError => {
            Some(record.error_message.clone().unwrap_or_else(|| "the server gives no reason".to_owned()))
        }
    }
}

/// Describes the current phase of the creation.
fn phase(record: &InstanceRecord, fetching: Option<&str>) -> String {
    let on = record.node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    match (record.state, fetching) {
        (InstanceState::Creating, _) => format!("building and starting{on}"),
        (_, Some(image)) => format!("fetching {image}{on}"),
        (InstanceState::Initial, None) if record.node.is_none() => "placing".to_owned(),
        (_, None) => format!("preparing{on}"),
    }
}

/// Polls and shows the progress until the instance runs or has failed.
async fn watch(
    session: &Session,
    mut response: ApiResponse<InstanceRecord>,
    mut timer: PollTimer,
) -> anyhow::Result<ApiResponse<InstanceRecord>> {
    let client = &session.client;
    let mut view = CreationView::default();
    let mut retries = Retries::new(RetryPolicy::default());
    loop {
        let record = response.clone().value()?;
        let settled = matches!(record.state, InstanceState::Created | InstanceState::Error)
            // Will become `error`; before the reason is set it is not final.
            || failure(&record).is_some() && record.error_message.is_some()
            || matches!(record.state, InstanceState::DeleteWait | InstanceState::Deleted);
        if settled {
            return Ok(response);
        }
        view.show(client, &record).await;
        if !timer.tick().await {
            let id = record.uuid;
            return Err(timed_out(format!(
                "timed out; the creation of instance {id} continues: see `muster instance why {id}`"
            )));
        }
        match client.instance(&record.uuid.to_string()).await {
            Ok(newer) => {
                retries.reset();
                response = newer;
            }
            // The creation continues during a short outage of the API.
            Err(error) => retries.back_off(error, None).await?,
        }
    }
}

/// The displayed progress.
#[derive(Default)]
struct CreationView {
    phase: String,
    meter: Option<(String, ProgressMeter)>,
    /// Ids and names of the artifacts that the instance waits for, once queried.
    images: Option<Vec<(String, String)>>,
}

impl CreationView {
    async fn show(&mut self, client: &Client, record: &InstanceRecord) {
        let fetch = self.fetch(client, record).await;
        let phase = phase(record, fetch.as_ref().map(|(image, _)| image.as_str()));
        if phase != self.phase {
            self.meter = None;
            output::status(&phase);
            self.phase = phase;
        }
        let Some((title, Some(progress))) = fetch else {
            self.meter = None;
            return;
        };
        if self.meter.as_ref().is_none_or(|(shown, _)| *shown != title) {
            self.meter = Some((title.clone(), ProgressMeter::new(&title, 0, None)));
        }
        if let Some((_, meter)) = &self.meter {
            show_progress(meter, &progress);
        }
    }

    /// Returns the image being fetched for an instance and its progress, if the caller may see them.
    async fn fetch(
        &mut self,
        client: &Client,
        record: &InstanceRecord,
    ) -> Option<(String, Option<OperationProgress>)> {
        let bases = pending_images(record);
        if bases.is_empty() {
            return None;
        }
        if self.images.is_none() {
            let all = client.artifacts(&ListQuery::default()).await.and_then(ApiResponse::value).ok()?;
            let wanted = all.into_iter().filter(|artifact| bases.contains(&artifact.source_url.as_str()));
            self.images = Some(wanted.map(|artifact| (artifact.uuid.to_string(), artifact.name)).collect());
        }
        for (id, name) in self.images.iter().flatten() {
            let operations = client
                .artifact_operations(id, false, &ListQuery::default())
                .await
                .and_then(ApiResponse::value)
                .ok()?;
            if let Some(fetch) = operations.into_iter().find(is_fetch) {
                return Some((name.clone(), fetch.progress));
            }
        }
        None
    }
}

fn is_fetch(operation: &OperationRecord) -> bool {
    operation.operation_type == OperationType::ArtifactFetch && operation.state == OperationState::Executing
}

#[cfg(test)]
mod tests;
