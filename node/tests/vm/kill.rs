//! What a killed daemon leaves behind: machines that run, and nothing that nobody knows.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muster_types::node::NodeApi;
use muster_types::vm::VmPower;

use crate::world::{PATIENCE, World, node_at, plan};

/// Not a test: what the test kills. Makes, starts, stops and removes machines for as long as it lives.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "only as a victim"]
async fn victim() {
    let (Ok(folder), Ok(image)) = (std::env::var("MUSTER_TEST_VICTIM"), std::env::var("MUSTER_TEST_IMAGE"))
    else {
        return;
    };
    let (folder, image) = (Path::new(&folder), image.parse().unwrap());
    let node = node_at(folder);
    let machines = node.vms();
    std::fs::write(folder.join("ready"), "").unwrap();
    for number in 0.. {
        let plan = plan(machines, image, &[], &format!("victim-{number}")).await;
        machines.build(&plan).await.unwrap();
        machines.start(&plan).await.unwrap();
        if number % 2 == 1 {
            machines.stop(plan.id).await.unwrap();
        }
        if number % 3 != 0 {
            machines.remove(plan.id).await.unwrap();
        }
    }
}

/// How many processes work somewhere below a folder.
fn processes(folder: &Path) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let places = entries.filter_map(|entry| std::fs::read_link(entry.path().join("cwd")).ok());
    places.filter(|place| place.starts_with(folder.join("machines"))).count()
}

#[tokio::test]
async fn a_killed_daemon_leaves_machines_that_the_next_one_knows_and_can_remove() {
    let Some(mut world) = World::new().await else { return };
    let folder = world.folder.path().to_owned();
    let (_never, clock) = std::sync::mpsc::channel::<()>();
    let (mut on, mut off) = (0, 0);
    for attempt in 0..12 {
        world.leave();
        let _ = std::fs::remove_file(folder.join("ready"));
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kill::victim", "--ignored"])
            .env("MUSTER_TEST_VICTIM", &folder)
            .env("MUSTER_TEST_IMAGE", world.image.to_string())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        muster_testing::wait_for("the victim", PATIENCE, || folder.join("ready").exists().then_some(()));
        let _ = clock.recv_timeout(Duration::from_millis(5 + 97 * (attempt * 5 % 12)));
        // With everything that belongs to it, which machines do not.
        let group = nix::unistd::Pid::from_raw(i32::try_from(victim.id()).unwrap());
        nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
        victim.wait().unwrap();
        world.restart();
        let machines = world.vms();
        let found = machines.find().await.unwrap();
        let running = found.iter().filter(|found| found.power == VmPower::On).count();
        for machine in &found {
            let is_known = match &machine.power {
                VmPower::On | VmPower::Off { .. } => true,
                VmPower::Crashed { reason } => reason == "its start was interrupted",
                VmPower::Paused | VmPower::Lost => false,
            };
            assert!(is_known, "{machine:?}");
            // It is not only there, but can be driven.
            if machine.power == VmPower::On {
                machines.pause(machine.id).await.unwrap();
            }
        }
        assert_eq!(processes(&folder), running, "{found:?}");
        (on, off) = (on + running, off + found.len() - running);
        // Every other time they stay, and the next victim lives beside them.
        if attempt % 2 == 1 {
            for machine in &found {
                machines.remove(machine.id).await.unwrap();
            }
            assert_eq!(processes(&folder), 0);
            assert_eq!(std::fs::read_dir(folder.join("machines")).unwrap().count(), 0);
        }
        for machine in machines.find().await.unwrap() {
            if machine.power == VmPower::Paused {
                machines.resume(machine.id).await.unwrap();
            }
        }
    }
    assert!(on > 0 && off > 0, "{on} {off}");
}
