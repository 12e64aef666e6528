//! Connection tracking of routers. NAT rules only apply to the first packet of a connection: when a floating address is
//! removed, the connections that it translated have to be deleted, or they would continue.

use std::net::Ipv4Addr;

use muster_types::Result;
use muster_types::network::{NetworkPlan, RouterPlan};
use nix::libc;

use super::netlink::{NESTED, NetlinkRequest, NetlinkSocket, NfGenMsg, attributes, attributes_after};

// Message and attribute types from `linux/netfilter/nfnetlink_conntrack.h`.
const CTNETLINK_SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_CTNETLINK << 8) as u16;
const IPCTNL_MSG_CT_GET: u16 = CTNETLINK_SUBSYSTEM | 1;
const IPCTNL_MSG_CT_DELETE: u16 = CTNETLINK_SUBSYSTEM | 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_TUPLE_IP: u16 = 1;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;

/// A connection: source and destination of its original direction and of its replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) from: Ipv4Addr,
    pub(crate) to: Ipv4Addr,
    pub(crate) reply_from: Ipv4Addr,
    pub(crate) reply_to: Ipv4Addr,
}

/// Returns whether a connection would be translated in the same way if it started now.
pub(crate) fn matches_nat_plan(flow: &Flow, plan: &NetworkPlan, router: &RouterPlan) -> bool {
    let floating = &router.egress.floating;
    let inward = flow.to == flow.reply_from || floating.contains(&(flow.to, flow.reply_from));
    let outward = if flow.from == flow.reply_to {
        // No address of the network leaves towards the external network untranslated.
        let inner = |address| plan.netblock.contains(address);
        !inner(flow.from) || inner(flow.to)
    } else {
        let floating_address =
            floating.iter().find(|(_, inner)| *inner == flow.from).map(|(address, _)| *address);
        let hairpin = flow.reply_to == plan.netblock.router() && flow.to != flow.reply_from;
        hairpin || floating_address.or(router.egress.gateway.filter(|_| router.nat)) == Some(flow.reply_to)
    };
    inward && outward
}

/// Deletes the stale connections of this thread's namespace.
pub(crate) fn delete_flows(socket: &mut NetlinkSocket, stale: impl Fn(&Flow) -> bool) -> Result<()> {
    let ipv4 = NetlinkRequest::new::<NfGenMsg>().set(0, &[libc::AF_INET as u8]);
    for payload in socket.dump(IPCTNL_MSG_CT_GET, &ipv4)? {
        let attribute = |wanted: u16| attributes_after::<NfGenMsg>(&payload).value(wanted);
        let (Some(original), Some(reply)) = (attribute(CTA_TUPLE_ORIG), attribute(CTA_TUPLE_REPLY)) else {
            continue;
        };
        let (Some((from, to)), Some((reply_from, reply_to))) = (addresses(original), addresses(reply)) else {
            continue;
        };
        if stale(&Flow { from, to, reply_from, reply_to }) {
            let mut request = ipv4.clone().with(CTA_TUPLE_ORIG | NESTED, original);
            if let Some(id) = attribute(CTA_ID) {
                request = request.with(CTA_ID, id);
            }
            // Not `change`: the connection may have ended meanwhile.
            socket.get(IPCTNL_MSG_CT_DELETE, &request)?;
        }
    }
    Ok(())
}

/// Returns source and destination of one direction.
fn addresses(tuple: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let ip = attributes(tuple).value(CTA_TUPLE_IP)?;
    let address = |wanted: u16| <[u8; 4]>::try_from(attributes(ip).value(wanted)?).ok().map(Ipv4Addr::from);
    Some((address(CTA_IP_V4_SRC)?, address(CTA_IP_V4_DST)?))
}

#[cfg(test)]
mod tests {
    use super::super::fixtures;
    use super::*;

    fn flow(from: &str, to: &str, reply_from: &str, reply_to: &str) -> Flow {
        let [from, to, reply_from, reply_to] =
            [from, to, reply_from, reply_to].map(|text| text.parse().unwrap());
        Flow { from, to, reply_from, reply_to }
    }

    #[test]
    fn flow_is_stale_after_its_translation_changed() {
        let (plan, mut router) = (fixtures::plan(), fixtures::router());
        let outside = "198.51.100.1";
        let inward = flow(outside, "192.168.20.7", "10.0.0.2", outside);
        let outward = flow("10.0.0.2", outside, outside, "192.168.20.7");
        let masqueraded = flow("10.0.0.3", outside, outside, "192.168.20.5");
        let hairpin = flow("10.0.0.3", "192.168.20.7", "10.0.0.2", "10.0.0.1");
        let plain = flow("10.0.0.3", "10.0.0.1", "10.0.0.1", "10.0.0.3");
        let routed = flow(outside, "192.168.20.9", "192.168.20.9", outside);
        for flow in [inward, outward, masqueraded, hairpin, plain, routed] {
            assert!(matches_nat_plan(&flow, &plan, &router), "{flow:?}");
        }
        router.egress.floating[0].1 = "10.0.0.3".parse().unwrap();
        for flow in [inward, outward, masqueraded, hairpin] {
            assert!(!matches_nat_plan(&flow, &plan, &router), "{flow:?}");
        }
        router.nat = false;
        router.egress.floating.clear();
        let untranslated = flow("10.0.0.3", outside, outside, "10.0.0.3");
        for flow in [inward, outward, masqueraded, hairpin, untranslated] {
            assert!(!matches_nat_plan(&flow, &plan, &router), "{flow:?}");
        }
        assert!(matches_nat_plan(&plain, &plan, &router) && matches_nat_plan(&routed, &plan, &router));
    }
}
