//! `muster node`.

use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::Subcommand;
use muster_types::event::EventType;
use muster_types::host_check::HostCheck;
use muster_types::node::{EvacuationRecord, NodeRecord, NodeState};
use muster_types::object::ObjectType;
use muster_types::shared_storage::SharedStorageRecord;
use reqwest::StatusCode;
use serde_json::{Map, Value};

use super::arguments::prompt_confirmation;
use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::Session;
use super::{node_drain, node_join};
use crate::api::{ApiResponse, EventQuery, ObjectPath};
use crate::output::{Table, compact, escape_control, format_size, or_dash};
use crate::time::format_utc;

const LIST: ListView<NodeRecord> = ListView {
    table,
    wide: &["release", "epoch", "clock_skew", "uuid"],
    order: &[],
    watched: &[ObjectType::Node],
};

/// Commands for nodes, which are given by name or id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the nodes
    List {
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a node
    Show { node: String },
    /// Show the last reported resources of a node
    Resources { node: String },
    /// Show the CPU usage of a node's daemon
    Metrics { node: String },
    /// Delete a drained or dead node; checking in does not restore it
    Delete {
        node: String,
        /// Declare that the host of a node that does not check in is dead; its instances end in error
        #[arg(long, alias = "force")]
        dead: bool,
        /// Do not ask for confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Move the instances of a node to other nodes; it gets no new ones
    Drain(node_drain::Arguments),
    /// Let a node get new instances again; cancels its drain
    Undrain { node: String },
    /// Keep new instances from a node, whose instances stay, until `undrain`
    Maintenance { node: String },
    /// Restart the instances of a dead node on other nodes
    Evacuate {
        node: String,
        /// Declare that the host of the node is dead: VMs that still run there would run twice
        #[arg(long)]
        dead: bool,
        /// Do not ask for confirmation
        #[arg(long, requires = "dead")]
        yes: bool,
    },
    /// Give a copied data directory a new identity, so that this host joins as a new node
    Adopt {
        /// Data directory of a daemon that is not running
        #[arg(long, value_name = "DIR", default_value_os_t = crate::default_data_dir())]
        data_dir: PathBuf,
        /// Keep the identity: the directory was moved here, and the host that it comes from is off
        #[arg(long)]
        moved: bool,
    },
    /// Print the command that joins a new host to the cluster; it can be used once
    Invite {
        /// Seconds until the invitation expires
        #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
        expires_in: u64,
    },
    /// Write the settings with which this host joins a cluster that has invited it
    Join(node_join::Arguments),
    /// Show the metadata of a node
    Metadata { node: String },
    /// Set a metadata key of a node
    SetMetadata {
        node: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a node
    DeleteMetadata {
        node: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.nodes(&query)).await
        }
        Command::Show { node } => session.show(client.node(&node).await?, details),
        Command::Resources { node } => session.show(resources(session, &node).await?, key_values),
        Command::Metrics { node } => session.show(client.process_metrics(&node).await?, key_values),
        Command::Delete { node, dead, yes } => delete(session, &node, dead, yes).await,
        // The executable, which knows the format of the directory, runs it.
        Command::Adopt { .. } => bail!("`node adopt` needs no server"),
        Command::Drain(arguments) => node_drain::drain(session, arguments).await,
        Command::Undrain { node } => {
            let response = client.undrain_node(&node).await?;
            session.confirm(&response, &format!("node {node} gets new instances again"))
        }
        Command::Maintenance { node } => {
            let response = client.start_maintenance(&node).await?;
            session.confirm(&response, &format!("node {node} gets no new instances"))
        }
        Command::Evacuate { node, dead, yes } => {
            let question = format!("is the host of {node} dead? VMs that still run there would run twice.");
            if dead && !yes && !prompt_confirmation(&question)? {
                bail!("nothing was evacuated");
            }
            session.show(client.evacuate_node(&node, dead).await?, evacuations)
        }
        Command::Invite { expires_in } => {
            let response = client.invite_node(expires_in).await?;
            let token = response.json()["token"].as_str().unwrap_or_default();
            session.print_line(&response, &format!("muster node join {token}"))
        }
        Command::Join(arguments) => node_join::run(arguments).await,
        Command::Metadata { node } => metadata::show(session, ObjectPath::Node(&node)).await,
        Command::SetMetadata { node, item } => metadata::set(session, ObjectPath::Node(&node), &item).await,
        Command::DeleteMetadata { node, item } => {
            metadata::delete(session, ObjectPath::Node(&node), &item).await
        }
    }
}

