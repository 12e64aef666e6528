//! Connections that a router remembers. Its rules only judge the first packet of a connection; when an address no
//! longer floats, those that came in by it must be forgotten, or they would go on.

use std::net::Ipv4Addr;

use muster_types::Result;
use muster_types::network::{NetworkPlan, RouterPlan};

use super::netlink::{Request, Socket, attributes};

const SUBSYSTEM: u16 = 1 << 8;
const GET: u16 = SUBSYSTEM | 1;
const DELETE: u16 = SUBSYSTEM | 2;
const FAMILY_INET: u8 = 2;
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ID: u16 = 12;
const NESTED: u16 = 0x8000;

/// A connection: who speaks to whom, and who answers whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) from: Ipv4Addr,
    pub(crate) to: Ipv4Addr,
    pub(crate) answer_from: Ipv4Addr,
    pub(crate) answer_to: Ipv4Addr,
}

/// Whether a connection would be translated in the same way if it began now.
pub(crate) fn is_meant(flow: &Flow, plan: &NetworkPlan, router: &RouterPlan) -> bool {
    let floating = &router.egress.floating;
    let inward = flow.to == flow.answer_from || floating.contains(&(flow.to, flow.answer_from));
    let outward = if flow.from == flow.answer_to {
        // Towards the world nothing of the network goes out under its own address.
        let inner = |address| plan.netblock.contains(address);
        !inner(flow.from) || inner(flow.to)
    } else {
        let floats = floating.iter().find(|(_, own)| *own == flow.from).map(|(address, _)| *address);
        let hairpin = flow.answer_to == plan.netblock.router() && flow.to != flow.answer_from;
        hairpin || floats.or(router.egress.gateway.filter(|_| router.nat)) == Some(flow.answer_to)
    };
    inward && outward
}

/// Forgets connections of this thread's namespace.
pub(crate) fn forget(socket: &mut Socket, stale: impl Fn(&Flow) -> bool) -> Result<()> {
    let fixed = [FAMILY_INET, 0, 0, 0];
    for payload in socket.dump(GET, &Request::new(&fixed))? {
        let parts = || attributes(payload.get(4..).unwrap_or_default());
        let part = |wanted: u16| parts().find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let (Some(original), Some(reply)) = (part(ORIGINAL), part(REPLY)) else { continue };
        let (Some((from, to)), Some((answer_from, answer_to))) = (ends(original), ends(reply)) else {
            continue;
        };
        if stale(&Flow { from, to, answer_from, answer_to }) {
            let mut request = Request::new(&fixed).with(ORIGINAL | NESTED, original);
            if let Some(id) = part(ID) {
                request = request.with(ID, id);
            }
            // Gone already is as good.
            socket.get(DELETE, &request)?;
        }
    }
    Ok(())
}

/// Sender and receiver of one direction.
fn ends(tuple: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let (_, addresses) = attributes(tuple).find(|(kind, _)| *kind == 1)?;
    let address = |wanted: u16| {
        let (_, value) = attributes(addresses).find(|(kind, _)| *kind == wanted)?;
        <[u8; 4]>::try_from(value).ok().map(Ipv4Addr::from)
    };
    Some((address(1)?, address(2)?))
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    fn flow(from: &str, to: &str, answer_from: &str, answer_to: &str) -> Flow {
        let [from, to, answer_from, answer_to] =
            [from, to, answer_from, answer_to].map(|text| text.parse().unwrap());
        Flow { from, to, answer_from, answer_to }
    }

    #[test]
    fn connections_end_with_the_translation_that_made_them() {
        let (plan, mut router) = (example::plan(), example::router());
        let outside = "198.51.100.1";
        let inward = flow(outside, "192.168.20.7", "10.0.0.2", outside);
        let outward = flow("10.0.0.2", outside, outside, "192.168.20.7");
        let hidden = flow("10.0.0.3", outside, outside, "192.168.20.5");
        let hairpin = flow("10.0.0.3", "192.168.20.7", "10.0.0.2", "10.0.0.1");
        let plain = flow("10.0.0.3", "10.0.0.1", "10.0.0.1", "10.0.0.3");
        let routed = flow(outside, "192.168.20.9", "192.168.20.9", outside);
        for flow in [inward, outward, hidden, hairpin, plain, routed] {
            assert!(is_meant(&flow, &plan, &router), "{flow:?}");
        }
        router.egress.floating[0].1 = "10.0.0.3".parse().unwrap();
        for flow in [inward, outward, hidden, hairpin] {
            assert!(!is_meant(&flow, &plan, &router), "{flow:?}");
        }
        router.nat = false;
        router.egress.floating.clear();
        let unhidden = flow("10.0.0.3", outside, outside, "10.0.0.3");
        for flow in [inward, outward, hidden, hairpin, unhidden] {
            assert!(!is_meant(&flow, &plan, &router), "{flow:?}");
        }
        assert!(is_meant(&plain, &plan, &router) && is_meant(&routed, &plan, &router));
    }
}
