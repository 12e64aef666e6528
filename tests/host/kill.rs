//! A daemon that is killed at any step of making or removing a network goes on where it was.

use std::time::Duration;

use muster_testing::wait;
use serde_json::json;

use crate::machine::{World, id, wait_until_same};
use crate::{PATIENCE, SOON, enter};

const ATTEMPTS: u64 = 12;
/// Making a network and removing it take about so long, in milliseconds.
const LONGEST: u64 = 300;

/// Before, while and after everything: spread over the whole time, and not the same in every run.
fn moment(attempt: u64) -> Duration {
    let jitter = u64::from(muster_types::ids::NetworkId::new().0.as_bytes()[15]) % (LONGEST / ATTEMPTS);
    Duration::from_millis(attempt * LONGEST / ATTEMPTS + jitter)
}

#[test]
fn a_daemon_killed_while_it_makes_or_removes_a_network_ends_what_it_began() {
    if !enter("kill::a_daemon_killed_while_it_makes_or_removes_a_network_ends_what_it_began") {
        return;
    }
    let mut world = World::of_one(&[("IP_DELETION_HALO_DURATION", "1")]);
    let machine = &mut world.machines[0];
    let empty = machine.inventory();
    // What a network looks like that nobody disturbed.
    let calm = id(&machine.create(json!({ "name": "calm", "provide_dns": true })));
    let parts = machine.inventory().lines().count();
    machine.ask_to_delete(calm);
    machine.wait_for_state(calm, "deleted");
    wait_until_same("the way out to go", SOON, &empty, || machine.inventory());

    for attempt in 0..ATTEMPTS {
        let (making, removing) = (moment(attempt), moment(attempt));
        println!("attempt {attempt}: killed {making:?} after the creation, {removing:?} after the deletion");
        let network = id(&machine.ask_for(json!({ "name": "victim", "provide_dns": true })));
        wait(making);
        machine.kill();
        machine.start();
        machine.wait_for_state(network, "created");
        // The state is the truth at once, not some time later.
        assert_eq!(machine.inventory().lines().count(), parts, "{}", machine.inventory());

        machine.ask_to_delete(network);
        wait(removing);
        machine.kill();
        machine.start();
        machine.wait_for_state(network, "deleted");
        wait_until_same("nothing to be left", PATIENCE, &empty, || machine.inventory());
    }
    let log = machine.log();
    assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
}
