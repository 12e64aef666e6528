//! Guests keep running while daemons stop, start and crash.

use std::path::Path;

use serde_json::{Value, json};

use crate::console::Console;
use crate::instance::Instance;
use crate::world::{self, enter};

fn uptime(console: &mut Console) -> f64 {
    console.run("cut -d ' ' -f 1 /proc/uptime").trim().parse().unwrap()
}

#[test]
fn guests_outlive_their_daemon_which_finds_out_what_became_of_them() {
    if !enter("outlive::guests_outlive_their_daemon_which_finds_out_what_became_of_them") {
        return;
    }
    let mut world = world::of_one(&[]);
    let machine = &mut world.machines[0];
    let network = machine.create(json!({ "name": "one" }))["uuid"].clone();
    let changes = json!({ "network": [{ "network_uuid": network }] });
    let one = Instance::ask_for(machine, "one", &changes);
    let two = Instance::ask_for(machine, "two", &changes);
    one.wait_for_state(machine, "created");
    let mut in_one = one.console(machine);
    two.wait_for_state(machine, "created");
    let mut in_two = two.console(machine);
    in_one.log_in();
    in_two.log_in();
    let processes = (one.process(), two.process());

    // Killed, and stopped as an operator does it: both go on, and the next daemon drives them.
    for end in ["kill", "stop"] {
        let before = (uptime(&mut in_one), uptime(&mut in_two));
        if end == "kill" {
            machine.kill();
        } else {
            machine.stop();
        }
        in_one.run_until("ping -c 1 -W 5 10.0.0.1 >/dev/null");
        let without = (uptime(&mut in_one), uptime(&mut in_two));
        assert!(without.0 > before.0 && without.1 > before.1);
        machine.start();
        for instance in [&one, &two] {
            assert_eq!(instance.record(machine)["power_state"], "on");
            instance.post(machine, "/pause");
            assert_eq!(instance.record(machine)["power_state"], "paused");
            instance.post(machine, "/unpause");
            assert_eq!(instance.record(machine)["power_state"], "on");
        }
        assert!(uptime(&mut in_one) > without.0 && uptime(&mut in_two) > without.1);
        assert!(one.shown(machine).contains("one login: "));
        assert_eq!((one.process(), two.process()), processes);
    }

    // One switches itself off and the other one's QEMU dies while nobody watches.
    machine.kill();
    in_one.type_line("poweroff");
    in_one.wait_for("Power down");
    two.kill();
    machine.start();
    let event = one.wait_for_power(machine, "off", 0.0);
    assert_eq!(event["extra"]["reason"], "the guest switched itself off", "{event}");
    let event = two.wait_for_power(machine, "crashed", 0.0);
    assert!(
        event["extra"]["reason"].as_str().unwrap().contains("while the daemon was not running"),
        "{event}"
    );
    assert_eq!((one.process(), two.process()), (None, None));
    for instance in [&one, &two] {
        instance.post(machine, "/poweron");
        assert_eq!(instance.record(machine)["power_state"], "on");
        instance.delete(machine);
    }
    assert_eq!(world::processes(), []);
}

/// Lets a machine belong to an earlier start of the host.
fn belongs_to_earlier_start(folder: &Path) {
    let file = folder.join("machine.json");
    let mut record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(record["boot"].is_string(), "{record}");
    record["boot"] = "an earlier one".into();
    std::fs::write(file, record.to_string()).unwrap();
}

#[test]
fn after_the_host_was_down_what_was_on_is_started_again_and_what_was_off_stays_off() {
    if !enter("outlive::after_the_host_was_down_what_was_on_is_started_again_and_what_was_off_stays_off") {
        return;
    }
    let mut world = world::of_one(&[]);
    let network = world.machine(1).create(json!({ "name": "one" }))["uuid"].clone();
    let changes = json!({ "network": [{ "network_uuid": network }] });
    let [on, off] = ["on", "off"].map(|name| Instance::create(world.machine(1), name, &changes));
    let mut console = on.console(world.machine(1));
    console.log_in();
    console.run("echo precious >/root/kept && sync");
    off.post(world.machine(1), "/poweroff");

    world.machines[0].kill();
    on.kill();
    for instance in [&on, &off] {
        belongs_to_earlier_start(&instance.folder(&world, 1));
    }
    world.machines[0].start();
    let machine = world.machine(1);
    let mut console = on.console(machine);
    console.log_in();
    assert_eq!(console.run("cat /root/kept"), "precious\n");
    console.run_until("ping -c 1 -W 5 10.0.0.1 >/dev/null");
    let told = "restarting the VM after its host went down";
    assert_eq!(on.events(machine, told).len(), 1);
    assert_eq!(on.record(machine)["power_state"], "on");
    assert_eq!(off.record(machine)["power_state"], "off");
    assert_eq!(off.process(), None);
    assert_eq!(off.events(machine, told).len(), 0);
}
