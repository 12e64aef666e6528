use super::super::fixtures::{plan, router};
use super::*;

#[test]
fn guests_can_send_only_from_their_own_addresses() {
    let mut plan = plan();
    plan.routed = vec!["192.168.20.9".parse().unwrap()];
    let text = host_rules(&plan, &NetworkNames::new(plan.vxid));
    let device = plan.ports[0].interface.device();
    assert!(text.starts_with("add table bridge muster-00000a\ndelete table bridge muster-00000a\n"));
    for line in [
        "ether saddr != 02:00:00:00:00:02 drop".to_owned(),
        "ether type != { ip, arp } drop".into(),
        "arp saddr ether 02:00:00:00:00:02 arp saddr ip { 0.0.0.0, 10.0.0.2, 192.168.20.9 } accept".into(),
        "ip saddr { 10.0.0.2, 192.168.20.9 } accept".into(),
        "udp sport 67 drop".into(),
        "udp dport 68 drop".into(),
        format!("iifname vmap {{ \"{device}\" : jump {device} }}"),
        format!("iifname {{ \"{device}\", \"vxlan-00000a\", \"veth-00000a-o\" }} drop"),
    ] {
        assert!(text.contains(&line), "{line}\n{text}");
    }
    assert_eq!(count_rules(&text), 10);
    plan.check_senders = false;
    let text = host_rules(&plan, &NetworkNames::new(plan.vxid));
    assert!(!text.contains("saddr") && text.contains("hook input"), "{text}");
    assert_eq!(count_rules(&text), 1);
}

#[test]
fn guests_without_an_address_may_use_dhcp() {
    let mut plan = plan();
    plan.ports[0].address = None;
    let text = host_rules(&plan, &NetworkNames::new(plan.vxid));
    assert!(text.contains("arp saddr ip { 0.0.0.0 } accept"), "{text}");
    assert_eq!(text.matches("ip saddr").count(), 1, "{text}");
}

#[test]
fn router_forwards_only_what_the_plan_allows() {
    let (plan, mut router, names) = (plan(), router(), NetworkNames::new(10));
    let text = router_rules(&plan, &router, &names);
    for line in [
        "policy drop",
        "iifname \"veth-00000a-i\" oifname \"egr-00000a-i\" ip saddr 10.0.0.0/24 accept",
        "dnat ip to ip daddr map { 192.168.20.7 : 10.0.0.2 }",
        "snat ip to ip saddr map { 10.0.0.2 : 192.168.20.7 }",
        "ip saddr 10.0.0.0/24 ct status dnat masquerade",
        "ip saddr 10.0.0.0/24 snat ip to 192.168.20.5",
        "oifname \"egr-00000a-i\" udp dport 4789 drop",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    router.nat = false;
    let text = router_rules(&plan, &router, &names);
    assert!(text.contains("oifname \"egr-00000a-i\" ip saddr { 10.0.0.2 } accept"), "{text}");
    assert!(!text.contains("snat ip to 192"), "{text}");
    router.egress.floating.clear();
    let text = router_rules(&plan, &router, &names);
    assert!(!text.contains("nat ip to") && !text.contains("oifname"), "{text}");
}

#[test]
fn vxlan_packets_are_accepted_only_from_nodes() {
    let text = mesh_rules(&plan().cluster_nodes);
    assert!(text.contains("    ip saddr != { 10.99.0.1, 10.99.0.2 } udp dport 4789 drop\n"), "{text}");
    assert!(mesh_rules(&[]).contains("    udp dport 4789 drop\n"));
}

#[test]
fn floating_network_is_masqueraded() {
    let mut egress = router().egress;
    let text = egress_rules(&egress, "egr-br-eth0", None);
    assert!(text.contains("ip saddr 192.168.20.0/24 oifname != { \"egr-br-eth0\", \"lo\" } masquerade"));
    egress.masquerade = false;
    assert!(!egress_rules(&egress, "egr-br-eth0", None).contains("nat"));
}

#[test]
fn host_is_protected_from_the_egress_bridge_with_and_without_masquerading() {
    let mut egress = router().egress;
    for masquerade in [true, false] {
        egress.masquerade = masquerade;
        let text = egress_rules(&egress, "egr-br-eth0", Some(13000));
        assert_eq!(text.matches("iifname \"egr-br-eth0\" udp dport 4789 drop").count(), 2, "{text}");
        for line in ["tcp dport 13000 accept\n    iifname \"egr-br-eth0\" drop", "169.254.0.0/16 drop"] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        // Traffic from other devices is not filtered.
        let verdicts = text.lines().filter(|line| line.ends_with(" drop") || line.ends_with(" accept"));
        assert!(verdicts.clone().all(|line| line.contains("iifname \"egr-br-eth0\"")), "{text}");
        assert!(!text.contains("policy drop"));
        assert_eq!(count_rules(&text), 7 + usize::from(masquerade));
    }
    assert!(!egress_rules(&egress, "egr-br-eth0", None).contains("tcp"));
    egress.nodes = vec!["10.99.0.2".parse().unwrap(), "10.99.0.3".parse().unwrap()];
    let text = egress_rules(&egress, "egr-br-eth0", Some(13000));
    let protected = "ip daddr { 10.99.0.2, 10.99.0.3 }";
    assert!(text.contains(&format!("{protected} tcp dport 13000 accept")), "{text}");
    assert!(text.contains(&format!("{protected} drop\n  }}")), "{text}");
}

#[test]
fn gate_opens_in_one_transaction_and_expires() {
    let text = open_gate(Some(Duration::from_millis(1500)));
    assert!(text.starts_with(CLOSE_GATE) && text.contains("open { arp timeout 1500ms }"), "{text}");
    assert!(!open_gate(None).contains("timeout"));
    let virtual_ip = "198.51.100.9/24".parse().unwrap();
    let text = ip_gate_rules("egr-br-eth0", Some(virtual_ip));
    assert!(text.contains("ip daddr 198.51.100.9 meta protocol != @open drop"), "{text}");
    assert_eq!(count_rules(&text), 3);
    assert_eq!(count_rules(&bridge_gate_rules()), 2);
}
