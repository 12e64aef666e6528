//! What guests find on their networks.

use muster_test_cluster::{
    ClusterDatabase, enter_vm_namespaces, list_resources, single_vm_host, wait_until_no_operations,
    wait_until_released,
};
use muster_testing::wait_for;
use serde_json::json;

use crate::PATIENCE;
use crate::instance::Instance;

#[test]
fn guests_have_the_addresses_names_and_ways_that_their_records_say() {
    if !enter_vm_namespaces("network::guests_have_the_addresses_names_and_ways_that_their_records_say") {
        return;
    }
    let world = single_vm_host(&[("CLEANER_DELAY", "3")]);
    let machine = world.host(1);
    let backdoor = ClusterDatabase::open(&world.database_url, &world.directory);
    let network = |request| machine.create_network(request)["uuid"].clone();
    let front = network(json!({ "name": "front", "provide_dns": true }));
    network(json!({ "name": "back", "netblock": "10.1.0.0/24", "provide_nat": false }));
    let late = network(json!({ "name": "late", "netblock": "10.2.0.0/24", "provide_nat": false }));
    wait_until_no_operations(&backdoor);
    let before = list_resources(&world, &backdoor, &[]);

    let both = json!([{ "network_uuid": front }, { "network_uuid": "back" }]);
    let web = Instance::ask_for(machine, "web", &json!({ "network": both }));
    let floats = json!([{ "network_uuid": front, "address": "10.0.0.77", "float": true }]);
    let db = Instance::ask_for(machine, "db", &json!({ "network": floats }));
    let ids = [web.uuid.clone(), db.uuid.clone()];
    web.wait_for_state(machine, "created");
    let mut in_web = web.console(machine);
    db.wait_for_state(machine, "created");
    let mut in_db = db.console(machine);
    assert!(in_web.log_in().ends_with("web"));
    assert!(in_db.log_in().ends_with("db"));
    assert!(web.shown(machine).contains("web login: "));

    // Its addresses are those of the record, in the same order.
    for (number, device) in ["eth0", "eth1"].iter().enumerate() {
        let address = web.address(machine, number);
        in_web.run_until(&format!("ip -4 addr show dev {device} | grep -q 'inet {address}/24 '"));
        let mac = web.record(machine)["interfaces"][number]["macaddr"].as_str().unwrap().to_owned();
        assert_eq!(in_web.run(&format!("cat /sys/class/net/{device}/address")).trim(), mac);
    }
    in_db.run_until("ip -4 addr show dev eth0 | grep -q 'inet 10.0.0.77/24 '");

    // Names, each other, and the world, which sees the machine.
    in_web.run_until("nslookup db 10.0.0.1 | grep -q 'Address: *10.0.0.77'");
    in_web.run_until("ping -c 1 -W 5 db >/dev/null");
    in_db.run_until(&format!("ping -c 1 -W 5 {} >/dev/null", web.address(machine, 0)));
    world.external_peer.serve_peer_address(80);
    assert_eq!(in_web.run("nc -w 10 198.51.100.1 80 </dev/null"), "198.51.100.2");

    // The floating address leads the world to the guest.
    in_db.run("(while :; do echo this is $(hostname) | nc -l -p 80; done) >/dev/null 2>&1 & true");
    let floating = db.record(machine)["interfaces"][0]["floating"].as_str().unwrap().to_owned();
    wait_for("the guest to answer the world", PATIENCE, || {
        (world.external_peer.address_seen_by(&floating, 80).as_deref() == Some("this is db\n")).then_some(())
    });

    // An interface that comes later.
    let plugged =
        machine.post(&web.path("/interfaces"), Some(json!({ "network": { "network_uuid": late } })));
    let address = plugged["ipv4"].as_str().unwrap();
    assert!(address.starts_with("10.2.0."), "{plugged}");
    in_web.run_until(&format!("ip -4 addr show dev eth2 2>/dev/null | grep -q 'inet {address}/24 '"));
    in_web.run_until("ping -c 1 -W 5 10.2.0.1 >/dev/null");
    wait_for("the interface to be created", PATIENCE, || {
        let list = machine.get(&web.path("/interfaces"));
        (list.as_array().unwrap().len() == 3 && list[2]["state"] == "created").then_some(())
    });

    web.delete(machine);
    db.delete(machine);
    wait_until_released(&world, &backdoor, &before, &ids);
    assert_eq!(world.external_peer.address_seen_by(&floating, 80), None);
}
