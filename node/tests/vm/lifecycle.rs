//! The lifecycle of VMs: start, pause, reboot, recovery by another daemon, removal.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use muster_types::node::NodeApi as _;
use muster_types::vm::VmPower;
use tokio::task::JoinSet;

use crate::fixture::{Console, Fixture, GUEST_TIMEOUT};

#[tokio::test]
async fn vm_boots_is_controlled_and_is_removed_completely() {
    let Some(fixture) = Fixture::new().await else { return };
    let vms = fixture.vms();
    let plan = fixture.plan("first").await;
    let mut console = fixture.boot(&plan).await;
    // A second start does nothing.
    let pid = fixture.pid(&plan);
    vms.start(&plan).await.unwrap();
    assert_eq!(fixture.pid(&plan), pid);

    // It runs without privileges as another user, in its own session.
    let status = fixture.status(&plan);
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
    // The guest sees its UUID.
    let uuid = console.run("cat /sys/class/dmi/id/product_uuid").await;
    assert_eq!(uuid.trim(), plan.id.to_string());
    assert!(console.run("ls /dev/virtio-ports").await.contains("sf-agent"));
    let shown = vms.console(plan.id, None).await.unwrap();
    let shown = String::from_utf8_lossy(&shown);
    assert!(shown.contains("first login:") && shown.contains("end-of-2"), "{shown}");
    assert_eq!(vms.console(plan.id, Some(7)).await.unwrap().len(), 7);
    vms.clear_console(plan.id).await.unwrap();
    // Except for a prompt, which may be printed only now.
    let remaining = vms.console(plan.id, None).await.unwrap();
    assert!(!String::from_utf8_lossy(&remaining).contains("login:"), "{remaining:?}");

    vms.pause(plan.id).await.unwrap();
    assert_eq!(fixture.power(&plan).await, VmPower::Paused);
    vms.resume(plan.id).await.unwrap();
    assert_eq!(fixture.power(&plan).await, VmPower::On);
    assert_eq!(console.run("echo still").await, "still\n");

    let usage = vms.usage(plan.id).await.unwrap().unwrap();
    assert!(usage.cpu["cpu time ns"] > 0 && usage.disks["vda"]["read bytes"] > 1 << 20, "{usage:?}");
    let report = fixture.node().report().await.unwrap().resources;
    assert_eq!((&report["instances_active"], &report["cpu_total_instance_vcpus"]), (&1.into(), &1.into()));
    assert!(report["memory_total_instance_actual"].as_u64().unwrap() > 50);

    vms.stop(plan.id).await.unwrap();
    assert!(matches!(fixture.power(&plan).await, VmPower::Off { .. }));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    vms.stop(plan.id).await.unwrap();
    assert_eq!(vms.usage(plan.id).await.unwrap(), None);
    vms.remove(plan.id).await.unwrap();
    vms.remove(plan.id).await.unwrap();
    assert_eq!(vms.power(plan.id).await.unwrap(), None);
    assert!(vms.list().await.unwrap().is_empty());
    assert_eq!(std::fs::read_dir(fixture.storage.path().join("machines")).unwrap().count(), 0);
    // The conversion still belongs to the storage.
    let conversion = fixture.storage.path().join(format!("conversions/{}.qcow2", fixture.image));
    assert_eq!(std::fs::metadata(conversion).unwrap().uid(), nix::unistd::geteuid().as_raw());
}

