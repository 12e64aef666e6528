//! VmApi that end in other ways than anybody wanted, or never begin.

use muster_types::Error;
use muster_types::spec::Vdi;
use muster_types::vm::VmPower;

use crate::world::{PATIENCE, World, sh};

fn crashed(power: &VmPower) -> bool {
    matches!(power, VmPower::Crashed { .. })
}

#[tokio::test]
async fn a_machine_whose_process_dies_has_crashed_and_starts_again() {
    let Some(mut world) = World::new().await else { return };
    let plan = world.plan("crash").await;
    world.boot(&plan).await;
    let mut changes = world.vms().changes();
    sh(&format!("kill -9 {}", world.pid(&plan)));
    let power = world.wait_for_power(&mut changes, &plan, PATIENCE, crashed).await;
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.contains("signal 9")), "{power:?}");
    world.restart();
    assert_eq!(world.power(&plan).await, power);

    // Nobody sees this one.
    world.vms().start(&plan).await.unwrap();
    let pid = world.pid(&plan);
    drop(std::mem::replace(&mut changes, world.vms().changes()));
    world.leave();
    sh(&format!(
        "kill -9 {pid}; while [ -e /proc/{pid} ] && ! grep -q ') Z' /proc/{pid}/stat; do sleep 0.01; done"
    ));
    world.restart();
    let power = world.power(&plan).await;
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.contains("nobody watched")), "{power:?}");

    // As after a start of the host.
    world.vms().start(&plan).await.unwrap();
    let pid = world.pid(&plan);
    world.leave();
    let record = world.place(&plan).join("machine.json");
    let text = std::fs::read_to_string(&record).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert!(text.contains(boot.trim()), "{text}");
    std::fs::write(record, text.replace(boot.trim(), "another")).unwrap();
    sh(&format!("kill -9 {pid}"));
    world.restart();
    assert_eq!(world.power(&plan).await, VmPower::Lost);
    world.vms().stop(plan.id).await.unwrap();
    assert!(matches!(world.power(&plan).await, VmPower::Off { .. }));
}

#[tokio::test]
async fn a_start_that_a_daemon_did_not_finish_is_cleared_away_and_a_signal_is_named() {
    let Some(mut world) = World::new().await else { return };
    let plan = world.plan("half").await;
    world.boot(&plan).await;
    let pid = world.pid(&plan);
    world.leave();
    std::fs::remove_file(world.place(&plan).join("started")).unwrap();
    world.restart();
    let power = world.power(&plan).await;
    assert_eq!(power, VmPower::Crashed { reason: "its start was interrupted".into() });
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());

    world.vms().start(&plan).await.unwrap();
    let mut changes = world.vms().changes();
    sh(&format!("kill -TERM {}", world.pid(&plan)));
    let power = world.wait_for_power(&mut changes, &plan, PATIENCE, crashed).await;
    let said = "QEMU was told to end by somebody: terminating on signal 15";
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.starts_with(said)), "{power:?}");
    // So it is when the host goes down, after which the machine shall run again.
    assert!(!world.place(&plan).join("end.json").exists());
}

#[tokio::test]
async fn a_qemu_that_hangs_holds_up_nobody_and_can_be_ended() {
    let Some(mut world) = World::new().await else { return };
    let plan = world.plan("hang").await;
    world.boot(&plan).await;
    let pid = world.pid(&plan);
    world.leave();
    sh(&format!("kill -STOP {pid}"));
    world.restart();
    assert_eq!(world.power(&plan).await, VmPower::On);
    let error = world.vms().pause(plan.id).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(text) if text.contains(&pid.to_string())), "{error:?}");
    // It goes on, and is reached again.
    let mut changes = world.vms().changes();
    sh(&format!("kill -CONT {pid}"));
    let paused = async {
        while world.vms().pause(plan.id).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, paused).await.unwrap();
    world.wait_for_power(&mut changes, &plan, PATIENCE, |power| *power == VmPower::Paused).await;
    sh(&format!("kill -STOP {pid}"));
    world.vms().remove(plan.id).await.unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert!(!world.place(&plan).exists());
}

#[tokio::test]
async fn what_can_never_work_is_refused_in_the_words_of_qemu() {
    let Some(world) = World::new().await else { return };
    let machines = world.vms();
    let mut plan = world.plan("wrong").await;
    plan.video.model = "nonsense".into();
    machines.build(&plan).await.unwrap();
    let error = machines.start(&plan).await.unwrap_err();
    assert!(
        matches!(&error, Error::Conflict(text) if text.contains("'nonsense' is not a display device")),
        "{error:?}"
    );
    assert!(matches!(world.power(&plan).await, VmPower::Off { .. }));
    // What QEMU itself does not take is told in its words, and nobody switched it off.
    plan.video.model = "vga".into();
    plan.cpus = 100_000;
    let error = machines.start(&plan).await.unwrap_err();
    assert!(matches!(&error, Error::Conflict(text) if text.contains("CPU")), "{error:?}");
    let power = world.power(&plan).await;
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.contains("CPU")), "{power:?}");
    plan.cpus = 1;

    // A port that somebody has may be free later.
    plan.video.model = "vga".into();
    for vdi in [Vdi::Spice, Vdi::Vnc] {
        plan.video.vdi = vdi;
        let taken = std::net::TcpListener::bind(("127.0.0.1", plan.ports.vdi)).unwrap();
        let error = machines.start(&plan).await.unwrap_err();
        assert!(matches!(&error, Error::Unavailable(_)), "{vdi}: {error:?}");
        drop(taken);
        machines.start(&plan).await.unwrap();
        assert_eq!(world.power(&plan).await, VmPower::On);
        machines.stop(plan.id).await.unwrap();
    }

    // What was never built cannot be started.
    let never = world.plan("never").await;
    assert!(matches!(machines.start(&never).await, Err(Error::NotFound(_))));
    assert!(matches!(machines.pause(never.id).await, Err(Error::NotFound(_))));
    assert!(matches!(machines.pause(plan.id).await, Err(Error::Conflict(_))));
    machines.remove(plan.id).await.unwrap();
}
