//! A node with VMs, and the console of a guest.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use muster_node::LocalNode;
use muster_testing::skipped;
use muster_types::ids::{BlobId, InstanceId, NodeId};
use muster_types::instance::{FencingPolicy, MachineType, SideChannel};
use muster_types::node::{HostFeature, NodeApi};
use muster_types::settings::Settings;
use muster_types::spec::{DiskBus, Vdi, VideoSpec};
use muster_types::vm::{
    ChangeStream, ConfigDriveFile, ConsolePorts, DiskKind, DiskPlan, VmApi, VmPlan, VmPower,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long an emulated guest may take on a busy host.
pub(crate) const GUEST_TIMEOUT: Duration = Duration::from_secs(240);

/// A node whose storage has the image of the small guest. VMs and files are removed when it is dropped.
pub(crate) struct Fixture {
    node: Option<LocalNode>,
    pub(crate) storage: tempfile::TempDir,
    pub(crate) image: BlobId,
    /// The ports of all plans.
    used_ports: Mutex<Vec<u16>>,
}

impl Fixture {
    /// Creates the fixture, or returns `None` if this host cannot run VMs.
    pub(crate) async fn new() -> Option<Self> {
        let image = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join("target/image/tiny.qcow2");
        if !image.exists() {
            skipped("target/image/tiny.qcow2 (make image)");
            return None;
        }
        let storage = tempfile::Builder::new().prefix("muster-vm-test-").tempdir().unwrap();
        let blob = BlobId::new();
        let conversions = storage.path().join("conversions");
        std::fs::create_dir(&conversions).unwrap();
        std::fs::copy(image, conversions.join(format!("{blob}.qcow2"))).unwrap();
        let mut fixture = Self { node: None, storage, image: blob, used_ports: Mutex::default() };
        fixture.restart_daemon();
        let limits = fixture.node().report().await.unwrap().limits;
        for feature in [HostFeature::Vms, HostFeature::Images] {
            if let Some(why) = limits.get(&feature) {
                skipped(why);
                return None;
            }
        }
        Some(fixture)
    }

    /// Replaces the daemon by a new one.
    pub(crate) fn restart_daemon(&mut self) {
        self.stop_daemon();
        self.node = Some(node_at(self.storage.path()));
    }

    /// Stops the daemon; VMs continue to run.
    pub(crate) fn stop_daemon(&mut self) {
        drop(self.node.take());
    }

    pub(crate) fn node(&self) -> &LocalNode {
        self.node.as_ref().unwrap()
    }

    pub(crate) fn vms(&self) -> &dyn VmApi {
        self.node().vms()
    }

    /// Returns a plan for the small guest.
    pub(crate) async fn plan(&self, name: &str) -> VmPlan {
        let used_ports = self.used_ports.lock().unwrap().clone();
        let plan = plan(self.vms(), self.image, &used_ports, name).await;
        let ConsolePorts { console, vdi, vdi_tls } = plan.ports;
        self.used_ports.lock().unwrap().extend([console, vdi].into_iter().chain(vdi_tls));
        plan
    }

    /// Builds and starts a VM, and connects to its console.
    pub(crate) async fn boot(&self, plan: &VmPlan) -> Console {
        self.vms().build(plan).await.unwrap();
        self.vms().start(plan).await.unwrap();
        assert_eq!(self.power(plan).await, VmPower::On);
        Console::open(plan.ports.console).await
    }

    pub(crate) async fn power(&self, plan: &VmPlan) -> VmPower {
        self.vms().power(plan.id).await.unwrap().unwrap()
    }

    /// Waits for a power state, relying on change notifications alone.
    pub(crate) async fn wait_for_power(
        &self,
        changes: &mut ChangeStream,
        plan: &VmPlan,
        limit: Duration,
        is_expected: impl Fn(&VmPower) -> bool,
    ) -> VmPower {
        let wait = async {
            loop {
                let power = self.power(plan).await;
                if is_expected(&power) {
                    return power;
                }
                next(changes).await.unwrap();
            }
        };
        match timeout(limit, wait).await {
            Ok(power) => power,
            Err(_) => panic!("still {:?} after {limit:?}", self.power(plan).await),
        }
    }

    pub(crate) fn vm_dir(&self, plan: &VmPlan) -> PathBuf {
        self.storage.path().join("machines").join(plan.id.to_string())
    }

    pub(crate) fn pid(&self, plan: &VmPlan) -> u32 {
        std::fs::read_to_string(self.vm_dir(plan).join("pid")).unwrap().parse().unwrap()
    }

    /// Returns the fields of `/proc/<pid>/status` of a VM's process.
    pub(crate) fn status(&self, plan: &VmPlan) -> BTreeMap<String, String> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid(plan))).unwrap();
        let line =
            |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
        text.lines().filter_map(line).collect()
    }
}

/// Creates a node on existing storage.
pub(crate) fn node_at(storage: &Path) -> LocalNode {
    let settings = Settings::from_pairs(&[("NODE_MESH_IP", "127.0.0.1"), ("NODE_NAME", "here")]).unwrap();
    LocalNode::new(NodeId::new(), &settings, storage, Ipv4Addr::LOCALHOST.into())
}

