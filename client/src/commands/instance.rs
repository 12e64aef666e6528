//! `muster instance`.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Subcommand;
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceRecord, InstanceState};
use muster_types::interface::InterfaceState;
use muster_types::object::ObjectType;
use serde_json::{Value, json};

use super::arguments::{path_parser, prompt_confirmation};
use super::instance_create::{self, create};
use super::instance_tables::{details, snapshots, table};
use super::list::{ListOptions, ListView};
use super::lookup::{NamedType, require_unambiguous, resolve};
use super::session::Session;
use super::wait::{PollTimer, WaitOptions};
use super::{
    blob, events, guest_facts, instance_history, instance_log, instance_migrate, instance_snapshot,
    instance_specs as specs, instance_vdi, interface, metadata, operation,
};
use crate::api::{ApiResponse, ListQuery, NewInterface, ObjectPath, PowerAction, SnapshotRecord};
use crate::exit_code::{Outcome, error_with_outcome, timed_out};
use crate::output::{self, escape_control};
use crate::transfer::DownloadTarget;

const LIST: ListView<InstanceRecord> = ListView {
    table,
    wide: &["agent_state", "power_state_since", "machine_type", "storage", "error_message"],
    order: &["namespace", "name", "uuid"],
    watched: &[ObjectType::Instance],
};

const SNAPSHOTS: ListView<SnapshotRecord> = ListView {
    table: snapshots,
    wide: &[],
    order: &["device", "created"],
    watched: &[ObjectType::Instance, ObjectType::Blob, ObjectType::Artifact],
};

