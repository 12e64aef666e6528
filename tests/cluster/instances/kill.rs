//! The daemon of a real node is killed again and again while instances come and go. In the end the database and the
//! machine agree, and nothing is left over.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use muster_testing::{wait, wait_for};
use muster_types::ids::InterfaceId;
use reqwest::Method;
use serde_json::json;

use super::storm::{Storm, Told};
use crate::PATIENCE;
use crate::backdoor::Backdoor;
use crate::machine::World;
use crate::world::{
    self, enter, groups, processes, remains, settings, wait_until_calm, wait_until_nothing_is_left,
};

const CALLERS: usize = 4;

const CREATED: &str = "(SELECT uuid FROM instances WHERE state = 'created')";
const LIVE: &str = "(SELECT uuid FROM interfaces WHERE state = 'created')";

/// What must not be found once everything has come to rest.
fn wrong() -> Vec<(&'static str, String)> {
    let sum = |what: &str| {
        format!(
            "SELECT node_uuid FROM node_claims WHERE {what} <> (SELECT COALESCE(SUM(claimed_{what}), 0) \
             FROM instances WHERE instances.node_uuid = node_claims.node_uuid)"
        )
    };
    vec![
        (
            "instances on their way",
            "SELECT uuid FROM instances WHERE state NOT IN ('created', 'error', 'deleted')".into(),
        ),
        (
            "errors without a reason",
            "SELECT uuid FROM instances WHERE state = 'error' AND COALESCE(error_message, '') = ''".into(),
        ),
        ("operations under way", "SELECT uuid FROM operations WHERE state IN ('queued', 'executing')".into()),
        (
            "claims of those that are gone",
            "SELECT uuid FROM instances WHERE state <> 'created' AND claimed_cpus + claimed_memory + claimed_disk <> 0"
                .into(),
        ),
        ("created without a claim", "SELECT uuid FROM instances WHERE state = 'created' AND claimed_cpus <> 1".into()),
        ("wrong sums of processors", sum("cpus")),
        ("wrong sums of memory", sum("memory")),
        ("wrong sums of disk", sum("disk")),
        (
            "ports of those that are gone",
            format!("SELECT instance_uuid FROM instance_ports WHERE instance_uuid NOT IN {CREATED}"),
        ),
        (
            "created without ports",
            "SELECT uuid FROM instances WHERE state = 'created' AND (console_port IS NULL OR NOT EXISTS \
             (SELECT port FROM instance_ports WHERE instance_uuid = instances.uuid AND port = console_port))"
                .into(),
        ),
        (
            "interfaces of those that are gone",
            format!("SELECT uuid FROM interfaces WHERE state <> 'deleted' AND instance_uuid NOT IN {CREATED}"),
        ),
        ("interfaces half made", "SELECT uuid FROM interfaces WHERE state NOT IN ('created', 'deleted')".into()),
        (
            "addresses of those that are gone",
            format!("SELECT user_id FROM addresses WHERE kind = 'instance' AND user_id NOT IN {CREATED}"),
        ),
        (
            "floating addresses of those that are gone",
            format!("SELECT user_id FROM addresses WHERE kind = 'floating' AND user_id NOT IN {LIVE}"),
        ),
        (
            "hardware addresses of those that are gone",
            format!("SELECT interface_uuid FROM hardware_addresses WHERE interface_uuid NOT IN {LIVE}"),
        ),
        (
            "references of those that are gone",
            format!(
                "SELECT source_id FROM object_references WHERE source_type = 'instance' AND source_id NOT IN {CREATED}"
            ),
        ),
    ]
}

/// Compares the machine with the database. What is not yet as it should be is an error.
fn settled(world: &World, backdoor: &Backdoor) -> Result<(), String> {
    for (what, sql) in wrong() {
        let found = backdoor.find(&sql);
        if !found.is_empty() {
            return Err(format!("{what}: {found:?}"));
        }
    }
    let set = |sql: &str| backdoor.find(sql).into_iter().collect::<BTreeSet<String>>();
    let all = set("SELECT uuid FROM instances");
    let created = set("SELECT uuid FROM instances WHERE state = 'created'");
    let on = set("SELECT uuid FROM instances WHERE state = 'created' AND power_state = 'on'");
    let of = |text: &str| all.iter().find(|id| text.contains(id.as_str())).cloned();
    let lines = processes();
    let running: BTreeSet<String> = lines.iter().filter_map(|(line, _)| of(line)).collect();
    same("machines that run", &running, &on)?;
    if lines.len() != on.len() {
        return Err(format!("{} processes for {} machines", lines.len(), on.len()));
    }
    let folder = world.folder.join("m1/data/machines");
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    same("folders", &folders, &created)?;
    let groups: BTreeSet<String> = groups().iter().filter_map(|group| of(&group.to_string_lossy())).collect();
    same("resource groups", &groups, &groups.intersection(&created).cloned().collect())?;

    let interfaces = "SELECT interfaces.uuid FROM interfaces JOIN instances ON instances.uuid = instance_uuid \
                      WHERE interfaces.state = 'created' AND power_state = 'on' AND instances.state = 'created'";
    let device = |id: String| id.parse::<InterfaceId>().unwrap().device();
    let devices = backdoor.find(interfaces).into_iter().map(device).collect();
    let taps = world.machine(1).place.sh("ip -o link | grep -o '^[0-9]*: tap[0-9a-f]*' | cut -d ' ' -f 2");
    same("devices", &taps.lines().map(str::to_owned).collect(), &devices)
}

