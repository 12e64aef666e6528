//! The daemon of a real node is killed repeatedly while instances are created and deleted. Afterwards the database and
//! the host are consistent, and there are no orphans.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use muster_test_cluster::{
    ClusterDatabase, HostCluster, cgroups, enter_vm_namespaces, list_resources, publish_image,
    qemu_processes, vm_settings, wait_until_no_operations, wait_until_released,
};
use muster_testing::{wait, wait_for};
use muster_types::ids::InterfaceId;
use reqwest::Method;
use serde_json::json;

use super::workload::{Acknowledged, Workload};
use crate::TIMEOUT;

const CLIENTS: usize = 4;

const CREATED_INSTANCES: &str = "(SELECT uuid FROM instances WHERE state = 'created')";
const LIVE_INTERFACES: &str = "(SELECT uuid FROM interfaces WHERE state = 'created')";

/// Returns queries that find inconsistent rows. All must be empty once operations have ended.
fn inconsistencies() -> Vec<(&'static str, String)> {
    let sum = |what: &str| {
        format!(
            "SELECT node_uuid FROM node_claims WHERE {what} <> (SELECT COALESCE(SUM(claimed_{what}), 0) \
             FROM instances WHERE instances.node_uuid = node_claims.node_uuid)"
        )
    };
    vec![
        (
            "instances in transition",
            "SELECT uuid FROM instances WHERE state NOT IN ('created', 'error', 'deleted')".into(),
        ),
        (
            "errors without a reason",
            "SELECT uuid FROM instances WHERE state = 'error' AND COALESCE(error_message, '') = ''".into(),
        ),
        ("pending operations", "SELECT uuid FROM operations WHERE state IN ('queued', 'executing')".into()),
        (
            "claims of deleted objects",
            "SELECT uuid FROM instances WHERE state <> 'created' AND claimed_cpus + claimed_memory + claimed_disk <> 0"
                .into(),
        ),
        ("created instances without a claim", "SELECT uuid FROM instances WHERE state = 'created' AND claimed_cpus <> 1".into()),
        ("wrong sums of CPUs", sum("cpus")),
        ("wrong sums of memory", sum("memory")),
        ("wrong sums of disk", sum("disk")),
        (
            "ports of deleted objects",
            format!("SELECT instance_uuid FROM instance_ports WHERE instance_uuid NOT IN {CREATED_INSTANCES}"),
        ),
        (
            "created instances without ports",
            "SELECT uuid FROM instances WHERE state = 'created' AND (console_port IS NULL OR NOT EXISTS \
             (SELECT port FROM instance_ports WHERE instance_uuid = instances.uuid AND port = console_port))"
                .into(),
        ),
        (
            "interfaces of deleted objects",
            format!("SELECT uuid FROM interfaces WHERE state <> 'deleted' AND instance_uuid NOT IN {CREATED_INSTANCES}"),
        ),
        ("partly created interfaces", "SELECT uuid FROM interfaces WHERE state NOT IN ('created', 'deleted')".into()),
        (
            "addresses of deleted objects",
            format!("SELECT user_id FROM addresses WHERE kind = 'instance' AND user_id NOT IN {CREATED_INSTANCES}"),
        ),
        (
            "floating addresses of deleted objects",
            format!("SELECT user_id FROM addresses WHERE kind = 'floating' AND user_id NOT IN {LIVE_INTERFACES}"),
        ),
        (
            "hardware addresses of deleted objects",
            format!("SELECT interface_uuid FROM hardware_addresses WHERE interface_uuid NOT IN {LIVE_INTERFACES}"),
        ),
        (
            "references of deleted objects",
            format!(
                "SELECT source_id FROM object_references WHERE source_type = 'instance' AND source_id NOT IN {CREATED_INSTANCES}"
            ),
        ),
    ]
}

/// Compares the host with the database. Temporary differences are returned as errors.
fn check_settled(cluster: &HostCluster, database: &ClusterDatabase) -> Result<(), String> {
    for (what, sql) in inconsistencies() {
        let found = database.first_column(&sql);
        if !found.is_empty() {
            return Err(format!("{what}: {found:?}"));
        }
    }
    let set = |sql: &str| database.first_column(sql).into_iter().collect::<BTreeSet<String>>();
    let all = set("SELECT uuid FROM instances");
    let created = set("SELECT uuid FROM instances WHERE state = 'created'");
    let on = set("SELECT uuid FROM instances WHERE state = 'created' AND power_state = 'on'");
    let instance_in = |text: &str| all.iter().find(|id| text.contains(id.as_str())).cloned();
    let lines = qemu_processes();
    let running: BTreeSet<String> = lines.iter().filter_map(|(line, _)| instance_in(line)).collect();
    compare("running VMs", &running, &on)?;
    if lines.len() != on.len() {
        return Err(format!("{} processes for {} VMs", lines.len(), on.len()));
    }
    let directory = cluster.directory.join("m1/data/machines");
    let names = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let directories = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    compare("VM directories", &directories, &created)?;
    let groups: BTreeSet<String> =
        cgroups().iter().filter_map(|group| instance_in(&group.to_string_lossy())).collect();
    compare("cgroups", &groups, &groups.intersection(&created).cloned().collect())?;

    let interfaces = "SELECT interfaces.uuid FROM interfaces JOIN instances ON instances.uuid = instance_uuid \
                      WHERE interfaces.state = 'created' AND power_state = 'on' AND instances.state = 'created'";
    let device = |id: String| id.parse::<InterfaceId>().unwrap().device();
    let devices = database.first_column(interfaces).into_iter().map(device).collect();
    let taps = cluster.host(1).namespace.sh("ip -o link | grep -o '^[0-9]*: tap[0-9a-f]*' | cut -d ' ' -f 2");
    compare("tap devices", &taps.lines().map(str::to_owned).collect(), &devices)
}

