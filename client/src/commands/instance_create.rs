//! `muster instance create`: has an instance made, and watches until it runs.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{anyhow, bail};
use clap::Args;
use muster_types::instance::{ConfigDriveType, InstanceRecord, InstanceState};
use muster_types::operation::{OperationRecord, OperationState, OperationType, Progress};
use muster_types::spec::{DiskSpec, VideoSpec};
use serde_json::Value;

use super::instance_specs as specs;
use super::instance_tables::facts;
use super::instance_why::{refusals, stage_advice, stage_meaning};
use super::wait::{LongWaiting, Patience};
use super::{Session, path_parser};
use crate::api::{Answer, Client, Error, EventQuery, NewInstance, NewInterface, Object};
use crate::output::{self, visible};
use crate::progress::Meter;
use crate::transfer::{Policy, Tries, unless_interrupted};

/// What to make.
#[derive(Debug, Args)]
#[command(after_help = "\
Disks:     --disk 20                    20 GB, empty
           --disk 8@tiny                8 GB from the label, artifact or image of that name
           --disk @debian:12            as large as the image
           --disk @cd,type=cdrom        a disc in a drive
Networks:  --network lan                any address of the network
           --network lan@10.0.0.7       this address; @none for no address
           --network lan,float          reachable from outside
           --network lan,model=e1000,mac=02:00:00:00:00:07")]
