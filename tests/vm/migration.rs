//! Migration between two hosts.

use muster_control::objects::interface::WantedAddress;
use muster_test_cluster::{
    ClusterDatabase, Host, HostCluster, enter_vm_namespaces, qemu_processes, vm_hosts,
};
use muster_testing::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::console::Console;
use crate::instance::{Instance, bytes};

/// Requests a migration, and returns the path of its operation.
fn request(host: &Host, instance: &Instance, body: Value) -> String {
    let (status, operation) = host.call(Method::POST, &instance.path("/migrate"), Some(body));
    assert_eq!(status, 202, "{operation}");
    format!("/clusteroperations/node_inst_op/{}", operation["uuid"].as_str().unwrap())
}

/// Waits until a migration has ended, and returns its operation.
fn wait_until_ended(host: &Host, operation: &str) -> Value {
    wait_for("the migration to end", TIMEOUT, || {
        let record = host.get(operation);
        (!["queued", "executing"].contains(&record["state"].as_str().unwrap())).then_some(record)
    })
}

/// Migrates an instance, and returns its record. On a busy host, a connection may time out; then the guest must still run on
/// the source, and the migration is repeated.
fn migrate(host: &Host, instance: &Instance, node: &str) -> Value {
    let before = instance.record(host);
    for _ in 0..3 {
        let operation = wait_until_ended(host, &request(host, instance, json!({ "target": node })));
        let record = instance.record(host);
        if operation["state"] == "complete" {
            assert_eq!(record["node"], node, "{record}");
            return record;
        }
        println!("{operation:#}\n{}", host.log());
        assert_eq!((&record["node"], &record["power_state"]), (&before["node"], &before["power_state"]));
    }
    panic!("no migration succeeds");
}

/// Waits until the peer has received another 20 lines from the guest, and asserts that none is missing.
fn assert_connected(peer_console: &mut Console, console: &mut Console) {
    let counted = peer_console.run("wc -l </tmp/received");
    let enough = format!("[ $(wc -l </tmp/received) -gt $(({} + 20)) ]", counted.trim());
    // Stops waiting when the connection has ended.
    peer_console.run(&format!("until {enough} || ! pidof nc >/dev/null; do usleep 50000; done"));
    if peer_console.run(&format!("{enough} && echo enough")).trim() != "enough" {
        panic!("the connection ended: {}", console.run("cat /tmp/ended; dmesg | tail -n 20; ps"));
    }
    let complete = "n=$(wc -l </tmp/received); [ \"$(seq 1 $n | md5sum)\" = \"$(head -n $n /tmp/received | md5sum)\" ] \
                    && echo complete";
    assert_eq!(peer_console.run(complete).trim(), "complete");
}

/// Starts a migration that takes long, and waits until it copies memory. Returns the path of its operation.
fn migrate_slowly(host: &Host, instance: &Instance) -> String {
    let operation = request(host, instance, json!({ "target": "m2", "bandwidth_limit_mbps": 8 }));
    wait_for("the migration to copy memory", TIMEOUT, || {
        let record = host.get(&operation);
        assert!(record["error_report"].is_null(), "{record}");
        record["progress"]["total"].as_u64().filter(|total| *total > 100 << 20)
    });
    operation
}

/// Returns the password of the display.
fn display_password(host: &Host, instance: &Instance) -> String {
    let file = String::from_utf8(bytes(host, &instance.path("/vdiconsolehelper"))).unwrap();
    file.lines().find(|line| line.starts_with("password=")).unwrap().to_owned()
}

/// Returns the PIDs of the VMs of an instance: of those that run, and of those that wait for a migration.
fn processes(instance: &Instance) -> (Vec<i32>, Vec<i32>) {
    let own = qemu_processes().into_iter().filter(|(line, _)| line.contains(&instance.uuid));
    let (incoming, running): (Vec<_>, Vec<_>) = own.partition(|(line, _)| line.contains("-incoming"));
    let pids = |list: Vec<(String, i32)>| list.into_iter().map(|(_, pid)| pid).collect();
    (pids(running), pids(incoming))
}

