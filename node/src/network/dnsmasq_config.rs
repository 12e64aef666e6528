//! The configuration of a network's DHCP and DNS server. Text from users is validated before it gets into a file: a name
//! that is not a valid host name is left out.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::Ipv4Addr;
use std::path::Path;

use muster_types::network::{NetworkPlan, RouterPlan};

use super::names::NetworkNames;

/// The contents of dnsmasq's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DnsmasqConfig {
    /// The main configuration, only read at startup: a change requires a restart.
    pub(crate) settings: String,
    /// The DHCP leases, read again on SIGHUP.
    pub(crate) leases: String,
    /// Host names and their addresses, read again on SIGHUP.
    pub(crate) hosts: String,
}

/// The file with the leases, in the network's directory.
pub(crate) const LEASES_FILE: &str = "leases";
/// The file with the host names.
pub(crate) const HOSTS_FILE: &str = "hosts";
/// The file that dnsmasq writes its PID to.
pub(crate) const PID_FILE: &str = "dnsmasq.pid";

/// Builds the configuration of a network's server, if it needs one. `device` is the index of the router's device; it is
/// part of the configuration because the server has to restart when the device is recreated. `user` is the user that the
/// server runs as.
pub(crate) fn build(
    plan: &NetworkPlan,
    names: &NetworkNames,
    dir: &Path,
    device: u32,
    user: Option<&str>,
) -> Option<DnsmasqConfig> {
    let router = plan.router.as_ref().filter(|router| router.dhcp || router.dns)?;
    Some(DnsmasqConfig {
        settings: settings(plan, router, names, dir, device, user),
        leases: leases(router),
        hosts: hosts(router),
    })
}

fn settings(
    plan: &NetworkPlan,
    router: &RouterPlan,
    names: &NetworkNames,
    dir: &Path,
    device: u32,
    user: Option<&str>,
) -> String {
    let dir = dir.display();
    let block = plan.netblock;
    let domain = Some(router.domain.as_str()).filter(|domain| is_host_name(domain));
    let mut text = format!(
        "# network {} on device {device}\ninterface={}\nexcept-interface=lo\nbind-interfaces\npid-file={dir}/{PID_FILE}\n\
         no-hosts\nno-resolv\nbogus-priv\ndomain-needed\nquiet-dhcp\n",
        plan.id, names.veth_inner
    );
    // Without a value, dnsmasq keeps its user and its groups.
    let _ = match user {
        Some(user) => writeln!(text, "user={user}"),
        None => writeln!(text, "user=\ngroup="),
    };
    if let Some(domain) = domain {
        let _ = write!(text, "domain={domain}\nexpand-hosts\nlocal=/{domain}/\n");
    }
    if router.dns {
        let _ = writeln!(text, "addn-hosts={dir}/{HOSTS_FILE}");
        let _ = writeln!(text, "server={}", router.dns_server);
    } else {
        text.push_str("port=0\n");
    }
    if router.dhcp {
        let _ = write!(
            text,
            "dhcp-range={},static,{},1h\ndhcp-hostsfile={dir}/{LEASES_FILE}\ndhcp-authoritative\nleasefile-ro\n\
             dhcp-option-force=option:mtu,{}\n",
            block.network(),
            block.netmask(),
            plan.mtu
        );
        let resolver = match (router.dns, router.nat) {
            (true, _) => Some(block.router()),
            (false, true) => Some(router.dns_server),
            (false, false) => None,
        };
        // Without a value the option is never sent.
        let resolver = resolver.map(|resolver| format!(",{resolver}")).unwrap_or_default();
        let _ = writeln!(text, "dhcp-option=option:dns-server{resolver}");
    }
    text
}

fn leases(router: &RouterPlan) -> String {
    let mut seen = BTreeSet::new();
    let mut text = String::new();
    // dnsmasq refuses to start with two leases for the same guest or address, so only the first is written.
    for lease in router.leases.iter().filter(|lease| seen.insert(lease.address)) {
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
        // dnsmasq itself appends the domain only to names without a dot.
        if name.contains('.') && is_host_name(&format!("{name}.{}", router.domain)) {
            let _ = write!(text, " {name}.{}", router.domain);
        }
        text.push('\n');
    }
    text
}

/// Returns whether a text is a valid host name.
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
    use super::super::fixtures;
    use super::*;

    fn config_with(change: impl FnOnce(&mut RouterPlan)) -> Option<DnsmasqConfig> {
        let mut plan = fixtures::plan();
        plan.router = Some(fixtures::router());
        change(plan.router.as_mut().unwrap());
        build(&plan, &NetworkNames::new(plan.vxid), Path::new("/run/n"), 7, Some("dnsmasq"))
    }

    #[test]
    fn serves_every_lease_with_its_address_and_name() {
        let config = config_with(|_| {}).unwrap();
        for line in [
            "interface=veth-00000a-i",
            "user=dnsmasq",
            "dhcp-range=10.0.0.0,static,255.255.255.0,1h",
            "dhcp-option-force=option:mtu,1450",
            "dhcp-option=option:dns-server,10.0.0.1",
            "server=8.8.8.8",
            "domain=one.example",
            "local=/one.example/",
        ] {
            assert!(config.settings.lines().any(|found| found == line), "{line}\n{}", config.settings);
        }
        assert_eq!(config.leases, "02:00:00:00:00:02,10.0.0.2,web\n");
        assert_eq!(config.hosts, "10.0.0.2 web\n10.0.0.9 printer\n");
    }

    #[test]
    fn keeps_its_user_and_groups_without_another_user() {
        let plan =
            muster_types::network::NetworkPlan { router: Some(fixtures::router()), ..fixtures::plan() };
        let config = build(&plan, &NetworkNames::new(plan.vxid), Path::new("/run/n"), 7, None).unwrap();
        assert!(config.settings.contains("\nuser=\ngroup=\n"), "{}", config.settings);
    }

    #[test]
    fn guests_use_the_external_resolver_when_dns_is_disabled() {
        let config = config_with(|router| router.dns = false).unwrap();
        assert!(config.settings.contains("port=0\n") && !config.settings.contains("server=8"));
        assert!(config.settings.contains("option:dns-server,8.8.8.8\n"));
        let config = config_with(|router| (router.dns, router.nat) = (false, false)).unwrap();
        assert!(config.settings.contains("option:dns-server\n"), "{}", config.settings);
        assert!(config_with(|router| (router.dns, router.dhcp) = (false, false)).is_none());
    }

    #[test]
    fn user_text_never_becomes_a_setting() {
        let config = config_with(|router| {
            router.leases[0].name = "web\ndhcp-script=/bin/evil".into();
            router.names.push(("a b".into(), Ipv4Addr::LOCALHOST));
            router.names.push(("#x".into(), Ipv4Addr::LOCALHOST));
            router.names.push(("set:tag".into(), Ipv4Addr::LOCALHOST));
            router.domain = "x\nconf-file=/etc/passwd".into();
        })
        .unwrap();
        let all = format!("{}{}{}", config.settings, config.leases, config.hosts);
        for evil in ["dhcp-script", "conf-file", "set:", "a b", "#x"] {
            assert!(!all.contains(evil), "{all}");
        }
        assert_eq!(config.leases, "02:00:00:00:00:02,10.0.0.2\n");
    }
}
