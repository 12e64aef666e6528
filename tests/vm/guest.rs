//! A guest that a test can read, type to and switch off. It ends with the test, however that ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use muster_testing::{skipped, wait_for};
use serde_json::{Value, json};

use crate::PATIENCE;
use crate::console::Console;

/// What a guest starts from: a folder with a disk that is a copy of the small image.
#[derive(Debug)]
pub(crate) struct Disk {
    folder: tempfile::TempDir,
}

impl Disk {
    /// A fresh disk, of the size of the image or larger; nothing when this machine has no image or no QEMU.
    pub(crate) fn new(size: Option<&str>) -> Option<Self> {
        let image = image()?;
        let folder = tempfile::Builder::new().prefix("muster-vm-").tempdir().unwrap();
        let status = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .arg(image)
            .arg(folder.path().join("disk"))
            .args(size)
            .status()
            .unwrap();
        assert!(status.success(), "no disk: {status}");
        Some(Self { folder })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Adds a config drive, in the form that instances get, and answers the arguments that plug it in.
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

/// The image, if everything is here that a guest needs.
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

/// A running guest. Dropping it kills it.
pub(crate) struct Guest {
    qemu: Child,
    pub(crate) console: Console,
    control: BufReader<UnixStream>,
}

impl Guest {
    /// Switches a guest on. Its processor is emulated, so that it behaves the same everywhere.
    pub(crate) fn start(disk: &Disk, arguments: &[String]) -> Self {
        let socket = |name: &str| disk.path().join(name);
        let disk_argument = format!("file={},if=virtio,format=qcow2", socket("disk").display());
        // It must not outlive this process, even when that is killed.
        let qemu = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-user-config"])
            .args(["-machine", "q35,accel=tcg", "-cpu", "qemu64", "-m", "128", "-display", "none"])
            .args(["-drive", &disk_argument, "-device", "virtio-rng-pci"])
            .args(["-device", "pcie-root-port,id=free"])
            .args(["-serial", &format!("unix:{},server=on,wait=on", socket("console").display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket("qmp").display())])
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(socket("qemu.log")).unwrap())
            .spawn()
            .unwrap();
        // Held already, so that a guest that does not come up is killed, too.
        let mut qemu = Kill(Some(qemu));
        let mut connect = |name: &str| {
            wait_for(&format!("QEMU's {name}"), PATIENCE, || {
                let ended = qemu.0.as_mut().and_then(|child| child.try_wait().unwrap());
                let log = || std::fs::read_to_string(socket("qemu.log")).unwrap_or_default();
                assert!(ended.is_none(), "QEMU ended: {}", log());
                UnixStream::connect(socket(name)).ok()
            })
        };
        let keys = connect("console");
        let control = connect("qmp");
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        let console = Console::new(keys.try_clone().unwrap(), keys);
        let mut guest = Self { qemu: qemu.0.take().unwrap(), console, control: BufReader::new(control) };
        guest.answer(); // its greeting
        guest.control("qmp_capabilities", &json!({}));
        guest
    }

    /// Tells QEMU something.
    pub(crate) fn control(&mut self, command: &str, arguments: &Value) -> Value {
        let request = json!({ "execute": command, "arguments": arguments });
        self.control.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
        loop {
            let mut answer = self.answer();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(answer) = answer.get_mut("return") {
                return answer.take();
            }
        }
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.control.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Presses the power button and waits until the guest is off.
    pub(crate) fn shutdown(mut self) -> ExitStatus {
        self.control("system_powerdown", &json!({}));
        wait_for("the guest to switch itself off", PATIENCE, || self.qemu.try_wait().unwrap())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

struct Kill(Option<Child>);

impl Drop for Kill {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
