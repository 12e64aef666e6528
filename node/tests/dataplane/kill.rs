//! Networks that a killed process left behind.

use muster_types::node::NodeApi;

use crate::fixture::{self, TestNetwork, Testbed, is_conflict, run_isolated};

#[test]
fn finds_and_removes_partly_created_networks() {
    if !run_isolated("kill::finds_and_removes_partly_created_networks") {
        return;
    }
    let testbed = Testbed::new();
    let host = testbed.host(3);
    let empty = host.inventory();
    let net = TestNetwork::new(0xf1, "10.0.0.0/24", "192.168.20.5");
    let plan = net.plan(&testbed, 3, &[]);
    let router = net.plan.id;
    for command in [
        "true".to_owned(),
        format!("rm -r /run/muster/networks/{router}"),
        "ip link del br-vxlan-0000f1; ip link del vxlan-0000f1; ip link del veth-0000f1-o; ip link del egr-0000f1-o".into(),
        format!("ip netns del {router}; nft delete table bridge muster-0000f1; touch /run/netns/{router}"),
        format!("rm -r /run/muster/networks/{router}; ip link del br-vxlan-0000f1; ip link del vxlan-0000f1; ip link del veth-0000f1-o; ip link del egr-0000f1-o; nft delete table bridge muster-0000f1"),
        "ip link del br-vxlan-0000f1; ip link add br-vxlan-0000f1 type bridge; ip link del vxlan-0000f1; ip link add vxlan-0000f1 type vxlan id 241 dstport 4789".into(),
        "ip link del egr-br-uplink0; ip link del egr-0000f1-o; ip link add egr-br-uplink0 type bridge".into(),
    ] {
        host.ensure(&plan);
        host.netns.sh(&command);
        let found = host.find();
        assert_eq!(found.iter().map(|found| found.id).collect::<Vec<_>>(), [router], "{command}");
        host.remove(found[0]);
        assert_eq!(host.inventory(), empty, "{command}");
        assert_eq!(host.find(), [], "{command}");
    }
    // Damages the network, then repairs it.
    host.ensure(&plan);
    let whole = host.inventory();
    host.netns.sh(
        "ip link del br-vxlan-0000f1; ip link add br-vxlan-0000f1 type bridge; ip link del veth-0000f1-o",
    );
    host.ensure(&plan);
    assert_eq!(host.inventory(), whole);

    // A device of the operator is neither used nor removed.
    host.remove(net.found());
    host.netns.sh("ip link add br-vxlan-0000f1 type bridge; ip link set br-vxlan-0000f1 alias mine");
    let refused = host.try_ensure(vec![plan]).remove(0);
    assert!(is_conflict(&refused), "{refused:?}");
    host.remove(net.found());
    host.netns.sh("ip link show br-vxlan-0000f1");
}

/// Not a test by itself: the process that `survives_being_killed_at_any_moment` kills.
#[test]
#[ignore = "started by another test"]
fn kill_target() {
    let Ok(id) = std::env::var("MUSTER_TEST_VICTIM") else { return };
    let net = fixture::kill_target_network(&id);
    let node = fixture::kill_target_node();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    loop {
        runtime.block_on(async {
            node.ensure_networks(&[fixture::kill_target_plan(&net)]).await.unwrap().remove(0).unwrap();
            node.remove_network(net.found()).await.unwrap();
        });
    }
}

#[test]
fn survives_being_killed_at_any_moment() {
    if !run_isolated("kill::survives_being_killed_at_any_moment") {
        return;
    }
    let mut testbed = Testbed::new();
    let host = testbed.host(3);
    let empty = host.inventory();
    let net = fixture::kill_target_network(&muster_types::ids::NetworkId::new().to_string());
    let plan = fixture::kill_target_plan(&net);
    host.ensure(&plan);
    let whole = host.inventory();
    host.remove(net.found());
    let (never, clock) = std::sync::mpsc::channel::<()>();
    for attempt in 0..30 {
        let host = testbed.host(3);
        let id = net.plan.id.to_string();
        let mut child = host.netns.run(move || {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "kill::kill_target", "--ignored"])
                .env("MUSTER_TEST_VICTIM", id)
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        });
        let _ = clock.recv_timeout(std::time::Duration::from_millis(10 + 11 * attempt));
        child.kill().unwrap();
        child.wait().unwrap();
        // Programs that it had started may still be running.
        host.netns
            .until("! grep -qzxE '.*/(ip|nft|bridge)|kill::kill_target' /proc/[0-9]*/cmdline 2>/dev/null");
        testbed.hosts[2].restart();
        let host = testbed.host(3);
        let found = host.find();
        assert!(found.iter().all(|found| found.id == net.plan.id), "{found:?}");
        if attempt % 2 == 0 {
            // A server that is about to exit may still be found by the first pass.
            let settled = (0..5).any(|_| {
                host.ensure(&plan);
                let before = host.commands_run();
                host.ensure(&plan);
                host.commands_run() == before && host.inventory() == whole
            });
            assert!(settled, "attempt {attempt}: {}\nis not {whole}", host.inventory());
        } else {
            found.into_iter().for_each(|found| host.remove(found));
            // The egress bridge belongs to no network: it is removed by the next reconcile pass.
            host.try_ensure(Vec::new());
            assert_eq!(host.inventory(), empty, "attempt {attempt}");
        }
    }
    drop(never);
}
