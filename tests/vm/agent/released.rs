//! The released agent in a guest, which knows nothing of what ours adds.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use muster_test_cluster::{enter_vm_namespaces, publish_image, single_vm_host};
use muster_testing::skipped;
use serde_json::json;

use super::{ask, console, execute, said, wait_until_ready};
use crate::instance::{Instance, bytes};

/// Makes a disk that has Debian's Python and the agent in it, for a guest to change its root to.
const MAKE_DISK: &str = r#"
set -eu
folder=$1
mkdir -p "$folder"
/usr/bin/python3 -m venv "$folder/venv"
tree=$folder/tree
mkdir -p "$tree/usr/bin" "$tree/usr/lib" "$tree/lib64" "$tree/bin" "$tree/dev" "$tree/proc" "$tree/etc" "$tree/tmp" "$tree/root"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --target "$tree/agent" 'shakenfist-agent==0.4.1' 'setuptools<81'
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
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -d "$tree" "$folder/disk.raw" 400M
qemu-img convert -O qcow2 "$folder/disk.raw" "$folder/disk.part"
rm -rf "$tree" "$folder/disk.raw" "$folder/venv"
mv "$folder/disk.part" "$folder/disk.qcow2"
"#;

/// The disk, made once; nothing when the agent cannot be had.
fn disk() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("released-agent");
    let disk = folder.join("disk.qcow2");
    if !disk.exists() {
        let _ = std::fs::remove_dir_all(&folder);
        let made = Command::new("sh").args(["-c", MAKE_DISK, "sh"]).arg(&folder).status();
        made.ok().filter(ExitStatus::success)?;
    }
    Some(disk)
}

#[test]
fn the_released_agent_runs_commands_and_moves_files() {
    // Made where there is a network, before the world is entered that has none.
    let Some(disk) = disk() else { return skipped("the released agent from PyPI") };
    if !enter_vm_namespaces("agent::released::the_released_agent_runs_commands_and_moves_files") {
        return;
    }
    let mut world = publish_image(single_vm_host(&[]), "released", &disk);
    let machine = &mut world.hosts[0];
    let changes = json!({
        "disk": [{ "base": "label:tiny", "size": 1 }, { "base": "label:released" }],
        "side_channels": ["sf-agent"], "memory": 256,
    });
    let one = Instance::create(machine, "one", &changes);
    wait_until_ready(machine, &one);
    let mut console = console(machine, &one);
    console.run("mv /usr/bin/muster-agent /usr/bin/away; killall muster-agent; mount -t ext4 /dev/vdc /mnt");
    console.run("mount -o bind /dev /mnt/dev; mount -t proc proc /mnt/proc");
    let agent = "chroot /mnt /bin/busybox env PATH=/bin:/usr/bin PYTHONPATH=/agent /usr/bin/python3 -c \
                 'from shakenfist_agent.main import cli; cli()' daemon run";
    console.run(&format!("({agent} >/root/agent.log 2>&1 </dev/null &)"));
    // It is another one: it is not in our root.
    muster_testing::wait_for("the released agent to be ready", crate::PATIENCE, || {
        let record = one.record(machine);
        if !record["agent_state"].as_str()?.starts_with("ready") {
            return None;
        }
        (execute(machine, &one, "cat /bin/systemctl")["return-code"] == 0).then_some(())
    });

    let result = execute(machine, &one, "echo here; echo there >&2; exit 3");
    assert_eq!((&result["return-code"], &result["stdout"]), (&json!(3), &json!("here\n")), "{result}");
    assert_eq!(result["stderr"], "there\n", "{result}");

    // A file out of it and in again.
    said(machine, &one, "head -c 300000 /dev/urandom >/root/out");
    let sum = said(machine, &one, "sha512sum </root/out");
    let got = ask(machine, &one, "get", json!({ "path": "/root/out" })).wait_for(machine, "complete");
    let blob = got["results"]["0"]["content_blob"].clone();
    assert_eq!(bytes(machine, &format!("/blobs/{}/data", blob.as_str().unwrap())).len(), 300_000);
    let put = json!({ "blob_uuid": blob, "path": "/root/in", "mode": 416 });
    ask(machine, &one, "put", put).wait_for(machine, "complete");
    assert_eq!(said(machine, &one, "sha512sum </root/in"), sum);
    ask(machine, &one, "get", json!({ "path": "/root/absent" })).wait_for(machine, "error");

    // It forgets what it was doing: a command that is sent again is told of.
    let line = "echo ran >>/root/ran; sleep 3; echo done";
    let command = ask(machine, &one, "execute", json!({ "command_line": line }));
    command.wait_for(machine, "executing");
    console.run_until("[ -e /mnt/root/ran ]");
    machine.kill();
    machine.start();
    let record = command.wait_for(machine, "complete");
    assert_eq!(record["results"]["0"]["stdout"], "done\n", "{record}");
    let told = command.messages(machine);
    assert!(told.iter().any(|message| message.contains("second time")), "{told:?}");
}
