//! What a kill leaves behind.

use muster_types::node::NodeApi;

use crate::world::{self, Net, World, enter, is_conflict};

#[test]
fn what_a_kill_leaves_half_made_is_found_and_removed() {
    if !enter("kill::what_a_kill_leaves_half_made_is_found_and_removed") {
        return;
    }
    let world = World::new();
    let machine = world.machine(3);
    let empty = machine.inventory();
    let net = Net::new(0xf1, "10.0.0.0/24", "192.168.20.5");
    let plan = net.plan(&world, 3, &[]);
    let router = net.plan.id;
    for deed in [
        "true".to_owned(),
        format!("rm -r /run/muster/networks/{router}"),
        "ip link del br-vxlan-0000f1; ip link del vxlan-0000f1; ip link del veth-0000f1-o; ip link del egr-0000f1-o".into(),
        format!("ip netns del {router}; nft delete table bridge muster-0000f1; touch /run/netns/{router}"),
        format!("rm -r /run/muster/networks/{router}; ip link del br-vxlan-0000f1; ip link del vxlan-0000f1; ip link del veth-0000f1-o; ip link del egr-0000f1-o; nft delete table bridge muster-0000f1"),
        "ip link del br-vxlan-0000f1; ip link add br-vxlan-0000f1 type bridge; ip link del vxlan-0000f1; ip link add vxlan-0000f1 type vxlan id 241 dstport 4789".into(),
        "ip link del egr-br-world0; ip link del egr-0000f1-o; ip link add egr-br-world0 type bridge".into(),
    ] {
        machine.ensure(&plan);
        machine.place.sh(&deed);
        let found = machine.find();
        assert_eq!(found.iter().map(|found| found.id).collect::<Vec<_>>(), [router], "{deed}");
        machine.remove(found[0]);
        assert_eq!(machine.inventory(), empty, "{deed}");
        assert_eq!(machine.find(), [], "{deed}");
    }
    // Half of it, then the whole again.
    machine.ensure(&plan);
    let whole = machine.inventory();
    machine.place.sh(
        "ip link del br-vxlan-0000f1; ip link add br-vxlan-0000f1 type bridge; ip link del veth-0000f1-o",
    );
    machine.ensure(&plan);
    assert_eq!(machine.inventory(), whole);

    // What is not ours is neither used nor removed.
    machine.remove(net.found());
    machine.place.sh("ip link add br-vxlan-0000f1 type bridge; ip link set br-vxlan-0000f1 alias mine");
    let refused = machine.try_ensure(vec![plan]).remove(0);
    assert!(is_conflict(&refused), "{refused:?}");
    machine.remove(net.found());
    machine.place.sh("ip link show br-vxlan-0000f1");
}

/// Not a test: what `a_kill_at_any_moment_is_survived` kills.
#[test]
#[ignore = "only as a victim"]
fn victim() {
    let Ok(id) = std::env::var("MUSTER_TEST_VICTIM") else { return };
    let net = world::victim(&id);
    let node = world::victims_node();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    loop {
        runtime.block_on(async {
            node.ensure_networks(&[world::victims_plan(&net)]).await.unwrap().remove(0).unwrap();
            node.remove_network(net.found()).await.unwrap();
        });
    }
}

#[test]
fn a_kill_at_any_moment_is_survived() {
    if !enter("kill::a_kill_at_any_moment_is_survived") {
        return;
    }
    let mut world = World::new();
    let machine = world.machine(3);
    let empty = machine.inventory();
    let net = world::victim(&muster_types::ids::NetworkId::new().to_string());
    let plan = world::victims_plan(&net);
    machine.ensure(&plan);
    let whole = machine.inventory();
    machine.remove(net.found());
    let (never, clock) = std::sync::mpsc::channel::<()>();
    for attempt in 0..30 {
        let machine = world.machine(3);
        let id = net.plan.id.to_string();
        let mut victim = machine.place.run(move || {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "kill::victim", "--ignored"])
                .env("MUSTER_TEST_VICTIM", id)
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        });
        let _ = clock.recv_timeout(std::time::Duration::from_millis(10 + 11 * attempt));
        victim.kill().unwrap();
        victim.wait().unwrap();
        // What it had started goes on for a moment.
        machine
            .place
            .until("! grep -qzxE '.*/(ip|nft|bridge)|kill::victim' /proc/[0-9]*/cmdline 2>/dev/null");
        world.machines[2].restart();
        let machine = world.machine(3);
        let found = machine.find();
        assert!(found.iter().all(|found| found.id == net.plan.id), "{found:?}");
        if attempt % 2 == 0 {
            // A server that was already told to end may still be there at the first look.
            let settled = (0..5).any(|_| {
                machine.ensure(&plan);
                let before = machine.programs_run();
                machine.ensure(&plan);
                machine.programs_run() == before && machine.inventory() == whole
            });
            assert!(settled, "attempt {attempt}: {}\nis not {whole}", machine.inventory());
        } else {
            found.into_iter().for_each(|found| machine.remove(found));
            // The way out is no network's: it goes with the next look after the networks that there are.
            machine.try_ensure(Vec::new());
            assert_eq!(machine.inventory(), empty, "attempt {attempt}");
        }
    }
    drop(never);
}
