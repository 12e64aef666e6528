//! On, paused, restarted, found again, gone.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use muster_types::node::NodeApi as _;
use muster_types::vm::VmPower;
use tokio::task::JoinSet;

use crate::world::{PATIENCE, World};

#[tokio::test]
async fn a_machine_boots_is_driven_and_leaves_nothing() {
    let Some(world) = World::new().await else { return };
    let machines = world.vms();
    let plan = world.plan("first").await;
    let mut console = world.boot(&plan).await;
    // Once more changes nothing.
    let pid = world.pid(&plan);
    machines.start(&plan).await.unwrap();
    assert_eq!(world.pid(&plan), pid);

    // As another user without any right, in its own session.
    let status = world.status(&plan);
    let user = (1_900_000_000 + u32::from(plan.ports.console)).to_string();
    if nix::unistd::geteuid().is_root() {
        assert!(status["Uid"].split_whitespace().all(|uid| uid == user), "{status:?}");
        assert!(status["Gid"].split_whitespace().all(|gid| gid == user), "{status:?}");
        assert_eq!(status["Groups"], "");
        assert!(status["CapBnd"].trim_matches('0').is_empty(), "{status:?}");
    }
    assert!(status["CapEff"].trim_matches('0').is_empty() && status["CapPrm"].trim_matches('0').is_empty());
    assert_eq!((status["Seccomp"].as_str(), status["NoNewPrivs"].as_str()), ("2", "1"));
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap();
    assert_eq!(session, pid.to_string());

    let before = console.log_in().await;
    assert!(before.ends_with("first"), "{before}");
    // The guest sees who it is.
    let uuid = console.run("cat /sys/class/dmi/id/product_uuid").await;
    assert_eq!(uuid.trim(), plan.id.to_string());
    assert!(console.run("ls /dev/virtio-ports").await.contains("sf-agent"));
    let shown = machines.console(plan.id, None).await.unwrap();
    let shown = String::from_utf8_lossy(&shown);
    assert!(shown.contains("first login:") && shown.contains("end-of-2"), "{shown}");
    assert_eq!(machines.console(plan.id, Some(7)).await.unwrap().len(), 7);
    machines.clear_console(plan.id).await.unwrap();
    // But for a prompt, which may come only now.
    let left = machines.console(plan.id, None).await.unwrap();
    assert!(!String::from_utf8_lossy(&left).contains("login:"), "{left:?}");

    machines.pause(plan.id).await.unwrap();
    assert_eq!(world.power(&plan).await, VmPower::Paused);
    machines.resume(plan.id).await.unwrap();
    assert_eq!(world.power(&plan).await, VmPower::On);
    assert_eq!(console.run("echo still").await, "still\n");

    let usage = machines.usage(plan.id).await.unwrap().unwrap();
    assert!(usage.cpu["cpu time ns"] > 0 && usage.disks["vda"]["read bytes"] > 1 << 20, "{usage:?}");
    let report = world.node().report().await.unwrap().resources;
    assert_eq!((&report["instances_active"], &report["cpu_total_instance_vcpus"]), (&1.into(), &1.into()));
    assert!(report["memory_total_instance_actual"].as_u64().unwrap() > 50);

    machines.stop(plan.id).await.unwrap();
    assert!(matches!(world.power(&plan).await, VmPower::Off { .. }));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    machines.stop(plan.id).await.unwrap();
    assert_eq!(machines.usage(plan.id).await.unwrap(), None);
    machines.remove(plan.id).await.unwrap();
    machines.remove(plan.id).await.unwrap();
    assert_eq!(machines.power(plan.id).await.unwrap(), None);
    assert!(machines.find().await.unwrap().is_empty());
    assert_eq!(std::fs::read_dir(world.folder.path().join("machines")).unwrap().count(), 0);
    // The conversion is the storage's, and as it was.
    let conversion = world.folder.path().join(format!("conversions/{}.qcow2", world.image));
    assert_eq!(std::fs::metadata(conversion).unwrap().uid(), nix::unistd::geteuid().as_raw());
}

