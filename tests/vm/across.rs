//! Instances on two machines with one database.

use muster_test_cluster::{enter_vm_namespaces, qemu_processes, vm_hosts};
use reqwest::Method;
use serde_json::json;

use crate::instance::{Instance, bytes};
use crate::picture::colours;

#[test]
fn guests_on_two_machines_meet_and_every_daemon_takes_every_call() {
    if !enter_vm_namespaces("across::guests_on_two_machines_meet_and_every_daemon_takes_every_call") {
        return;
    }
    let Some(world) = vm_hosts(2, &[]) else { return };
    let (first, second) = (world.host(1), world.host(2));
    let network = first.create_network(json!({ "name": "one", "provide_dns": true }))["uuid"].clone();
    let on = |node: &str| json!({ "network": [{ "network_uuid": network }], "placed_on": node });
    // The second one's image comes from the first machine.
    let here = Instance::ask_for(first, "here", &on("m1"));
    let there = Instance::ask_for(first, "there", &on("m2"));
    here.wait_for_state(first, "created");
    let mut in_here = here.console(first);
    assert_eq!(there.wait_for_state(first, "created")["node"], "m2");
    let mut in_there = there.console(second);
    in_here.log_in();
    in_there.log_in();

    let (near, far) = (here.address(first, 0), there.address(first, 0));
    in_here.run_until(&format!("ip -4 addr show dev eth0 | grep -q 'inet {near}/24 '"));
    in_there.run_until(&format!("ip -4 addr show dev eth0 | grep -q 'inet {far}/24 '"));
    in_here.run_until(&format!("ping -c 1 -W 5 {far} >/dev/null"));
    in_there.run_until("ping -c 1 -W 5 here >/dev/null");
    in_here.run_until(&format!("ping -c 1 -s 1422 -W 5 {far} >/dev/null"));

    // What is asked of the daemon that does not have it is handed on.
    assert!(there.shown(first).contains("there login: "));
    let blob = first.get(&there.path("/screenshot"));
    let picture = bytes(first, &format!("/blobs/{}/data", blob.as_str().unwrap()));
    assert!(colours(&picture).len() > 1, "the screen is blank");
    there.post(first, "/pause");
    assert_eq!(second.get(&there.path(""))["power_state"], "paused");
    there.post(first, "/unpause");
    assert_eq!(first.call(Method::DELETE, &there.path("/consoledata"), None).0, 200);
    assert!(!there.shown(second).contains("there login: "));
    there.post(first, "/poweroff");
    assert_eq!(there.process(), None);
    assert_eq!(second.get(&there.path(""))["power_state"], "off");
    assert!(here.process().is_some());

    // An interface is plugged in, and everything is deleted, from over there.
    let plugged =
        second.post(&here.path("/interfaces"), Some(json!({ "network": { "network_uuid": network } })));
    let address = plugged["ipv4"].as_str().unwrap();
    in_here.run_until(&format!("ip -4 addr show dev eth1 2>/dev/null | grep -q 'inet {address}/24 '"));
    here.delete(second);
    there.delete(first);
    assert_eq!(qemu_processes(), []);
}
