//! Restricts the addresses that URLs of users may refer to, so that the cluster is not a way into internal networks.

use std::error::Error as StdError;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// The default timeout for resolving a name, shorter than that of fetching an image, so that it can tell what failed.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(8);

/// The error for an address that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockedAddress {
    /// The host and the kind of its address.
    target: String,
    /// The setting that can allow it.
    setting: &'static str,
}

impl fmt::Display for BlockedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, which {} does not allow", self.target, self.setting)
    }
}

impl StdError for BlockedAddress {}

/// Allows public addresses, and those in the networks that the operator configures.
#[derive(Debug, Clone)]
pub(crate) struct AddressFilter {
    allowed: Arc<Vec<IpNet>>,
    /// The setting with the allowed networks.
    setting: &'static str,
    /// Whether private and loopback addresses are allowed too.
    allows_private: bool,
    /// The host of the HTTP proxy, which may have any address.
    proxy: Option<String>,
    resolve_timeout: Duration,
}

impl AddressFilter {
    /// Creates a filter that allows `networks`, the value of `setting`, which the settings have checked. An empty
    /// `proxy` means no proxy.
    pub(crate) fn new(setting: &'static str, networks: &str, proxy: &str) -> Self {
        let networks = networks.split([' ', ',']).filter(|network| !network.is_empty());
        // An invalid proxy URL fails when the client is built.
        let proxy = Url::parse(proxy).ok().and_then(|url| url.host_str().map(str::to_owned));
        Self {
            allowed: Arc::new(networks.filter_map(parse_network).collect()),
            setting,
            allows_private: false,
            proxy,
            resolve_timeout: RESOLVE_TIMEOUT,
        }
    }

    /// Returns a filter that also allows private and loopback addresses, for URLs of operators.
    pub(crate) fn allowing_private(&self) -> Self {
        Self { allows_private: true, ..self.clone() }
    }

    /// Returns a filter for requests with a timeout. Resolving a name takes at most four fifths of it, so that the error
    /// says that the name was not resolved.
    pub(crate) fn for_requests_within(&self, timeout: Duration) -> Self {
        Self { resolve_timeout: RESOLVE_TIMEOUT.min(timeout * 4 / 5), ..self.clone() }
    }

    async fn lookup(&self, host: &str) -> Option<Vec<SocketAddr>> {
        let lookup = tokio::net::lookup_host((host, 0));
        let found = tokio::time::timeout(self.resolve_timeout, lookup).await.ok()?;
        Some(found.ok()?.collect())
    }

    fn check(&self, host: &str, ip: IpAddr) -> Result<(), BlockedAddress> {
        let ip = ip.to_canonical();
        if self.allowed.iter().any(|network| network.contains(&ip)) {
            return Ok(());
        }
        let kind = match ip {
            IpAddr::V4(ip) => special_v4(ip),
            IpAddr::V6(ip) => special_v6(ip),
        };
        match kind {
            None => Ok(()),
            Some(AddressKind::Private | AddressKind::Loopback) if self.allows_private => Ok(()),
            Some(kind) => Err(BlockedAddress {
                target: format!("{host} is at a {kind} address"),
                setting: self.setting,
            }),
        }
    }

    /// Checks a URL whose host is an address. The resolver never sees such a host.
    pub(crate) fn check_literal(&self, url: &Url) -> Result<(), BlockedAddress> {
        let host = url.host_str().unwrap_or_default();
        host.trim_matches(['[', ']']).parse().map_or(Ok(()), |ip| self.check(host, ip))
    }

    /// Resolves the host of a URL and checks its addresses. Needed with a proxy, which resolves names itself. A name
    /// that only the proxy can resolve, or that is not resolved in time, is allowed.
    pub(crate) async fn check_name(&self, url: &Url) -> Result<(), BlockedAddress> {
        let host = url.host_str().unwrap_or_default();
        for address in self.lookup(host).await.unwrap_or_default() {
            self.check(host, address.ip())?;
        }
        Ok(())
    }
}

/// The kind of an address that is not a public one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddressKind {
    Loopback,
    Private,
    LinkLocal,
    Reserved,
    Multicast,
    Tunnelled,
}

impl fmt::Display for AddressKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::LinkLocal => "link-local",
            Self::Reserved => "reserved",
            Self::Multicast => "multicast",
            Self::Tunnelled => "tunnelled",
        })
    }
}

/// Parses a network or a single address.
fn parse_network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

/// Returns the kind of an address that is not a public one.
fn special_v4(ip: Ipv4Addr) -> Option<AddressKind> {
    let [a, b, c, _] = ip.octets();
    match (a, b, c) {
        (127, ..) => Some(AddressKind::Loopback),
        (10, ..) | (172, 16..=31, _) | (192, 168, _) | (100, 64..=127, _) => Some(AddressKind::Private),
        (169, 254, _) => Some(AddressKind::LinkLocal),
        (0, ..) | (192, 0, 0 | 2) | (198, 18..=19, _) | (198, 51, 100) | (203, 0, 113) | (240..=255, ..) => {
            Some(AddressKind::Reserved)
        }
        (224..=239, ..) => Some(AddressKind::Multicast),
        _ => None,
    }
}