#[tokio::test]
async fn another_daemon_finds_a_machine_again_and_hears_that_the_guest_switches_it_off() {
    let Some(mut world) = World::new().await else { return };
    let plan = world.plan("second").await;
    let mut console = world.boot(&plan).await;
    let pid = world.pid(&plan);
    world.restart();
    assert_eq!(world.power(&plan).await, VmPower::On);
    assert_eq!(world.pid(&plan), pid);
    console.log_in().await;
    world.vms().pause(plan.id).await.unwrap();
    world.restart();
    assert_eq!(world.power(&plan).await, VmPower::Paused);
    world.vms().resume(plan.id).await.unwrap();

    let mut changes = world.vms().changes();
    console.type_line("poweroff").await;
    console.wait_for("VmPower down").await;
    let second = std::time::Duration::from_secs(1);
    let off = |power: &VmPower| matches!(power, VmPower::Off { .. });
    let power = world.wait_for_power(&mut changes, &plan, second, off).await;
    assert_eq!(power, VmPower::Off { reason: "the guest switched itself off".into() });
    world.restart();
    assert_eq!(world.power(&plan).await, power);

    // Its disk is what it was, its config drive is new.
    let mut plan = plan;
    let drive = &mut plan.config_drive.as_mut().unwrap()[0].content;
    *drive = String::from_utf8(drive.clone()).unwrap().replace("second", "renamed").into_bytes();
    let mut console = world.boot(&plan).await;
    assert!(console.log_in().await.ends_with("renamed"));

    // While nobody watches.
    drop(world.vms().changes());
    console.type_line("poweroff").await;
    world.restart();
    let mut changes = world.vms().changes();
    let power = world.wait_for_power(&mut changes, &plan, PATIENCE, off).await;
    assert_eq!(power, VmPower::Off { reason: "the guest switched itself off".into() });
}

#[tokio::test]
async fn a_guest_that_is_asked_to_restart_does_so_also_under_another_daemon() {
    let Some(mut world) = World::new().await else { return };
    let plan = world.plan("third").await;
    let mut console = world.boot(&plan).await;
    console.log_in().await;
    let pid = world.pid(&plan);
    world.vms().reboot(plan.id).await.unwrap();
    console.log_in().await;
    assert_eq!(world.power(&plan).await, VmPower::On);
    world.vms().reboot(plan.id).await.unwrap();
    world.restart();
    console.log_in().await;
    assert_eq!((world.power(&plan).await, world.pid(&plan)), (VmPower::On, pid));
    world.vms().reset(plan.id).await.unwrap();
    console.log_in().await;
    assert_eq!(world.power(&plan).await, VmPower::On);
    // A restart was asked for long ago: this is none.
    let mut changes = world.vms().changes();
    console.type_line("poweroff").await;
    let off = |power: &VmPower| matches!(power, VmPower::Off { .. });
    world.wait_for_power(&mut changes, &plan, PATIENCE, off).await;
}

#[tokio::test]
async fn many_start_at_once_and_each_is_somebody_else() {
    let Some(world) = World::new().await else { return };
    let world = Arc::new(world);
    let mut plans = Vec::new();
    for number in 0..10 {
        plans.push(world.plan(&format!("many-{number}")).await);
    }
    let starts = plans.iter().cloned().map(|plan| {
        let world = world.clone();
        async move {
            world.vms().build(&plan).await.unwrap();
            world.vms().start(&plan).await.unwrap();
            world.vms().pause(plan.id).await.unwrap();
        }
    });
    starts.collect::<JoinSet<()>>().join_all().await;
    let users: BTreeSet<String> = plans.iter().map(|plan| world.status(plan)["Uid"].clone()).collect();
    if nix::unistd::geteuid().is_root() {
        assert_eq!(users.len(), plans.len());
    }
    let found = world.vms().find().await.unwrap();
    assert_eq!(found.len(), plans.len());
    assert!(found.iter().all(|found| found.power == VmPower::Paused), "{found:?}");
    let ends = found.into_iter().map(|found| {
        let world = world.clone();
        async move { world.vms().remove(found.id).await.unwrap() }
    });
    ends.collect::<JoinSet<()>>().join_all().await;
    assert!(world.vms().find().await.unwrap().is_empty());
}