/// Deletes a node if the user confirms it. The server rejects nodes that are alive and not drained, without a question.
async fn delete(session: &Session, node: &str, dead: bool, yes: bool) -> anyhow::Result<()> {
    let client = &session.client;
    let require_confirmation = |question: &str| {
        if yes || prompt_confirmation(question)? { Ok(()) } else { Err(anyhow!("nothing was deleted")) }
    };
    let record = client.node(node).await?.value()?;
    let is_alive = matches!(record.state, NodeState::Created | NodeState::Stopping);
    if is_alive && record.cordon.is_some() {
        require_confirmation(&format!("delete node {node}? Its daemon stops and cannot rejoin."))?;
    }
    let response = match client.delete_node(node, false).await {
        Err(error) if dead && !is_alive && error.status() == Some(StatusCode::CONFLICT.as_u16()) => {
            // The error lists the instances that end in error.
            crate::message!("{}", escape_control(&error.to_string()));
            require_confirmation(&format!("is the host of {node} dead, and delete the node?"))?;
            client.delete_node(node, true).await?
        }
        response => response?,
    };
    session.confirm(&response, &format!("node {node} deleted"))
}

/// Returns the last reported resources, which only a node's newest `resources` event contains.
async fn resources(session: &Session, node: &str) -> anyhow::Result<ApiResponse<Map<String, Value>>> {
    let newest = EventQuery {
        limit: Some(1),
        event_type: Some(EventType::Resources.to_string()),
        ..EventQuery::default()
    };
    let events = session.client.events(ObjectPath::Node(node), &newest).await?;
    events.part("/0/extra").ok_or_else(|| anyhow!("node {node} has not reported its resources yet"))
}

fn roles(node: &NodeRecord) -> String {
    let roles = [
        (node.is_hypervisor, "hypervisor"),
        (node.is_network_node && !node.is_active_network_node, "network"),
        (node.is_active_network_node, "active network"),
        (node.is_database_node, "database"),
        (node.is_cluster_maintainer, "maintainer"),
        (node.simulated, "simulated"),
    ];
    let roles = roles.into_iter().filter(|(has, _)| *has).map(|(_, role)| role.to_owned());
    let limits = node.limits.keys().map(|limit| format!("no {limit}"));
    let limits = limits.chain(node.degraded.iter().map(|_| "degraded".to_owned()));
    let limits = limits.chain(node.cordon.iter().map(|cordon| cordon.reason.to_string()));
    or_dash(roles.chain(limits).collect::<Vec<_>>().join(", "))
}

fn time(seconds: f64) -> String {
    if seconds > 0.0 { format_utc(seconds) } else { "never".to_owned() }
}

/// Returns what happens to the VMs of a node that does not check in.
fn fencing(node: &NodeRecord) -> String {
    match node.fencing_lease {
        Some(lease) => format!("a watchdog stops its VMs {lease} s after its last check-in"),
        None => "none; its VMs keep running without check-ins".to_owned(),
    }
}

/// Returns which storage a node shares with others.
fn shared_storage(node: &NodeRecord) -> String {
    match &node.shared_storage {
        None => "none".to_owned(),
        Some(SharedStorageRecord { path, uuid: None, .. }) => format!("not mounted at {path}"),
        Some(SharedStorageRecord { path, uuid: Some(uuid), free, total, .. }) => {
            format!("{uuid} at {path}, {} of {} free", format_size(*free), format_size(*total))
        }
    }
}

/// Returns a check of a host that did not pass, with its fix.
fn check(check: &HostCheck) -> (String, String) {
    let fix = check.fix.as_ref().map(|fix| format!("; fix: {fix}")).unwrap_or_default();
    let HostCheck { name, state, detail, affects, .. } = check;
    (format!("{state} {name}"), format!("{detail}; affects {affects}{fix}"))
}

fn table(nodes: Vec<NodeRecord>) -> Table {
    Table::new(&["NAME", "STATE", "ADDRESS", "LAST SEEN"], &["ROLES"]).rows(nodes.into_iter().map(|node| {
        let (last_seen, roles) = (time(node.lastseen), roles(&node));
        [node.name, node.state.to_string(), node.ip, last_seen, roles]
    }))
}

