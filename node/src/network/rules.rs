//! The rule sets of a network, as input for `nft -f`. Each replaces its predecessor atomically.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::Ipv4Addr;
use std::time::Duration;

use muster_types::address::{InterfaceAddress, Netblock};
use muster_types::network::{EgressPlan, InterfacePlan, NetworkPlan, RouterPlan};

use super::names::{EGRESS_TABLE, GATE_TABLE, MESH_TABLE, NetworkNames, ROUTER_TABLE, VXLAN_PORT, marker};

/// Returns the rule set on the host: guests cannot reach the host itself, nor forge their sender addresses.
///
/// The host has no address in the network, yet its kernel would answer for its other addresses and forward packets
/// that a guest sends to the bridge's MAC address. Hence the chain `node`, which no plan disables.
pub(crate) fn host_rules(plan: &NetworkPlan, names: &NetworkNames) -> String {
    let devices: BTreeSet<String> = plan.ports.iter().map(|port| port.interface.device()).collect();
    let members = devices.iter().map(String::as_str).chain([names.vxlan.as_str(), names.veth_outer.as_str()]);
    let members: Vec<String> = members.map(|name| format!("\"{name}\"")).collect();
    let mut text = replace_table("bridge", &names.table);
    let _ = write!(
        text,
        "  comment \"{}\"\n  chain node {{\n    type filter hook input priority 0; policy accept;\n    \
         iifname {{ {} }} drop\n  }}\n",
        marker(plan.id),
        members.join(", ")
    );
    if plan.check_senders && !plan.ports.is_empty() {
        for port in &plan.ports {
            antispoofing_rules(&mut text, port, &plan.routed);
        }
        let jumps: Vec<String> =
            devices.iter().map(|device| format!("\"{device}\" : jump {device}")).collect();
        let _ = write!(
            text,
            "  chain senders {{\n    type filter hook prerouting priority -300; policy accept;\n    \
             iifname vmap {{ {} }}\n  }}\n",
            jumps.join(", ")
        );
    }
    text.push_str("}\n");
    text
}

/// Appends the rules for frames from one guest: only its own address and those routed to the network, only IPv4 and ARP,
/// and no DHCP server replies from any port.
fn antispoofing_rules(text: &mut String, port: &InterfacePlan, routed: &[Ipv4Addr]) {
    let (device, mac) = (port.interface.device(), port.mac);
    let own: BTreeSet<Ipv4Addr> = port.address.into_iter().chain(routed.iter().copied()).collect();
    let probes: BTreeSet<Ipv4Addr> = own.iter().copied().chain([Ipv4Addr::UNSPECIFIED]).collect();
    let _ = write!(
        text,
        "  chain {device} {{\n    ether saddr != {mac} drop\n    ether type != {{ ip, arp }} drop\n    \
         ether type arp arp htype 1 arp ptype ip arp hlen 6 arp plen 4 arp saddr ether {mac} \
         arp saddr ip {} accept\n    udp sport 67 drop\n    udp dport 68 drop\n",
        set(probes)
    );
    if !own.is_empty() {
        let _ = writeln!(text, "    ip saddr {} accept", set(own));
    }
    text.push_str("    ip saddr 0.0.0.0 udp sport 68 udp dport 67 accept\n    drop\n  }\n");
}

/// Returns the rule set in the router: forwarding and address translation.
pub(crate) fn router_rules(plan: &NetworkPlan, router: &RouterPlan, names: &NetworkNames) -> String {
    let inner = &names.veth_inner;
    let mut text = replace_table("inet", ROUTER_TABLE);
    text.push_str(
        "  chain input {\n    type filter hook input priority filter; policy drop;\n    iifname \"lo\" accept\n    \
         ct state established,related accept\n    ct state invalid drop\n    icmp type echo-request accept\n",
    );
    if router.dhcp {
        let _ = writeln!(text, "    iifname \"{inner}\" udp dport 67 accept");
    }
    if router.dns {
        let _ = writeln!(text, "    iifname \"{inner}\" meta l4proto {{ tcp, udp }} th dport 53 accept");
    }
    text.push_str("  }\n");
    forward_chain(&mut text, plan, router, names);
    nat_chains(&mut text, plan, router, names);
    text.push_str("}\n");
    text
}