/// Returns a plan for the small guest, with ports that are not in `used_ports`.
pub(crate) async fn plan(vms: &dyn VmApi, image: BlobId, used_ports: &[u16], name: &str) -> VmPlan {
    let ports = vms.choose_ports(3, used_ports).await.unwrap();
    assert!(
        ports.iter().all(|port| (30000..50000).contains(port) && !used_ports.contains(port)),
        "{ports:?}"
    );
    let meta_data = format!(r#"{{"uuid": "{}", "hostname": "{name}"}}"#, InstanceId::new());
    let file = |path: &str, text: String| ConfigDriveFile { path: path.into(), content: text.into_bytes() };
    let disk = |device: &str, kind, base| DiskPlan {
        device: device.into(),
        bus: DiskBus::Virtio,
        kind,
        size: None,
        base,
    };
    VmPlan {
        id: InstanceId::new(),
        generation: 1,
        name: name.into(),
        cpus: 1,
        memory_mb: 128,
        machine_type: MachineType::Q35,
        uefi: false,
        secure_boot: false,
        nvram_template: None,
        disks: vec![disk("vda", DiskKind::Disk, Some(image)), disk("vdb", DiskKind::ConfigDrive, None)],
        nics: Vec::new(),
        video: VideoSpec { model: "cirrus".into(), memory: 16384, vdi: Vdi::Spice },
        ports: ConsolePorts { console: ports[0], vdi: ports[1], vdi_tls: Some(ports[2]) },
        config_drive: Some(vec![file("openstack/latest/meta_data.json", meta_data)]),
        side_channels: vec![SideChannel::Agent],
        fencing: FencingPolicy::None,
        shared_storage: None,
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        drop(self.node.take());
        let dirs = std::fs::read_dir(self.storage.path().join("machines")).into_iter().flatten().flatten();
        for dir in dirs {
            let id = dir.file_name().to_string_lossy().into_owned();
            let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap_or_default();
            let command_line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if !pid.is_empty() && command_line.contains(&id) {
                let _ = Command::new("kill").args(["-9", &pid]).status();
                muster_testing::wait_for("the exit of QEMU", GUEST_TIMEOUT, || {
                    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                    (stat.is_empty() || stat.contains(") Z")).then_some(())
                });
            }
            // The cgroup can be removed once it is empty.
            let script = format!(
                "find /sys/fs/cgroup -type d -path '*/muster/{id}' -exec rmdir {{}} + 2>/dev/null; true"
            );
            let _ = Command::new("sh").args(["-c", &script]).status();
        }
    }
}

pub(crate) async fn next(changes: &mut ChangeStream) -> Option<InstanceId> {
    std::future::poll_fn(|context| changes.as_mut().poll_next(context)).await
}

/// The serial console of a guest.
pub(crate) struct Console {
    stream: TcpStream,
    text: String,
    seen: usize,
    commands: u32,
}

impl Console {
    pub(crate) async fn open(port: u16) -> Self {
        // A new daemon opens the port when it has found the VM.
        let connect = async {
            loop {
                match TcpStream::connect(("127.0.0.1", port)).await {
                    Ok(stream) => return stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let stream = timeout(GUEST_TIMEOUT, connect).await.expect("the port of the console is open");
        Self { stream, text: String::new(), seen: 0, commands: 0 }
    }

    /// Waits for the next occurrence of a text, and returns the output before it.
    pub(crate) async fn wait_for(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = self.text[self.seen..].find(text) {
                let before = self.text[self.seen..self.seen + at].to_owned();
                self.seen += at + text.len();
                return before;
            }
            let mut buffer = [0; 4096];
            match timeout(GUEST_TIMEOUT, self.stream.read(&mut buffer)).await {
                // Telnet negotiation is not ASCII.
                Ok(Ok(size @ 1..)) => {
                    let shown = buffer[..size].iter().filter(|byte| byte.is_ascii());
                    self.text.extend(shown.map(|byte| char::from(*byte)));
                }
                end => panic!("no {text:?} on the console ({end:?}):\n{}", self.text),
            }
        }
    }

    pub(crate) async fn type_line(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// Waits for the login prompt, logs in, and returns the output before the prompt.
    pub(crate) async fn log_in(&mut self) -> String {
        let before = self.wait_for(" login: ").await;
        self.type_line("root").await;
        self.wait_for("# ").await;
        before
    }

    /// Runs a command in the guest's shell and returns its output.
    pub(crate) async fn run(&mut self, command: &str) -> String {
        self.commands += 1;
        let end = format!("end-of-{}", self.commands);
        // The quotes distinguish the echoed command from its output.
        self.type_line(&format!("echo \"be\"gin; {command}; echo \"e\"{}", &end[1..])).await;
        self.wait_for("begin\r\n").await;
        self.wait_for(&end).await.replace('\r', "")
    }
}

pub(crate) fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{script}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}
