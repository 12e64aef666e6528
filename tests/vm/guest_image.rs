//! The small guest image without Muster.

use serde_json::json;

use crate::guest::{Disk, Guest};

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3/x+y me@\"home\"";

fn nic(network: &str) -> Vec<String> {
    vec!["-nic".into(), format!("user,model=virtio-net-pci,restrict=on,net={network}")]
}

#[test]
fn applies_config_drive_and_runs_script_once() {
    let Some(disk) = Disk::new(None) else { return };
    let meta_data = json!({
        "uuid": "6f1a7c54-8a8e-4f0e-9c3b-6a5b0d1c2e3f",
        "hostname": "first.local",
        "name": "first",
        "project_id": null,
        "devices": [],
        "public_keys": { "mykey": format!("{KEY}\nssh-rsa second"), "none": null },
    });
    // Some JSON writers escape characters that others do not.
    let meta_data = serde_json::to_string_pretty(&meta_data).unwrap().replace("/x", "\\u002fx");
    let script = "#!/bin/sh\necho \"script: $(hostname) is $(id -u)\"\n";
    let mut guest = Guest::start(&disk, &disk.config_drive(&meta_data, script));
    let before = guest.console.log_in();
    assert!(before.ends_with("first"), "{before}");
    // The script runs concurrently with the login and prints to the console.
    guest.console.run_until("grep -q ended /var/log/user-data.log");
    assert!(guest.console.output().contains("script: first is 0"), "{}", guest.console.output());
    assert_eq!(guest.console.run("cat /root/.ssh/authorized_keys"), format!("{KEY}\nssh-rsa second\n"));
    assert_eq!(guest.console.run("hostname; stat -c %a /root/.ssh/authorized_keys"), "first\n600\n");
    assert_eq!(guest.console.run("head -n 1 /var/log/user-data.log"), "script: first is 0\n");

    // A compact config drive of the same instance: the script does not run again.
    assert!(guest.shutdown().success());
    let compact = serde_json::from_str::<serde_json::Value>(&meta_data).unwrap();
    let compact = compact.to_string().replace("first.local", "renamed.local");
    let mut guest = Guest::start(&disk, &disk.config_drive(&compact, "#!/bin/sh\necho again\n"));
    let before = guest.console.log_in();
    assert!(before.ends_with("renamed"), "{before}");
    assert_eq!(
        guest.console.run("cat /var/log/user-data.log"),
        "script: first is 0\nuser data: ended with 0\n"
    );
}

#[test]
fn gets_address_by_dhcp() {
    let Some(disk) = Disk::new(None) else { return };
    let mut guest = Guest::start(&disk, &nic("10.11.12.0/24"));
    let before = guest.console.log_in();
    assert!(before.ends_with("tiny"), "{before}");
    guest.console.run_until("ip -4 addr show dev eth0 | grep -q 'inet 10.11.12.15/24 '");
    // The empty password of root must not allow SSH logins.
    guest.console.run_until("netstat -ltn | grep -q ':22 '");
    let response = guest.console.run("ssh -y 127.0.0.1 true </dev/null 2>&1 | tail -n 1");
    assert!(response.contains("No auth methods could be used"), "{response}");
}

#[test]
fn powers_off_on_acpi_event() {
    let Some(disk) = Disk::new(None) else { return };
    let mut guest = Guest::start(&disk, &[]);
    guest.console.log_in();
    assert!(guest.shutdown().success());
}

#[test]
fn grows_root_file_system_and_keeps_data_across_reboot() {
    let Some(disk) = Disk::new(Some("1G")) else { return };
    let mut guest = Guest::start(&disk, &[]);
    guest.console.log_in();
    let size = guest.console.run("df -m / | awk 'END { print $2 }'");
    assert!((900..1024).contains(&size.trim().parse().unwrap()), "{size}");
    guest
        .console
        .run("dd if=/dev/urandom of=/root/data bs=1M count=8 2>/dev/null; sha512sum /root/data >/root/sum");
    guest.console.type_line("reboot");
    guest.console.log_in();
    assert_eq!(guest.console.run("sha512sum -c /root/sum"), "/root/data: OK\n");
    assert_eq!(guest.console.run("df -m / | awk 'END { print $2 }'"), size);
}

#[test]
fn hot_plugged_interface_gets_address() {
    let Some(disk) = Disk::new(None) else { return };
    let mut guest = Guest::start(&disk, &[]);
    guest.console.log_in();
    assert_eq!(guest.console.run("ls /sys/class/net"), "lo\n");
    guest.execute_qmp(
        "netdev_add",
        &json!({ "type": "user", "id": "late", "restrict": true, "net": "10.13.14.0/24" }),
    );
    let device = json!({ "driver": "virtio-net-pci", "id": "late-card", "netdev": "late", "bus": "free" });
    guest.execute_qmp("device_add", &device);
    guest.console.run_until("ip -4 addr show dev eth0 2>/dev/null | grep -q 'inet 10.13.14.15/24 '");
    guest.execute_qmp("device_del", &json!({ "id": "late-card" }));
    guest.console.run_until("[ ! -e /sys/class/net/eth0 ] && ! pidof udhcpc");
}
