//! Instances on two hosts with one database.

use muster_test_cluster::{enter_vm_namespaces, qemu_processes, vm_hosts};
use reqwest::Method;
use serde_json::json;

use crate::instance::{Instance, bytes};
use crate::screenshot::colours;

#[test]
fn guests_on_two_hosts_communicate_and_any_daemon_serves_any_request() {
    if !enter_vm_namespaces("multi_host::guests_on_two_hosts_communicate_and_any_daemon_serves_any_request") {
        return;
    }
    let Some(cluster) = vm_hosts(2, &[]) else { return };
    let (first, second) = (cluster.host(1), cluster.host(2));
    let network = first.create_network(json!({ "name": "one", "provide_dns": true }))["uuid"].clone();
    let placed_on = |node: &str| json!({ "network": [{ "network_uuid": network }], "placed_on": node });
    // The second host copies the image from the first.
    let here = Instance::request(first, "here", &placed_on("m1"));
    let there = Instance::request(first, "there", &placed_on("m2"));
    here.wait_for_state(first, "created");
    let mut console_here = here.console(first);
    assert_eq!(there.wait_for_state(first, "created")["node"], "m2");
    let mut console_there = there.console(second);
    console_here.log_in();
    console_there.log_in();

    let (address_here, address_there) = (here.address(first, 0), there.address(first, 0));
    console_here.run_until(&format!("ip -4 addr show dev eth0 | grep -q 'inet {address_here}/24 '"));
    console_there.run_until(&format!("ip -4 addr show dev eth0 | grep -q 'inet {address_there}/24 '"));
    console_here.run_until(&format!("ping -c 1 -W 5 {address_there} >/dev/null"));
    console_there.run_until("ping -c 1 -W 5 here >/dev/null");
    console_here.run_until(&format!("ping -c 1 -s 1422 -W 5 {address_there} >/dev/null"));

    // Requests to the daemon of another host are forwarded.
    assert!(there.console_text(first).contains("there login: "));
    let blob = first.get(&there.path("/screenshot"));
    let screenshot = bytes(first, &format!("/blobs/{}/data", blob.as_str().unwrap()));
    assert!(colours(&screenshot).len() > 1, "the screen is blank");
    let mut forwarded = there.open_console(first);
    assert_eq!(forwarded.run("echo forwarded"), "forwarded\n");
    console_there.wait_for("forwarded");
    let viewer_file = bytes(first, &there.path("/vdiconsolehelper"));
    assert!(String::from_utf8_lossy(&viewer_file).contains("\npassword="), "from the daemon of its host");
    there.post(first, "/pause");
    assert_eq!(second.get(&there.path(""))["power_state"], "paused");
    there.post(first, "/unpause");
    assert_eq!(first.call(Method::DELETE, &there.path("/consoledata"), None).0, 200);
    assert!(!there.console_text(second).contains("there login: "));
    there.post(first, "/poweroff");
    assert_eq!(there.process(), None);
    assert_eq!(second.get(&there.path(""))["power_state"], "off");
    assert!(here.process().is_some());

    // Hot-plug and deletion through the other daemon.
    let plugged =
        second.post(&here.path("/interfaces"), Some(json!({ "network": { "network_uuid": network } })));
    let address = plugged["ipv4"].as_str().unwrap();
    console_here.run_until(&format!("ip -4 addr show dev eth1 2>/dev/null | grep -q 'inet {address}/24 '"));
    here.delete(second);
    there.delete(first);
    assert_eq!(qemu_processes(), []);
}