fn forward_chain(text: &mut String, plan: &NetworkPlan, router: &RouterPlan, names: &NetworkNames) {
    let (inner, outer, block) = (&names.veth_inner, &names.egress_inner, plan.netblock);
    let floating = &router.egress.floating;
    let routed: BTreeSet<Ipv4Addr> = plan.routed.iter().copied().collect();
    text.push_str("  chain forward {\n    type filter hook forward priority filter; policy drop;\n");
    text.push_str("    tcp flags syn tcp option maxseg size set rt mtu\n");
    if router.nat || !floating.is_empty() || !routed.is_empty() {
        // A VXLAN packet from a node's address would be accepted by nodes as a frame of any network.
        let _ = writeln!(text, "    oifname \"{outer}\" udp dport {VXLAN_PORT} drop");
    }
    if !routed.is_empty() {
        // The replies do not pass the router, so connection tracking cannot be used here.
        let _ = writeln!(
            text,
            "    iifname \"{inner}\" oifname \"{inner}\" ip saddr {block} ip daddr {} accept",
            set(routed.iter().copied())
        );
    }
    text.push_str("    ct state invalid drop\n    ct state established,related accept\n");
    if router.nat {
        let _ = writeln!(text, "    iifname \"{inner}\" oifname \"{outer}\" ip saddr {block} accept");
    } else if !floating.is_empty() {
        let own = set(floating.iter().map(|(_, own)| *own));
        let _ = writeln!(text, "    iifname \"{inner}\" oifname \"{outer}\" ip saddr {own} accept");
    }
    if !routed.is_empty() {
        let routed = set(routed.iter().copied());
        let _ = write!(
            text,
            "    iifname \"{inner}\" oifname \"{outer}\" ip saddr {routed} accept\n    \
             iifname \"{outer}\" oifname \"{inner}\" ip daddr {routed} accept\n"
        );
    }
    if !floating.is_empty() {
        let _ = writeln!(text, "    oifname \"{inner}\" ct status dnat accept");
    }
    text.push_str("  }\n");
}

fn nat_chains(text: &mut String, plan: &NetworkPlan, router: &RouterPlan, names: &NetworkNames) {
    let (inner, outer, block) = (&names.veth_inner, &names.egress_inner, plan.netblock);
    let floating = &router.egress.floating;
    if !floating.is_empty() {
        let map = map(floating.iter().copied());
        let _ = write!(
            text,
            "  chain prerouting {{\n    type nat hook prerouting priority dstnat; policy accept;\n    \
             dnat ip to ip daddr map {map}\n  }}\n  chain output {{\n    \
             type nat hook output priority -100; policy accept;\n    dnat ip to ip daddr map {map}\n  }}\n"
        );
    }
    text.push_str("  chain postrouting {\n    type nat hook postrouting priority srcnat; policy accept;\n");
    if !floating.is_empty() {
        let _ = write!(
            text,
            "    oifname \"{inner}\" ip saddr {block} ct status dnat masquerade\n    \
             oifname \"{outer}\" snat ip to ip saddr map {}\n",
            map(floating.iter().map(|(address, own)| (*own, *address)))
        );
    }
    if let (true, Some(gateway)) = (router.nat, router.egress.gateway) {
        let _ = writeln!(text, "    oifname \"{outer}\" ip saddr {block} snat ip to {gateway}");
    }
    text.push_str("  }\n");
}