fn details(node: NodeRecord) -> Table {
    let (fencing, roles, shared_storage) = (fencing(&node), roles(&node), shared_storage(&node));
    let has_check = |reason: &String| node.checks.iter().any(|check| check.detail == *reason);
    let limits = node.limits.iter().filter(|(_, reason)| !has_check(reason));
    let limits = limits.map(|(limit, reason)| (format!("no {limit}"), reason.clone()));
    let limits = limits.chain(node.checks.iter().map(check));
    let limits = limits.chain(node.degraded.iter().map(|degraded| {
        ("degraded".to_owned(), format!("{} (since {})", degraded.reason, format_utc(degraded.since)))
    }));
    let limits = limits.chain(node.cordon.iter().map(|cordon| {
        let value = format!("gets no new instances (since {})", format_utc(cordon.since));
        (cordon.reason.to_string(), value)
    }));
    let metadata = node.metadata.iter().map(|(key, value)| (format!("metadata {key}"), compact(value)));
    let details = [
        ("name", node.name),
        ("uuid", node.uuid.to_string()),
        ("state", node.state.to_string()),
        ("address", node.ip),
        ("roles", roles),
        ("last seen", time(node.lastseen)),
        ("started", time(node.started)),
        ("epoch", node.epoch.to_string()),
        ("fencing", fencing),
        ("shared disks", shared_storage),
        ("clock skew", format!("{:.3} s", node.clock_skew)),
        ("release", node.release),
    ];
    Table::key_values(
        details.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(limits).chain(metadata),
    )
}

fn evacuations(records: Vec<EvacuationRecord>) -> Table {
    Table::new(&["INSTANCE", "NAMESPACE", "OUTCOME", "NODE"], &["REASON"]).rows(records.into_iter().map(
        |record| {
            let (outcome, node) = (record.outcome.to_string(), or_dash(record.node.unwrap_or_default()));
            [record.name, record.namespace, outcome, node, record.reason]
        },
    ))
}

fn key_values(values: Map<String, Value>) -> Table {
    Table::key_values(values.into_iter().map(|(name, value)| (name, compact(&value))))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn example(lastseen: f64) -> NodeRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": "sim-1", "fqdn": "sim-1", "ip": "127.1.0.2",
            "state": "created", "metadata": { "rack": "b" }, "version": 1, "lastseen": lastseen, "release": "muster 0.1.0",
            "is_hypervisor": true, "is_network_node": false, "is_database_node": false, "is_etcd_master": false,
            "is_eventlog_node": false, "is_cluster_maintainer": true, "simulated": true,
            "limits": { "taps": "needs /dev/net/tun" }, "references_to": {}, "references_from": {}
        }))
        .unwrap()
    }

    #[test]
    fn lists_nodes_with_roles_and_last_check_in() {
        let text = table(vec![example(1_767_225_600.0)]).render(None);
        let line =
            "sim-1  created  127.1.0.2  2026-01-01T00:00:00.000Z  hypervisor, maintainer, simulated, no taps";
        assert_eq!(text.lines().nth(1), Some(line));
    }

    #[test]
    fn shows_a_node_that_never_checked_in() {
        let text = details(example(0.0)).render(None);
        assert!(text.contains("no taps        needs /dev/net/tun\n"), "{text}");
        assert!(
            text.contains("last seen      never\nstarted        never\nepoch          0\n")
                && text.contains("clock skew     0.000 s\n")
                && text.contains("metadata rack  b\n"),
            "{text}"
        );
    }

    #[test]
    fn shows_failed_checks_instead_of_limits_with_the_same_reason() {
        let check = HostCheck::failed("tun", "guests", "needs /dev/net/tun").with_fix("modprobe tun");
        let text = details(NodeRecord { checks: vec![check], ..example(0.0) }).render(None);
        assert!(
            text.contains("failed tun     needs /dev/net/tun; affects guests; fix: modprobe tun\n")
                && !text.contains("no taps  "),
            "{text}"
        );
    }

    #[test]
    fn shows_the_active_network_node_and_the_watchdog() {
        let node = NodeRecord {
            is_network_node: true,
            is_active_network_node: true,
            epoch: 7,
            started: 1_767_225_600.0,
            fencing_lease: Some(30.0),
            ..example(0.0)
        };
        let storage = SharedStorageRecord {
            path: "/mnt/nfs".into(),
            uuid: Some("5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a07".parse().unwrap()),
            total: 2 << 30,
            free: 1 << 30,
            problem: None,
        };
        let text = details(NodeRecord { shared_storage: Some(storage), ..node }).render(None);
        for line in [
            "shared disks   5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a07 at /mnt/nfs, 1.0 GiB of 2.0 GiB free\n",
            "roles          hypervisor, active network, maintainer",
            "started        2026-01-01T00:00:00.000Z\n",
            "epoch          7\n",
            "fencing        a watchdog stops its VMs 30 s after its last check-in\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}
