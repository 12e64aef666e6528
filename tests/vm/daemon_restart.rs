//! Instances across restarts of the daemon and of the host.

use std::path::Path;

use muster_test_cluster::{enter_vm_namespaces, qemu_processes, single_vm_host};
use serde_json::{Value, json};

use crate::console::Console;
use crate::instance::{Instance, console_without_daemon};

/// Returns whether a line of the log reports a failure, other than a missing feature of the host.
fn is_failure(line: &str) -> bool {
    let is_feature = line.contains("host lacks an optional feature") || line.contains("host has no vsock");
    (line.contains(" WARN ") || line.contains(" ERROR ")) && !is_feature
}

fn uptime(console: &mut Console) -> f64 {
    console.run("cut -d ' ' -f 1 /proc/uptime").trim().parse().unwrap()
}

#[test]
fn vms_survive_daemon_restart_and_missed_exits_are_detected() {
    if !enter_vm_namespaces("daemon_restart::vms_survive_daemon_restart_and_missed_exits_are_detected") {
        return;
    }
    let mut cluster = single_vm_host(&[]);
    let host = cluster.host(1);
    let network = host.create_network(json!({ "name": "one" }))["uuid"].clone();
    let changes = json!({ "network": [{ "network_uuid": network }] });
    let one = Instance::request(host, "one", &changes);
    let two = Instance::request(host, "two", &changes);
    let consoles = [&one, &two].map(|instance| {
        instance.wait_for_state(host, "created");
        instance.console(host)
    });
    // Both have connected before the prompts.
    for mut console in consoles {
        console.log_in();
    }
    let directories = [one.vm_dir(&cluster, 1), two.vm_dir(&cluster, 1)];
    let processes = (one.process(), two.process());
    let host = &mut cluster.hosts[0];

    // Both VMs continue after the daemon is killed or stopped, and the next daemon controls them.
    for how in ["kill", "stop"] {
        let before = [&one, &two].map(|instance| uptime(&mut instance.console(host)));
        if how == "kill" {
            host.kill();
        } else {
            host.stop();
        }
        let mut consoles = directories.each_ref().map(|directory| console_without_daemon(directory));
        consoles[0].run_until("ping -c 1 -W 5 10.0.0.1 >/dev/null");
        let without_daemon = consoles.each_mut().map(uptime);
        assert!(without_daemon[0] > before[0] && without_daemon[1] > before[1]);
        drop(consoles);
        host.start();
        for (number, instance) in [&one, &two].into_iter().enumerate() {
            assert_eq!(instance.record(host)["power_state"], "on");
            instance.post(host, "/pause");
            assert_eq!(instance.record(host)["power_state"], "paused");
            instance.post(host, "/unpause");
            assert_eq!(instance.record(host)["power_state"], "on");
            assert!(uptime(&mut instance.console(host)) > without_daemon[number]);
        }
        assert!(one.console_text(host).contains("one login: "));
        assert_eq!((one.process(), two.process()), processes);
        let log = host.log();
        let failures: Vec<_> = log.lines().filter(|line| is_failure(line)).collect();
        assert_eq!(failures, [""; 0], "after {how}");
    }

    // One guest powers off and the other one's QEMU is killed while no daemon runs.
    host.kill();
    let mut console = console_without_daemon(&directories[0]);
    console.type_line("poweroff");
    console.wait_for("Power down");
    two.kill();
    host.start();
    let event = one.wait_for_power(host, "off", 0.0);
    assert_eq!(event["extra"]["reason"], "the guest switched itself off", "{event}");
    let event = two.wait_for_power(host, "crashed", 0.0);
    assert!(
        event["extra"]["reason"].as_str().unwrap().contains("while the daemon was not running"),
        "{event}"
    );
    assert_eq!((one.process(), two.process()), (None, None));
    for instance in [&one, &two] {
        instance.post(host, "/poweron");
        assert_eq!(instance.record(host)["power_state"], "on");
        instance.delete(host);
    }
    assert_eq!(qemu_processes(), []);
}

/// Changes the boot ID of a VM's record, as if the host had been rebooted.
fn simulate_host_reboot(directory: &Path) {
    let file = directory.join("machine.json");
    let mut record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(record["boot"].is_string(), "{record}");
    record["boot"] = "an earlier one".into();
    std::fs::write(file, record.to_string()).unwrap();
}

#[test]
fn restarts_only_running_instances_after_host_reboot() {
    if !enter_vm_namespaces("daemon_restart::restarts_only_running_instances_after_host_reboot") {
        return;
    }
    let mut cluster = single_vm_host(&[]);
    let network = cluster.host(1).create_network(json!({ "name": "one" }))["uuid"].clone();
    let changes = json!({ "network": [{ "network_uuid": network }] });
    let [on, off] = ["on", "off"].map(|name| Instance::create(cluster.host(1), name, &changes));
    let mut console = on.console(cluster.host(1));
    console.log_in();
    console.run("echo precious >/root/kept && sync");
    off.post(cluster.host(1), "/poweroff");

    cluster.hosts[0].kill();
    on.kill();
    for instance in [&on, &off] {
        simulate_host_reboot(&instance.vm_dir(&cluster, 1));
    }
    cluster.hosts[0].start();
    let host = cluster.host(1);
    let mut console = on.console(host);
    console.log_in();
    assert_eq!(console.run("cat /root/kept"), "precious\n");
    console.run_until("ping -c 1 -W 5 10.0.0.1 >/dev/null");
    let message = "restarting the VM after its host went down";
    assert_eq!(on.events(host, message).len(), 1);
    assert_eq!(on.record(host)["power_state"], "on");
    assert_eq!(off.record(host)["power_state"], "off");
    assert_eq!(off.process(), None);
    assert_eq!(off.events(host, message).len(), 0);
}
