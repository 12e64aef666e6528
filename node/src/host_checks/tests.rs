use super::*;

fn features() -> FeatureFacts {
    FeatureFacts {
        capabilities: Ok(effective_capabilities("Name:\tx\nCapEff:\t000001fffeffffff\n")),
        missing_tools: Vec::new(),
        missing_kernel_feature: None,
        tun: None,
        images: None,
        kvm: None,
        has_uefi_firmware: true,
    }
}

fn state() -> StateFacts {
    StateFacts {
        disk: DiskSpace { total: 100 << 30, free: 50 << 30 },
        reserved_disk_gb: 20.0,
        uplink: Some(("eth0".into(), 1500)),
        forward_drop: Ok(None),
        resolver: Ok(vec![Ipv4Addr::LOCALHOST.into()]),
    }
}

/// Returns the only problem that a change of the facts causes.
fn problem(change: impl FnOnce(&mut FeatureFacts, &mut StateFacts)) -> HostCheck {
    let (mut features, mut state) = (features(), state());
    assert_eq!(problems(&features, &state), []);
    change(&mut features, &mut state);
    let mut found = problems(&features, &state);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn limits(change: impl FnOnce(&mut FeatureFacts)) -> BTreeMap<HostFeature, String> {
    let mut facts = features();
    change(&mut facts);
    facts.limits()
}

#[test]
fn host_with_everything_has_no_limits() {
    assert_eq!(limits(|_| {}), BTreeMap::new());
    let checks: Vec<HostCheck> = features().checks().into_iter().map(|(_, check)| check).collect();
    assert!(checks.iter().all(|check| check.state == CheckState::Passed && check.fix.is_none()));
}

#[test]
fn missing_capabilities_and_programs_limit_networks() {
    let found = limits(|facts| {
        facts.capabilities = facts.capabilities.clone().map(|all| all & !(1 << 12));
        facts.missing_tools = vec![Tool::Nft];
    });
    assert_eq!(
        found[&HostFeature::Networks],
        "networks need CAP_NET_ADMIN and CAP_SYS_ADMIN (run as root): missing CAP_NET_ADMIN"
    );
    let found = limits(|facts| facts.missing_tools = vec![Tool::Dnsmasq]);
    assert_eq!(
        found[&HostFeature::Networks],
        "networks need the program dnsmasq (Debian package dnsmasq-base)"
    );
    let found = problem(|facts, _| facts.missing_tools = vec![Tool::Ip, Tool::Bridge, Tool::Nft]);
    assert!(found.detail.contains("programs ip (Debian package iproute2), bridge"), "{found:?}");
    assert_eq!(found.fix.unwrap(), "apt-get install iproute2 nftables");
    let found = limits(|facts| facts.missing_kernel_feature = Some("devices of kind vxlan".into()));
    assert_eq!(found[&HostFeature::Networks], "networks need a kernel with devices of kind vxlan");
    assert_eq!(effective_capabilities("nonsense"), 0);
}

#[test]
fn emulation_is_a_warning_with_the_fix_for_its_reason() {
    for (reason, fix) in [
        (KvmError::NoDevice, Some("modprobe")),
        (KvmError::PermissionDenied("Permission denied (os error 13)".into()), Some("kvm $USER")),
        (KvmError::TestGuestFailed("it timed out".into()), None),
    ] {
        let found = problem(|facts, _| facts.kvm = Some(reason.clone()));
        assert_eq!((found.state, &*found.name), (CheckState::Warning, "kvm"));
        assert_eq!(found.detail, format!("VMs are emulated, which is slow: {reason}"));
        assert_eq!(found.fix.is_some(), fix.is_some(), "{found:?}");
        assert!(found.fix.unwrap_or_default().contains(fix.unwrap_or_default()));
    }
}

#[test]
fn devices_and_programs_for_guests_are_required() {
    let found = problem(|facts, _| facts.missing_tools = vec![Tool::QemuSystem]);
    assert_eq!((found.state, &*found.fix.unwrap()), (CheckState::Failed, "apt-get install qemu-system-x86"));
    let found = problem(|facts, _| facts.tun = Some((ErrorKind::PermissionDenied, "denied".into())));
    assert_eq!((found.state, &*found.fix.unwrap()), (CheckState::Failed, "chmod 666 /dev/net/tun"));
    let found = problem(|facts, _| facts.tun = Some((ErrorKind::NotFound, "missing".into())));
    assert_eq!(found.fix.unwrap(), "modprobe tun");
    let found = problem(|facts, _| facts.has_uefi_firmware = false);
    assert_eq!((found.state, &*found.fix.unwrap()), (CheckState::Warning, "apt-get install ovmf"));
    let (mut facts, reason) = (features(), "the program xz is not in /usr/bin");
    (facts.images, facts.missing_tools) = (Some(ImagesError::Unusable(reason.into())), vec![Tool::Xz]);
    assert_eq!(facts.limits()[&HostFeature::Images], format!("images cannot be inspected: {reason}"));
    assert_eq!(problems(&facts, &state())[0].fix.as_deref(), Some("apt-get install xz-utils"));
    let found = problem(|facts, _| facts.images = Some(ImagesError::NoUserNamespaces("EPERM".into())));
    assert_eq!(found.fix.as_deref(), Some(ALLOW_USER_NAMESPACES));
}

#[test]
fn scarce_disk_space_is_a_warning_and_none_is_a_failure() {
    let found = problem(|_, state| state.disk.free = 10 << 30);
    assert_eq!(found.state, CheckState::Warning);
    assert!(found.detail.contains("10.0 GB free") && found.fix.is_some(), "{found:?}");
    assert_eq!(problem(|_, state| state.disk.free = 1 << 20).state, CheckState::Failed);
}

#[test]
fn checks_the_uplink_and_the_packet_size_of_networks() {
    let found = problem(|_, state| state.uplink = Some(("eth0".into(), 1400)));
    assert!(found.detail.contains("so that of networks is 1350"), "{found:?}");
    assert_eq!(found.fix.unwrap(), "ip link set dev eth0 mtu 1500");
    assert!(problem(|_, state| state.uplink = None).detail.contains("no route"));
}

#[test]
fn names_the_rule_set_that_drops_packets_of_guests() {
    let drop = ForwardDrop { family: "ip", table: "filter".into(), chain: "FORWARD".into(), is_docker: true };
    let found = problem(|_, state| state.forward_drop = Ok(Some(drop)));
    assert!(found.detail.contains("chain FORWARD in table ip filter") && found.detail.contains("Docker"));
    assert!(found.fix.unwrap().starts_with("iptables -I DOCKER-USER"));
    // Without the right to read the rule sets, nothing is known to be wrong.
    let unknown = StateFacts { forward_drop: Err("EPERM".into()), ..state() };
    assert_eq!(problems(&features(), &unknown), []);
}

#[test]
fn host_needs_a_name_server() {
    let found = problem(|_, state| state.resolver = Ok(Vec::new()));
    assert!(found.detail.contains("no name server"), "{found:?}");
    let text =
        "# comment\nsearch example\nnameserver 10.0.0.1\n  nameserver\tfe80::1%eth0\nnameserver nonsense\n";
    let expected: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "fe80::1".parse().unwrap()];
    assert_eq!(name_servers(text), expected);
}

#[test]
fn runs_every_check_once() {
    let dir = tempfile::tempdir().unwrap();
    let commands = Commands::find();
    let facts = FeatureFacts::read(&commands, None, None);
    let state = StateFacts::read(dir.path(), 0.0, Ipv4Addr::LOCALHOST);
    assert!(state.disk.free > 0 && state.uplink.is_none());
    let mut names: Vec<String> = facts.checks().into_iter().map(|(_, check)| check.name).collect();
    names.extend(state.checks().map(|check| check.name));
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!((names.len(), count), (12, 12), "{names:?}");
}
