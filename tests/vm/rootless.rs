//! `muster up` and `muster down` with real guests: without root in namespaces of its own, and as root.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use muster_test_cluster::{enter_vm_namespaces, qemu_processes, tiny_image};
use muster_testing::{NetworkNamespace, skipped, wait_for};
use serde_json::Value;

use crate::TIMEOUT;

/// A user without any entry in the databases of the system.
pub(crate) const UID: u32 = 54_321;
const OUTSIDE: &str = "198.51.100.1";

/// A host with a link to a peer outside, and a user on it.
pub(crate) struct RootlessHost {
    pub(crate) host: NetworkNamespace,
    outside: NetworkNamespace,
    directory: tempfile::TempDir,
}

impl RootlessHost {
    pub(crate) fn new() -> Self {
        let (host, outside) = (NetworkNamespace::new("host"), NetworkNamespace::new("outside"));
        host.connect("eth9", &outside, "eth9");
        outside.sh(&format!("ip address add {OUTSIDE}/24 dev eth9 && ip link set eth9 up"));
        host.sh(&format!(
            "ip address add 198.51.100.2/24 dev eth9 && ip link set eth9 up && ip route add default via {OUTSIDE}"
        ));
        let directory = tempfile::tempdir().unwrap();
        for dir in directory.path().ancestors().take(2) {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
        }
        let this = Self { host, outside, directory };
        std::fs::copy(env!("CARGO_BIN_EXE_muster"), this.path("muster")).unwrap();
        std::fs::copy(tiny_image(), this.path("tiny.qcow2")).unwrap();
        let (tun, home) = (this.path("tun"), this.path("home"));
        this.serve_outside();
        std::fs::create_dir(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(UID), Some(UID)).unwrap();
        // As on ordinary hosts, everyone may open it.
        this.host.sh(&format!(
            "mknod {0} c 10 200 && chmod 666 {0} && mount --bind {0} /dev/net/tun",
            tun.display()
        ));
        this
    }

    /// Starts a web server and a name server outside, and lets the host use the latter.
    fn serve_outside(&self) {
        let (site, resolver) = (self.path("site"), self.path("resolv.conf"));
        std::fs::create_dir(&site).unwrap();
        std::fs::write(site.join("index.html"), "hello from outside\n").unwrap();
        std::fs::write(&resolver, format!("nameserver {OUTSIDE}\n")).unwrap();
        std::fs::set_permissions(&resolver, std::fs::Permissions::from_mode(0o644)).unwrap();
        self.outside.sh(&format!(
            "busybox httpd -p 80 -h {} && dnsmasq --conf-file=/dev/null --no-resolv --no-hosts --bind-interfaces --user=root \
             --pid-file={} --listen-address={OUTSIDE} --address=/outside.example/{OUTSIDE}",
            site.display(),
            self.path("dnsmasq.pid").display()
        ));
        self.host.sh(&format!("mount --bind {} /etc/resolv.conf", resolver.display()));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the script that runs a program as the user on the host.
    fn as_user(&self, program: &str) -> String {
        format!(
            "cd / && exec env -i HOME={} PATH=/usr/bin:/bin MUSTER_NODE_DISK_RESERVATION_GB=0 MUSTER_CPU_OVERCOMMIT_RATIO=20 \
             setpriv --reuid={UID} --regid={UID} --clear-groups --inh-caps=-all --bounding-set=-all {program}",
            self.path("home").display()
        )
    }

    fn command(&self, arguments: &str) -> String {
        self.as_user(&format!("{} {arguments}", self.path("muster").display()))
    }

    pub(crate) fn try_muster(&self, arguments: &str) -> (bool, String) {
        let Output { status, stdout, stderr } = self.host.try_sh(&self.command(arguments));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (status.success(), text(&stdout) + &text(&stderr))
    }

    pub(crate) fn muster(&self, arguments: &str) -> String {
        let (success, text) = self.try_muster(arguments);
        assert!(success, "{arguments}: {text}{}", self.log());
        text
    }

    pub(crate) fn json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.muster(&format!("--json {arguments}"))).unwrap()
    }

    /// Runs a program as the user on the host.
    pub(crate) fn run(&self, program: &str) -> Output {
        self.host.try_sh(&self.as_user(program))
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("home/.local/share/muster/muster.log")).unwrap_or_default()
    }

    /// Returns everything of the host that a cluster could have changed.
    pub(crate) fn inventory(&self) -> String {
        self.host
            .sh("ip -o link | cut -d: -f2; ip -o -4 address | cut -d/ -f1; ip route; nft list ruleset; ls -A /run; cat /proc/mounts; \
             cat /proc/sys/net/ipv4/ip_forward; find /sys/fs/cgroup -name 'muster-54321*'")
    }
}