fn same(what: &str, found: &BTreeSet<String>, expected: &BTreeSet<String>) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let more: Vec<_> = found.difference(expected).collect();
    let less: Vec<_> = expected.difference(found).collect();
    Err(format!("{what}: these should not be: {more:?}, and these should: {less:?}"))
}

fn settle(world: &World, backdoor: &Backdoor) {
    let began = Instant::now();
    while let Err(why) = settled(world, backdoor) {
        assert!(began.elapsed() < PATIENCE, "it does not settle: {why}\n{}", world.machine(1).log());
        wait(Duration::from_millis(100));
    }
}

/// An image with nothing on it, which no processor is busy with.
fn empty_image(folder: &Path) -> std::path::PathBuf {
    let file = folder.join("empty.qcow2");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&file).arg("16M").status();
    assert!(made.unwrap().success());
    file
}

fn survives(world: World, kills: usize) {
    let image = empty_image(&world.folder);
    let mut world = world::offer(world, "empty", &image);
    let backdoor = Backdoor::open(&world.database, &world.folder);
    world.machine(1).create(json!({ "name": "one", "provide_dns": true }));
    world.machine(1).create(json!({ "name": "two", "netblock": "10.1.0.0/24", "provide_nat": false }));
    wait_until_calm(&backdoor);
    let before = remains(&world, &backdoor, &[]);
    // Nothing may go before it was looked at, and nobody sends the image again.
    world.machines[0].setup = world.machine(1).setup.clone().arguments(&[]);
    world.machines[0].restart_with("CLEANER_DELAY", "3600");

    let began = Instant::now();
    let storm = Storm::new(world.machine(1));
    let callers = storm.begin(world.machine(1), CALLERS);
    let enough = || {
        let (accepted, deleted) = storm.counts();
        accepted > kills && deleted > kills / 2
    };
    let mut killed = 0;
    while killed < kills || !enough() {
        assert!(killed < 5 * kills, "little is done: {:?}", storm.counts());
        killed += 1;
        // Any moment will do.
        wait(Duration::from_millis(100 + storm.dice.below(1900)));
        world.machines[0].kill();
        world.machines[0].start();
        assert!(!callers.iter().any(std::thread::JoinHandle::is_finished), "a caller has given up");
    }
    storm.end();
    for caller in callers {
        caller.join().unwrap();
    }
    settle(&world, &backdoor);
    let state = |id: &str| backdoor.find(&format!("SELECT state FROM instances WHERE uuid = '{id}'"));
    for (id, told) in &*storm.told() {
        let state = state(id);
        match told {
            Told::Accepted => assert!(state == ["created"] || state == ["error"], "{id} is {state:?}"),
            Told::Deleted => assert_eq!(state, ["deleted"], "{id}"),
        }
    }
    let count =
        |state: &str| backdoor.find(&format!("SELECT uuid FROM instances WHERE state = '{state}'")).len();
    let reasons: BTreeSet<String> =
        backdoor.find("SELECT error_message FROM instances WHERE state = 'error'").into_iter().collect();
    println!(
        "{:?}: {killed} kills: {} created, {} in error, {} deleted; told of {:?}; {reasons:?}",
        began.elapsed(),
        count("created"),
        count("error"),
        count("deleted"),
        storm.counts()
    );

    // Those that are off can still be switched on, and in the end everything goes.
    let ids = backdoor.find("SELECT uuid FROM instances ORDER BY uuid");
    let off = "SELECT uuid FROM instances WHERE state = 'created' AND power_state <> 'on'";
    for id in backdoor.find(off) {
        world.machine(1).post(&format!("/instances/{id}/poweron"), None);
    }
    settle(&world, &backdoor);
    world.machines[0].restart_with("CLEANER_DELAY", "1");
    let body = json!({ "confirm": true, "namespace": "system" });
    let (status, answer) = world.machine(1).call(Method::DELETE, "/instances", Some(body));
    assert_eq!(status, 200, "{answer}");
    for snapshot in backdoor.find("SELECT uuid FROM artifacts WHERE artifact_type = 'snapshot'") {
        let (status, answer) = world.machine(1).call(Method::DELETE, &format!("/artifacts/{snapshot}"), None);
        assert_eq!(status, 200, "{answer}");
    }
    wait_for("the instances to go", PATIENCE, || {
        backdoor.find("SELECT uuid FROM instances").is_empty().then_some(())
    });
    wait_until_nothing_is_left(&world, &backdoor, &before, &ids);
    let log = world.machine(1).log();
    assert!(!log.contains("panicked") && !log.contains("without a record"), "{log}");
}

#[test]
fn instances_survive_kills_whole_or_leave_nothing_on_sqlite() {
    if !enter("instances::kill::instances_survive_kills_whole_or_leave_nothing_on_sqlite") {
        return;
    }
    survives(World::of_one(&settings(SETTINGS)), 20);
}

#[test]
fn instances_survive_kills_whole_or_leave_nothing_on_mariadb() {
    if !enter("instances::kill::instances_survive_kills_whole_or_leave_nothing_on_mariadb") {
        return;
    }
    let Some(world) = World::of(1, &settings(SETTINGS)) else { return };
    survives(world, 8);
}

const SETTINGS: &[(&str, &str)] =
    &[("CLEANER_DELAY", "1"), ("BLOB_DELETION_DELAY", "1"), ("CLUSTER_OP_MAX_ATTEMPTS", "50")];
