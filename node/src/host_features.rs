//! Detects which features this host lacks, and why.

use std::collections::BTreeMap;
use std::fs;

use muster_types::node::HostFeature;

use crate::command::{Commands, Tool};
use crate::network;

const CAP_NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const CAP_SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");

/// Checks capabilities, commands, devices and the kernel, and returns the missing features with the reasons. `images`
/// and `vms` are the results of earlier checks.
pub(crate) fn missing_features(
    commands: &Commands,
    images: Option<String>,
    vms: &[(HostFeature, String)],
) -> BTreeMap<HostFeature, String> {
    let missing_tools: Vec<Tool> =
        Tool::NETWORKS.into_iter().filter(|tool| !commands.is_installed(*tool)).collect();
    let kernel_feature =
        || Some(format!("networks need a kernel with {}", network::missing_kernel_feature(commands)?));
    let networks = match fs::read_to_string("/proc/self/status") {
        Ok(status) => {
            missing_for_networks(effective_capabilities(&status), &missing_tools).or_else(kernel_feature)
        }
        Err(error) => Some(format!("failed to read the capabilities of this process: {error}")),
    };
    let taps = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").err();
    let taps = taps.map(|error| format!("tap devices need /dev/net/tun: {error}"));
    let features =
        [(HostFeature::Networks, networks), (HostFeature::Taps, taps), (HostFeature::Images, images)];
    let features = features.into_iter().filter_map(|(feature, reason)| Some((feature, reason?)));
    features.chain(vms.iter().cloned()).collect()
}

/// Returns which capabilities or programs networks need and the host lacks, if any.
fn missing_for_networks(capabilities: u64, missing_tools: &[Tool]) -> Option<String> {
    let missing_capabilities: Vec<&str> = [CAP_NET_ADMIN, CAP_SYS_ADMIN]
        .into_iter()
        .filter(|(bit, _)| capabilities & (1 << bit) == 0)
        .map(|(_, name)| name)
        .collect();
    if !missing_capabilities.is_empty() {
        return Some(format!(
            "networks need CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing {}",
            missing_capabilities.join(", ")
        ));
    }
    let program = |tool: &Tool| format!("{} (Debian package {})", tool.name(), tool.package());
    match missing_tools {
        [] => None,
        [tool] => Some(format!("networks need the program {}", program(tool))),
        tools => {
            let programs: Vec<String> = tools.iter().map(program).collect();
            Some(format!("networks need the programs {}", programs.join(", ")))
        }
    }
}

/// Parses the effective capabilities from `/proc/self/status`; none if they cannot be parsed.
fn effective_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_missing_capabilities_and_programs() {
        let all = effective_capabilities("Name:\tx\nCapEff:\t000001fffeffffff\n");
        assert_eq!(missing_for_networks(all, &[]), None);
        assert_eq!(
            missing_for_networks(all & !(1 << 12), &[Tool::Nft]).unwrap(),
            "networks need CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing CAP_NET_ADMIN"
        );
        assert_eq!(
            missing_for_networks(all, &[Tool::Dnsmasq]).unwrap(),
            "networks need the program dnsmasq (Debian package dnsmasq-base)"
        );
        assert!(
            missing_for_networks(all, &[Tool::Ip, Tool::Nft])
                .unwrap()
                .contains("programs ip (Debian package iproute2), nft")
        );
        assert_eq!(effective_capabilities("nonsense"), 0);
    }
}