fn special_v6(ip: Ipv6Addr) -> Option<AddressKind> {
    let parts = ip.segments();
    let embedded = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        special_v4(Ipv4Addr::new(a, b, c, d))
    };
    match parts {
        [0, 0, 0, 0, 0, 0, 0, 1] => Some(AddressKind::Loopback),
        [0xfe80..=0xfebf, ..] => Some(AddressKind::LinkLocal),
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Some(AddressKind::Private),
        [0xff00..=0xffff, ..] => Some(AddressKind::Multicast),
        // Addresses that embed an IPv4 address.
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => embedded(high, low).or(Some(AddressKind::Reserved)),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => embedded(high, low),
        [0, ..] | [0x64, 0xff9b, 1, ..] | [0x100, ..] | [0x2001, 0xdb8, ..] => Some(AddressKind::Reserved),
        // Teredo embeds the address of a server and, inverted, that of a client.
        [0x2001, 0, ..] => Some(AddressKind::Tunnelled),
        _ => None,
    }
}

/// A host name that cannot be resolved.
#[derive(Debug)]
pub(crate) struct UnresolvedName(String);

impl fmt::Display for UnresolvedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot resolve the host name {}", self.0)
    }
}

impl StdError for UnresolvedName {}

impl Resolve for AddressFilter {
    /// Resolves a name to those of its addresses that are allowed.
    fn resolve(&self, name: Name) -> Resolving {
        let filter = self.clone();
        Box::pin(async move {
            let found = filter.lookup(name.as_str()).await;
            let found = found.ok_or_else(|| UnresolvedName(name.as_str().to_owned()))?;
            let mut blocked = None;
            let mut allowed = Vec::new();
            if filter.proxy.as_deref() == Some(name.as_str()) {
                return Ok(Box::new(found.into_iter()) as Addrs);
            }
            for address in found {
                match filter.check(name.as_str(), address.ip()) {
                    Ok(()) => allowed.push(address),
                    Err(error) => blocked = Some(error),
                }
            }
            match blocked {
                Some(error) if allowed.is_empty() => Err(Box::new(error) as Box<dyn StdError + Send + Sync>),
                _ => Ok(Box::new(allowed.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(allowed: &str) -> AddressFilter {
        AddressFilter::new("ALLOWED_NETWORKS", allowed, "")
    }

    #[test]
    fn allows_only_public_addresses_by_default() {
        for ip in [
            "127.0.0.1",
            "127.8.8.8",
            "10.0.0.1",
            "172.20.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:0:7f00:1::1",
        ] {
            assert!(filter("").check("host", ip.parse().unwrap()).is_err(), "{ip}");
        }
        for ip in
            ["1.1.1.1", "172.15.0.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::101:101"]
        {
            assert!(filter("").check("host", ip.parse().unwrap()).is_ok(), "{ip}");
        }
    }

    #[test]
    fn names_are_resolved_before_the_request_times_out() {
        let timeout = |seconds| {
            filter("").for_requests_within(Duration::from_secs(seconds)).allowing_private().resolve_timeout
        };
        assert_eq!(timeout(5), Duration::from_secs(4));
        assert!(timeout(1) < Duration::from_secs(1));
        assert_eq!(timeout(60), RESOLVE_TIMEOUT);
    }

    #[test]
    fn error_names_the_setting_that_can_allow_it() {
        let url = Url::parse("https://[::1]:8443/keys").unwrap();
        let why = filter("").check_literal(&url).unwrap_err().to_string();
        assert_eq!(why, "[::1] is at a loopback address, which ALLOWED_NETWORKS does not allow");
        assert!(filter("::1").check_literal(&url).is_ok());
        assert!(filter("").check_literal(&Url::parse("https://localhost/keys").unwrap()).is_ok());
    }

    #[test]
    fn filter_for_operators_allows_private_and_loopback_addresses() {
        let filter = filter("").allowing_private();
        for (ip, is_allowed) in [
            ("10.0.0.1", true),
            ("192.168.1.1", true),
            ("fd00::1", true),
            ("127.0.0.1", true),
            ("::1", true),
            ("169.254.169.254", false),
            ("fe80::1", false),
            ("224.0.0.1", false),
            ("0.0.0.0", false),
        ] {
            assert_eq!(filter.check("host", ip.parse().unwrap()).is_ok(), is_allowed, "{ip}");
        }
    }

    #[test]
    fn allows_only_configured_networks() {
        let filter = filter("10.1.0.0/16, 127.0.0.1 fd00::/8");
        for (ip, is_allowed) in [
            ("10.1.2.3", true),
            ("10.2.0.1", false),
            ("127.0.0.1", true),
            ("127.0.0.2", false),
            ("::ffff:10.1.2.3", true),
            ("fd00::1", true),
        ] {
            assert_eq!(filter.check("host", ip.parse().unwrap()).is_ok(), is_allowed, "{ip}");
        }
    }
}
