//! A VM whose host has no disk space.

use muster_test_cluster::{Host, enter_vm_namespaces, vm_hosts};
use muster_testing::{daemon_program, wait_for};
use serde_json::json;

use crate::TIMEOUT;
use crate::instance::Instance;

/// Waits for a power state. On a full disk there are no events.
fn wait_for_power(host: &Host, instance: &Instance, power: &str) {
    wait_for(&format!("the VM to be {power}"), TIMEOUT, || {
        (instance.record(host)["power_state"] == power).then_some(())
    });
}

#[test]
fn vm_that_a_full_disk_paused_continues_when_there_is_space() {
    if !enter_vm_namespaces("full_disk::vm_that_a_full_disk_paused_continues_when_there_is_space") {
        return;
    }
    let Some(mut cluster) = vm_hosts(1, &[("NODE_CHECKIN_MAXIMUM", "4"), ("NODE_DISK_RESERVATION_GB", "0")])
    else {
        return;
    };
    let data = cluster.directory.join("m1/data");
    let data = data.display();
    cluster.hosts[0].stop();
    cluster.hosts[0].namespace.sh(&format!(
        "mv {data} {data}.old && mkdir {data} && mount -t tmpfs -o size=3g none {data} && cp -a {data}.old/. {data}/ \
         && {} node adopt --moved --data-dir {data}",
        daemon_program()
    ));
    cluster.hosts[0].start();
    let host = cluster.host(1);
    let web = Instance::create(host, "web", &json!({}));
    let mut console = web.console(host);
    console.log_in();
    // Fails if something was written in between.
    let fill = format!("mount -o remount,size=$(df -B1 --output=used {data} | tail -n 1) {data}");
    wait_for("the disk to be full", TIMEOUT, || host.namespace.succeeds(&fill).then_some(()));
    console.type_line("head -c 5000000 /dev/urandom >/root/file; sync; echo writ\\ten");
    wait_for_power(host, &web, "paused");
    host.namespace.sh(&format!("mount -o remount,size=3g {data}"));
    wait_for_power(host, &web, "on");
    console.wait_for("written");
    web.delete(host);
}