pub struct Arguments {
    /// Its name, which is also its host name
    name: String,
    /// Virtual processors
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// Megabytes, or with a unit such as 2G
    #[arg(long, value_name = "SIZE", value_parser = specs::memory, default_value = "1024")]
    memory: u64,
    /// A disk, in the order of its devices: SIZE, @IMAGE or SIZE@IMAGE, then ,bus=BUS and ,type=cdrom
    #[arg(long, value_name = "DISK", value_parser = specs::disk, required = true)]
    disk: Vec<DiskSpec>,
    /// An interface, in their order: NETWORK or NETWORK@ADDRESS, then ,float ,model=MODEL and ,mac=MAC
    #[arg(long, value_name = "NETWORK", value_parser = specs::network)]
    network: Vec<NewInterface>,
    /// A public key for the guest, or the file that it is in
    #[arg(long, value_name = "FILE|KEY")]
    ssh_key: Option<String>,
    /// What the guest's cloud-init is given; - is standard input
    #[arg(long, value_name = "FILE", value_parser = path_parser())]
    user_data: Option<PathBuf>,
    /// The node that it is to be on
    #[arg(long, value_name = "NODE")]
    placed_on: Option<String>,
    /// Namespace that it is for, if not the one that you act as
    #[arg(long, value_name = "NAMESPACE")]
    in_namespace: Option<String>,
    /// Boot with UEFI in place of BIOS
    #[arg(long)]
    uefi: bool,
    /// Only boot what is signed
    #[arg(long, requires = "uefi")]
    secure_boot: bool,
    /// What the memory of the firmware begins as: label:NAME or sf://blob/UUID
    #[arg(long, value_name = "IMAGE", requires = "uefi")]
    nvram_template: Option<String>,
    /// The guest is told nothing about itself
    #[arg(long)]
    no_config_drive: bool,
    /// The screen: model=MODEL,memory=KIB,vdi=VDI
    #[arg(long, value_name = "VIDEO", value_parser = specs::video)]
    video: Option<VideoSpec>,
    /// An item of its metadata; the value is JSON or else a string
    #[arg(long, value_name = "KEY=VALUE", value_parser = specs::metadata)]
    metadata: Vec<(String, Value)>,
    /// A tag, which the affinity of others may name
    #[arg(long, value_name = "TAG")]
    tag: Vec<String>,
    /// Whom it is to be with: RULE=TAG, with require-with, require-without, prefer-with or prefer-without
    #[arg(long, value_name = "RULE=TAG", value_parser = specs::affinity)]
    affinity: Vec<(&'static str, String)>,
    /// A way into the guest, such as sf-agent; `none` for none
    #[arg(long, value_name = "NAME")]
    side_channel: Vec<String>,
    #[command(flatten)]
    waiting: LongWaiting,
}

impl Arguments {
    /// The instance as the API wants it.
    async fn request(self, client: &Client) -> anyhow::Result<NewInstance> {
        let mut disk = self.disk;
        for base in disk.iter_mut().filter_map(|disk| disk.base.as_mut()) {
            *base = specs::image(client, base).await?;
        }
        Ok(NewInstance {
            name: self.name,
            cpus: self.cpus,
            memory: self.memory,
            disk,
            network: self.network,
            ssh_key: self.ssh_key.as_deref().map(specs::ssh_key).transpose()?,
            user_data: self.user_data.as_deref().map(specs::user_data).transpose()?,
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
            metadata: specs::all_metadata(self.metadata, &self.tag, self.affinity)?,
            side_channels: specs::side_channels(self.side_channel)?,
        })
    }
}

/// Makes an instance, and waits until it runs.
pub(super) async fn create(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let waiting = arguments.waiting;
    let begun = Instant::now();
    let new = arguments.request(&session.client).await?;
    let answer = match session.client.create_instance(&new).await {
        Ok(answer) => answer,
        Err(error) => return Err(refused(session, &new, error).await),
    };
    let Some(patience) = waiting.patience() else { return session.show(answer, facts) };
    let id = answer.clone().value()?.uuid;
    let goes_on = || format!("the cluster goes on: `muster instance why {id}` tells how far");
    let answer = unless_interrupted(watch(session, answer, patience), goes_on).await?;
    let record = answer.clone().value()?;
    if let Some(why) = failure(&record) {
        if session.json {
            output::print_json(answer.json())?;
        }
        bail!(
            "instance {} failed: {}; `muster instance why {id}` tells its story, `muster instance delete {id}` clears it \
             away",
            visible(&record.name),
            visible(&why)
        );
    }
    session.show(answer, facts)?;
    eprintln!("instance {} runs after {:.1} s", visible(&record.name), begun.elapsed().as_secs_f64());
    Ok(())
}

/// Says as much as is known about why an instance was not made.
async fn refused(session: &Session, new: &NewInstance, error: Error) -> anyhow::Error {
    let Error::NotPlaced { stage, transient, .. } = &error else { return error.into() };
    let (stage, transient) = (stage.clone(), *transient);
    eprintln!("not placed: {} (stage {stage})", stage_meaning(&stage));
    let left = left_behind(session, new).await;
    let id = left.as_ref().map(|record| record.uuid.to_string());
    if let Some(id) = &id {
        for line in refusals(session, id).await {
            eprintln!("  {}", visible(&line));
        }
    }
    let again = if transient { "; it may work later" } else { "" };
    let clear = id.map_or_else(String::new, |id| format!("; `muster instance delete {id}` clears it away"));
    anyhow!("{error}: {}{again}{clear}", stage_advice(&stage))
}

/// The record that a refused instance leaves, which tells why. There may be older ones of the name.
async fn left_behind(session: &Session, new: &NewInstance) -> Option<InstanceRecord> {
    let client = &session.client;
    let namespace = new.namespace.as_deref().unwrap_or(client.acts_as());
    let all = client.instances(false).await.and_then(Answer::value).ok()?;
    let named = all.into_iter().filter(|record| record.name == new.name && record.namespace == namespace);
    let mut failed: Vec<InstanceRecord> = named.filter(|record| !record.state.is_alive()).collect();
    if failed.len() > 1 {
        // Several failed before: which is the newest only their events know.
        let mut newest: Option<(f64, InstanceRecord)> = None;
        for record in failed.drain(..) {
            let id = record.uuid.to_string();
            let query = EventQuery { limit: Some(1), event_type: None };
            let events = client.events(Object::Instance(&id), &query).await;
            let time = events.and_then(Answer::value).ok()?;
            // What has no events yet is so new that they are still on their way.
            let time = time.first().map_or(f64::INFINITY, |event| event.timestamp);
            if newest.as_ref().is_none_or(|(newest, _)| time > *newest) {
                newest = Some((time, record));
            }
        }
        return newest.map(|(_, record)| record);
    }
    failed.pop()
}

/// Why an instance will not run, if that is known.
fn failure(record: &InstanceRecord) -> Option<String> {
    match record.state {
        InstanceState::Initial
        | InstanceState::Preflight
        | InstanceState::Creating
        | InstanceState::Created => None,
        InstanceState::DeleteWait | InstanceState::Deleted => {
            Some("somebody deleted it meanwhile".to_owned())
        }
        InstanceState::Error
        | InstanceState::InitialError
        | InstanceState::PreflightError
        | InstanceState::CreatingError
        | InstanceState::CreatedError
        | InstanceState::DeleteWaitError => {
            Some(record.error_message.clone().unwrap_or_else(|| "the server does not say why".to_owned()))
        }
    }
}

/// What is going on, in a few words.
fn phase(record: &InstanceRecord, fetching: Option<&str>) -> String {
    let on = record.node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    match (record.state, fetching) {
        (InstanceState::Creating, _) => format!("building and starting{on}"),
        (_, Some(image)) => format!("fetching {image}{on}"),
        (InstanceState::Initial, None) if record.node.is_none() => "placing".to_owned(),
        (_, None) => format!("preparing{on}"),
    }
}

/// Asks again and again, and shows how far it is, until it runs or failed.
async fn watch(
    session: &Session,
    mut answer: Answer<InstanceRecord>,
    mut patience: Patience,
) -> anyhow::Result<Answer<InstanceRecord>> {
    let client = &session.client;
    let mut view = View::default();
    let mut tries = Tries::new(Policy::default());
    loop {
        let record = answer.clone().value()?;
        let settled = matches!(record.state, InstanceState::Created | InstanceState::Error)
            // On its way to `error`; until then there may be no reason.
            || failure(&record).is_some() && record.error_message.is_some()
            || matches!(record.state, InstanceState::DeleteWait | InstanceState::Deleted);
        if settled {
            return Ok(answer);
        }
        view.show(client, &record).await;
        if !patience.lasts().await {
            let id = record.uuid;
            bail!(
                "instance {id} does not run in time; it may do so later: `muster instance why {id}` tells how far"
            );
        }
        match client.instance(&record.uuid.to_string()).await {
            Ok(newer) => {
                tries.succeeded();
                answer = newer;
            }
            // A server that is away for a moment does not end it: the instance is made anyway.
            Err(error) => tries.again(error, None).await?,
        }
    }
}

/// What the user sees of it.
#[derive(Default)]
struct View {
    phase: String,
    meter: Option<(String, Meter)>,
    /// The images that it waits for, once they are known: ids and names of artifacts.
    images: Option<Vec<(String, String)>>,
}

impl View {
    async fn show(&mut self, client: &Client, record: &InstanceRecord) {
        let fetch = self.fetch(client, record).await;
        let phase = phase(record, fetch.as_ref().map(|(image, _)| image.as_str()));
        if phase != self.phase {
            self.meter = None;
            eprintln!("{}", visible(&phase));
            self.phase = phase;
        }
        let Some((title, Some(progress))) = fetch else {
            self.meter = None;
            return;
        };
        let number = |number: i64| u64::try_from(number).unwrap_or(0);
        let done = number(progress.done);
        if self.meter.as_ref().is_none_or(|(shown, _)| *shown != title) {
            self.meter = Some((title.clone(), Meter::new(&title, done, progress.total.map(number))));
        }
        if let Some((_, meter)) = &self.meter {
            if let Some(total) = progress.total {
                meter.set_total(number(total));
            }
            meter.at(done);
        }
    }

