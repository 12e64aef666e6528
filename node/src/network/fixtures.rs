//! A network plan for the unit tests of this module.

use muster_types::ids::{InterfaceId, NetworkId};
use muster_types::network::{DhcpLease, EgressPlan, InterfacePlan, NetworkPlan, RouterPlan};

pub(crate) fn plan() -> NetworkPlan {
    NetworkPlan {
        id: NetworkId::new(),
        vxid: 10,
        generation: 1,
        netblock: "10.0.0.0/24".parse().unwrap(),
        mtu: 1450,
        mesh_address: "10.99.0.1".parse().unwrap(),
        peers: vec!["10.99.0.2".parse().unwrap()],
        cluster_nodes: ["10.99.0.1", "10.99.0.2"].map(|address| address.parse().unwrap()).to_vec(),
        ports: vec![InterfacePlan {
            interface: InterfaceId::new(),
            mac: "02:00:00:00:00:02".parse().unwrap(),
            address: Some("10.0.0.2".parse().unwrap()),
        }],
        routed: Vec::new(),
        check_senders: true,
        router: None,
    }
}

pub(crate) fn router() -> RouterPlan {
    RouterPlan {
        dhcp: true,
        dns: true,
        nat: true,
        domain: "one.example".into(),
        dns_server: "8.8.8.8".parse().unwrap(),
        leases: vec![DhcpLease {
            mac: "02:00:00:00:00:02".parse().unwrap(),
            address: "10.0.0.2".parse().unwrap(),
            name: "web".into(),
        }],
        names: vec![("printer".into(), "10.0.0.9".parse().unwrap())],
        egress: EgressPlan {
            netblock: "192.168.20.0/24".parse().unwrap(),
            gateway: Some("192.168.20.5".parse().unwrap()),
            floating: vec![("192.168.20.7".parse().unwrap(), "10.0.0.2".parse().unwrap())],
            masquerade: true,
            nodes: vec![],
        },
    }
}