/// Asserts that a failed migration has left the guest on the first host, and that nothing of it remains on the second.
fn assert_stays(cluster: &HostCluster, instance: &Instance, process: i32, console: &mut Console) {
    let host = cluster.host(1);
    let record = instance.record(host);
    assert_eq!((&record["node"], &record["power_state"]), (&json!("m1"), &json!("on")), "{record}");
    assert_eq!(processes(instance).0, [process]);
    assert_eq!(instance.events(host, "power state is now paused"), Vec::<Value>::new());
    assert!(!instance.vm_dir(cluster, 1).join("migrating").exists());
    let counted = console.run("cat /root/count");
    console.run_until(&format!("[ $(cat /root/count) -gt {} ]", counted.trim()));
    wait_for("the VM to be removed from the target", TIMEOUT, || {
        (processes(instance).1.is_empty() && !instance.vm_dir(cluster, 2).exists()).then_some(())
    });
}

#[test]
fn guest_keeps_its_memory_disk_address_and_connections() {
    if !enter_vm_namespaces("migration::guest_keeps_its_memory_disk_address_and_connections") {
        return;
    }
    let Some(cluster) = vm_hosts(2, &[]) else { return };
    let (first, second) = (cluster.host(1), cluster.host(2));
    let network = first.create_network(json!({ "name": "one" }))["uuid"].clone();
    // Keeps the network on the first host: the hosts of a test see each other's processes, and removing it would end those of
    // the other host.
    let database = ClusterDatabase::open(&cluster.database_url, &cluster.directory);
    let id = network.as_str().unwrap().parse().unwrap();
    database.create_interface(id, first.node(), "keep", WantedAddress::Any);
    let placed_on = |node: &str| {
        json!({
            "network": [{ "network_uuid": network }], "placed_on": node, "side_channels": ["sf-agent"],
            "disk": [{ "base": "label:tiny", "size": 1 }, { "size": 1 }],
        })
    };
    let web = Instance::request(first, "web", &placed_on("m1"));
    let peer = Instance::request(first, "peer", &placed_on("m2"));
    let before = web.wait_for_state(first, "created");
    let mut console = web.console(first);
    peer.wait_for_state(first, "created");
    let mut peer_console = peer.console(second);
    console.log_in();
    peer_console.log_in();
    let address = web.address(first, 0);
    console.run_until(&format!("ip -4 addr show dev eth0 | grep -q 'inet {address}/24 '"));
    peer_console.run_until(&format!("ping -c 1 -W 5 {address} >/dev/null"));

    // It counts in memory, on its disk, and over a TCP connection.
    let count = "(n=0; while true; do n=$((n+1)); echo $n; echo $n >/root/count; usleep 50000 || echo usleep $? >>/tmp/ended; done \
                 2>>/tmp/ended | nc -l -p 5000 2>>/tmp/ended; echo nc $? >>/tmp/ended) >/dev/null 2>&1 & true";
    console.run(count);
    console.run_until("netstat -ltn | grep -q ':5000 '");
    peer_console.run(&format!("(sleep 100000 | nc {address} 5000 >/tmp/received) >/dev/null 2>&1 & true"));
    peer_console.run_until("[ -s /tmp/received ]");
    console
        .run("dd if=/dev/urandom of=/root/data bs=64k count=64 2>/dev/null; cat /root/data >/dev/vdc; sync");
    let sum = console.run("md5sum </root/data");
    let read_disk = "blockdev --flushbufs /dev/vdc; head -c 4194304 /dev/vdc | md5sum";
    assert_eq!(console.run(read_disk), sum);
    let boot = console.run("cat /proc/sys/kernel/random/boot_id");
    let password = display_password(first, &web);
    assert!(web.console_text(first).contains("login:"));

    let moved = migrate(second, &web, "m2");
    for field in ["uuid", "name", "interfaces", "power_state", "disks"] {
        assert_eq!(moved[field], before[field], "{field}");
    }
    assert!(moved["generation"].as_i64() > before["generation"].as_i64());
    assert!(!web.vm_dir(&cluster, 1).exists());
    let mut console = web.console(second);
    assert_connected(&mut peer_console, &mut console);
    assert_eq!(console.run("cat /proc/sys/kernel/random/boot_id"), boot, "it did not reboot");
    // The data is read from the disk of the second host.
    assert_eq!(console.run(read_disk), sum);
    assert_eq!(display_password(first, &web), password);
    wait_for("the console log to continue", TIMEOUT, || {
        let text = web.console_text(first);
        (text.contains("login:") && text.rfind("flushbufs") > text.find("login:")).then_some(())
    });
    wait_for("the agent to be ready", TIMEOUT, || {
        (web.record(first)["agent_state"] == "ready").then_some(())
    });
    let event = wait_for("the event of the migration", TIMEOUT, || {
        web.events(first, "moved to the target of its migration").pop()
    });
    let resumed =
        wait_for("the event of the target", TIMEOUT, || web.events(first, "migrated to another node").pop());
    println!("downtime: {} ms until the instance was moved", event["extra"]["downtime_ms"]);
    println!(
        "the guest ran on the target {:.3} s before the source was removed",
        event["timestamp"].as_f64().unwrap() - resumed["timestamp"].as_f64().unwrap()
    );

    // And back, now through the other daemon.
    let back = migrate(second, &web, "m1");
    assert!(back["generation"].as_i64() > moved["generation"].as_i64());
    assert_eq!(back["interfaces"], before["interfaces"]);
    assert_connected(&mut peer_console, &mut web.console(first));
    web.post(first, "/poweroff");
    assert_eq!(processes(&web), (vec![], vec![]));

    // Its disks move while it is off, and it can be powered off for that.
    let off = migrate(first, &web, "m2");
    assert_eq!(off["power_state"], "off");
    assert!(!web.vm_dir(&cluster, 1).exists() && processes(&web) == (vec![], vec![]));
    assert!(web.console_text(first).contains("login:"));
    web.post(first, "/poweron");
    let operation = request(first, &web, json!({ "stop": true }));
    let ended = wait_until_ended(first, &operation);
    assert_eq!(ended["state"], "complete", "{ended}");
    wait_for("the instance to be started on the target", TIMEOUT, || {
        let record = web.record(first);
        (record["node"] == "m1" && record["power_state"] == "on").then_some(())
    });
    let mut console = web.console(first);
    console.log_in();
    assert_eq!(console.run("md5sum </root/data"), sum);
    web.delete(first);
    peer.delete(first);
}

