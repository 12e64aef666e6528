//! The lifecycle of an instance: pause, reboot, power off and on, screenshot, snapshot, crash, deletion.

use muster_test_cluster::{
    ClusterDatabase, enter_vm_namespaces, list_resources, single_vm_host, wait_until_no_operations,
    wait_until_released,
};
use muster_testing::{skipped, wait_for};
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::console::Console;
use crate::instance::{Instance, bytes, now};
use crate::screenshot::colours;

/// The maximum delay of an exit event in seconds. Exits are notified, not polled.
const MAX_EVENT_DELAY: f64 = 3.0;

/// Returns the metadata on the config drive.
fn meta_data(console: &mut Console) -> Value {
    let script = "mkdir -p /mnt && mount -t iso9660 -o ro $(findfs LABEL=config-2) /mnt && \
                  cat /mnt/openstack/latest/meta_data.json && umount /mnt";
    serde_json::from_str(&console.run(script)).unwrap()
}

fn boot_id(console: &mut Console) -> String {
    console.run("cat /proc/sys/kernel/random/boot_id")
}

#[test]
fn instance_survives_reboots_power_cycles_snapshots_and_crashes() {
    if !enter_vm_namespaces("lifecycle::instance_survives_reboots_power_cycles_snapshots_and_crashes") {
        return;
    }
    let cluster = single_vm_host(&[("CLEANER_DELAY", "3"), ("BLOB_DELETION_DELAY", "20")]);
    let host = cluster.host(1);
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    wait_until_no_operations(&database);
    let before = list_resources(&cluster, &database, &[]);

    // The user data prints the hostname.
    let script = "IyEvYmluL3NoCmVjaG8gInNjcmlwdCBvZiAkKGhvc3RuYW1lKSIK";
    let changes = json!({ "metadata": { "colour": "navy" }, "ssh_key": "ssh-rsa key", "user_data": script });
    let one = Instance::create(host, "one", &changes);
    let mut console = one.console(host);
    assert!(console.log_in().ends_with("one"));
    console.run_until("grep -qx 'script of one' /var/log/user-data.log");
    assert_eq!(console.run("cat /root/.ssh/authorized_keys"), "ssh-rsa key\n");
    let first = meta_data(&mut console);
    assert_eq!((&first["uuid"], &first["hostname"]), (&json!(one.uuid), &json!("one.local")));
    console.run("echo precious >/root/kept && sync");

    // A paused guest reacts only after it is resumed.
    let first_boot = boot_id(&mut console);
    one.post(host, "/pause");
    assert_eq!(one.record(host)["power_state"], "paused");
    console.type_line("echo still \"here\"");
    assert_eq!(host.call(Method::POST, &one.path("/pause"), None).0, 409);
    one.post(host, "/unpause");
    assert_eq!(one.record(host)["power_state"], "on");
    console.wait_for("still here");

    // The screen shows a prompt as well.
    let blob = host.get(&one.path("/screenshot"));
    let screenshot = bytes(host, &format!("/blobs/{}/data", blob.as_str().unwrap()));
    assert!(colours(&screenshot).len() > 1, "the screen is blank");

    // Soft and hard reboot.
    one.post(host, "/rebootsoft");
    console.log_in();
    let second_boot = boot_id(&mut console);
    assert_ne!(first_boot, second_boot);
    one.post(host, "/reboothard");
    console.log_in();
    assert_ne!(boot_id(&mut console), second_boot);
    assert_eq!(console.run("cat /root/kept"), "precious\n");

    // Power off and on: the same disk, but a new config drive.
    one.post(host, "/poweroff");
    assert_eq!(one.record(host)["power_state"], "off");
    assert_eq!(one.process(), None);
    assert_eq!(host.call(Method::POST, &one.path("/rebootsoft"), None).0, 409);
    one.post(host, "/poweron");
    assert_eq!(one.record(host)["power_state"], "on");
    let mut console = one.console(host);
    console.log_in();
    assert_eq!(console.run("cat /root/kept"), "precious\n");
    let second = meta_data(&mut console);
    assert_eq!(first["uuid"], second["uuid"]);
    assert_ne!(first["random_seed"], second["random_seed"]);

    // A snapshot of the running instance becomes another instance with the same data.
    console.run("echo more >>/root/kept && sync");
    let snapshot = one.post(host, "/snapshot");
    let (artifact, blob) = (&snapshot["vda"]["artifact_uuid"], &snapshot["vda"]["blob_uuid"]);
    wait_for("the snapshot", TIMEOUT, || {
        let list = host.get(&one.path("/snapshot"));
        let mut list = list.as_array().unwrap().iter();
        list.any(|copy| copy["blob_uuid"] == *blob && copy["state"] == "created").then_some(())
    });
    let base = format!("sf://snapshot/{}", artifact.as_str().unwrap());
    let copy = Instance::create(host, "copy", &json!({ "disk": [{ "base": base }] }));
    let mut copy_console = copy.console(host);
    assert!(copy_console.log_in().ends_with("copy"));
    assert_eq!(copy_console.run("cat /root/kept"), "precious\nmore\n");
    assert_eq!(copy_console.run("rm /root/kept; ls /root"), "");
    assert_eq!(console.run("cat /root/kept"), "precious\nmore\n");

    // A power-off by the guest is noticed immediately.
    let since = now();
    console.type_line("poweroff");
    console.wait_for("Power down");
    let down = now();
    let event = one.wait_for_power(host, "off", since);
    let delay = event["timestamp"].as_f64().unwrap() - down;
    assert!(delay < MAX_EVENT_DELAY, "noticed after {delay} s: {event}");
    assert_eq!(event["extra"]["reason"], "the guest switched itself off", "{event}");
    assert_eq!(one.process(), None);

    // A killed QEMU is a crash, not a power-off.
    let since = now();
    copy.kill();
    let event = copy.wait_for_power(host, "crashed", since);
    let delay = event["timestamp"].as_f64().unwrap() - since;
    assert!(delay < MAX_EVENT_DELAY, "noticed after {delay} s: {event}");
    assert!(event["extra"]["reason"].as_str().unwrap().contains("signal 9"), "{event}");
    copy.post(host, "/poweron");
    assert_eq!(copy.record(host)["power_state"], "on");

    one.delete(host);
    copy.delete(host);
    let path = format!("/artifacts/{}", artifact.as_str().unwrap());
    assert_eq!(host.call(Method::DELETE, &path, None).0, 200);
    wait_until_released(&cluster, &database, &before, &[one.uuid, copy.uuid]);
}

