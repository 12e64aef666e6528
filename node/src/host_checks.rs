//! The checks of this host: what it lacks, what that affects, and the command that fixes it. The one list behind
//! `muster doctor`, the limits of the node, `muster node show` and the web UI. See docs/decisions/0092.
//!
//! A check is a pure function of facts about the host, which are read separately.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use muster_types::host_check::{CheckState, HostCheck};
use muster_types::node::HostFeature;
use muster_types::settings::Settings;

use crate::command::{Commands, Tool};
use crate::host::{self, DiskSpace};
use crate::image::{Images, ImagesError};
use crate::network::{self, ForwardDrop};
use crate::vm::{FIRMWARE_DIR, KvmError, probe_kvm};

const CAP_NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const CAP_SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");

const TUN_DEVICE: &str = "/dev/net/tun";
const RESOLVER_FILE: &str = "/etc/resolv.conf";

/// The MTU of Ethernet.
const ETHERNET_MTU: u32 = 1500;
/// What VXLAN adds to the packets of guests.
const VXLAN_OVERHEAD: u32 = 50;

const GIGABYTE: f64 = (1_u64 << 30) as f64;
/// Below this free space, the database and the event log may fail.
const MIN_FREE_GB: f64 = 1.0;
const FREE_SPACE: &str = "muster artifact list; muster artifact delete NAME";

/// How long to wait for the answer of a name server.
const RESOLVER_TIMEOUT: Duration = Duration::from_secs(2);

/// Facts that determine the features of the host. The daemon reads them when it starts.
#[derive(Debug, Clone)]
pub(crate) struct FeatureFacts {
    /// The effective capabilities of this process, or why they are unknown.
    capabilities: Result<u64, String>,
    missing_tools: Vec<Tool>,
    missing_kernel_feature: Option<String>,
    /// Why tap devices cannot be created.
    tun: Option<(ErrorKind, String)>,
    /// Why images cannot be handled.
    images: Option<ImagesError>,
    /// Why guests cannot run under KVM.
    kvm: Option<KvmError>,
    has_uefi_firmware: bool,
}

impl FeatureFacts {
    /// Reads the facts. `images` and `kvm` are the results of earlier checks.
    pub(crate) fn read(commands: &Commands, images: Option<ImagesError>, kvm: Option<KvmError>) -> Self {
        let is_missing = |tool: &Tool| !commands.is_installed(*tool);
        let tools = Tool::NETWORKS.into_iter().chain(Tool::IMAGES).chain(Tool::VMS);
        let missing_tools: Vec<Tool> = tools.filter(is_missing).collect();
        let capabilities = fs::read_to_string("/proc/self/status")
            .map(|status| effective_capabilities(&status))
            .map_err(|error| format!("failed to read the capabilities of this process: {error}"));
        let mut facts = Self {
            capabilities,
            missing_tools,
            missing_kernel_feature: None,
            tun: OpenOptions::new()
                .read(true)
                .write(true)
                .open(TUN_DEVICE)
                .err()
                .map(|error| (error.kind(), error.to_string())),
            images,
            kvm,
            has_uefi_firmware: Path::new(FIRMWARE_DIR).join("OVMF_CODE_4M.fd").exists(),
        };
        // The probe needs the capabilities and the programs.
        if !facts.checks().iter().any(|(feature, check)| is_limit(*feature, check, HostFeature::Networks)) {
            facts.missing_kernel_feature = network::missing_kernel_feature(commands);
        }
        facts
    }

    /// Returns the features that the host lacks, each with the reason.
    pub(crate) fn limits(&self) -> BTreeMap<HostFeature, String> {
        let mut limits = BTreeMap::new();
        for (feature, check) in self.checks() {
            if let Some(feature) = feature.filter(|_| check.state != CheckState::Passed) {
                // The first reason has to be fixed first.
                limits.entry(feature).or_insert(check.detail);
            }
        }
        limits
    }