#[test]
fn failed_migration_leaves_guest_running_on_its_host() {
    if !enter_vm_namespaces("migration::failed_migration_leaves_guest_running_on_its_host") {
        return;
    }
    let settings = [("NODE_CHECKIN_MAXIMUM", "6"), ("CLUSTER_OP_LEASE", "3")];
    let Some(mut cluster) = vm_hosts(2, &settings) else { return };
    let first = cluster.host(1);
    let web = Instance::create(first, "web", &json!({ "placed_on": "m1" }));
    let mut console = web.console(first);
    console.log_in();
    console.run(
        "(n=0; while true; do n=$((n+1)); echo $n >/root/count; usleep 50000; done) >/dev/null 2>&1 & true",
    );
    let process = web.process().unwrap();

    // Cancelled.
    let operation = migrate_slowly(first, &web);
    assert_eq!(processes(&web).1.len(), 1);
    // Without KVM the guest is stopped while its memory is copied.
    assert!(web.vm_dir(&cluster, 1).join("migrating").exists());
    console.type_line("echo input-of-a\"\"-stopped-guest");
    let copied = || first.get(&operation)["progress"]["done"].as_u64();
    let before = copied();
    wait_for("more memory to be copied", TIMEOUT, || (copied() > before).then_some(()));
    assert!(!web.console_text(first).contains("input-of-a-stopped-guest"));
    assert_eq!(web.record(first)["power_state"], "on");
    assert_eq!(first.call(Method::POST, &web.path("/migrate/cancel"), None).0, 200);
    let ended = wait_until_ended(first, &operation);
    assert!(ended["error_report"]["message"].to_string().contains("cancelled"), "{ended}");
    console.wait_for("input-of-a-stopped-guest");
    assert_stays(&cluster, &web, process, &mut console);

    // The target dies.
    let operation = migrate_slowly(cluster.host(1), &web);
    kill(Pid::from_raw(processes(&web).1[0]), Signal::SIGKILL).unwrap();
    let ended = wait_until_ended(cluster.host(1), &operation);
    assert_eq!(ended["state"], "error", "{ended}");
    assert_stays(&cluster, &web, process, &mut console);

    // The daemon of the target dies.
    let operation = migrate_slowly(cluster.host(1), &web);
    cluster.hosts[1].kill();
    let ended = wait_until_ended(cluster.host(1), &operation);
    assert_eq!(ended["state"], "error", "{ended}");
    cluster.hosts[1].start();
    assert_stays(&cluster, &web, process, &mut console);

    // The daemon of the source dies, and with it the console.
    let operation = migrate_slowly(cluster.host(1), &web);
    cluster.hosts[0].kill();
    cluster.hosts[0].start();
    let ended = wait_until_ended(cluster.host(1), &operation);
    assert!(ended["error_report"]["message"].to_string().contains("interrupted"), "{ended}");
    let mut console = web.console(cluster.host(1));
    assert_stays(&cluster, &web, process, &mut console);
    web.delete(cluster.host(1));
}
