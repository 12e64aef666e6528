//! Manual changes to networks are repaired and recorded as events.

use std::time::Instant;

use muster_testing::wait_for;
use serde_json::json;

use crate::backdoor::Backdoor;
use crate::guest::Guest;
use crate::machine::{World, id, inventories, wait_until_same};
use crate::{RECONCILE_TIMEOUT, enter};

#[test]
fn repairs_manual_damage_within_ten_seconds() {
    if !enter("repair::repairs_manual_damage_within_ten_seconds") {
        return;
    }
    let Some(world) = World::of(2, &[]) else { return };
    let backdoor = Backdoor::open(&world.database, &world.folder);
    let record = world.machine(1).create(json!({ "name": "one", "provide_dns": true }));
    let network = id(&record);
    let guest = Guest::new(&backdoor, world.machine(1), network, "guest", "10.0.0.2");
    guest.dhcp();
    let interface = format!("/interfaces/{}", guest.interface.id);
    world.machine(1).post(&format!("{interface}/float"), None);
    let floating = world.machine(1).get(&interface)["floating"].as_str().unwrap().to_owned();
    assert!(world.outside.pings(&floating));

    let vxid = format!("{:06x}", record["vxid"].as_u64().unwrap());
    let (hypervisor, nn) = (world.machine(1), world.machine(2));
    let complete = inventories(&world.machines);
    let in_router = format!("ip netns exec {network}");
    let flood = |peer: &str| format!("bridge fdb del 00:00:00:00:00:00 dev vxlan-{vxid} dst {peer}");
    for (host, command) in [
        (hypervisor, format!("ip link del br-vxlan-{vxid}")),
        (nn, format!("ip link del br-vxlan-{vxid}")),
        (hypervisor, flood("10.99.0.2")),
        (nn, flood("10.99.0.1")),
        (hypervisor, format!("nft delete table bridge muster-{vxid}")),
        (hypervisor, format!("nft flush table bridge muster-{vxid}")),
        (nn, format!("{in_router} nft delete table inet muster")),
        (nn, format!("{in_router} nft flush table inet muster")),
        (nn, format!("{in_router} ip addr del 10.0.0.1/24 dev veth-{vxid}-i")),
        (nn, format!("{in_router} ip addr flush dev egr-{vxid}-i")),
        (nn, format!("{in_router} ip route del default")),
        (nn, "ip link del egr-br-world0; nft delete table ip muster-egress".into()),
        (nn, format!("ip netns del {network}")),
    ] {
        let before = nn.events(network, "network repaired").len();
        host.place.sh(&command);
        let began = Instant::now();
        wait_until_same(&format!("repair of: {command}"), RECONCILE_TIMEOUT, &complete, || {
            inventories(&world.machines)
        });
        let events = wait_for(&format!("the event of: {command}"), RECONCILE_TIMEOUT, || {
            Some(nn.events(network, "network repaired")).filter(|events| events.len() > before)
        });
        println!("{:?}: {command}: {}", began.elapsed(), events[0]["extra"]["repaired"]);
        assert_eq!(events[0]["type"], "status");
        assert!(!events[0]["extra"]["repaired"].as_array().unwrap().is_empty(), "{command}: {}", events[0]);
    }
    assert!(guest.place.pings("10.0.0.1") && guest.place.pings("198.51.100.1"));
    assert!(world.outside.pings(&floating));

    // dnsmasq.
    let message = "dnsmasq died and was started again";
    let before = nn.events(network, message).len();
    let pid = nn.place.sh(&format!("cat /run/muster/networks/{network}/dnsmasq.pid"));
    nn.place.sh(&format!("kill -9 {}", pid.trim()));
    wait_until_same("dnsmasq to be restarted", RECONCILE_TIMEOUT, &complete, || inventories(&world.machines));
    let events = wait_for("the event of the restart", RECONCILE_TIMEOUT, || {
        Some(nn.events(network, message)).filter(|events| events.len() > before)
    });
    assert!(events[0]["extra"]["reason"].as_str().unwrap().contains(pid.trim()), "{}", events[0]);
    assert_ne!(nn.place.sh(&format!("cat /run/muster/networks/{network}/dnsmasq.pid")), pid);
    guest.wait_until_resolved("guest", guest.address());
    guest.place.sh("ip addr flush dev eth0");
    guest.dhcp();
    // A regular change does not repair anything.
    let repairs = nn.events(network, "network repaired").len();
    world
        .machine(1)
        .post(&format!("/networks/{network}/dns"), Some(json!({ "name": "a", "value": "10.0.0.7" })));
    guest.wait_until_resolved("a", "10.0.0.7".parse().unwrap());
    assert_eq!(nn.events(network, "network repaired").len(), repairs);
}
