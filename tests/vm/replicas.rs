//! Guests with replicas whose host loses power while their disks are copied.

use std::time::{Duration, Instant};

use muster_test_cluster::{HostCluster, enter_vm_namespaces, qemu_processes, vm_hosts};
use muster_testing::wait_for;
use muster_types::ids::InstanceId;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::console::Console;
use crate::instance::{Instance, now};

/// The number of times that a host loses power; more with `MUSTER_TEST_REPLICA_ROUNDS`.
const ROUNDS: usize = 2;

/// How much the clock of the database, which the record uses, may differ from that of this test: daemons know it by round trips,
/// which take long on a busy host.
const CLOCK_ERROR: f64 = 2.0;

/// Writes a growing number to two places of one disk and then to another disk, each time synced, with other data in between. A
/// number in `/tmp/written` is on all of them.
fn count_from(number: u64) -> String {
    format!(
        "(n={number}; while true; do n=$((n+1)); \
         printf '%08d' $n | dd of=/dev/vdc conv=fsync,notrunc; \
         dd if=/dev/urandom of=/dev/vdc bs=64k seek=16 count=32 conv=fsync,notrunc; \
         printf '%08d' $n | dd of=/dev/vdc bs=1M seek=500 conv=fsync,notrunc; \
         printf '%08d' $n | dd of=/dev/vdd bs=1M seek=100 conv=fsync,notrunc; \
         echo $n >/tmp/written.new; mv /tmp/written.new /tmp/written; done) >/dev/null 2>&1 & true"
    )
}

fn number(text: &str) -> u64 {
    text.trim().trim_start_matches('0').parse().unwrap_or_else(|_| panic!("not a number: {text:?}"))
}

/// Returns the number at a place of a disk.
fn read_number(console: &mut Console, disk: &str, megabytes: u32) -> u64 {
    let command = format!("dd if=/dev/{disk} bs=1M skip={megabytes} count=1 2>/dev/null | head -c 8; echo");
    number(&console.run(&command))
}

struct Replicated {
    cluster: HostCluster,
    web: Instance,
}

impl Replicated {
    fn has_replica(&self, host: usize) -> bool {
        self.cluster.directory.join(format!("m{host}/data/replicas/{}", self.web.uuid)).exists()
    }

