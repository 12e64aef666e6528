//! Guests of QEMU without Muster, killed when the test ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use muster_testing::{skipped, wait_for};
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::console::Console;

/// A directory with a disk that is an overlay of the small image.
#[derive(Debug)]
pub(crate) struct Disk {
    directory: tempfile::TempDir,
}

impl Disk {
    /// Creates a disk of the size of the image or larger, or returns `None` without the image or QEMU.
    pub(crate) fn new(size: Option<&str>) -> Option<Self> {
        let image = image()?;
        let directory = tempfile::Builder::new().prefix("muster-vm-").tempdir().unwrap();
        let status = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .arg(image)
            .arg(directory.path().join("disk"))
            .args(size)
            .status()
            .unwrap();
        assert!(status.success(), "qemu-img failed: {status}");
        Some(Self { directory })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Creates a config drive as instances have it and returns the QEMU arguments for it.
    pub(crate) fn config_drive(&self, meta_data: &str, user_data: &str) -> Vec<String> {
        let tree = self.path().join("config");
        let latest = tree.join("openstack/latest");
        std::fs::create_dir_all(&latest).unwrap();
        std::fs::write(latest.join("meta_data.json"), meta_data).unwrap();
        std::fs::write(latest.join("user_data"), user_data).unwrap();
        let drive = self.path().join("config.iso");
        let output = Command::new("xorriso")
            .args(["-as", "genisoimage", "-quiet", "-J", "-R", "-V", "config-2", "-o"])
            .args([&drive, &tree])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        vec!["-drive".into(), format!("file={},if=virtio,format=raw,readonly=on", drive.display())]
    }
}

/// Returns the image, or `None` if the image or a required program is missing.
pub(crate) fn image() -> Option<PathBuf> {
    for program in ["qemu-system-x86_64", "qemu-img", "xorriso", "setpriv"] {
        if !Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()) {
            skipped(program);
            return None;
        }
    }
    let image = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join("target/image/tiny.qcow2");
    if !image.exists() {
        skipped("target/image/tiny.qcow2 (make image)");
        return None;
    }
    Some(image)
}

/// A running guest, killed on drop.
pub(crate) struct Guest {
    qemu: Child,
    pub(crate) console: Console,
    qmp: BufReader<UnixStream>,
}

impl Guest {
    /// Starts a guest with an emulated CPU, so that it behaves the same on every host.
    pub(crate) fn start(disk: &Disk, arguments: &[String]) -> Self {
        let path = |name: &str| disk.path().join(name);
        let disk_argument = format!("file={},if=virtio,format=qcow2", path("disk").display());
        // QEMU must not outlive this process, even if it is killed.
        let qemu = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-user-config"])
            .args(["-machine", "q35,accel=tcg", "-cpu", "qemu64", "-m", "128", "-display", "none"])
            .args(["-drive", &disk_argument, "-device", "virtio-rng-pci"])
            .args(["-device", "pcie-root-port,id=free"])
            .args(["-serial", &format!("unix:{},server=on,wait=on", path("console").display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", path("qmp").display())])
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(path("qemu.log")).unwrap())
            .spawn()
            .unwrap();
        // Kills QEMU if a connection fails.
        let mut qemu = KillOnDrop(Some(qemu));
        let mut connect = |name: &str| {
            wait_for(&format!("QEMU's {name}"), TIMEOUT, || {
                let ended = qemu.0.as_mut().and_then(|child| child.try_wait().unwrap());
                let log = || std::fs::read_to_string(path("qemu.log")).unwrap_or_default();
                assert!(ended.is_none(), "QEMU ended: {}", log());
                UnixStream::connect(path(name)).ok()
            })
        };
        let console = connect("console");
        let qmp = connect("qmp");
        qmp.set_read_timeout(Some(TIMEOUT)).unwrap();
        let console = Console::new(console.try_clone().unwrap(), console);
        let mut guest = Self { qemu: qemu.0.take().unwrap(), console, qmp: BufReader::new(qmp) };
        guest.read_message(); // the greeting
        guest.execute_qmp("qmp_capabilities", &json!({}));
        guest
    }

    /// Executes a QMP command and returns its result.
    pub(crate) fn execute_qmp(&mut self, command: &str, arguments: &Value) -> Value {
        let request = json!({ "execute": command, "arguments": arguments });
        self.qmp.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
        loop {
            let mut message = self.read_message();
            assert!(message.get("error").is_none(), "{command}: {message}");
            if let Some(result) = message.get_mut("return") {
                return result.take();
            }
        }
    }

    fn read_message(&mut self) -> Value {
        let mut line = String::new();
        self.qmp.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Sends an ACPI power-off event and waits until QEMU exits.
    pub(crate) fn shutdown(mut self) -> ExitStatus {
        self.execute_qmp("system_powerdown", &json!({}));
        wait_for("the guest to power off", TIMEOUT, || self.qemu.try_wait().unwrap())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

struct KillOnDrop(Option<Child>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