    /// Checks the facts. A check that does not pass limits its feature.
    fn checks(&self) -> Vec<(Option<HostFeature>, HostCheck)> {
        vec![
            (Some(HostFeature::Kvm), self.check_kvm()),
            (Some(HostFeature::Vms), self.check_qemu()),
            (None, self.check_uefi()),
            (Some(HostFeature::Images), self.check_images()),
            (Some(HostFeature::Taps), self.check_tun()),
            (Some(HostFeature::Networks), self.check_capabilities()),
            (Some(HostFeature::Networks), self.check_network_programs()),
            (Some(HostFeature::Networks), self.check_kernel()),
        ]
    }

    fn check_kvm(&self) -> HostCheck {
        let (name, affects) = ("kvm", "the speed of guests");
        let Some(reason) = &self.kvm else {
            return HostCheck::passed(name, affects, "guests run with hardware virtualization");
        };
        let check = HostCheck::warning(name, affects, format!("VMs are emulated, which is slow: {reason}"));
        match reason {
            KvmError::NoDevice => check.with_fix("modprobe kvm_intel || modprobe kvm_amd"),
            KvmError::PermissionDenied(_) => check.with_fix("usermod --append --groups kvm $USER"),
            KvmError::Unusable(_) | KvmError::TestGuestFailed(_) => check,
        }
    }

    fn check_qemu(&self) -> HostCheck {
        let (name, affects) = ("qemu", "running guests");
        match &*self.missing(&Tool::VMS) {
            [] => HostCheck::passed(name, affects, "QEMU is installed"),
            tools => HostCheck::failed(name, affects, needed_programs("VMs", tools)).with_fix(install(tools)),
        }
    }

    fn check_uefi(&self) -> HostCheck {
        let (name, affects) = ("uefi", "guests that boot with UEFI");
        if self.has_uefi_firmware {
            return HostCheck::passed(name, affects, "the firmware is installed");
        }
        let detail = format!("UEFI needs the firmware in {FIRMWARE_DIR} (Debian package ovmf)");
        HostCheck::warning(name, affects, detail).with_fix("apt-get install ovmf")
    }

    fn check_images(&self) -> HostCheck {
        let (name, affects) = ("images", "uploading and fetching images, and disks made from them");
        let Some(reason) = &self.images else {
            return HostCheck::passed(name, affects, "images are inspected in a sandbox");
        };
        let check = HostCheck::failed(name, affects, reason.to_string());
        match reason {
            ImagesError::NoUserNamespaces(_) => check.with_fix(ALLOW_USER_NAMESPACES),
            ImagesError::Unusable(_) => match &*self.missing(&Tool::IMAGES) {
                [] => check,
                tools => check.with_fix(install(tools)),
            },
        }
    }

    fn check_tun(&self) -> HostCheck {
        let (name, affects) = ("tun", "guests with network interfaces");
        let Some((kind, error)) = &self.tun else {
            return HostCheck::passed(name, affects, format!("{TUN_DEVICE} can be opened"));
        };
        let check = HostCheck::failed(name, affects, format!("tap devices need {TUN_DEVICE}: {error}"));
        match kind {
            ErrorKind::NotFound => check.with_fix("modprobe tun"),
            ErrorKind::PermissionDenied => check.with_fix(format!("chmod 666 {TUN_DEVICE}")),
            _ => check,
        }
    }

    fn check_capabilities(&self) -> HostCheck {
        let (name, affects) = ("capabilities", "networks");
        let capabilities = match &self.capabilities {
            Ok(capabilities) => *capabilities,
            Err(error) => return HostCheck::failed(name, affects, error.clone()),
        };
        let missing: Vec<&str> = [CAP_NET_ADMIN, CAP_SYS_ADMIN]
            .into_iter()
            .filter(|(bit, _)| capabilities & (1 << bit) == 0)
            .map(|(_, name)| name)
            .collect();
        if missing.is_empty() {
            return HostCheck::passed(name, affects, "has CAP_NET_ADMIN and CAP_SYS_ADMIN");
        }
        let detail = format!(
            "networks need CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing {}",
            missing.join(", ")
        );
        HostCheck::failed(name, affects, detail).with_fix("sudo muster up")
    }

    fn check_network_programs(&self) -> HostCheck {
        let (name, affects) = ("network-programs", "networks");
        match &*self.missing(&Tool::NETWORKS) {
            [] => HostCheck::passed(name, affects, "all programs are installed"),
            tools => {
                HostCheck::failed(name, affects, needed_programs("networks", tools)).with_fix(install(tools))
            }
        }
    }