    /// Ends every process of a host at once.
    fn power_off(&mut self, host: usize) {
        let dir = self.web.vm_dir(&self.cluster, host);
        let of_host = || {
            let processes = qemu_processes().into_iter().map(|(_, pid)| pid);
            let in_dir =
                |pid: &i32| std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == dir);
            processes.filter(in_dir).collect::<Vec<_>>()
        };
        self.cluster.hosts[host - 1].kill();
        let running = of_host();
        assert_eq!(running.len(), 1);
        for pid in running {
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        }
        wait_for("QEMU to exit", TIMEOUT, || of_host().is_empty().then_some(()));
    }

    /// Lets the host of the instance lose power at a random moment, and checks the disks of the guest on the other host.
    /// Returns the console of the guest, and the number that it continues from.
    fn lose_host(
        &mut self,
        (lost, other): (usize, usize),
        delay: Duration,
        (mut console, counted): (Console, u64),
    ) -> (Console, u64) {
        let host = self.cluster.host(lost);
        console.run(&count_from(counted));
        let mut written: Vec<(f64, u64)> = Vec::new();
        let mut sample = |console: &mut Console| {
            let text = console.run("cat /tmp/written 2>/dev/null || echo 0");
            let number = text.trim().parse().unwrap_or(0);
            written.push((now(), number));
            number
        };
        wait_for("the guest to write", TIMEOUT, || (sample(&mut console) > counted).then_some(()));
        let started = now();
        let replica = |record: Value| record["replica"].clone();
        let time = |replica: &Value| replica["last_complete"].as_f64().unwrap_or(0.0);
        let mut wait_for_copy = |after: f64| {
            wait_for("a copy while the guest writes", TIMEOUT, || {
                sample(&mut console);
                let replica = replica(self.web.record(host));
                (time(&replica) > after).then_some(replica)
            })
        };
        // The first copy is full, the next one is not.
        let first = wait_for_copy(started);
        let node = format!("m{other}");
        assert_eq!((&first["node"], &first["state"]), (&json!(node), &json!("complete")), "{first}");
        wait_for_copy(time(&first));
        let waiting = Instant::now();
        wait_for("the moment of the power loss", TIMEOUT, || {
            sample(&mut console);
            (waiting.elapsed() >= delay).then_some(())
        });
        let record = replica(self.web.record(host));
        self.power_off(lost);
        let said = time(&record);
        println!("host m{lost} loses power after {delay:?}: {record}");

        let second = self.cluster.host(other);
        self.web.wait_for_power(second, "unknown", 0.0);
        let evacuated = second.post(&format!("/nodes/m{lost}/evacuate"), Some(json!({ "dead": true })));
        assert_eq!(evacuated[0]["node"], node, "{evacuated}");
        assert!(evacuated[0]["reason"].to_string().contains("its replica of 20"), "{evacuated}");
        let record = wait_for("the guest to run elsewhere", TIMEOUT, || {
            let record = self.web.record(second);
            assert_ne!(record["state"], "error", "{record:#}\n{}", second.log());
            (record["state"] == "created" && record["power_state"] == "on").then_some(record)
        });
        assert_eq!(record["node"], node, "{record}");
        let event = wait_for("the event of the replica", TIMEOUT, || {
            self.web.events(second, "disks restored from the replica").into_iter().next()
        });
        let restored = event["extra"]["time"].as_f64().unwrap();
        assert!(restored >= said, "the replica is of {restored}, the record said {said}");

        let mut console = self.web.console(second);
        console.log_in();
        let begin = read_number(&mut console, "vdc", 0);
        let end = read_number(&mut console, "vdc", 500);
        let other_disk = read_number(&mut console, "vdd", 100);
        let is_included = |at: &f64| *at < said - CLOCK_ERROR;
        let expected = written.iter().filter(|(at, _)| is_included(at)).map(|(_, number)| *number).max();
        let expected = expected.unwrap_or(counted);
        println!("the disks have {begin}, {end}, {other_disk}; {expected} was written before {said}");
        assert!(begin >= end && end >= other_disk && begin - other_disk <= 1, "not one point in time");
        assert!(other_disk >= expected, "older than the record said");

        // The host returns: its VM is stale, and it gets the next replica.
        self.cluster.hosts[lost - 1].start();
        wait_for("the replica to be removed from the host of the instance", TIMEOUT, || {
            (!self.has_replica(other)).then_some(())
        });
        (console, begin)
    }
}

#[test]
fn guest_of_a_lost_host_continues_from_one_point_in_time() {
    if !enter_vm_namespaces("replicas::guest_of_a_lost_host_continues_from_one_point_in_time") {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "4"), ("CLEANER_DELAY", "8"), ("REPLICA_INTERVAL", "1")];
    let Some(cluster) = vm_hosts(2, &settings) else { return };
    let disks = json!([{ "base": "label:tiny", "size": 1 }, { "size": 1 }, { "size": 1 }]);
    let changes = json!({ "placed_on": "m1", "disk": disks, "replicas": 1 });
    let web = Instance::create(cluster.host(1), "web", &changes);
    let mut test = Replicated { cluster, web };
    let rounds = std::env::var("MUSTER_TEST_REPLICA_ROUNDS").ok();
    let rounds = rounds.map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let mut console = test.web.console(test.cluster.host(1));
    console.log_in();
    let mut guest = (console, 0);
    for round in 0..rounds {
        let hosts = if round % 2 == 0 { (1, 2) } else { (2, 1) };
        let random = u64::try_from(InstanceId::new().0.as_u128() % 3000).unwrap();
        guest = test.lose_host(hosts, Duration::from_millis(random), guest);
    }
    let host = test.cluster.host(1);
    let replica = || test.web.record(host)["replica"].clone();
    wait_for("what the replica lacks to be measured", TIMEOUT, || replica()["bytes_behind"].as_u64());
    test.web.post(host, "/poweroff");
    let since = test.web.record(host)["power_state_since"].as_f64();
    let last = wait_for("the last copy", TIMEOUT, || {
        Some(replica()).filter(|replica| replica["last_complete"].as_f64() >= since)
    });
    assert_eq!((&last["state"], &last["bytes_behind"]), (&json!("complete"), &json!(0)), "{last}");
    test.web.delete(host);
    wait_for("the replicas to be removed", TIMEOUT, || {
        (!test.has_replica(1) && !test.has_replica(2)).then_some(())
    });
}