/// Returns the command lines of the processes of the user.
pub(crate) fn processes() -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let is_of_user = status.lines().any(|line| line.starts_with(&format!("Uid:\t{UID}\t")));
        let is_zombie = status.contains("\nState:\tZ");
        if is_of_user && !is_zombie {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push(String::from_utf8_lossy(&line).replace('\0', " "));
        }
    }
    found
}

pub(crate) fn has_pasta() -> bool {
    Path::new("/usr/bin/pasta").exists()
}

#[test]
fn unprivileged_user_runs_guests_and_leaves_nothing() {
    if !has_pasta() {
        return skipped("pasta (Debian package passt)");
    }
    if !enter_vm_namespaces("rootless::unprivileged_user_runs_guests_and_leaves_nothing") {
        return;
    }
    let cluster = RootlessHost::new();
    let before = cluster.inventory();
    let doctor: Vec<Value> = serde_json::from_value(cluster.json("doctor")).unwrap();
    let check = |name: &str| doctor.iter().find(|check| check["name"] == name).unwrap()["state"].clone();
    for name in ["user-namespaces", "pasta", "tun-for-users", "capabilities", "tun", "database"] {
        assert_eq!(check(name), "ok", "{doctor:?}");
    }

    let image = cluster.path("tiny.qcow2");
    let up = format!("up --background --image {}", image.display());
    let text = cluster.muster(&up);
    for expected in
        ["web UI       http://127.0.0.1:13000/ui/#ticket=", "credentials.json", "Three things to try"]
    {
        assert!(text.contains(expected), "{text}");
    }
    let (success, text) = cluster.try_muster(&up);
    assert!(!success && text.contains("already runs") && text.contains("muster down"), "{text}");

    cluster.muster("network create lan 10.0.0.0/24 --dns");
    wait_for("the image to be published", TIMEOUT, || cluster.try_muster("label show tiny").0.then_some(()));
    for (name, network) in [("one", "lan"), ("two", "lan,float")] {
        cluster.muster(&format!(
            "instance create {name} --cpus 1 --memory 128 --disk 1@tiny --network {network}"
        ));
    }
    let interface = |name: &str| cluster.json(&format!("instance interfaces {name}"))[0].clone();
    let (one, two) = (interface("one"), interface("two"));
    // The guests reach each other by address and by name.
    cluster.muster("exec two --wait 240 -- true");
    cluster.muster(&format!("exec one --wait 240 -- ping -c 10 -W 5 {}", two["ipv4"].as_str().unwrap()));
    cluster.muster(&format!("exec two --wait 240 -- ping -c 3 -W 5 {}", one["ipv4"].as_str().unwrap()));
    cluster.muster("exec one --wait 240 -- ping -c 3 -W 5 two");
    // They reach a server outside by its name, which the name server of the host knows.
    let page = cluster.muster("exec one --wait 240 -- wget -q -O - http://outside.example/");
    assert!(page.contains("hello from outside"), "{page}");
    // They do not reach the loopback address of the host, which pasta could map to the gateway.
    let request = "printf \"GET / HTTP/1.0\\r\\n\\r\\n\" | nc -w 5";
    let (_, text) = cluster.try_muster(&format!("exec one --wait 240 -- sh -c '{request} {OUTSIDE} 13000'"));
    assert!(!text.contains("HTTP/1"), "{text}");
    assert_eq!(cluster.inventory(), before, "the host has changed");

    // A floating address is reachable through a forwarded port.
    let floating = two["floating"].as_str().unwrap();
    assert!(banner_through_forward(&cluster, &format!("{floating}:22")).starts_with("SSH-2.0-"));
    // ssh reaches it without a port.
    let ssh = cluster.muster("ssh --print two");
    assert!(ssh.contains("ProxyCommand=") && ssh.contains(" forward - %h:%p --data-dir "), "{ssh}");
    let data = cluster.path("home/.local/share/muster");
    let proxy = cluster.command(&format!("forward - {floating}:22 --data-dir {}", data.display()));
    let banner = cluster.host.sh(&format!("printf 'SSH-2.0-test\\r\\n' | ({proxy}) | head -n 1"));
    assert!(banner.starts_with("SSH-2.0-"), "{banner}");

    let text = cluster.muster("down");
    assert!(text.contains("powering off one") && text.contains("nothing of it runs"), "{text}");
    assert_eq!(processes(), Vec::<String>::new());
    assert_eq!(cluster.inventory(), before);
    assert!(cluster.muster("down").contains("no cluster runs"));
    assert!(!cluster.path("home/.local/share/muster/muster.pid").exists());
    assert!(!cluster.path("home/.local/share/muster/forward.sock").exists());

    // The data is still there, and the guests start again.
    cluster.muster(&up);
    let list = cluster.json("instance list");
    assert_eq!(list.as_array().unwrap().len(), 2, "{list}");
    cluster.muster("instance poweron one");
    cluster.muster("exec one --wait 240 -- true");
    // Even when it is killed, nothing remains.
    let pid = std::fs::read_to_string(cluster.path("home/.local/share/muster/muster.pid")).unwrap();
    assert!(!qemu_processes().is_empty());
    Command::new("kill").args(["-KILL", pid.lines().next().unwrap()]).status().unwrap();
    wait_for("all processes to end", TIMEOUT, || processes().is_empty().then_some(()));
    assert_eq!(cluster.inventory(), before);
}