    /// The image that is being fetched for an instance, and how far it is, as far as the caller may see it.
    async fn fetch(
        &mut self,
        client: &Client,
        record: &InstanceRecord,
    ) -> Option<(String, Option<Progress>)> {
        let bases = awaited(record);
        if bases.is_empty() {
            return None;
        }
        if self.images.is_none() {
            let all = client.artifacts().await.and_then(Answer::value).ok()?;
            let wanted = all.into_iter().filter(|artifact| bases.contains(&artifact.source_url.as_str()));
            self.images = Some(wanted.map(|artifact| (artifact.uuid.to_string(), artifact.name)).collect());
        }
        for (id, name) in self.images.iter().flatten() {
            let operations = client.artifact_operations(id, false).await.and_then(Answer::value).ok()?;
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

/// What the disks are to begin as that is not there yet.
pub(super) fn awaited(record: &InstanceRecord) -> Vec<&str> {
    if !matches!(record.state, InstanceState::Initial | InstanceState::Preflight) {
        return vec![];
    }
    let missing = record.disk_spec.iter().filter(|disk| disk.blob_uuid.is_none());
    missing.filter_map(|disk| disk.spec.base.as_deref()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::instance_tables::tests::example;
    use super::*;
    use crate::fake::Fake;

    #[test]
    fn it_failed_only_when_it_will_not_run() {
        for state in ["initial", "preflight", "creating", "created"] {
            assert_eq!(failure(&example(&json!({ "state": state }))), None, "{state}");
        }
        let broken = example(&json!({ "state": "error", "error_message": "no image" }));
        assert_eq!(failure(&broken).as_deref(), Some("no image"));
        assert!(failure(&example(&json!({ "state": "deleted" }))).unwrap().contains("meanwhile"));
        assert!(failure(&example(&json!({ "state": "creating-error" }))).is_some());
    }

    #[test]
    fn only_what_is_not_there_yet_is_waited_for() {
        let disk = |base: &str, blob: Value| json!({ "size": null, "base": base, "bus": "virtio", "type": "disk", "blob_uuid": blob });
        let here = json!("5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01");
        let disks = json!([disk("debian:12", json!(null)), disk("label:tiny", here)]);
        let at = |state: &str| example(&json!({ "state": state, "disk_spec": disks }));
        assert_eq!(awaited(&at("preflight")), ["debian:12"]);
        assert!(awaited(&at("creating")).is_empty());
    }

    #[test]
    fn the_phase_names_node_and_image() {
        let at = |state: &str, node: Value, image| {
            phase(&example(&json!({ "state": state, "node": node })), image)
        };
        assert_eq!(at("initial", json!(null), None), "placing");
        assert_eq!(at("initial", json!("sim-1"), None), "preparing on sim-1");
        assert_eq!(at("preflight", json!("sim-1"), Some("tiny")), "fetching tiny on sim-1");
        assert_eq!(at("creating", json!("sim-1"), Some("tiny")), "building and starting on sim-1");
    }

    const ID: &str = "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";

    fn arguments(line: &str) -> Arguments {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            arguments: Arguments,
        }
        let words = std::iter::once("create").chain(line.split_whitespace());
        <Line as clap::Parser>::try_parse_from(words).unwrap().arguments
    }

    fn at(state: &str) -> (u16, Value) {
        (
            200,
            json!(example(
                &json!({ "state": state, "error_message": (state == "error").then_some("no image") })
            )),
        )
    }

    #[tokio::test]
    async fn it_is_watched_until_it_runs() {
        let (client, fake) = Fake::serve(vec![
            ("POST /instances", vec![at("initial")]),
            ("GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![at("creating"), at("created")]),
        ])
        .await;
        let session = Session { client, json: true };
        create(&session, arguments("web --disk 8@a:b --network lan --tag big --memory 2G")).await.unwrap();
        let asked = fake.asked();
        let body = asked[0].strip_prefix("POST /instances ").unwrap();
        let expected = json!({
            "name": "web", "cpus": 1, "memory": 2048, "uefi": false, "secure_boot": false,
            "disk": [{ "size": 8, "base": "a:b", "bus": "virtio", "type": "disk" }],
            "network": [{ "network_uuid": "lan", "float": false }],
            "configdrive": "openstack-disk", "metadata": { "tags": ["big"] }
        });
        assert_eq!(serde_json::from_str::<Value>(body).unwrap(), expected);
        assert_eq!(asked.last().unwrap(), &format!("GET /instances/{ID}"));
    }

    #[tokio::test]
    async fn a_failure_says_why() {
        let (client, _) = Fake::serve(vec![
            ("POST /instances", vec![at("initial")]),
            ("GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![at("error")]),
        ])
        .await;
        let session = Session { client, json: false };
        let error = create(&session, arguments("web --disk 8")).await.unwrap_err().to_string();
        assert!(error.starts_with("instance web failed: no image; "), "{error}");
    }

    #[tokio::test]
    async fn a_refusal_by_the_scheduler_is_explained() {
        let full = json!({ "error": "No nodes remaining", "status": 507, "stage": "queue_state", "transient": true });
        let event = json!({
            "event_uuid": "x", "request_id": null, "timestamp": 1.0, "event_type": "status", "type": "status",
            "message": "schedule has no candidates at stage queue_state, aborting", "extra": {}, "node": "",
            "fqdn": "", "duration": null
        });
        let (client, fake) = Fake::serve(vec![
            ("POST /instances", vec![(507, full)]),
            ("GET /instances", vec![(200, json!([at("error").1]))]),
            (
                "GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/events",
                vec![(200, json!([])), (200, json!([event]))],
            ),
        ])
        .await;
        let session = Session { client, json: false };
        let error = create(&session, arguments("web --disk 8")).await.unwrap_err().to_string();
        let expected = format!(
            "No nodes remaining: try again in a minute; it may work later; `muster instance delete {ID}` clears it away"
        );
        assert_eq!(error, expected);
        assert_eq!(fake.asked().len(), 4);
    }
}