#[test]
fn boots_with_uefi_and_disks_on_other_buses() {
    if !std::path::Path::new("/usr/share/OVMF/OVMF_CODE_4M.fd").exists() {
        return skipped("ovmf");
    }
    if !enter_vm_namespaces("lifecycle::boots_with_uefi_and_disks_on_other_buses") {
        return;
    }
    let cluster = single_vm_host(&[]);
    let host = cluster.host(1);
    let disks = json!([
        { "base": "label:tiny", "bus": "scsi" },
        { "size": 1, "bus": "nvme" },
        { "size": 2, "bus": "virtio" },
    ]);
    let changes = json!({ "uefi": true, "memory": 512, "disk": disks });
    let instance = Instance::create(host, "modern", &changes);
    let mut console = instance.console(host);
    assert!(console.log_in().ends_with("modern"));
    assert_eq!(console.run("ls -d /sys/firmware/efi"), "/sys/firmware/efi\n");
    let size = |console: &mut Console, device: &str| console.run(&format!("cat /sys/block/{device}/size"));
    assert_eq!(size(&mut console, "nvme0n1").trim(), (1_u64 << 21).to_string());
    assert_eq!(size(&mut console, "vda").trim(), (2_u64 << 21).to_string());
    let root = console.run("readlink /dev/root");
    assert!(root.starts_with("sd"), "{root}");
    let record = instance.record(host);
    let buses: Vec<&str> =
        record["disks"].as_array().unwrap().iter().map(|disk| disk["bus"].as_str().unwrap()).collect();
    assert_eq!(buses, ["scsi", "scsi", "nvme", "virtio"], "the second is the config drive: {record:#}");
    instance.delete(host);
}