/// Returns the rule set on the host for the egress bridge. It only filters what comes from the bridge.
///
/// Guests use the addresses of their routers there, or their own. Of the host itself they can reach ping and the API on
/// `api_port`. Through the host they can reach the external network, except the VXLAN port and the link-local services
/// that are meant for the host.
///
/// Matching on connection state also makes the kernel reassemble fragments before any of these rules.
pub(crate) fn egress_rules(egress: &EgressPlan, bridge: &str, api_port: Option<u16>) -> String {
    let mut text = replace_table("ip", EGRESS_TABLE);
    let _ = write!(
        text,
        "  chain input {{\n    type filter hook input priority filter; policy accept;\n    \
         iifname \"{bridge}\" udp dport {VXLAN_PORT} drop\n    \
         iifname \"{bridge}\" ct state established,related accept\n    \
         iifname \"{bridge}\" icmp type echo-request accept\n"
    );
    if let Some(port) = api_port {
        let _ = writeln!(text, "    iifname \"{bridge}\" tcp dport {port} accept");
    }
    let _ = write!(
        text,
        "    iifname \"{bridge}\" drop\n  }}\n  chain forward {{\n    \
         type filter hook forward priority filter; policy accept;\n    \
         iifname \"{bridge}\" udp dport {VXLAN_PORT} drop\n    \
         iifname \"{bridge}\" ip daddr 169.254.0.0/16 drop\n"
    );
    if !egress.nodes.is_empty() {
        // Consoles on other nodes are not protected by a password.
        let nodes: Vec<String> = egress.nodes.iter().map(ToString::to_string).collect();
        let to = format!("iifname \"{bridge}\" ip daddr {{ {} }}", nodes.join(", "));
        let _ = writeln!(text, "    {to} ct state established,related accept");
        let _ = writeln!(text, "    {to} icmp type echo-request accept");
        if let Some(port) = api_port {
            let _ = writeln!(text, "    {to} tcp dport {port} accept");
        }
        let _ = writeln!(text, "    {to} drop");
    }
    text.push_str("  }\n");
    if egress.masquerade {
        let _ = write!(
            text,
            "  chain postrouting {{\n    type nat hook postrouting priority srcnat; policy accept;\n    \
             ip saddr {} oifname != {{ \"{bridge}\", \"lo\" }} masquerade\n  }}\n",
            egress.netblock
        );
    }
    text.push_str("}\n");
    text
}

/// Returns the rule set on the host that accepts VXLAN packets only from these addresses. The kernel receives them on
/// every address of the host, whatever the address of the tunnel.
pub(crate) fn mesh_rules(nodes: &[Ipv4Addr]) -> String {
    let mut text = replace_table("ip", MESH_TABLE);
    let others =
        if nodes.is_empty() { String::new() } else { format!("ip saddr != {} ", set(nodes.iter().copied())) };
    let _ = write!(
        text,
        "  chain input {{\n    type filter hook input priority filter; policy accept;\n    \
         {others}udp dport {VXLAN_PORT} drop\n  }}\n}}\n"
    );
    text
}

/// The protocols that the gate passes.
const GATE_SET: &str = "  set open { type ether_type; flags timeout; }\n";

/// Returns the rule set on the host that drops frames from and to routers while the gate is closed.
pub(crate) fn bridge_gate_rules() -> String {
    let mut text = replace_table("bridge", GATE_TABLE);
    let _ = write!(
        text,
        "  set routers {{ type ifname; }}\n{GATE_SET}  chain from-routers {{\n    \
         type filter hook prerouting priority -310; policy accept;\n    \
         iifname @routers meta protocol != @open drop\n  }}\n  chain to-routers {{\n    \
         type filter hook postrouting priority -310; policy accept;\n    \
         oifname @routers meta protocol != @open drop\n  }}\n}}\n"
    );
    text
}

/// Returns the rule set on the host that keeps it from answering ARP for the virtual address and the floating network
/// while the gate is closed. The kernel answers for an address of any device on every device.
pub(crate) fn arp_gate_rules(floating: Netblock, virtual_ip: Option<InterfaceAddress>) -> String {
    let mut text = replace_table("arp", GATE_TABLE);
    let virtual_ip = virtual_ip.map(|virtual_ip| format!(", {}", virtual_ip.address)).unwrap_or_default();
    let addresses = format!("{{ {floating}{virtual_ip} }}");
    let _ = write!(
        text,
        "{GATE_SET}  chain input {{\n    type filter hook input priority -310; policy accept;\n    \
         arp daddr ip {addresses} meta protocol != @open drop\n  }}\n  chain output {{\n    \
         type filter hook output priority -310; policy accept;\n    \
         arp saddr ip {addresses} meta protocol != @open drop\n  }}\n}}\n"
    );
    text
}