/// Connects to a target through `muster forward`, and returns the first line that it sends.
fn banner_through_forward(cluster: &RootlessHost, target: &str) -> String {
    let command = cluster.command(&format!("forward 0 {target}"));
    let mut child = cluster
        .host
        .run(move || Command::new("sh").args(["-c", &command]).stdout(Stdio::piped()).spawn().unwrap());
    let mut output = child.stdout.take().unwrap();
    let mut line = String::new();
    let mut byte = [0];
    while !line.ends_with('\n') {
        assert_eq!(output.read(&mut byte).unwrap(), 1, "{line}");
        line.push(byte[0].into());
    }
    let local: SocketAddr = line.split(' ').nth(1).unwrap().parse().unwrap();
    let banner = wait_for("a banner", TIMEOUT, || {
        cluster.host.run(move || {
            let mut stream = TcpStream::connect(local).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
            stream.write_all(b"SSH-2.0-test\r\n").ok()?;
            let mut text = [0; 64];
            let length = stream.read(&mut text).ok()?;
            Some(String::from_utf8_lossy(&text[..length]).into_owned()).filter(|text| !text.is_empty())
        })
    });
    child.kill().unwrap();
    child.wait().unwrap();
    banner
}

#[test]
fn says_why_it_is_impossible_without_root() {
    if !has_pasta() {
        return skipped("pasta (Debian package passt)");
    }
    if !enter_vm_namespaces("rootless::says_why_it_is_impossible_without_root") {
        return;
    }
    let cluster = RootlessHost::new();
    cluster.host.sh("chmod 600 /dev/net/tun");
    // A user namespace has its own limit, so that of the host stays as it is.
    let script = cluster.as_user(&format!(
        "unshare --user --map-current-user --keep-caps sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv \
         --ambient-caps=-all --inh-caps=-all {} up --background' 2>&1",
        cluster.path("muster").display()
    ));
    let output = cluster.host.try_sh(&script);
    let (success, text) = (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned());
    assert!(!success, "{text}");
    for expected in [
        "the kernel setting user.max_user_namespaces is 0",
        "sysctl -w user.max_user_namespaces=",
        "failed to open /dev/net/tun: Permission denied",
        "chmod 666 /dev/net/tun",
        "muster up --simulate 3",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    // What it offers works.
    cluster.muster("up --background --simulate 2");
    assert_eq!(cluster.json("node list").as_array().unwrap().len(), 2);
    cluster.muster("down");
    assert_eq!(processes(), Vec::<String>::new());
}

#[test]
fn guests_of_root_survive_down_unless_requested() {
    if !enter_vm_namespaces("rootless::guests_of_root_survive_down_unless_requested") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let image = tiny_image();
    let host = NetworkNamespace::new("host");
    let muster = |arguments: &str| {
        let script = format!(
            "exec env -i HOME={} PATH=$PATH MUSTER_CREDENTIALS={}/credentials.json MUSTER_NODE_DISK_RESERVATION_GB=0 {} {arguments} \
             </dev/null 2>&1",
            directory.path().display(),
            data.display(),
            env!("CARGO_BIN_EXE_muster")
        );
        host.sh(&script)
    };
    let dir = format!("--data-dir {}", data.display());
    let up = format!("up --background --demo {dir} --image {}", image.display());
    let text = muster(&up);
    assert!(text.contains("muster console demo"), "{text}");
    let guests = qemu_processes();
    assert_eq!(guests.len(), 1);
    let text = muster(&format!("down {dir}"));
    assert!(text.contains("these VMs and their networks keep running: demo"), "{text}");
    assert_eq!(qemu_processes(), guests);
    // The second demo uses what exists.
    muster(&up);
    assert_eq!(qemu_processes(), guests);
    let text = muster(&format!("down --guests {dir}"));
    assert!(text.contains("powering off demo") && text.contains("no VMs run"), "{text}");
    assert_eq!(qemu_processes(), []);
}
