//! QEMU without Muster: the baseline for instances and agents.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::time::ClockId;
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;
use tokio::process::{Child, Command};

use crate::server::free_address;

const PROGRAM: &str = "qemu-system-x86_64";
/// The timeout for starting.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The configuration of QEMU processes, with the hardware of an instance with one disk and one interface.
#[derive(Debug, Clone)]
pub(crate) struct BareQemu {
    directory: PathBuf,
    base: PathBuf,
    memory_mb: u64,
    kvm: bool,
}

/// A process that is ready to start.
pub(crate) struct PreparedQemu {
    command: Command,
    listener: UnixListener,
    /// The socket of the guest agent.
    port: PathBuf,
}

/// A process that responds to QMP commands, killed on drop.
pub(crate) struct RunningQemu {
    process: Child,
    pub(crate) startup_time: Duration,
    pub(crate) port: PathBuf,
}

impl BareQemu {
    /// Creates a configuration with files in `directory` and overlays of the image `base`.
    pub(crate) fn new(directory: &Path, base: &Path, memory_mb: u64, kvm: bool) -> anyhow::Result<Self> {
        let base = base.canonicalize().with_context(|| base.display().to_string())?;
        Ok(Self { directory: directory.to_owned(), base, memory_mb, kvm })
    }

    /// Creates the files of a process.
    pub(crate) async fn prepare(&self, number: usize) -> anyhow::Result<PreparedQemu> {
        let file = |kind: &str| self.directory.join(format!("bare-{number}.{kind}"));
        let (disk, socket, port) = (file("qcow2"), file("sock"), file("agent"));
        let status = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .args([&self.base, &disk])
            .status();
        ensure!(status.await?.success(), "qemu-img failed");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)?;
        let (console, spice) = (free_address()?.port(), free_address()?.port());
        let mut command = Command::new(PROGRAM);
        command
            .args(["-no-user-config", "-nodefaults", "-no-shutdown", "-S", "-display", "none"])
            .args(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"])
            .args(["-machine", "pc,usb=off,vmport=off,dump-guest-core=off"])
            .args(if self.kvm {
                ["-accel", "kvm", "-cpu", "host"]
            } else {
                ["-accel", "tcg", "-cpu", "qemu64"]
            })
            .args(["-smp", "1", "-m", &format!("size={}M", self.memory_mb)])
            .args(["-chardev", &format!("socket,id=control,path={}", socket.display())])
            .args(["-mon", "chardev=control,mode=control", "-chardev"])
            .arg(format!("socket,id=console,host=127.0.0.1,port={console},server=on,wait=off,telnet=on"))
            .args(["-device", "isa-serial,chardev=console", "-device", "virtio-serial-pci"])
            .args(["-chardev", &format!("socket,id=agent,path={},server=on,wait=off", port.display())])
            .args(["-device", "virtserialport,chardev=agent,name=sf-agent"])
            .args(["-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0"])
            .args(["-drive", &format!("if=none,id=disk,file={},format=qcow2,cache=none", disk.display())])
            .args(["-device", "virtio-blk-pci,drive=disk,bootindex=0"])
            .args(["-netdev", "user,id=net,restrict=on", "-device", "virtio-net-pci,netdev=net,romfile="])
            .args(["-device", "cirrus-vga", "-spice"])
            .arg(format!("addr=127.0.0.1,port={spice},disable-ticketing=on"))
            .args(["-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,rng=rng"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        Ok(PreparedQemu { command, listener, port })
    }
}

impl PreparedQemu {
    /// Starts QEMU with paused CPUs and waits until it responds.
    pub(crate) async fn start(self) -> anyhow::Result<RunningQemu> {
        self.start_with(&["qmp_capabilities"]).await
    }

    /// Starts QEMU and boots its guest.
    pub(crate) async fn boot(self) -> anyhow::Result<RunningQemu> {
        self.start_with(&["qmp_capabilities", "cont"]).await
    }

    async fn start_with(mut self, commands: &[&str]) -> anyhow::Result<RunningQemu> {
        let began = Instant::now();
        let mut process = self.command.spawn().context(PROGRAM)?;
        let handshake = async {
            let (stream, _) = self.listener.accept().await?;
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            for command in commands {
                stream.write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes()).await?;
                line.clear();
                stream.read_line(&mut line).await?;
                let response: Value = serde_json::from_str(&line)?;
                ensure!(response.get("error").is_none(), "QEMU responded {line}");
            }
            Ok(())
        };
        tokio::select! {
            result = tokio::time::timeout(TIMEOUT, handshake) => result.context("timed out waiting for QEMU")??,
            status = process.wait() => anyhow::bail!("QEMU exited: {}", status?),
        }
        Ok(RunningQemu { process, startup_time: began.elapsed(), port: self.port })
    }
}

impl RunningQemu {
    /// Returns the CPU time of the process.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let pid = self.process.id().context("QEMU has exited")?;
        Ok(ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid)?))?.now()?.into())
    }

    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.process.kill().await?)
    }
}

/// Returns what this host lacks to run real instances, if anything.
pub(crate) async fn missing_requirement(image: &Path) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root".into());
    }
    for program in [PROGRAM, "qemu-img"] {
        let status = Command::new(program).arg("--version").stdout(Stdio::null()).status().await;
        if !status.is_ok_and(|status| status.success()) {
            return Some(format!("{program} is not installed"));
        }
    }
    (!image.is_file()).then(|| format!("{} does not exist; create it with make image", image.display()))
}