    fn check_kernel(&self) -> HostCheck {
        let (name, affects) = ("kernel", "networks");
        match &self.missing_kernel_feature {
            None => HostCheck::passed(name, affects, "no missing feature is known"),
            Some(feature) => {
                HostCheck::failed(name, affects, format!("networks need a kernel with {feature}"))
            }
        }
    }

    fn missing(&self, needed: &[Tool]) -> Vec<Tool> {
        needed.iter().copied().filter(|tool| self.missing_tools.contains(tool)).collect()
    }
}

/// The command that lets unprivileged users create user namespaces, on the distributions that restrict it.
const ALLOW_USER_NAMESPACES: &str =
    "sysctl -w kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0";

fn is_limit(feature: Option<HostFeature>, check: &HostCheck, wanted: HostFeature) -> bool {
    feature == Some(wanted) && check.state != CheckState::Passed
}

/// Returns the command that installs programs.
fn install(tools: &[Tool]) -> String {
    let mut packages: Vec<&str> = tools.iter().map(|tool| tool.package()).collect();
    packages.dedup();
    format!("apt-get install {}", packages.join(" "))
}

fn needed_programs(what: &str, tools: &[Tool]) -> String {
    let programs: Vec<String> =
        tools.iter().map(|tool| format!("{} (Debian package {})", tool.name(), tool.package())).collect();
    let noun = if programs.len() == 1 { "program" } else { "programs" };
    format!("{what} need the {noun} {}", programs.join(", "))
}

/// Parses the effective capabilities from `/proc/self/status`; none if they cannot be parsed.
fn effective_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

/// Facts that may change while the daemon runs.
#[derive(Debug, Clone)]
pub(crate) struct StateFacts {
    disk: DiskSpace,
    reserved_disk_gb: f64,
    /// The name and the MTU of the device with the route to other hosts, if there is a route.
    uplink: Option<(String, u32)>,
    /// The rule set that drops forwarded packets, or why it is unknown.
    forward_drop: Result<Option<ForwardDrop>, String>,
    /// The name servers of the host, or why they cannot be used.
    resolver: Result<Vec<IpAddr>, String>,
}

impl StateFacts {
    /// Reads the facts. `address` is the address of the host.
    pub(crate) fn read(storage: &Path, reserved_disk_gb: f64, address: Ipv4Addr) -> Self {
        let uplink = network::device_with(address).ok().flatten().filter(|_| !address.is_loopback());
        Self {
            disk: host::disk_space(storage),
            reserved_disk_gb,
            uplink,
            forward_drop: network::forward_drop().map_err(|error| error.to_string()),
            resolver: fs::read_to_string(RESOLVER_FILE)
                .map(|text| name_servers(&text))
                .map_err(|error| format!("failed to read {RESOLVER_FILE}: {error}")),
        }
    }

    /// Checks the facts.
    pub(crate) fn checks(&self) -> [HostCheck; 4] {
        [self.check_disk(), self.check_uplink(), self.check_firewall(), self.check_resolver()]
    }

    fn check_disk(&self) -> HostCheck {
        let (name, affects) = ("disk", "new disks, images and the database");
        #[expect(clippy::cast_precision_loss, reason = "only for display and a threshold")]
        let free = self.disk.free as f64 / GIGABYTE;
        let detail =
            format!("{free:.1} GB free in the data directory, {} GB reserved", self.reserved_disk_gb);
        if free < MIN_FREE_GB {
            return HostCheck::failed(name, affects, detail).with_fix(FREE_SPACE);
        }
        if free < self.reserved_disk_gb {
            let detail = format!("{detail}: no instances are placed here");
            return HostCheck::warning(name, affects, detail).with_fix(FREE_SPACE);
        }
        HostCheck::passed(name, affects, detail)
    }

