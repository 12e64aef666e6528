//! Networks of real guests.

use muster_test_cluster::{
    ClusterDatabase, enter_vm_namespaces, list_resources, single_vm_host, wait_until_no_operations,
    wait_until_released,
};
use muster_testing::wait_for;
use serde_json::json;

use crate::TIMEOUT;
use crate::instance::Instance;

#[test]
fn guests_get_recorded_addresses_names_and_routes() {
    if !enter_vm_namespaces("network::guests_get_recorded_addresses_names_and_routes") {
        return;
    }
    let cluster = single_vm_host(&[("CLEANER_DELAY", "3")]);
    let host = cluster.host(1);
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let network = |request| host.create_network(request)["uuid"].clone();
    let front = network(json!({ "name": "front", "provide_dns": true }));
    network(json!({ "name": "back", "netblock": "10.1.0.0/24", "provide_nat": false }));
    let late = network(json!({ "name": "late", "netblock": "10.2.0.0/24", "provide_nat": false }));
    wait_until_no_operations(&database);
    let before = list_resources(&cluster, &database, &[]);

    let both = json!([{ "network_uuid": front }, { "network_uuid": "back" }]);
    let web = Instance::request(host, "web", &json!({ "network": both }));
    let floats = json!([{ "network_uuid": front, "address": "10.0.0.77", "float": true }]);
    let db = Instance::request(host, "db", &json!({ "network": floats }));
    let ids = [web.uuid.clone(), db.uuid.clone()];
    web.wait_for_state(host, "created");
    let mut web_console = web.console(host);
    db.wait_for_state(host, "created");
    let mut db_console = db.console(host);
    assert!(web_console.log_in().ends_with("web"));
    assert!(db_console.log_in().ends_with("db"));
    assert!(web.console_text(host).contains("web login: "));

    // The guest has the recorded addresses in the same order.
    for (number, device) in ["eth0", "eth1"].iter().enumerate() {
        let address = web.address(host, number);
        web_console.run_until(&format!("ip -4 addr show dev {device} | grep -q 'inet {address}/24 '"));
        let mac = web.record(host)["interfaces"][number]["macaddr"].as_str().unwrap().to_owned();
        assert_eq!(web_console.run(&format!("cat /sys/class/net/{device}/address")).trim(), mac);
    }
    db_console.run_until("ip -4 addr show dev eth0 | grep -q 'inet 10.0.0.77/24 '");

    // DNS, other guests, and the external network, which sees the address of the host.
    web_console.run_until("nslookup db 10.0.0.1 | grep -q 'Address: *10.0.0.77'");
    web_console.run_until("ping -c 1 -W 5 db >/dev/null");
    db_console.run_until(&format!("ping -c 1 -W 5 {} >/dev/null", web.address(host, 0)));
    cluster.external_peer.serve_peer_address(80);
    assert_eq!(web_console.run("nc -w 10 198.51.100.1 80 </dev/null"), "198.51.100.2");

    // The guest is reachable from the external network by its floating address.
    db_console.run("(while :; do echo this is $(hostname) | nc -l -p 80; done) >/dev/null 2>&1 & true");
    let floating = db.record(host)["interfaces"][0]["floating"].as_str().unwrap().to_owned();
    wait_for("a response from the floating address", TIMEOUT, || {
        (cluster.external_peer.address_seen_by(&floating, 80).as_deref() == Some("this is db\n"))
            .then_some(())
    });

    // A hot-plugged interface.
    let plugged = host.post(&web.path("/interfaces"), Some(json!({ "network": { "network_uuid": late } })));
    let address = plugged["ipv4"].as_str().unwrap();
    assert!(address.starts_with("10.2.0."), "{plugged}");
    web_console.run_until(&format!("ip -4 addr show dev eth2 2>/dev/null | grep -q 'inet {address}/24 '"));
    web_console.run_until("ping -c 1 -W 5 10.2.0.1 >/dev/null");
    wait_for("the interface to be created", TIMEOUT, || {
        let list = host.get(&web.path("/interfaces"));
        (list.as_array().unwrap().len() == 3 && list[2]["state"] == "created").then_some(())
    });

    web.delete(host);
    db.delete(host);
    wait_until_released(&cluster, &database, &before, &ids);
    assert_eq!(cluster.external_peer.address_seen_by(&floating, 80), None);
}

#[test]
fn guest_gets_the_address_of_a_deleted_guest() {
    if !enter_vm_namespaces("network::guest_gets_the_address_of_a_deleted_guest") {
        return;
    }
    let cluster = single_vm_host(&[]);
    let host = cluster.host(1);
    let network =
        host.create_network(json!({ "name": "front", "netblock": "10.61.0.0/24", "provide_dns": true }));
    let network = network["uuid"].as_str().unwrap();
    let within = format!("ip netns exec {network}");
    cluster.external_peer.serve_peer_address(80);
    let interface = json!({ "network": [{ "network_uuid": network, "address": "10.61.0.77" }] });
    let mut macs = Vec::new();
    for name in ["first", "second"] {
        let guest = Instance::create(host, name, &interface);
        let mut console = guest.console(host);
        console.log_in();
        let arp = host.namespace.sh(&format!("{within} ip neigh show 10.61.0.77"));
        assert!(macs.iter().all(|mac: &String| !arp.contains(mac)), "{arp}");
        console.run_until("ip -4 addr show dev eth0 | grep -q 'inet 10.61.0.77/24 '");
        assert_eq!(console.run("nc -w 10 198.51.100.1 80 </dev/null"), "198.51.100.2");
        let flows = || host.namespace.sh(&format!("{within} cat /proc/net/nf_conntrack"));
        assert!(flows().contains("src=10.61.0.77 "), "{}", flows());
        macs.push(guest.record(host)["interfaces"][0]["macaddr"].as_str().unwrap().to_owned());
        guest.delete(host);
        wait_for("the router to forget the guest", TIMEOUT, || {
            let arp = host.namespace.sh(&format!("{within} ip neigh show 10.61.0.77"));
            (!flows().contains("10.61.0.77") && !arp.contains("lladdr")).then_some(())
        });
    }
}