fn compare(what: &str, found: &BTreeSet<String>, expected: &BTreeSet<String>) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let extra: Vec<_> = found.difference(expected).collect();
    let missing: Vec<_> = expected.difference(found).collect();
    Err(format!("{what}: unexpected {extra:?}, missing {missing:?}"))
}

fn settle(cluster: &HostCluster, database: &ClusterDatabase) {
    let began = Instant::now();
    while let Err(why) = check_settled(cluster, database) {
        assert!(began.elapsed() < TIMEOUT, "the daemon does not settle: {why}\n{}", cluster.host(1).log());
        wait(Duration::from_millis(100));
    }
}

/// Creates an empty image, so that the guest uses no CPU time.
fn empty_image(directory: &Path) -> std::path::PathBuf {
    let file = directory.join("empty.qcow2");
    let created =
        Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&file).arg("16M").status();
    assert!(created.unwrap().success());
    file
}

fn kill_during_workload(cluster: HostCluster, kills: usize) {
    let image = empty_image(&cluster.directory);
    let mut cluster = publish_image(cluster, "empty", &image);
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    cluster.host(1).create_network(json!({ "name": "one", "provide_dns": true }));
    cluster.host(1).create_network(json!({ "name": "two", "netblock": "10.1.0.0/24", "provide_nat": false }));
    wait_until_no_operations(&database);
    let before = list_resources(&cluster, &database, &[]);
    // Deleted rows must exist until they are checked, and the image must not be published again.
    cluster.hosts[0].setup = cluster.host(1).setup.clone().arguments(&[]);
    cluster.hosts[0].restart_with("CLEANER_DELAY", "3600");

    let began = Instant::now();
    let workload = Workload::new(cluster.host(1));
    let clients = workload.start(cluster.host(1), CLIENTS);
    let is_enough = || {
        let (accepted, deleted) = workload.counts();
        accepted > kills && deleted > kills / 2
    };
    let mut killed = 0;
    while killed < kills || !is_enough() {
        assert!(killed < 5 * kills, "too little progress: {:?}", workload.counts());
        killed += 1;
        wait(Duration::from_millis(100 + workload.random.below(1900)));
        cluster.hosts[0].kill();
        cluster.hosts[0].start();
        assert!(!clients.iter().any(std::thread::JoinHandle::is_finished), "a client ended early");
    }
    workload.stop();
    for client in clients {
        client.join().unwrap();
    }
    settle(&cluster, &database);
    let state = |id: &str| database.first_column(&format!("SELECT state FROM instances WHERE uuid = '{id}'"));
    for (id, acknowledged) in &*workload.acknowledged() {
        let state = state(id);
        match acknowledged {
            Acknowledged::Accepted => {
                assert!(state == ["created"] || state == ["error"], "{id} is {state:?}");
            }
            Acknowledged::Deleted => assert_eq!(state, ["deleted"], "{id}"),
        }
    }
    let count = |state: &str| {
        database.first_column(&format!("SELECT uuid FROM instances WHERE state = '{state}'")).len()
    };
    let reasons: BTreeSet<String> = database
        .first_column("SELECT error_message FROM instances WHERE state = 'error'")
        .into_iter()
        .collect();
    println!(
        "{:?}: {killed} kills: {} created, {} in error, {} deleted; acknowledged {:?}; {reasons:?}",
        began.elapsed(),
        count("created"),
        count("error"),
        count("deleted"),
        workload.counts()
    );

    // Stopped instances can be started again, and all instances can be deleted.
    let ids = database.first_column("SELECT uuid FROM instances ORDER BY uuid");
    let off = "SELECT uuid FROM instances WHERE state = 'created' AND power_state <> 'on'";
    for id in database.first_column(off) {
        cluster.host(1).post(&format!("/instances/{id}/poweron"), None);
    }
    settle(&cluster, &database);
    cluster.hosts[0].restart_with("CLEANER_DELAY", "1");
    let body = json!({ "confirm": true, "namespace": "system" });
    let (status, response) = cluster.host(1).call(Method::DELETE, "/instances", Some(body));
    assert_eq!(status, 200, "{response}");
    for snapshot in database.first_column("SELECT uuid FROM artifacts WHERE artifact_type = 'snapshot'") {
        let (status, response) =
            cluster.host(1).call(Method::DELETE, &format!("/artifacts/{snapshot}"), None);
        assert_eq!(status, 200, "{response}");
    }
    wait_for("the instances to be deleted", TIMEOUT, || {
        database.first_column("SELECT uuid FROM instances").is_empty().then_some(())
    });
    wait_until_released(&cluster, &database, &before, &ids);
    let log = cluster.host(1).log();
    assert!(!log.contains("panicked") && !log.contains("without a record"), "{log}");
}

#[test]
fn instances_are_consistent_after_sigkill_on_sqlite() {
    if !enter_vm_namespaces("instances::kill::instances_are_consistent_after_sigkill_on_sqlite") {
        return;
    }
    kill_during_workload(HostCluster::single_host(&vm_settings(SETTINGS)), 20);
}

#[test]
fn instances_are_consistent_after_sigkill_on_mariadb() {
    if !enter_vm_namespaces("instances::kill::instances_are_consistent_after_sigkill_on_mariadb") {
        return;
    }
    let Some(cluster) = HostCluster::with_hosts(1, &vm_settings(SETTINGS)) else { return };
    kill_during_workload(cluster, 8);
}

const SETTINGS: &[(&str, &str)] =
    &[("CLEANER_DELAY", "1"), ("BLOB_DELETION_DELAY", "1"), ("CLUSTER_OP_MAX_ATTEMPTS", "50")];
