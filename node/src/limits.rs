//! What this machine cannot do, and why.

use std::collections::BTreeMap;
use std::fs;

use muster_types::node::Limit;

use crate::command::{Commands, Tool};
use crate::network;

const CAP_NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const CAP_SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");

/// Looks at the rights of this process, its programs, its devices and its kernel; `images` and `machines` were tried
/// already.
pub(crate) fn find(
    commands: &Commands,
    images: Option<String>,
    machines: &[(Limit, String)],
) -> BTreeMap<Limit, String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let missing: Vec<Tool> = Tool::NETWORKS.into_iter().filter(|tool| !commands.has(*tool)).collect();
    let lacking = || {
        Some(format!("carrying networks needs a kernel with {}", network::missing_kernel_feature(commands)?))
    };
    let networks = networks(effective(&status), &missing).or_else(lacking);
    let taps = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").err();
    let taps = taps.map(|error| format!("connecting guests needs /dev/net/tun: {error}"));
    let found = [(Limit::Networks, networks), (Limit::Taps, taps), (Limit::Images, images)];
    let found = found.into_iter().filter_map(|(limit, why)| Some((limit, why?)));
    found.chain(machines.iter().cloned()).collect()
}

fn networks(capabilities: u64, missing: &[Tool]) -> Option<String> {
    let lacks: Vec<&str> = [CAP_NET_ADMIN, CAP_SYS_ADMIN]
        .into_iter()
        .filter(|(bit, _)| capabilities & (1 << bit) == 0)
        .map(|(_, name)| name)
        .collect();
    if !lacks.is_empty() {
        return Some(format!(
            "carrying networks needs CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing {}",
            lacks.join(", ")
        ));
    }
    let program = |tool: &Tool| format!("{} (Debian package {})", tool.name(), tool.package());
    match missing {
        [] => None,
        [tool] => Some(format!("carrying networks needs the program {}", program(tool))),
        tools => {
            let programs: Vec<String> = tools.iter().map(program).collect();
            Some(format!("carrying networks needs the programs {}", programs.join(", ")))
        }
    }
}

/// The rights that are in effect, from `/proc/self/status`.
fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_or_program_is_named() {
        let all = effective("Name:\tx\nCapEff:\t000001fffeffffff\n");
        assert_eq!(networks(all, &[]), None);
        assert_eq!(
            networks(all & !(1 << 12), &[Tool::Nft]).unwrap(),
            "carrying networks needs CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing CAP_NET_ADMIN"
        );
        assert_eq!(
            networks(all, &[Tool::Dnsmasq]).unwrap(),
            "carrying networks needs the program dnsmasq (Debian package dnsmasq-base)"
        );
        assert!(
            networks(all, &[Tool::Ip, Tool::Nft])
                .unwrap()
                .contains("programs ip (Debian package iproute2), nft")
        );
        assert_eq!(effective("nonsense"), 0);
    }
}