#[tokio::test]
async fn next_daemon_recovers_vm_and_notices_poweroff_by_guest() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("second").await;
    let console = fixture.boot(&plan).await;
    let pid = fixture.pid(&plan);
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, VmPower::On);
    assert_eq!(fixture.pid(&plan), pid);
    // The daemon forwards the console.
    drop(console);
    Console::open(plan.ports.console).await.log_in().await;
    fixture.vms().pause(plan.id).await.unwrap();
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, VmPower::Paused);
    let mut console = Console::open(plan.ports.console).await;
    fixture.vms().resume(plan.id).await.unwrap();

    let mut changes = fixture.vms().changes();
    console.type_line("poweroff").await;
    console.wait_for("Power down").await;
    let second = std::time::Duration::from_secs(1);
    let off = |power: &VmPower| matches!(power, VmPower::Off { .. });
    let power = fixture.wait_for_power(&mut changes, &plan, second, off).await;
    assert_eq!(power, VmPower::Off { reason: "the guest switched itself off".into() });
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, power);

    // The disk is kept, the config drive is rewritten.
    let mut plan = plan;
    let drive = &mut plan.config_drive.as_mut().unwrap()[0].content;
    *drive = String::from_utf8(drive.clone()).unwrap().replace("second", "renamed").into_bytes();
    let mut console = fixture.boot(&plan).await;
    assert!(console.log_in().await.ends_with("renamed"));

    // The guest powers off while the daemon restarts.
    drop(fixture.vms().changes());
    console.type_line("poweroff").await;
    console.wait_for("poweroff").await;
    fixture.restart_daemon();
    let mut changes = fixture.vms().changes();
    let power = fixture.wait_for_power(&mut changes, &plan, GUEST_TIMEOUT, off).await;
    assert_eq!(power, VmPower::Off { reason: "the guest switched itself off".into() });
}

#[tokio::test]
async fn requested_reboot_survives_daemon_restart() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("third").await;
    let mut console = fixture.boot(&plan).await;
    console.log_in().await;
    let pid = fixture.pid(&plan);
    fixture.vms().reboot(plan.id).await.unwrap();
    console.log_in().await;
    assert_eq!(fixture.power(&plan).await, VmPower::On);
    fixture.vms().reboot(plan.id).await.unwrap();
    fixture.restart_daemon();
    let mut console = Console::open(plan.ports.console).await;
    console.log_in().await;
    assert_eq!((fixture.power(&plan).await, fixture.pid(&plan)), (VmPower::On, pid));
    fixture.vms().reset(plan.id).await.unwrap();
    console.log_in().await;
    assert_eq!(fixture.power(&plan).await, VmPower::On);
    // The reboot request was fulfilled: this is a power-off.
    let mut changes = fixture.vms().changes();
    console.type_line("poweroff").await;
    let off = |power: &VmPower| matches!(power, VmPower::Off { .. });
    fixture.wait_for_power(&mut changes, &plan, GUEST_TIMEOUT, off).await;
}

#[tokio::test]
async fn concurrent_starts_use_different_users() {
    let Some(fixture) = Fixture::new().await else { return };
    let fixture = Arc::new(fixture);
    let mut plans = Vec::new();
    for number in 0..10 {
        plans.push(fixture.plan(&format!("many-{number}")).await);
    }
    let starts = plans.iter().cloned().map(|plan| {
        let fixture = fixture.clone();
        async move {
            fixture.vms().build(&plan).await.unwrap();
            fixture.vms().start(&plan).await.unwrap();
            fixture.vms().pause(plan.id).await.unwrap();
        }
    });
    starts.collect::<JoinSet<()>>().join_all().await;
    let users: BTreeSet<String> = plans.iter().map(|plan| fixture.status(plan)["Uid"].clone()).collect();
    if nix::unistd::geteuid().is_root() {
        assert_eq!(users.len(), plans.len());
    }
    let found = fixture.vms().list().await.unwrap();
    assert_eq!(found.len(), plans.len());
    assert!(found.iter().all(|found| found.power == VmPower::Paused), "{found:?}");
    let ends = found.into_iter().map(|found| {
        let fixture = fixture.clone();
        async move { fixture.vms().remove(found.id).await.unwrap() }
    });
    ends.collect::<JoinSet<()>>().join_all().await;
    assert!(fixture.vms().list().await.unwrap().is_empty());
}
