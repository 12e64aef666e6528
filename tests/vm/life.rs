//! The life of an instance: halted, restarted, switched off and on, looked at, copied, broken, deleted.

use muster_test_cluster::{
    ClusterDatabase, enter_vm_namespaces, list_resources, single_vm_host, wait_until_no_operations,
    wait_until_released,
};
use muster_testing::{skipped, wait_for};
use reqwest::Method;
use serde_json::{Value, json};

use crate::PATIENCE;
use crate::console::Console;
use crate::instance::{Instance, bytes, now};
use crate::picture::colours;

/// How soon it is seen that a machine went, in seconds: it is told, not looked for from time to time.
const SOON: f64 = 3.0;

/// What the guest was told when it was switched on.
fn told(console: &mut Console) -> Value {
    let script = "mkdir -p /mnt && mount -t iso9660 -o ro $(findfs LABEL=config-2) /mnt && \
                  cat /mnt/openstack/latest/meta_data.json && umount /mnt";
    serde_json::from_str(&console.run(script)).unwrap()
}

fn boot(console: &mut Console) -> String {
    console.run("cat /proc/sys/kernel/random/boot_id")
}

#[test]
fn an_instance_lives_through_all_that_can_be_done_to_it() {
    if !enter_vm_namespaces("life::an_instance_lives_through_all_that_can_be_done_to_it") {
        return;
    }
    let world = single_vm_host(&[("CLEANER_DELAY", "3"), ("BLOB_DELETION_DELAY", "1")]);
    let machine = world.host(1);
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    wait_until_no_operations(&backdoor);
    let before = list_resources(&world, &backdoor, &[]);

    // The script says who runs it.
    let script = "IyEvYmluL3NoCmVjaG8gInNjcmlwdCBvZiAkKGhvc3RuYW1lKSIK";
    let changes = json!({ "metadata": { "colour": "navy" }, "ssh_key": "ssh-rsa key", "user_data": script });
    let one = Instance::create(machine, "one", &changes);
    let mut console = one.console(machine);
    assert!(console.log_in().ends_with("one"));
    console.run_until("grep -qx 'script of one' /var/log/user-data.log");
    assert_eq!(console.run("cat /root/.ssh/authorized_keys"), "ssh-rsa key\n");
    let first = told(&mut console);
    assert_eq!((&first["uuid"], &first["hostname"]), (&json!(one.uuid), &json!("one.local")));
    console.run("echo precious >/root/kept && sync");

    // Halted, it answers nothing until it goes on.
    let began = boot(&mut console);
    one.post(machine, "/pause");
    assert_eq!(one.record(machine)["power_state"], "paused");
    console.type_line("echo still \"here\"");
    assert_eq!(machine.call(Method::POST, &one.path("/pause"), None).0, 409);
    one.post(machine, "/unpause");
    assert_eq!(one.record(machine)["power_state"], "on");
    console.wait_for("still here");

    // Its screen, which has a prompt as well.
    let blob = machine.get(&one.path("/screenshot"));
    let picture = bytes(machine, &format!("/blobs/{}/data", blob.as_str().unwrap()));
    assert!(colours(&picture).len() > 1, "the screen is blank");

    // Asked to restart, and reset.
    one.post(machine, "/rebootsoft");
    console.log_in();
    let second = boot(&mut console);
    assert_ne!(began, second);
    one.post(machine, "/reboothard");
    console.log_in();
    assert_ne!(boot(&mut console), second);
    assert_eq!(console.run("cat /root/kept"), "precious\n");

    // Switched off and on: the same disk, but told anew.
    one.post(machine, "/poweroff");
    assert_eq!(one.record(machine)["power_state"], "off");
    assert_eq!(one.process(), None);
    assert_eq!(machine.call(Method::POST, &one.path("/rebootsoft"), None).0, 409);
    one.post(machine, "/poweron");
    assert_eq!(one.record(machine)["power_state"], "on");
    let mut console = one.console(machine);
    console.log_in();
    assert_eq!(console.run("cat /root/kept"), "precious\n");
    let second = told(&mut console);
    assert_eq!(first["uuid"], second["uuid"]);
    assert_ne!(first["random_seed"], second["random_seed"]);

    // A copy of its disk, made while it runs, is another instance with the same data.
    console.run("echo more >>/root/kept && sync");
    let copies = one.post(machine, "/snapshot");
    let (artifact, blob) = (&copies["vda"]["artifact_uuid"], &copies["vda"]["blob_uuid"]);
    wait_for("the snapshot", PATIENCE, || {
        let list = machine.get(&one.path("/snapshot"));
        let mut list = list.as_array().unwrap().iter();
        list.any(|copy| copy["blob_uuid"] == *blob && copy["state"] == "created").then_some(())
    });
    let base = format!("sf://snapshot/{}", artifact.as_str().unwrap());
    let copy = Instance::create(machine, "copy", &json!({ "disk": [{ "base": base }] }));
    let mut in_copy = copy.console(machine);
    assert!(in_copy.log_in().ends_with("copy"));
    assert_eq!(in_copy.run("cat /root/kept"), "precious\nmore\n");
    assert_eq!(in_copy.run("rm /root/kept; ls /root"), "");
    assert_eq!(console.run("cat /root/kept"), "precious\nmore\n");

    // It switches itself off, which is seen at once.
    let since = now();
    console.type_line("poweroff");
    console.wait_for("Power down");
    let down = now();
    let event = one.wait_for_power(machine, "off", since);
    let delay = event["timestamp"].as_f64().unwrap() - down;
    assert!(delay < SOON, "seen {delay} s later: {event}");
    assert_eq!(event["extra"]["reason"], "the guest switched itself off", "{event}");
    assert_eq!(one.process(), None);

    // Its QEMU is killed: that is no switching off.
    let since = now();
    copy.kill();
    let event = copy.wait_for_power(machine, "crashed", since);
    let delay = event["timestamp"].as_f64().unwrap() - since;
    assert!(delay < SOON, "seen {delay} s later: {event}");
    assert!(event["extra"]["reason"].as_str().unwrap().contains("signal 9"), "{event}");
    copy.post(machine, "/poweron");
    assert_eq!(copy.record(machine)["power_state"], "on");

    one.delete(machine);
    copy.delete(machine);
    let path = format!("/artifacts/{}", artifact.as_str().unwrap());
    assert_eq!(machine.call(Method::DELETE, &path, None).0, 200);
    wait_until_released(&world, &backdoor, &before, &[one.uuid, copy.uuid]);
}

