//! VMs that crash, hang or fail to start.

use muster_types::Error;
use muster_types::spec::Vdi;
use muster_types::vm::VmPower;

use crate::fixture::{Fixture, GUEST_TIMEOUT, sh};

fn crashed(power: &VmPower) -> bool {
    matches!(power, VmPower::Crashed { .. })
}

#[tokio::test]
async fn killed_vm_is_crashed_and_can_be_restarted() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("crash").await;
    fixture.boot(&plan).await;
    let mut changes = fixture.vms().changes();
    sh(&format!("kill -9 {}", fixture.pid(&plan)));
    let power = fixture.wait_for_power(&mut changes, &plan, GUEST_TIMEOUT, crashed).await;
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.contains("signal 9")), "{power:?}");
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, power);

    // Killed while no daemon runs.
    fixture.vms().start(&plan).await.unwrap();
    let pid = fixture.pid(&plan);
    fixture.stop_daemon();
    sh(&format!(
        "kill -9 {pid}; while [ -e /proc/{pid} ] && ! grep -q ') Z' /proc/{pid}/stat; do sleep 0.01; done"
    ));
    fixture.restart_daemon();
    let power = fixture.power(&plan).await;
    assert!(
        matches!(&power, VmPower::Crashed { reason } if reason.contains("while the daemon was not running")),
        "{power:?}"
    );

    // As after a reboot of the host.
    fixture.vms().start(&plan).await.unwrap();
    let pid = fixture.pid(&plan);
    fixture.stop_daemon();
    let record = fixture.vm_dir(&plan).join("machine.json");
    let text = std::fs::read_to_string(&record).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert!(text.contains(boot.trim()), "{text}");
    std::fs::write(record, text.replace(boot.trim(), "another")).unwrap();
    sh(&format!("kill -9 {pid}"));
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, VmPower::Lost);
    fixture.vms().stop(plan.id).await.unwrap();
    assert!(matches!(fixture.power(&plan).await, VmPower::Off { .. }));
}

#[tokio::test]
async fn ends_interrupted_start_and_reports_signal() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("half").await;
    fixture.boot(&plan).await;
    let pid = fixture.pid(&plan);
    fixture.stop_daemon();
    std::fs::remove_file(fixture.vm_dir(&plan).join("started")).unwrap();
    fixture.restart_daemon();
    let power = fixture.power(&plan).await;
    assert_eq!(power, VmPower::Crashed { reason: "its start was interrupted".into() });
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());

    fixture.vms().start(&plan).await.unwrap();
    let mut changes = fixture.vms().changes();
    sh(&format!("kill -TERM {}", fixture.pid(&plan)));
    let power = fixture.wait_for_power(&mut changes, &plan, GUEST_TIMEOUT, crashed).await;
    let expected = "QEMU received a signal to exit: terminating on signal 15";
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.starts_with(expected)), "{power:?}");
    // The same happens when the host shuts down, after which the VM must run again.
    assert!(!fixture.vm_dir(&plan).join("end.json").exists());
}

#[tokio::test]
async fn unresponsive_qemu_does_not_block_and_can_be_removed() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("hang").await;
    fixture.boot(&plan).await;
    let pid = fixture.pid(&plan);
    fixture.stop_daemon();
    sh(&format!("kill -STOP {pid}"));
    fixture.restart_daemon();
    assert_eq!(fixture.power(&plan).await, VmPower::On);
    let error = fixture.vms().pause(plan.id).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(text) if text.contains(&pid.to_string())), "{error:?}");
    // Once it continues, the daemon reconnects.
    let mut changes = fixture.vms().changes();
    sh(&format!("kill -CONT {pid}"));
    let paused = async {
        while fixture.vms().pause(plan.id).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(GUEST_TIMEOUT, paused).await.unwrap();
    fixture.wait_for_power(&mut changes, &plan, GUEST_TIMEOUT, |power| *power == VmPower::Paused).await;
    sh(&format!("kill -STOP {pid}"));
    fixture.vms().remove(plan.id).await.unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert!(!fixture.vm_dir(&plan).exists());
}

#[tokio::test]
async fn invalid_plan_fails_with_the_error_of_qemu() {
    let Some(fixture) = Fixture::new().await else { return };
    let vms = fixture.vms();
    let mut plan = fixture.plan("wrong").await;
    plan.video.model = "nonsense".into();
    vms.build(&plan).await.unwrap();
    let error = vms.start(&plan).await.unwrap_err();
    assert!(
        matches!(&error, Error::Conflict(text) if text.contains("'nonsense' is not a display device")),
        "{error:?}"
    );
    assert!(matches!(fixture.power(&plan).await, VmPower::Off { .. }));
    // QEMU's own error is reported, and the VM is crashed rather than off.
    plan.video.model = "vga".into();
    plan.cpus = 100_000;
    let error = vms.start(&plan).await.unwrap_err();
    assert!(matches!(&error, Error::Conflict(text) if text.contains("CPU")), "{error:?}");
    let power = fixture.power(&plan).await;
    assert!(matches!(&power, VmPower::Crashed { reason } if reason.contains("CPU")), "{power:?}");
    plan.cpus = 1;

    // A port that is in use may be free later.
    plan.video.model = "vga".into();
    for vdi in [Vdi::Spice, Vdi::Vnc] {
        plan.video.vdi = vdi;
        let listener = std::net::TcpListener::bind(("127.0.0.1", plan.ports.vdi)).unwrap();
        let error = vms.start(&plan).await.unwrap_err();
        assert!(matches!(&error, Error::PortInUse(_) | Error::Unavailable(_)), "{vdi}: {error:?}");
        drop(listener);
        vms.start(&plan).await.unwrap();
        assert_eq!(fixture.power(&plan).await, VmPower::On);
        vms.stop(plan.id).await.unwrap();
    }

    // A VM that was never built cannot be started.
    let never = fixture.plan("never").await;
    assert!(matches!(vms.start(&never).await, Err(Error::NotFound(_))));
    assert!(matches!(vms.pause(never.id).await, Err(Error::NotFound(_))));
    assert!(matches!(vms.pause(plan.id).await, Err(Error::Conflict(_))));
    vms.remove(plan.id).await.unwrap();
}