/// Commands for instances, which are given by name or id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the visible instances
    List {
        /// Include deleted instances
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show an instance
    Show { instance: String },
    /// Create an instance and wait until it runs
    Create(Box<instance_create::Arguments>),
    /// Explain the state of an instance: its history and what to do
    Why { instance: String },
    /// Delete instances and their disks
    Delete {
        #[arg(required = true, value_name = "INSTANCE")]
        instances: Vec<String>,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// List the instances of a namespace, ask, and delete them with their disks
    DeleteAll {
        /// Namespace to delete the instances of, if not your own
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Start an instance
    Poweron { instance: String },
    /// Power off an instance immediately
    Poweroff { instance: String },
    /// Pause an instance; it stays in memory
    Pause { instance: String },
    /// Resume a paused instance
    Unpause { instance: String },
    /// Reboot an instance
    Reboot {
        instance: String,
        /// Reset the instance instead of asking the guest to reboot
        #[arg(long)]
        hard: bool,
    },
    /// Replace what happens when the host of an instance is lost or cannot reach the database
    SetFencing {
        instance: String,
        #[command(flatten)]
        policies: instance_create::Policies,
    },
    /// Move a running instance to another node without restarting it
    Migrate(instance_migrate::Arguments),
    /// Cancel the migration of an instance, which stays on its node
    CancelMigration { instance: String },
    /// Show facts reported by the guest: distribution, mounts, SSH host keys
    Facts { instance: String },
    /// List the interfaces of an instance
    Interfaces {
        instance: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Add an interface to an instance, even while it runs
    Plug {
        instance: String,
        /// NETWORK or NETWORK@ADDRESS, followed by ,float ,model=MODEL or ,mac=MAC
        #[arg(value_parser = specs::parse_network)]
        network: NewInterface,
        /// Check the request without adding the interface
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        wait: WaitOptions,
    },
    /// Show the serial console log of an instance
    Log(instance_log::Arguments),
    /// Save a screenshot of an instance as PNG
    Screenshot {
        instance: String,
        /// File to write; - is standard output
        #[arg(value_parser = path_parser())]
        file: PathBuf,
        /// Replace an existing file
        #[arg(long)]
        force: bool,
    },
    /// Snapshot disks of an instance into artifacts, even while it runs
    Snapshot(instance_snapshot::Arguments),
    /// List the snapshots of an instance's disks
    Snapshots {
        instance: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Open the screen of an instance in a viewer such as remote-viewer
    Vdi(instance_vdi::Arguments),
    /// Show the events of an instance, newest first
    Events {
        instance: String,
        #[command(flatten)]
        filter: events::EventFilter,
    },
    /// List the unfinished operations on an instance, newest first
    Operations {
        instance: String,
        /// Include finished operations
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show the metadata of an instance
    Metadata { instance: String },
    /// Set a metadata key of an instance
    SetMetadata {
        instance: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of an instance
    DeleteMetadata {
        instance: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

impl Command {
    /// Returns the instance that the command is for, unless it deletes or creates it.
    fn instance_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::List { .. } | Self::Create(_) | Self::Delete { .. } | Self::DeleteAll { .. } => None,
            Self::Show { instance }
            | Self::Why { instance }
            | Self::Poweron { instance }
            | Self::Poweroff { instance }
            | Self::Pause { instance }
            | Self::Unpause { instance }
            | Self::Reboot { instance, .. }
            | Self::SetFencing { instance, .. }
            | Self::Migrate(instance_migrate::Arguments { instance, .. })
            | Self::CancelMigration { instance }
            | Self::Facts { instance }
            | Self::Interfaces { instance, .. }
            | Self::Plug { instance, .. }
            | Self::Log(instance_log::Arguments { instance, .. })
            | Self::Screenshot { instance, .. }
            | Self::Snapshot(instance_snapshot::Arguments { instance, .. })
            | Self::Snapshots { instance, .. }
            | Self::Vdi(instance_vdi::Arguments { instance, .. })
            | Self::Events { instance, .. }
            | Self::Operations { instance, .. }
            | Self::Metadata { instance }
            | Self::SetMetadata { instance, .. }
            | Self::DeleteMetadata { instance, .. } => Some(instance),
        }
    }
}

pub(super) async fn run(mut command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    if let Some(instance) = command.instance_mut() {
        resolve(client, NamedType::Instance, instance, None).await?;
    }
    match command {
        Command::List { all, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.instances(all, &query)).await
        }
        Command::Show { instance } => session.show(client.instance(&instance).await?, details),
        Command::Create(arguments) => create(session, *arguments).await,
        Command::Why { instance } => instance_history::show(session, &instance).await,
        Command::Delete { instances, wait } => delete(session, &instances, wait).await,
        Command::DeleteAll { in_namespace, yes, wait } => {
            delete_all(session, in_namespace.as_deref(), yes, wait).await
        }
        Command::Poweron { instance } => power(session, &instance, PowerAction::On, "is on").await,
        Command::Poweroff { instance } => power(session, &instance, PowerAction::Off, "is off").await,
        Command::Pause { instance } => power(session, &instance, PowerAction::Pause, "is paused").await,
        Command::Unpause { instance } => power(session, &instance, PowerAction::Unpause, "is resumed").await,
        Command::Reboot { instance, hard: true } => {
            power(session, &instance, PowerAction::RebootHard, "was reset").await
        }
        Command::Reboot { instance, hard: false } => {
            power(session, &instance, PowerAction::RebootSoft, "was asked to reboot").await
        }
        Command::SetFencing { instance, policies } => {
            let (fencing, restart) = (policies.fencing, policies.restart());
            session.show(client.set_fencing(&instance, fencing, restart).await?, details)
        }
        Command::Migrate(arguments) => instance_migrate::migrate(session, arguments).await,
        Command::CancelMigration { instance } => {
            let response = client.cancel_migration(&instance).await?;
            session.confirm(&response, &format!("the migration of instance {instance} is being cancelled"))
        }
        Command::Facts { instance } => guest_facts::show(session, &instance).await,
        Command::Interfaces { instance, list } => {
            let query = list.query();
            session.list(&list, &interface::LIST, || client.instance_interfaces(&instance, &query)).await
        }
        Command::Plug { instance, network, dry_run, wait } => {
            plug(session, &instance, &network, dry_run, wait).await
        }
        Command::Log(arguments) => instance_log::run(arguments, session).await,
        Command::Screenshot { instance, file, force } => screenshot(session, &instance, &file, force).await,
        Command::Snapshot(arguments) => instance_snapshot::snapshot(session, arguments).await,
        Command::Snapshots { instance, list } => {
            let query = list.query();
            session.list(&list, &SNAPSHOTS, || client.snapshots(&instance, &query)).await
        }
        Command::Vdi(arguments) => instance_vdi::run(session, &arguments).await,
        Command::Events { instance, filter } => {
            events::show(session, ObjectPath::Instance(&instance), &filter).await
        }
        Command::Operations { instance, all, list } => {
            let query = list.query();
            session.list(&list, &operation::LIST, || client.instance_operations(&instance, all, &query)).await
        }
        Command::Metadata { instance } => metadata::show(session, ObjectPath::Instance(&instance)).await,
        Command::SetMetadata { instance, item } => {
            metadata::set(session, ObjectPath::Instance(&instance), &item).await
        }
        Command::DeleteMetadata { instance, item } => {
            metadata::delete(session, ObjectPath::Instance(&instance), &item).await
        }
    }
}

async fn power(session: &Session, instance: &str, action: PowerAction, outcome: &str) -> anyhow::Result<()> {
    let response = session.client.power(instance, action).await?;
    session.confirm(&response, &format!("instance {instance} {outcome}"))
}

/// Deletes all given instances. Failures are reported at the end.
async fn delete(session: &Session, instances: &[String], wait: WaitOptions) -> anyhow::Result<()> {
    let mut deleting = vec![];
    let mut failed = vec![];
    for instance in instances {
        match start_deletion(session, instance).await {
            Ok((id, response)) => deleting.push((instance.clone(), id, response)),
            Err(error) => failed.push((Outcome::of(&error), format!("{instance}: {error}"))),
        }
    }
    let mut timer = wait.timer();
    let mut responses = vec![];
    for (instance, id, response) in deleting {
        match timer.as_mut() {
            None => {
                responses.push(response.json().clone());
                print_status(session, &format!("instance {instance} is being deleted"));
            }
            Some(timer) => match wait_until_deleted(session, &instance, id, timer).await {
                Ok(response) => {
                    responses.push(
                        response.map_or_else(|| json!({ "uuid": id }), |response| response.json().clone()),
                    );
                    print_status(session, &format!("instance {instance} deleted"));
                }
                Err(error) => failed.push((Outcome::of(&error), format!("{instance}: {error}"))),
            },
        }
    }
    if session.is_structured() {
        session.print_value(&Value::from(responses))?;
    }
    let Some((outcome, _)) = failed.first() else { return Ok(()) };
    let texts: Vec<&str> = failed.iter().map(|(_, text)| text.as_str()).collect();
    let text = format!("failed to delete {}", escape_control(&texts.join("; ")));
    Err(error_with_outcome(*outcome, text))
}

async fn start_deletion(
    session: &Session,
    instance: &str,
) -> anyhow::Result<(InstanceId, ApiResponse<InstanceRecord>)> {
    require_unambiguous(&session.client, NamedType::Instance, instance, None).await?;
    let response = session.client.delete_instance(instance).await?;
    Ok((response.clone().value()?.uuid, response))
}

fn print_status(session: &Session, text: &str) {
    if !session.is_structured() {
        output::status(text);
    }
}

/// Waits until an instance is deleted. Returns its last record, if the server still has it.
pub(super) async fn wait_until_deleted(
    session: &Session,
    name: &str,
    id: InstanceId,
    timer: &mut PollTimer,
) -> anyhow::Result<Option<ApiResponse<InstanceRecord>>> {
    let client = &session.client;
    let text = id.to_string();
    loop {
        // Queried first: an instance that still exists without operations will not be deleted.
        let operations = client.instance_operations(&text, false, &ListQuery::default()).await;
        let response = match client.instance(&text).await {
            Ok(response) => response,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let in_progress = !operations?.value()?.is_empty();
        let record = response.clone().value()?;
        match record.state {
            InstanceState::Deleted => return Ok(Some(response)),
            InstanceState::Error if !in_progress => {
                let reason = record.error_message.unwrap_or_else(|| "the server gives no reason".to_owned());
                bail!("{reason}; see `muster instance why {id}`");
            }
            _ => {}
        }
        if !timer.wait_for(&format!("instance {name} to be deleted")).await {
            return Err(timed_out(format!(
                "timed out; the deletion continues: see `muster instance why {id}`"
            )));
        }
    }
}

/// Lists the instances of a namespace, asks, and deletes exactly these.
async fn delete_all(
    session: &Session,
    namespace: Option<&str>,
    yes: bool,
    wait: WaitOptions,
) -> anyhow::Result<()> {
    let client = &session.client;
    let namespace = namespace.unwrap_or(client.own_namespace());
    let mut instances = client.instances(false, &ListQuery::default()).await?.value()?;
    instances.retain(|instance| {
        instance.namespace == namespace
            && !matches!(instance.state, InstanceState::DeleteWait | InstanceState::Deleted)
    });
    let ids: Vec<String> = instances.iter().map(|instance| instance.uuid.to_string()).collect();
    let namespace = escape_control(namespace);
    if ids.is_empty() {
        print_status(session, &format!("namespace {namespace} has no instances"));
    } else {
        crate::message!("{}", table(instances).render(None).trim_end());
        let question =
            format!("delete these {} instances of namespace {namespace} and their disks?", ids.len());
        if !yes && !prompt_confirmation(&question)? {
            bail!("nothing was deleted");
        }
    }
    delete(session, &ids, wait).await
}

/// Adds an interface and waits until it is attached.
async fn plug(
    session: &Session,
    instance: &str,
    network: &NewInterface,
    dry_run: bool,
    wait: WaitOptions,
) -> anyhow::Result<()> {
    let client = &session.client.with_dry_run(dry_run);
    let mut network = network.clone();
    // The server looks the name up in the namespace of the instance.
    let namespace = client.instance_in(instance, None).await?.value()?.namespace;
    resolve(client, NamedType::Network, &mut network.network_uuid, Some(&namespace)).await?;
    let mut response = client.plug_interface(instance, &network).await?;
    if dry_run {
        return session.show_created(response, dry_run, interface::details);
    }
    let Some(mut timer) = wait.timer() else { return session.show(response, interface::details) };
    loop {
        let record = response.clone().value()?;
        let id = record.uuid.to_string();
        match record.state {
            InterfaceState::Initial => {}
            InterfaceState::Created => return session.show(response, interface::details),
            InterfaceState::Error | InterfaceState::Deleted => {
                bail!(
                    "failed to attach interface {id}: it is in state {}; see `muster instance why {}`",
                    record.state,
                    record.instance_uuid
                );
            }
        }
        if !timer.wait_for(&format!("interface {id} to be attached to instance {instance}")).await {
            return Err(timed_out(format!(
                "timed out; interface {id} may still be attached later: see `muster interface show {id}`"
            )));
        }
        response = client.interface(&id).await?;
    }
}

async fn screenshot(session: &Session, instance: &str, file: &Path, force: bool) -> anyhow::Result<()> {
    // Checked before the screenshot, because its blob would be orphaned otherwise.
    DownloadTarget::new(file, force)?;
    let screenshot = session.client.screenshot(instance).await?.value()?;
    blob::download(session, &screenshot.to_string(), file, force, &format!("the screenshot of {instance}"))
        .await
}

#[cfg(test)]
mod tests {
    use super::super::instance_tables::tests::example;
    use super::*;
    use crate::fake_server::FakeServer;
    use crate::output::Format;

    const SHOW: &str = "GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
    const OPERATIONS: &str = "GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/clusteroperations";

    fn at(state: &str) -> (u16, Value) {
        (200, json!(example(&json!({ "state": state, "error_message": "it is stuck" }))))
    }

    async fn deletion(states: Vec<(u16, Value)>, names: &[&str]) -> anyhow::Result<()> {
        let (client, _) = FakeServer::start(vec![
            ("DELETE /instances/web", vec![at("created")]),
            (SHOW, states),
            (OPERATIONS, vec![(200, json!([]))]),
        ])
        .await;
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        delete(&Session { client, format: Format::Json }, &names, WaitOptions::with_timeout(5)).await
    }

    #[tokio::test]
    async fn waits_for_a_deletion() {
        deletion(vec![at("delete-wait"), at("deleted")], &["web"]).await.unwrap();
        // A record that no longer exists is deleted, too.
        let missing = (404, json!({ "error": "instance not found" }));
        deletion(vec![at("delete-wait"), missing], &["web"]).await.unwrap();
    }

    #[tokio::test]
    async fn delete_all_deletes_the_listed_instances_of_one_namespace() {
        let other = "6d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
        let own = json!(example(&json!({ "namespace": "ci" })));
        let foreign = json!(example(&json!({ "namespace": "production", "uuid": other })));
        let gone = json!(example(&json!({ "namespace": "ci", "state": "delete-wait", "uuid": other })));
        let id = own["uuid"].as_str().unwrap().to_owned();
        let (client, fake) = FakeServer::start(vec![
            ("GET /instances", vec![(200, json!([foreign, own, gone]))]),
            ("DELETE /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![at("created")]),
            (SHOW, vec![at("deleted")]),
            (OPERATIONS, vec![(200, json!([]))]),
        ])
        .await;
        let session = Session { client, format: Format::Json };
        delete_all(&session, None, true, WaitOptions::with_timeout(5)).await.unwrap();
        let deletions: Vec<_> =
            fake.requests().into_iter().filter(|call| call.starts_with("DELETE")).collect();
        assert_eq!(deletions, [format!("DELETE /instances/{id}")]);
        delete_all(&session, Some("empty"), true, WaitOptions::with_timeout(5)).await.unwrap();
        assert_eq!(fake.requests().iter().filter(|call| call.starts_with("DELETE")).count(), 1);
    }

    #[tokio::test]
    async fn reports_failed_deletions_at_the_end() {
        let error = deletion(vec![at("error")], &["web"]).await.unwrap_err().to_string();
        assert!(error.starts_with("failed to delete web: it is stuck; "), "{error}");
        let error = deletion(vec![at("deleted")], &["db", "web"]).await.unwrap_err().to_string();
        assert_eq!(error, "failed to delete db: not found");
    }
}
