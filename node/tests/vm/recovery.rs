//! A killed daemon leaves only VMs that the next one recovers.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muster_types::node::NodeApi;
use muster_types::vm::VmPower;

use crate::fixture::{Fixture, GUEST_TIMEOUT, node_at, plan};

/// Not a test by itself: the process that is killed. Creates, starts, stops and removes VMs in a loop.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by another test"]
async fn kill_target() {
    let (Ok(storage), Ok(image)) = (std::env::var("MUSTER_TEST_VICTIM"), std::env::var("MUSTER_TEST_IMAGE"))
    else {
        return;
    };
    let (storage, image) = (Path::new(&storage), image.parse().unwrap());
    let node = node_at(storage);
    let vms = node.vms();
    std::fs::write(storage.join("ready"), "").unwrap();
    for number in 0.. {
        let plan = plan(vms, image, &[], &format!("victim-{number}")).await;
        vms.build(&plan).await.unwrap();
        vms.start(&plan).await.unwrap();
        std::fs::write(storage.join("started"), "").unwrap();
        if number % 2 == 1 {
            vms.stop(plan.id).await.unwrap();
        }
        if number % 3 != 0 {
            vms.remove(plan.id).await.unwrap();
        }
    }
}

/// Counts the processes whose working directory is that of a VM.
fn vm_processes(storage: &Path) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let dirs = entries.filter_map(|entry| std::fs::read_link(entry.path().join("cwd")).ok());
    dirs.filter(|dir| dir.starts_with(storage.join("machines"))).count()
}

#[tokio::test]
async fn recovers_every_vm_of_a_killed_daemon() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let storage = fixture.storage.path().to_owned();
    let (_never, clock) = std::sync::mpsc::channel::<()>();
    let (mut on, mut off) = (0, 0);
    for attempt in 0..12 {
        fixture.stop_daemon();
        for file in ["ready", "started"] {
            let _ = std::fs::remove_file(storage.join(file));
        }
        let mut daemon = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "recovery::kill_target", "--ignored"])
            .env("MUSTER_TEST_VICTIM", &storage)
            .env("MUSTER_TEST_IMAGE", fixture.image.to_string())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        muster_testing::wait_for("the process to kill", GUEST_TIMEOUT, || {
            // On a busy host, VMs may need longer than the delays below.
            storage.join(if attempt % 4 == 2 { "started" } else { "ready" }).exists().then_some(())
        });
        let _ = clock.recv_timeout(Duration::from_millis(5 + 97 * (attempt * 5 % 12)));
        // VMs are not in its process group.
        let group = nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).unwrap());
        nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
        daemon.wait().unwrap();
        fixture.restart_daemon();
        let vms = fixture.vms();
        let found = vms.list().await.unwrap();
        let running = found.iter().filter(|found| found.power == VmPower::On).count();
        for vm in &found {
            let is_known = match &vm.power {
                VmPower::On | VmPower::Off { .. } => true,
                VmPower::Crashed { reason } => reason == "its start was interrupted",
                VmPower::Paused | VmPower::Lost => false,
            };
            assert!(is_known, "{vm:?}");
            // The VM can be controlled.
            if vm.power == VmPower::On {
                vms.pause(vm.id).await.unwrap();
            }
        }
        assert_eq!(vm_processes(&storage), running, "{found:?}");
        (on, off) = (on + running, off + found.len() - running);
        // Every other time the VMs are kept, and the next process runs beside them.
        if attempt % 2 == 1 {
            for vm in &found {
                vms.remove(vm.id).await.unwrap();
            }
            assert_eq!(vm_processes(&storage), 0);
            assert_eq!(std::fs::read_dir(storage.join("machines")).unwrap().count(), 0);
        }
        for vm in vms.list().await.unwrap() {
            if vm.power == VmPower::Paused {
                vms.resume(vm.id).await.unwrap();
            }
        }
    }
    assert!(on > 0 && off > 0, "{on} {off}");
}