    fn check_uplink(&self) -> HostCheck {
        let (name, affects) = ("uplink", "the packet size of networks, and guests that reach other hosts");
        let Some((device, mtu)) = &self.uplink else {
            return HostCheck::warning(name, affects, "the host has no route to other hosts")
                .with_fix("ip route add default via GATEWAY");
        };
        let guest_mtu = mtu.saturating_sub(VXLAN_OVERHEAD);
        let detail = format!("the MTU of {device} is {mtu}, so that of networks is {guest_mtu}");
        if *mtu < ETHERNET_MTU {
            let fix = format!("ip link set dev {device} mtu {ETHERNET_MTU}");
            return HostCheck::warning(name, affects, detail).with_fix(fix);
        }
        HostCheck::passed(name, affects, detail)
    }

    fn check_firewall(&self) -> HostCheck {
        let (name, affects) = ("firewall", "guests that reach other hosts, and floating addresses");
        match &self.forward_drop {
            Ok(None) => HostCheck::passed(name, affects, "no rule set drops all forwarded packets"),
            Ok(Some(found)) => {
                let detail = format!(
                    "the policy of chain {} in table {} {} drops the packets of guests{}",
                    found.chain,
                    found.family,
                    found.table,
                    if found.is_docker { " (Docker sets it)" } else { "" }
                );
                HostCheck::warning(name, affects, detail).with_fix(found.fix())
            }
            Err(reason) => HostCheck::passed(name, affects, format!("not inspected: {reason}")),
        }
    }

    fn check_resolver(&self) -> HostCheck {
        let (name, affects) = ("name-resolution", "fetching images by URL");
        match &self.resolver {
            Ok(servers) if servers.is_empty() => {
                let detail = format!("{RESOLVER_FILE} has no name server");
                let fix = format!("echo nameserver ADDRESS >> {RESOLVER_FILE}");
                HostCheck::warning(name, affects, detail).with_fix(fix)
            }
            Ok(servers) => {
                let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
                HostCheck::passed(name, affects, format!("name servers: {}", servers.join(", ")))
            }
            Err(reason) => {
                HostCheck::warning(name, affects, reason.clone()).with_fix(format!("cat {RESOLVER_FILE}"))
            }
        }
    }
}

fn name_servers(text: &str) -> Vec<IpAddr> {
    let addresses = text.lines().filter_map(|line| {
        let (keyword, address) = line.trim().split_once(char::is_whitespace)?;
        // The scope of a link-local address does not matter here.
        (keyword == "nameserver").then(|| address.trim().split('%').next()?.parse().ok()).flatten()
    });
    addresses.collect()
}

/// Asks a name server for the servers of the root zone. Any answer counts.
fn query(server: IpAddr) -> Result<(), String> {
    // The id, the flag for recursion, one question: the name of the root, NS, IN.
    const QUERY: [u8; 17] = [0x4d, 0x55, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1];
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
    let exchange = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(RESOLVER_TIMEOUT))?;
        socket.connect((server, 53))?;
        socket.send(&QUERY)?;
        socket.recv(&mut [0; 512])
    };
    match exchange() {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Err(format!("name server {server} does not answer"))
        }
        Err(error) => Err(format!("name server {server} does not answer: {error}")),
    }
}

/// Returns those checks that did not pass.
pub(crate) fn problems(features: &FeatureFacts, state: &StateFacts) -> Vec<HostCheck> {
    let checks = features.checks().into_iter().map(|(_, check)| check).chain(state.checks());
    checks.filter(|check| check.state != CheckState::Passed).collect()
}

/// Runs all checks of this host. Unlike the daemon, it also sends a query to the name servers. Blocks.
#[must_use]
pub fn check_host(settings: &Settings, storage: &Path) -> Vec<HostCheck> {
    let commands = Commands::find();
    let images = Images::new(&commands, settings).missing_requirement();
    let features = FeatureFacts::read(&commands, images, probe_kvm().err());
    let address = settings.node_mesh_ip.unwrap_or_else(host::primary_address);
    let mut state = StateFacts::read(storage, settings.node_disk_reservation_gb, address);
    if let Ok(servers) = &state.resolver
        && !servers.is_empty()
    {
        let failures: Vec<String> = servers.iter().map_while(|server| query(*server).err()).collect();
        if failures.len() == servers.len() {
            state.resolver = Err(failures.join("; "));
        }
    }
    features.checks().into_iter().map(|(_, check)| check).chain(state.checks()).collect()
}
