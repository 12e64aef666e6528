//! `muster instance`.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{Args, Subcommand};
use muster_types::ids::InstanceId;
use muster_types::instance::{InstanceRecord, InstanceState};
use muster_types::interface::InterfaceState;
use serde_json::{Value, json};

use super::instance_create::{self, create};
use super::instance_tables::{facts, table};
use super::instance_why::why;
use super::wait::{Patience, Waiting};
use super::{
    Session, blob, events, guest_facts, instance_log, instance_snapshot, instance_specs as specs, interface,
    metadata, operation, path_parser,
};
use crate::api::{Answer, NewInterface, Object, PowerCall};
use crate::credentials::write_private;
use crate::output::{self, visible};
use crate::time::iso;

/// The commands about virtual machines. An instance goes by its name or its id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the instances that you can see
    List {
        /// With those that are deleted
        #[arg(long)]
        all: bool,
    },
    /// Show one instance
    Show { instance: String },
    /// Make an instance, and wait until it runs
    Create(Box<instance_create::Arguments>),
    /// Tell the story of an instance, and how it is now
    Why { instance: String },
    /// Delete instances with their disks
    Delete {
        #[arg(required = true, value_name = "INSTANCE")]
        instances: Vec<String>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Delete every instance of a namespace
    DeleteAll {
        /// Namespace that loses its instances, if not the one that you act as
        #[arg(long, value_name = "NAMESPACE")]
        in_namespace: Option<String>,
        /// Say that you mean it
        #[arg(long, required = true)]
        yes: bool,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Switch an instance on
    Poweron { instance: String },
    /// Switch an instance off at once
    Poweroff { instance: String },
    /// Let an instance stand still; it stays in memory
    Pause { instance: String },
    /// Let a paused instance go on
    Unpause { instance: String },
    /// Ask the guest to start again
    Reboot {
        instance: String,
        /// Press the reset switch instead of asking
        #[arg(long)]
        hard: bool,
    },
    /// Show what the guest says of itself: distribution, mounts, SSH host keys
    Facts { instance: String },
    /// List the interfaces of an instance
    Interfaces { instance: String },
    /// Give an instance one more interface, also while it runs
    Plug {
        instance: String,
        /// NETWORK or NETWORK@ADDRESS, then ,float ,model=MODEL and ,mac=MAC
        #[arg(value_parser = specs::network)]
        network: NewInterface,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Show what the serial console showed
    Log(instance_log::Arguments),
    /// Store what the screen shows as a PNG
    Screenshot {
        instance: String,
        /// Where to store it; - is standard output
        #[arg(value_parser = path_parser())]
        file: PathBuf,
        /// Replace the file if it is there
        #[arg(long)]
        force: bool,
    },
    /// Copy disks of an instance into artifacts, also while it runs
    Snapshot(instance_snapshot::Arguments),
    /// List the copies of an instance's disks
    Snapshots { instance: String },
    /// Print the file with which a viewer such as remote-viewer shows the screen
    Vdi(Screen),
    /// Show the events of an instance, newest first
    Events {
        instance: String,
        #[command(flatten)]
        which: events::Which,
    },
    /// List the operations on an instance that have not ended, newest first
    Operations {
        instance: String,
        /// With those that have ended
        #[arg(long)]
        all: bool,
    },
    /// Show the metadata of an instance
    Metadata { instance: String },
    /// Set an item of an instance's metadata
    SetMetadata {
        instance: String,
        #[command(flatten)]
        item: metadata::Item,
    },
    /// Delete an item of an instance's metadata
    DeleteMetadata {
        instance: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

/// How to reach a screen.
#[derive(Debug, Args)]
pub struct Screen {
    instance: String,
    /// Write the file here
    #[arg(long, value_name = "FILE", value_parser = path_parser(), conflicts_with = "url")]
    output: Option<PathBuf>,
    /// Print an address that shows the screen for a short time, if the cluster has a proxy for that
    #[arg(long)]
    url: bool,
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { all } => session.show(client.instances(all).await?, table),
        Command::Show { instance } => session.show(client.instance(&instance).await?, facts),
        Command::Create(arguments) => create(session, *arguments).await,
        Command::Why { instance } => why(session, &instance).await,
        Command::Delete { instances, waiting } => delete(session, &instances, waiting).await,
        Command::DeleteAll { in_namespace, yes: _, waiting } => {
            delete_all(session, in_namespace.as_deref(), waiting).await
        }
        Command::Poweron { instance } => power(session, &instance, PowerCall::On, "is on").await,
        Command::Poweroff { instance } => power(session, &instance, PowerCall::Off, "is off").await,
        Command::Pause { instance } => power(session, &instance, PowerCall::Pause, "is paused").await,
        Command::Unpause { instance } => power(session, &instance, PowerCall::Unpause, "goes on").await,
        Command::Reboot { instance, hard: true } => {
            power(session, &instance, PowerCall::RebootHard, "starts again").await
        }
        Command::Reboot { instance, hard: false } => {
            power(session, &instance, PowerCall::RebootSoft, "was asked to start again").await
        }
        Command::Facts { instance } => guest_facts::show(session, &instance).await,
        Command::Interfaces { instance } => {
            session.show(client.instance_interfaces(&instance).await?, interface::table)
        }
        Command::Plug { instance, network, waiting } => plug(session, &instance, &network, waiting).await,
        Command::Log(arguments) => instance_log::run(arguments, session).await,
        Command::Screenshot { instance, file, force } => screenshot(session, &instance, &file, force).await,
        Command::Snapshot(arguments) => instance_snapshot::snapshot(session, arguments).await,
        Command::Snapshots { instance } => instance_snapshot::list(session, &instance).await,
        Command::Vdi(screen) => vdi(session, &screen).await,
        Command::Events { instance, which } => {
            events::show(session, Object::Instance(&instance), &which).await
        }
        Command::Operations { instance, all } => {
            session.show(client.instance_operations(&instance, all).await?, operation::table)
        }
        Command::Metadata { instance } => metadata::show(session, Object::Instance(&instance)).await,
        Command::SetMetadata { instance, item } => {
            metadata::set(session, Object::Instance(&instance), &item).await
        }
        Command::DeleteMetadata { instance, item } => {
            metadata::delete(session, Object::Instance(&instance), &item).await
        }
    }
}

async fn power(session: &Session, instance: &str, call: PowerCall, then: &str) -> anyhow::Result<()> {
    let answer = session.client.power(instance, call).await?;
    session.done(&answer, &format!("instance {instance} {then}"))
}

/// Deletes all that are named, whatever becomes of each. Those that failed are told at the end.
async fn delete(session: &Session, instances: &[String], waiting: Waiting) -> anyhow::Result<()> {
    let mut under_way = vec![];
    let mut failed = vec![];
    for instance in instances {
        match session.client.delete_instance(instance).await.and_then(|answer| {
            let record = answer.clone().value()?;
            Ok((answer, record))
        }) {
            Ok((answer, record)) => under_way.push((instance.clone(), record.uuid, answer)),
            // One of many is told at its end, one alone by its error.
            Err(error) => failed.push(format!("{instance}: {error}")),
        }
    }
    let mut patience = waiting.patience();
    let mut answers = vec![];
    for (instance, id, answer) in under_way {
        match patience.as_mut() {
            None => {
                answers.push(answer.json().clone());
                say(session, &format!("instance {instance} is being deleted"));
            }
            Some(patience) => match gone(session, id, patience).await {
                Ok(answer) => {
                    answers
                        .push(answer.map_or_else(|| json!({ "uuid": id }), |answer| answer.json().clone()));
                    say(session, &format!("instance {instance} deleted"));
                }
                Err(error) => failed.push(format!("{instance}: {error}")),
            },
        }
    }
    if session.json {
        output::print_json(&Value::from(answers))?;
    }
    if failed.is_empty() { Ok(()) } else { bail!("not deleted: {}", visible(&failed.join("; "))) }
}

fn say(session: &Session, text: &str) {
    if !session.json {
        eprintln!("{}", visible(text));
    }
}

/// Waits until nothing of an instance is left. The answer is its last record, if that is still known.
async fn gone(
    session: &Session,
    id: InstanceId,
    patience: &mut Patience,
) -> anyhow::Result<Option<Answer<InstanceRecord>>> {
    let client = &session.client;
    let text = id.to_string();
    loop {
        // Asked first: what is not deleted when no work is left stays.
        let operations = client.instance_operations(&text, false).await;
        let answer = match client.instance(&text).await {
            Ok(answer) => answer,
            Err(error) if error.status() == Some(404) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let working = !operations?.value()?.is_empty();
        let record = answer.clone().value()?;
        match record.state {
            InstanceState::Deleted => return Ok(Some(answer)),
            InstanceState::Error if !working => {
                let why = record.error_message.unwrap_or_else(|| "the server does not say why".to_owned());
                bail!("{why}; `muster instance why {id}` tells more");
            }
            _ => {}
        }
        if !patience.lasts().await {
            bail!("it is not deleted in time; the cluster goes on: `muster instance why {id}` tells how far");
        }
    }
}

async fn delete_all(session: &Session, namespace: Option<&str>, waiting: Waiting) -> anyhow::Result<()> {
    let answer = session.client.delete_instances(namespace).await?;
    let ids = answer.clone().value()?;
    let mut failed = vec![];
    if let Some(mut patience) = waiting.patience() {
        for id in &ids {
            if let Err(error) = gone(session, *id, &mut patience).await {
                failed.push(format!("{id}: {error}"));
            }
        }
    }
    session.show(answer, |ids| {
        output::Table::new(&["UUID"], &[]).rows(ids.into_iter().map(|id| [id.to_string()]))
    })?;
    if failed.is_empty() { Ok(()) } else { bail!("not deleted: {}", visible(&failed.join("; "))) }
}

/// Adds an interface, and waits until it is there.
async fn plug(
    session: &Session,
    instance: &str,
    network: &NewInterface,
    waiting: Waiting,
) -> anyhow::Result<()> {
    let client = &session.client;
    let mut answer = client.plug_interface(instance, network).await?;
    let Some(mut patience) = waiting.patience() else { return session.show(answer, interface::facts) };
    loop {
        let record = answer.clone().value()?;
        let id = record.uuid.to_string();
        match record.state {
            InterfaceState::Initial => {}
            InterfaceState::Created => return session.show(answer, interface::facts),
            InterfaceState::Error | InterfaceState::Deleted => {
                bail!(
                    "interface {id} was not plugged in: it is {}; `muster instance why {}` tells more",
                    record.state,
                    record.instance_uuid
                );
            }
        }
        if !patience.lasts().await {
            bail!("interface {id} is not there in time; it may come later");
        }
        answer = client.interface(&id).await?;
    }
}

async fn screenshot(session: &Session, instance: &str, file: &Path, force: bool) -> anyhow::Result<()> {
    // Refused before the picture is taken: it would stay with nobody knowing of it.
    crate::transfer::Target::new(file, force)?;
    let picture = session.client.screenshot(instance).await?.value()?;
    blob::download(session, &picture.to_string(), file, force, &format!("the screen of {instance}")).await
}

async fn vdi(session: &Session, screen: &Screen) -> anyhow::Result<()> {
    let client = &session.client;
    if screen.url {
        let answer = client.screen_link(&screen.instance).await?;
        if session.json {
            return output::print_json(answer.json());
        }
        let link = answer.value()?;
        #[expect(clippy::cast_precision_loss, reason = "a time of this millennium")]
        let until = iso(link.expires_at as f64);
        eprintln!("good until {until}");
        return output::print(&format!("{}\n", visible(&link.url)));
    }
    let file = client.screen_file(&screen.instance).await?;
    match &screen.output {
        Some(path) => {
            write_private(path, &file)?;
            eprintln!("{} is for a viewer: `remote-viewer {}`", path.display(), path.display());
            Ok(())
        }
        None if session.json => output::print_json(&json!(file)),
        // The lines are for a program; what they would do to a terminal is not theirs to choose.
        None => output::print(&file.lines().map(|line| visible(line) + "\n").collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::instance_tables::tests::example;
    use super::*;
    use crate::fake::Fake;

    const SHOW: &str = "GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
    const OPERATIONS: &str = "GET /instances/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01/clusteroperations";

    fn at(state: &str) -> (u16, Value) {
        (200, json!(example(&json!({ "state": state, "error_message": "it is stuck" }))))
    }

    async fn deletion(states: Vec<(u16, Value)>, names: &[&str]) -> anyhow::Result<()> {
        let (client, _) = Fake::serve(vec![
            ("DELETE /instances/web", vec![at("created")]),
            (SHOW, states),
            (OPERATIONS, vec![(200, json!([]))]),
        ])
        .await;
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        delete(&Session { client, json: true }, &names, Waiting::of(5)).await
    }

    #[tokio::test]
    async fn a_deletion_is_waited_for() {
        deletion(vec![at("delete-wait"), at("deleted")], &["web"]).await.unwrap();
        // A record that is gone altogether is deleted, too.
        let gone = (404, json!({ "error": "instance not found" }));
        deletion(vec![at("delete-wait"), gone], &["web"]).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_not_deleted_is_named_after_the_others() {
        let error = deletion(vec![at("error")], &["web"]).await.unwrap_err().to_string();
        assert!(error.starts_with("not deleted: web: it is stuck; "), "{error}");
        let error = deletion(vec![at("deleted")], &["db", "web"]).await.unwrap_err().to_string();
        assert_eq!(error, "not deleted: db: not found");
    }
}
