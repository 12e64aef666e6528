//! The released agent, which lacks the extensions of Muster's agent.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use muster_test_cluster::{enter_vm_namespaces, publish_image, single_vm_host};
use muster_testing::skipped;
use serde_json::json;

use super::{console, execute, request, run, wait_until_ready};
use crate::instance::{Instance, bytes};

/// Creates a disk with Debian's Python and the agent, which the guest uses as a chroot.
const CREATE_DISK_SCRIPT: &str = r#"
set -eu
directory=$1
mkdir -p "$directory"
/usr/bin/python3 -m venv "$directory/venv"
tree=$directory/tree
mkdir -p "$tree/usr/bin" "$tree/usr/lib" "$tree/lib64" "$tree/bin" "$tree/dev" "$tree/proc" "$tree/etc" "$tree/tmp" "$tree/root"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check --target "$tree/agent" 'shakenfist-agent==0.4.1' 'setuptools<81'
python=$(readlink -f /usr/bin/python3)
cp "$python" "$tree/usr/bin/python3"
cp -r "/usr/lib/$(basename "$python")" "$tree/usr/lib/"
rm -rf "$tree/usr/lib/$(basename "$python")"/config-* "$tree/usr/lib/$(basename "$python")"/dist-packages
cp "$(command -v busybox)" "$tree/bin/busybox"
for name in sh cat echo chmod sleep sha512sum head rm; do ln -s busybox "$tree/bin/$name"; done
printf '#!/bin/sh\necho running\n' >"$tree/bin/systemctl"
chmod 755 "$tree/bin/systemctl"
echo 'root:x:0:0:root:/root:/bin/sh' >"$tree/etc/passwd"
find "$tree" -type f \( -name '*.so*' -o -path '*/usr/bin/python3' -o -name busybox \) -exec ldd {} + 2>/dev/null |
    sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | sort -u | while read -r library; do
    mkdir -p "$tree$(dirname "$library")"
    cp -L "$library" "$tree$library"
done
cp -L /lib64/ld-linux-x86-64.so.2 "$tree/lib64/"
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -d "$tree" "$directory/disk.raw" 400M
qemu-img convert -O qcow2 "$directory/disk.raw" "$directory/disk.part"
rm -rf "$tree" "$directory/disk.raw" "$directory/venv"
mv "$directory/disk.part" "$directory/disk.qcow2"
"#;

/// Returns the disk, created once, or `None` if the agent cannot be installed.
fn disk() -> Option<PathBuf> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("released-agent");
    let disk = directory.join("disk.qcow2");
    if !disk.exists() {
        let _ = std::fs::remove_dir_all(&directory);
        let script = Command::new("sh").args(["-c", CREATE_DISK_SCRIPT, "sh"]).arg(&directory).status();
        script.ok().filter(ExitStatus::success)?;
    }
    Some(disk)
}

#[test]
fn released_agent_runs_commands_and_transfers_files() {
    // Created before the namespaces are entered, which have no internet access.
    let Some(disk) = disk() else { return skipped("the released agent from PyPI") };
    if !enter_vm_namespaces("agent::released::released_agent_runs_commands_and_transfers_files") {
        return;
    }
    let mut cluster = publish_image(single_vm_host(&[]), "released", &disk);
    let host = &mut cluster.hosts[0];
    let changes = json!({
        "disk": [{ "base": "label:tiny", "size": 1 }, { "base": "label:released" }],
        "side_channels": ["sf-agent"], "memory": 256,
    });
    let one = Instance::create(host, "one", &changes);
    wait_until_ready(host, &one);
    let mut console = console(host, &one);
    console.run("mv /usr/bin/muster-agent /usr/bin/away; killall muster-agent; mount -t ext4 /dev/vdc /mnt");
    console.run("mount -o bind /dev /mnt/dev; mount -t proc proc /mnt/proc");
    let agent = "chroot /mnt /bin/busybox env PATH=/bin:/usr/bin PYTHONPATH=/agent /usr/bin/python3 -c \
                 'from shakenfist_agent.main import cli; cli()' daemon run";
    console.run(&format!("({agent} >/root/agent.log 2>&1 </dev/null &)"));
    // The file exists only in the chroot, hence the released agent executes the command.
    muster_testing::wait_for("the released agent to be ready", crate::TIMEOUT, || {
        let record = one.record(host);
        if !record["agent_state"].as_str()?.starts_with("ready") {
            return None;
        }
        (execute(host, &one, "cat /bin/systemctl")["return-code"] == 0).then_some(())
    });

    let result = execute(host, &one, "echo here; echo there >&2; exit 3");
    assert_eq!((&result["return-code"], &result["stdout"]), (&json!(3), &json!("here\n")), "{result}");
    assert_eq!(result["stderr"], "there\n", "{result}");

    // Read a file from the guest and write it back.
    run(host, &one, "head -c 300000 /dev/urandom >/root/out");
    let checksum = run(host, &one, "sha512sum </root/out");
    let got = request(host, &one, "get", json!({ "path": "/root/out" })).wait_for(host, "complete");
    let blob = got["results"]["0"]["content_blob"].clone();
    assert_eq!(bytes(host, &format!("/blobs/{}/data", blob.as_str().unwrap())).len(), 300_000);
    let put = json!({ "blob_uuid": blob, "path": "/root/in", "mode": 416 });
    request(host, &one, "put", put).wait_for(host, "complete");
    assert_eq!(run(host, &one, "sha512sum </root/in"), checksum);
    request(host, &one, "get", json!({ "path": "/root/absent" })).wait_for(host, "error");

    // The agent does not remember commands: sending one again is recorded as an event.
    let line = "echo ran >>/root/ran; sleep 3; echo done";
    let command = request(host, &one, "execute", json!({ "command_line": line }));
    command.wait_for(host, "executing");
    console.run_until("[ -e /mnt/root/ran ]");
    host.kill();
    host.start();
    let record = command.wait_for(host, "complete");
    assert_eq!(record["results"]["0"]["stdout"], "done\n", "{record}");
    let messages = command.messages(host);
    assert!(messages.iter().any(|message| message.contains("second time")), "{messages:?}");
}