/// Returns the rule set on the host that drops packets for the virtual address, and between the egress bridge and the
/// external network, while the gate is closed.
pub(crate) fn ip_gate_rules(bridge: &str, virtual_ip: Option<InterfaceAddress>) -> String {
    let mut text = replace_table("ip", GATE_TABLE);
    let _ = write!(
        text,
        "{GATE_SET}  chain forward {{\n    type filter hook forward priority -310; policy accept;\n    \
         iifname \"{bridge}\" meta protocol != @open drop\n    \
         oifname \"{bridge}\" meta protocol != @open drop\n  }}\n"
    );
    if let Some(virtual_ip) = virtual_ip {
        let _ = write!(
            text,
            "  chain input {{\n    type filter hook input priority -310; policy accept;\n    \
             ip daddr {} meta protocol != @open drop\n  }}\n",
            virtual_ip.address
        );
    }
    text.push_str("}\n");
    text
}

/// Returns the commands that add devices of routers to the gate.
pub(crate) fn add_gate_devices(devices: &BTreeSet<String>) -> String {
    let devices: Vec<String> = devices.iter().map(|device| format!("\"{device}\"")).collect();
    format!("add element bridge {GATE_TABLE} routers {{ {} }}\n", devices.join(", "))
}

/// The commands that close the gate.
pub(crate) const CLOSE_GATE: &str = "flush set bridge muster-gate open\nflush set arp muster-gate open\n\
     flush set ip muster-gate open\n";

/// Returns the commands that open the gate in one transaction, for a limited time or permanently.
pub(crate) fn open_gate(duration: Option<Duration>) -> String {
    let timeout =
        duration.map(|duration| format!(" timeout {}ms", duration.as_millis().max(1))).unwrap_or_default();
    let mut text = CLOSE_GATE.to_owned();
    for (family, protocol) in [("bridge", "arp"), ("bridge", "ip"), ("arp", "arp"), ("ip", "ip")] {
        let _ = writeln!(text, "add element {family} {GATE_TABLE} open {{ {protocol}{timeout} }}");
    }
    text
}

/// One rule of every kind that networks need, to probe whether the kernel supports them.
pub(crate) const PROBE_RULESET: &str = "table bridge sample {\n  chain input {\n    \
     type filter hook input priority 0; policy accept;\n    iifname { \"sample\" } udp dport 68 drop\n  }\n}\n\
     table inet sample {\n  chain forward {\n    type filter hook forward priority filter; policy accept;\n    \
     ct state established,related accept\n    tcp flags syn tcp option maxseg size set rt mtu\n  }\n  \
     chain postrouting {\n    type nat hook postrouting priority srcnat; policy accept;\n    \
     oifname \"sample\" snat ip to ip saddr map { 10.0.0.2 : 10.0.0.3 }\n    oifname \"sample\" masquerade\n  }\n}\n\
     table arp sample {\n  set open { type ether_type; flags timeout; }\n  chain input {\n    \
     type filter hook input priority 0; policy accept;\n    arp daddr ip 10.0.0.2 meta protocol != @open drop\n  }\n}\n";

/// Returns the commands that delete a table, whether it exists or not.
pub(crate) fn delete_table(family: &str, table: &str) -> String {
    format!("add table {family} {table}\ndelete table {family} {table}\n")
}

/// Returns the number of rules in a rule set.
pub(crate) fn count_rules(text: &str) -> usize {
    // A rule is alone on a line that is indented twice; so is the line that attaches a chain to its hook.
    text.lines().filter(|line| line.starts_with("    ") && !line.starts_with("    type ")).count()
}

/// Begins a table that replaces its predecessor.
fn replace_table(family: &str, table: &str) -> String {
    format!("{}table {family} {table} {{\n", delete_table(family, table))
}

fn set(addresses: impl IntoIterator<Item = Ipv4Addr>) -> String {
    let addresses: BTreeSet<Ipv4Addr> = addresses.into_iter().collect();
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    format!("{{ {} }}", addresses.join(", "))
}

/// Returns a map from address to address. The kernel refuses duplicate keys, so only the first of them is used.
fn map(pairs: impl IntoIterator<Item = (Ipv4Addr, Ipv4Addr)>) -> String {
    let mut unique = std::collections::BTreeMap::new();
    for (key, value) in pairs {
        unique.entry(key).or_insert(value);
    }
    let pairs: Vec<String> = unique.iter().map(|(key, value)| format!("{key} : {value}")).collect();
    format!("{{ {} }}", pairs.join(", "))
}

#[cfg(test)]
mod tests;
