//! Guests: network namespaces in namespace of VMs.

use std::net::Ipv4Addr;

use muster_control::objects::interface::WantedAddress;
use muster_store::interfaces::InterfaceRow;
use muster_test_cluster::{ClusterDatabase, Host};
use muster_testing::{NetworkNamespace, wait_for};
use muster_types::ids::NetworkId;

use crate::RECONCILE_TIMEOUT;

/// A guest on a host.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) namespace: NetworkNamespace,
    pub(crate) interface: InterfaceRow,
}

impl Guest {
    /// Adds an interface to a network and connects a guest without an address.
    pub(crate) fn new(
        database: &ClusterDatabase,
        host: &Host,
        network: NetworkId,
        name: &str,
        address: &str,
    ) -> Self {
        let wanted = WantedAddress::Exactly(address.parse().unwrap());
        let interface = database.create_interface(network, host.node(), name, wanted);
        let namespace = NetworkNamespace::new(name);
        host.namespace.connect(&interface.id.device(), &namespace, "eth0");
        namespace.sh("for all in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $all; done");
        namespace.sh(&format!("ip link set eth0 address {} up", interface.mac));
        Self { namespace, interface }
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.interface.ipv4.unwrap()
    }

    /// Configures the address by DHCP and returns the lease.
    pub(crate) fn dhcp(&self) -> String {
        let script = "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr add $ip/$mask dev $interface\n\
            ip link set $interface mtu $mtu\n[ -z \"$router\" ] || ip route replace default via $router\n\
            echo \"$ip/$mask mtu=$mtu dns=$dns domain=$domain router=$router\" > /run/lease\n";
        self.namespace.run(move || std::fs::write("/run/script", script).unwrap());
        let client =
            "chmod +x /run/script && busybox udhcpc -i eth0 -f -n -q -t 20 -T 1 -O mtu -s /run/script";
        self.namespace.sh(&format!("{client} >&2 && cat /run/lease")).trim().to_owned()
    }

    /// Waits until the router resolves a name to an address.
    pub(crate) fn wait_until_resolved(&self, name: &str, address: Ipv4Addr) {
        let script = format!("busybox nslookup -type=a {name} 10.0.0.1 | grep -qx 'Address: {address}'");
        wait_for(&format!("{name} to be {address}"), RECONCILE_TIMEOUT, || {
            self.namespace.succeeds(&script).then_some(())
        });
    }
}
