//! What many networks cost.

use muster_types::network::NetworkPlan;

use crate::world::{Net, World, enter};

/// Not a test but a measurement: `cargo test -p muster-node --release --test dataplane -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn many_networks() {
    if !enter("scale::many_networks") {
        return;
    }
    let count: u32 =
        std::env::var("MUSTER_TEST_NETWORKS").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    let world = World::new();
    let machine = world.machine(3);
    let plans: Vec<NetworkPlan> = (1..=count)
        .map(|number| {
            let mut net = Net::new(0x1000 + number, "10.0.0.0/24", "192.168.20.5");
            net.router.egress.gateway = Some((u32::from_be_bytes([192, 168, 20, 5]) + number).into());
            net.router.egress.netblock = "192.168.0.0/16".parse().unwrap();
            net.plan(&world, 3, &[])
        })
        .collect();
    let pass = |plans: Vec<NetworkPlan>| {
        let begin = (std::time::Instant::now(), cpu(), machine.programs_run());
        let results = machine.try_ensure(plans);
        for result in results {
            result.unwrap();
        }
        let (wall, used) = (begin.0.elapsed(), cpu() - begin.1);
        (wall, used, machine.programs_run() - begin.2)
    };
    println!("first network: {:?}", pass(plans[..1].to_vec()));
    println!("second network: {:?}", pass(plans[1..2].to_vec()));
    println!("{count} networks made: {:?}", pass(plans.clone()));
    for _ in 0..5 {
        println!("{count} networks, nothing to do: {:?}", pass(plans.clone()));
    }
    println!("one of them alone, nothing to do: {:?}", pass(plans[5..6].to_vec()));
    machine.place.sh("nft add table ip other");
    println!("{count} networks, after a change of other rules: {:?}", pass(plans.clone()));
    let begin = std::time::Instant::now();
    for plan in &plans {
        machine.remove(muster_types::node::FoundNetwork { id: plan.id, vxid: plan.vxid });
    }
    println!("{count} networks removed: {:?}", begin.elapsed());
    println!("{}", machine.inventory());
}

/// Processor seconds of this process, without its children.
fn cpu() -> f64 {
    let usage = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = usage.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
