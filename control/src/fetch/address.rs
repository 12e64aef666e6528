//! Which addresses may be fetched from: the cluster must not be a way into its own network.

use std::error::Error as StdError;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Why an address is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    what: String,
    /// The setting that would allow it.
    setting: &'static str,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, which {} does not allow", self.what, self.setting)
    }
}

impl StdError for Refused {}

/// Lets public addresses pass, and those that the operator allows.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    allowed: Arc<Vec<IpNet>>,
    /// The setting that names them.
    setting: &'static str,
    /// The host of the operator's proxy, which may be anywhere.
    proxy: Option<String>,
}

impl Guard {
    /// Allows the networks in `words`, which are the value of `setting`. An empty `proxy` is none.
    pub(crate) fn new(setting: &'static str, words: &str, proxy: &str) -> Self {
        let words = words.split([' ', ',']).filter(|word| !word.is_empty());
        let proxy = Url::parse(proxy).ok().and_then(|url| url.host_str().map(str::to_owned));
        Self { allowed: Arc::new(words.filter_map(parse).collect()), setting, proxy }
    }

    pub(crate) fn check(&self, host: &str, ip: IpAddr) -> Result<(), Refused> {
        let ip = ip.to_canonical();
        if self.allowed.iter().any(|network| network.contains(&ip)) {
            return Ok(());
        }
        let what = match ip {
            IpAddr::V4(ip) => kind_of_v4(ip),
            IpAddr::V6(ip) => kind_of_v6(ip),
        };
        match what {
            None => Ok(()),
            Some(kind) => {
                Err(Refused { what: format!("{host} is at a {kind} address"), setting: self.setting })
            }
        }
    }

    /// A host that is an address needs no look-up, so it is checked here.
    pub(crate) fn check_literal(&self, url: &Url) -> Result<(), Refused> {
        let host = url.host_str().unwrap_or_default();
        host.trim_matches(['[', ']']).parse().map_or(Ok(()), |ip| self.check(host, ip))
    }

    /// A proxy would look the name up itself; what is known of it here must be allowed.
    pub(crate) async fn check_name(&self, url: &Url) -> Result<(), Refused> {
        let host = url.host_str().unwrap_or_default();
        let Ok(found) = tokio::net::lookup_host((host, 0)).await else { return Ok(()) };
        for address in found {
            self.check(host, address.ip())?;
        }
        Ok(())
    }
}

/// A network, or a single address.
fn parse(word: &str) -> Option<IpNet> {
    word.parse().ok().or_else(|| word.parse::<IpAddr>().ok().map(IpNet::from))
}

/// What an address is, unless it is one of the public internet.
fn kind_of_v4(ip: Ipv4Addr) -> Option<&'static str> {
    let [a, b, c, _] = ip.octets();
    match (a, b, c) {
        (127, ..) => Some("loopback"),
        (10, ..) | (172, 16..=31, _) | (192, 168, _) | (100, 64..=127, _) => Some("private"),
        (169, 254, _) => Some("link-local"),
        (0, ..) | (192, 0, 0 | 2) | (198, 18..=19, _) | (198, 51, 100) | (203, 0, 113) | (240..=255, ..) => {
            Some("reserved")
        }
        (224..=239, ..) => Some("multicast"),
        _ => None,
    }
}

fn kind_of_v6(ip: Ipv6Addr) -> Option<&'static str> {
    let parts = ip.segments();
    let embedded = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        kind_of_v4(Ipv4Addr::new(a, b, c, d))
    };
    match parts {
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("loopback"),
        [0xfe80..=0xfebf, ..] => Some("link-local"),
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Some("private"),
        [0xff00..=0xffff, ..] => Some("multicast"),
        // Other ways to write an IPv4 address.
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => embedded(high, low).or(Some("reserved")),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => embedded(high, low),
        [0, ..] | [0x64, 0xff9b, 1, ..] | [0x100, ..] | [0x2001, 0xdb8, ..] => Some("reserved"),
        // Teredo carries the address of a server and, inverted, that of a client.
        [0x2001, 0, ..] => Some("tunnelled"),
        _ => None,
    }
}

impl Resolve for Guard {
    /// Looks a name up; of its addresses only those that may be used are handed out.
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let mut refused = None;
            let mut good = Vec::new();
            if guard.proxy.as_deref() == Some(name.as_str()) {
                return Ok(Box::new(found.into_iter()) as Addrs);
            }
            for address in found {
                match guard.check(name.as_str(), address.ip()) {
                    Ok(()) => good.push(address),
                    Err(why) => refused = Some(why),
                }
            }
            match refused {
                Some(why) if good.is_empty() => Err(Box::new(why) as Box<dyn StdError + Send + Sync>),
                _ => Ok(Box::new(good.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(allowed: &str) -> Guard {
        Guard::new("ALLOWED_NETWORKS", allowed, "")
    }

    #[test]
    fn only_public_addresses_pass() {
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
            assert!(guard("").check("host", ip.parse().unwrap()).is_err(), "{ip}");
        }
        for ip in
            ["1.1.1.1", "172.15.0.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::101:101"]
        {
            assert!(guard("").check("host", ip.parse().unwrap()).is_ok(), "{ip}");
        }
    }

    #[test]
    fn a_refusal_names_the_setting_that_would_allow_it() {
        let url = Url::parse("https://[::1]:8443/keys").unwrap();
        let why = guard("").check_literal(&url).unwrap_err().to_string();
        assert_eq!(why, "[::1] is at a loopback address, which ALLOWED_NETWORKS does not allow");
        assert!(guard("::1").check_literal(&url).is_ok());
        assert!(guard("").check_literal(&Url::parse("https://localhost/keys").unwrap()).is_ok());
    }

    #[test]
    fn the_operator_opens_networks_and_no_others() {
        let guard = guard("10.1.0.0/16, 127.0.0.1 fd00::/8");
        for (ip, passes) in [
            ("10.1.2.3", true),
            ("10.2.0.1", false),
            ("127.0.0.1", true),
            ("127.0.0.2", false),
            ("::ffff:10.1.2.3", true),
            ("fd00::1", true),
        ] {
            assert_eq!(guard.check("host", ip.parse().unwrap()).is_ok(), passes, "{ip}");
        }
    }
}
