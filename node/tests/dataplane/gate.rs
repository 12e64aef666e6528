//! The gate of the routers: only the active network node answers, and the kernel silences it when its lease ends.

use std::time::{Duration, Instant};

use muster_types::node::RouterGate;

use crate::fixture::{Guest, TestNetwork, Testbed, run_isolated};

const VIRTUAL_IP: &str = "198.51.100.9";
const SETTINGS: &[(&str, &str)] = &[("NETWORK_VIRTUAL_IP", "198.51.100.9/24")];

/// Returns a gate that closes after this time, with the rest of a second until the lease ends.
fn open_for(seconds: f64) -> RouterGate {
    let close_at = Instant::now() + Duration::from_secs_f64(seconds);
    RouterGate::OpenUntil { close_at, lease_end: close_at + Duration::from_secs(1) }
}

/// Connects the second host to the external network, too.
fn testbed() -> Testbed {
    let mut testbed = Testbed::new();
    let (external, second) = (&testbed.external, &testbed.host(2).netns);
    second.connect_veth("uplink0", external, "eth1");
    second.sh("ip addr add 198.51.100.3/24 dev uplink0 && ip link set uplink0 up");
    external.sh("ip link add ext0 type bridge && ip addr flush dev eth0 && ip link set eth0 master ext0 && \
         ip link set eth1 up master ext0 && ip addr add 198.51.100.1/24 dev ext0 && ip link set ext0 up && \
         ip route replace 192.168.20.0/24 via 198.51.100.9");
    for host in [1, 2] {
        testbed.hosts[host].restart_with(SETTINGS);
    }
    testbed
}

#[test]
fn kernel_silences_routers_when_the_gate_is_not_reopened() {
    if !run_isolated("gate::kernel_silences_routers_when_the_gate_is_not_reopened") {
        return;
    }
    let mut testbed = testbed();
    let (external, guest) = (&testbed.external, Guest::new(&testbed, 1, "guest", "10.0.0.2"));
    let mut net = TestNetwork::new(0xa7, "10.0.0.0/24", "192.168.20.5").with(&[&guest]);
    net.router.egress.floating = vec![("192.168.20.7".parse().unwrap(), guest.address)];
    for host in [1, 2, 3] {
        net.router_on = if host == 2 { 2 } else { 3 };
        testbed.host(host).ensure(&net.plan(&testbed, host, &[&guest]));
    }
    guest.configure_address();
    // A router answers only after its node was told that it is the active one.
    assert!(guest.netns.cannot_ping("10.0.0.1") && external.cannot_ping(VIRTUAL_IP));

    testbed.host(3).set_gate(open_for(2.5));
    assert!(guest.netns.can_ping("10.0.0.1") && external.can_ping(VIRTUAL_IP));
    assert!(external.can_ping("192.168.20.7"));
    // Reopening it extends the time.
    testbed.host(3).set_gate(open_for(3.0));
    let reopened = Instant::now();
    guest.netns.until("! ping -n -c 1 -W 0.2 10.0.0.1");
    let silent = reopened.elapsed();
    assert!((2.5..3.5).contains(&silent.as_secs_f64()), "silent after {silent:?}");
    assert!(external.cannot_ping(VIRTUAL_IP) && external.cannot_ping("192.168.20.7"));
    let arping = "busybox arping -c 1 -w 1 -I";
    external.sh(&format!("! {arping} ext0 {VIRTUAL_IP} && ! {arping} ext0 192.168.20.1"));
    guest.netns.sh(&format!("! {arping} eth0 10.0.0.1"));
    // Only the kernel silenced it: the addresses are still there.
    testbed.host(3).netns.sh(&format!("ip addr show dev uplink0 | grep -q {VIRTUAL_IP}"));

    // Another host takes over. Neighbours learn it from the announcement.
    testbed.host(2).set_gate(RouterGate::Open);
    let mac = testbed.host(2).netns.sh("ip -br link show uplink0 | awk '{print $3}'");
    external.until(&format!("ip neigh show {VIRTUAL_IP} | grep -q {}", mac.trim()));
    assert!(guest.netns.can_ping("10.0.0.1") && external.can_ping("192.168.20.7"));

    // A restarted host stays silent, releases the virtual address and does not route to its own egress bridge.
    testbed.hosts[2].restart_with(SETTINGS);
    testbed.host(3).ensure(&net.plan(&testbed, 3, &[&guest]));
    testbed.host(3).set_gate(RouterGate::Closed);
    testbed.host(3).netns.sh(&format!(
        "! ip addr show dev uplink0 | grep -q {VIRTUAL_IP} && ! ip route | grep -q egr-br-uplink0 && \
         nft list table bridge muster-gate | grep -q veth-0000a7-o"
    ));
    assert!(testbed.external.can_ping("192.168.20.7"));
    // The gate is removed with the last router.
    testbed.host(3).remove(net.found());
    testbed.host(3).netns.sh("! nft list tables | grep -q muster-gate");
}