#[test]
fn a_guest_boots_by_uefi_and_sees_disks_on_other_buses() {
    if !std::path::Path::new("/usr/share/OVMF/OVMF_CODE_4M.fd").exists() {
        return skipped("ovmf");
    }
    if !enter_vm_namespaces("life::a_guest_boots_by_uefi_and_sees_disks_on_other_buses") {
        return;
    }
    let world = single_vm_host(&[]);
    let machine = world.host(1);
    let disks = json!([
        { "base": "label:tiny", "bus": "scsi" },
        { "size": 1, "bus": "nvme" },
        { "size": 2, "bus": "virtio" },
    ]);
    let changes = json!({ "uefi": true, "memory": 512, "disk": disks });
    let instance = Instance::create(machine, "modern", &changes);
    let mut console = instance.console(machine);
    assert!(console.log_in().ends_with("modern"));
    assert_eq!(console.run("ls -d /sys/firmware/efi"), "/sys/firmware/efi\n");
    let size = |console: &mut Console, device: &str| console.run(&format!("cat /sys/block/{device}/size"));
    assert_eq!(size(&mut console, "nvme0n1").trim(), (1_u64 << 21).to_string());
    assert_eq!(size(&mut console, "vda").trim(), (2_u64 << 21).to_string());
    let root = console.run("readlink /dev/root");
    assert!(root.starts_with("sd"), "{root}");
    let record = instance.record(machine);
    let buses: Vec<&str> =
        record["disks"].as_array().unwrap().iter().map(|disk| disk["bus"].as_str().unwrap()).collect();
    assert_eq!(buses, ["scsi", "scsi", "nvme", "virtio"], "the second is the config drive: {record:#}");
    instance.delete(machine);
}
