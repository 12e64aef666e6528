//! What the tests share: nodes with machines, and the console of a guest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use muster_node::LocalNode;
use muster_testing::skipped;
use muster_types::ids::{BlobId, InstanceId, NodeId};
use muster_types::instance::{MachineType, SideChannel};
use muster_types::node::{Limit, NodeApi};
use muster_types::settings::Settings;
use muster_types::spec::{DiskBus, Vdi, VideoSpec};
use muster_types::vm::{ChangeStream, ConsolePorts, DiskKind, DiskPlan, DriveFile, VmApi, VmPlan, VmPower};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long anyone would wait for a guest that is emulated on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

/// A node with a disk that has the small guest. Everything ends with it.
pub(crate) struct World {
    node: Option<LocalNode>,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) image: BlobId,
    /// The ports of all plans.
    taken: Mutex<Vec<u16>>,
}

impl World {
    /// Nothing when this machine lacks what machines need.
    pub(crate) async fn new() -> Option<Self> {
        let image = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join("target/image/tiny.qcow2");
        if !image.exists() {
            skipped("target/image/tiny.qcow2 (make image)");
            return None;
        }
        let folder = tempfile::Builder::new().prefix("muster-machine-").tempdir().unwrap();
        let blob = BlobId::new();
        let conversions = folder.path().join("conversions");
        std::fs::create_dir(&conversions).unwrap();
        std::fs::copy(image, conversions.join(format!("{blob}.qcow2"))).unwrap();
        let mut world = Self { node: None, folder, image: blob, taken: Mutex::default() };
        world.restart();
        let limits = world.node().report().await.unwrap().limits;
        for limit in [Limit::VmApi, Limit::Images] {
            if let Some(why) = limits.get(&limit) {
                skipped(why);
                return None;
            }
        }
        Some(world)
    }

    /// Another daemon takes over from the one that was there.
    pub(crate) fn restart(&mut self) {
        self.leave();
        self.node = Some(node_at(self.folder.path()));
    }

    /// The daemon goes.
    pub(crate) fn leave(&mut self) {
        drop(self.node.take());
    }

    pub(crate) fn node(&self) -> &LocalNode {
        self.node.as_ref().unwrap()
    }

    pub(crate) fn vms(&self) -> &dyn VmApi {
        self.node().vms()
    }

    /// A plan for the small guest.
    pub(crate) async fn plan(&self, name: &str) -> VmPlan {
        let taken = self.taken.lock().unwrap().clone();
        let plan = plan(self.vms(), self.image, &taken, name).await;
        let ConsolePorts { console, vdi, vdi_tls } = plan.ports;
        self.taken.lock().unwrap().extend([console, vdi].into_iter().chain(vdi_tls));
        plan
    }

    /// Builds and starts it, and connects to its console.
    pub(crate) async fn boot(&self, plan: &VmPlan) -> Console {
        self.vms().build(plan).await.unwrap();
        self.vms().start(plan).await.unwrap();
        assert_eq!(self.power(plan).await, VmPower::On);
        Console::open(plan.ports.console).await
    }

    pub(crate) async fn power(&self, plan: &VmPlan) -> VmPower {
        self.vms().power(plan.id).await.unwrap().unwrap()
    }

    /// Waits until a machine's power is as wanted, told by changes alone.
    pub(crate) async fn wait_for_power(
        &self,
        changes: &mut ChangeStream,
        plan: &VmPlan,
        limit: Duration,
        wanted: impl Fn(&VmPower) -> bool,
    ) -> VmPower {
        let wait = async {
            loop {
                let power = self.power(plan).await;
                if wanted(&power) {
                    return power;
                }
                next(changes).await.unwrap();
            }
        };
        let waited = timeout(limit, wait).await;
        match waited {
            Ok(power) => power,
            Err(_) => panic!("still {:?} after {limit:?}", self.power(plan).await),
        }
    }

    pub(crate) fn place(&self, plan: &VmPlan) -> PathBuf {
        self.folder.path().join("machines").join(plan.id.to_string())
    }

    pub(crate) fn pid(&self, plan: &VmPlan) -> u32 {
        std::fs::read_to_string(self.place(plan).join("pid")).unwrap().parse().unwrap()
    }

    /// Files of the kernel about a machine's process, by the beginnings of their lines.
    pub(crate) fn status(&self, plan: &VmPlan) -> BTreeMap<String, String> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid(plan))).unwrap();
        let line =
            |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
        text.lines().filter_map(line).collect()
    }
}

/// A node on a disk that is there.
pub(crate) fn node_at(folder: &Path) -> LocalNode {
    let settings = Settings::with(&[("NODE_MESH_IP", "127.0.0.1"), ("NODE_NAME", "here")]).unwrap();
    LocalNode::new(NodeId::new(), &settings, folder)
}

/// A plan for the small guest, with ports that are not taken.
pub(crate) async fn plan(machines: &dyn VmApi, image: BlobId, taken: &[u16], name: &str) -> VmPlan {
    let ports = machines.choose_ports(3, taken).await.unwrap();
    assert!(ports.iter().all(|port| (30000..50000).contains(port) && !taken.contains(port)), "{ports:?}");
    let meta_data = format!(r#"{{"uuid": "{}", "hostname": "{name}"}}"#, InstanceId::new());
    let file = |path: &str, text: String| DriveFile { path: path.into(), content: text.into_bytes() };
    let disk = |device: &str, kind, base| DiskPlan {
        device: device.into(),
        bus: DiskBus::Virtio,
        kind,
        size: None,
        base,
    };
    VmPlan {
        id: InstanceId::new(),
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
    }
}

impl Drop for World {
    fn drop(&mut self) {
        drop(self.node.take());
        let places = std::fs::read_dir(self.folder.path().join("machines")).into_iter().flatten().flatten();
        for place in places {
            let id = place.file_name().to_string_lossy().into_owned();
            let pid = std::fs::read_to_string(place.path().join("pid")).unwrap_or_default();
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if !pid.is_empty() && line.contains(&id) {
                let _ = Command::new("kill").args(["-9", &pid]).status();
                muster_testing::wait_for("the end of QEMU", PATIENCE, || {
                    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                    (stat.is_empty() || stat.contains(") Z")).then_some(())
                });
            }
            // Its resource group goes as soon as it is empty.
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
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        Self { stream, text: String::new(), seen: 0, commands: 0 }
    }

    /// Waits until the console shows a text after what was waited for before, and answers what came before it.
    pub(crate) async fn wait_for(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = self.text[self.seen..].find(text) {
                let before = self.text[self.seen..self.seen + at].to_owned();
                self.seen += at + text.len();
                return before;
            }
            let mut buffer = [0; 4096];
            match timeout(PATIENCE, self.stream.read(&mut buffer)).await {
                // What telnet says of itself is no text.
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

    /// Waits for the prompt, answers what was shown before it, and logs in.
    pub(crate) async fn log_in(&mut self) -> String {
        let before = self.wait_for(" login: ").await;
        self.type_line("root").await;
        self.wait_for("# ").await;
        before
    }

    /// Runs a command in the guest's shell and answers what it printed.
    pub(crate) async fn run(&mut self, command: &str) -> String {
        self.commands += 1;
        let end = format!("end-of-{}", self.commands);
        // The quotes are gone from what the shell prints, but not from the echo of what was typed.
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
