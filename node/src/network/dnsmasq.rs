//! The texts of a network's DHCP and DNS server. Nothing that others wrote gets into them unchecked: a name is a host
//! name or it is left out.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use muster_types::network::{NetworkPlan, RouterPlan};

use super::names::Names;

/// What the server reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Texts {
    /// Read once: a change means a restart.
    pub(crate) settings: String,
    /// Who gets which address; read again on SIGHUP.
    pub(crate) leases: String,
    /// Names and addresses; read again on SIGHUP.
    pub(crate) hosts: String,
}

/// The file of the leases, below the network's folder.
pub(crate) const LEASES: &str = "leases";
/// The file of the names.
pub(crate) const HOSTS: &str = "hosts";
/// Where the server leaves its number.
pub(crate) const PID: &str = "dnsmasq.pid";

/// What the server of a network shall read, if it needs one. `device` is the number of the router's device, on which
/// the server depends: it must start again when the device was made again.
pub(crate) fn texts(plan: &NetworkPlan, names: &Names, folder: &Path, device: u32) -> Option<Texts> {
    let router = plan.router.as_ref().filter(|router| router.dhcp || router.dns)?;
    Some(Texts {
        settings: settings(plan, router, names, folder, device),
        leases: leases(router),
        hosts: hosts(router),
    })
}

fn settings(plan: &NetworkPlan, router: &RouterPlan, names: &Names, folder: &Path, device: u32) -> String {
    let folder = folder.display();
    let block = plan.netblock;
    let domain = Some(router.domain.as_str()).filter(|domain| is_host_name(domain));
    let resolver = router.dns_server.parse::<IpAddr>().ok();
    let mut text = format!(
        "# network {} on device {device}\ninterface={}\nexcept-interface=lo\nbind-interfaces\npid-file={folder}/{PID}\n\
         no-hosts\nno-resolv\nbogus-priv\ndomain-needed\nquiet-dhcp\n",
        plan.id, names.veth_inner
    );
    if let Some(domain) = domain {
        let _ = write!(text, "domain={domain}\nexpand-hosts\nlocal=/{domain}/\n");
    }
    if router.dns {
        let _ = writeln!(text, "addn-hosts={folder}/{HOSTS}");
        if let Some(resolver) = resolver {
            let _ = writeln!(text, "server={resolver}");
        }
    } else {
        text.push_str("port=0\n");
    }
    if router.dhcp {
        let _ = write!(
            text,
            "dhcp-range={},static,{},1h\ndhcp-hostsfile={folder}/{LEASES}\ndhcp-authoritative\nleasefile-ro\n\
             dhcp-option-force=option:mtu,{}\n",
            block.network(),
            block.netmask(),
            plan.mtu
        );
        let resolver = match resolver {
            _ if router.dns => Some(IpAddr::V4(block.router())),
            Some(IpAddr::V4(resolver)) if router.nat => Some(IpAddr::V4(resolver)),
            _ => None,
        };
        // Without a value the option is never sent.
        let resolver = resolver.map(|resolver| format!(",{resolver}")).unwrap_or_default();
        let _ = writeln!(text, "dhcp-option=option:dns-server{resolver}");
    }
    text
}

fn leases(router: &RouterPlan) -> String {
    let mut known = BTreeSet::new();
    let mut text = String::new();
    // Of two leases for the same guest or address the first counts: the server refuses to start with both.
    for lease in router.leases.iter().filter(|lease| known.insert(lease.address)) {
        let _ = write!(text, "{},{}", lease.mac, lease.address);
        if is_host_name(&lease.name) && !lease.name.contains('.') {
            let _ = write!(text, ",{}", lease.name);
        }
        text.push('\n');
    }
    text
}

fn hosts(router: &RouterPlan) -> String {
    let leases = router.leases.iter().map(|lease| (&lease.name, lease.address));
    let names = router.names.iter().map(|(name, address)| (name, *address));
    let lines: BTreeSet<(Ipv4Addr, &str)> = leases
        .chain(names)
        .filter(|(name, _)| is_host_name(name))
        .map(|(name, address)| (address, name.as_str()))
        .collect();
    let mut text = String::new();
    for (address, name) in lines {
        let _ = write!(text, "{address} {name}");
        // The server itself appends the domain only to names without a dot.
        if name.contains('.') && is_host_name(&format!("{name}.{}", router.domain)) {
            let _ = write!(text, " {name}.{}", router.domain);
        }
        text.push('\n');
    }
    text
}

/// Whether a text is a host name and nothing else.
fn is_host_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.parse::<Ipv4Addr>().is_err() && name.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    fn texts_of(change: impl FnOnce(&mut RouterPlan)) -> Option<Texts> {
        let mut plan = example::plan();
        plan.router = Some(example::router());
        change(plan.router.as_mut().unwrap());
        texts(&plan, &Names::new(plan.vxid), Path::new("/run/n"), 7)
    }

    #[test]
    fn a_server_gives_every_guest_its_address_and_name() {
        let texts = texts_of(|_| {}).unwrap();
        for line in [
            "interface=veth-00000a-i",
            "dhcp-range=10.0.0.0,static,255.255.255.0,1h",
            "dhcp-option-force=option:mtu,1450",
            "dhcp-option=option:dns-server,10.0.0.1",
            "server=8.8.8.8",
            "domain=one.example",
            "local=/one.example/",
        ] {
            assert!(texts.settings.lines().any(|found| found == line), "{line}\n{}", texts.settings);
        }
        assert_eq!(texts.leases, "02:00:00:00:00:02,10.0.0.2,web\n");
        assert_eq!(texts.hosts, "10.0.0.2 web\n10.0.0.9 printer\n");
    }

    #[test]
    fn guests_ask_the_outside_when_the_network_answers_no_names() {
        let texts = texts_of(|router| router.dns = false).unwrap();
        assert!(texts.settings.contains("port=0\n") && !texts.settings.contains("server=8"));
        assert!(texts.settings.contains("option:dns-server,8.8.8.8\n"));
        let texts = texts_of(|router| (router.dns, router.nat) = (false, false)).unwrap();
        assert!(texts.settings.contains("option:dns-server\n"), "{}", texts.settings);
        assert!(texts_of(|router| (router.dns, router.dhcp) = (false, false)).is_none());
    }

    #[test]
    fn no_text_of_others_becomes_a_setting() {
        let texts = texts_of(|router| {
            router.leases[0].name = "web\ndhcp-script=/bin/evil".into();
            router.names.push(("a b".into(), Ipv4Addr::LOCALHOST));
            router.names.push(("#x".into(), Ipv4Addr::LOCALHOST));
            router.names.push(("set:tag".into(), Ipv4Addr::LOCALHOST));
            router.domain = "x\nconf-file=/etc/passwd".into();
            router.dns_server = "8.8.8.8\nuser=root".into();
        })
        .unwrap();
        let all = format!("{}{}{}", texts.settings, texts.leases, texts.hosts);
        for evil in ["dhcp-script", "conf-file", "user=", "set:", "a b", "#x"] {
            assert!(!all.contains(evil), "{all}");
        }
        assert_eq!(texts.leases, "02:00:00:00:00:02,10.0.0.2\n");
    }
}
