//! QEMU without us: how long it takes from its start until it can be spoken with, and guests in it.

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
const PATIENCE: Duration = Duration::from_secs(60);

/// What a bare QEMU is made of; the same hardware as that of an instance with one disk and one interface.
#[derive(Debug, Clone)]
pub(crate) struct Bare {
    folder: PathBuf,
    base: PathBuf,
    memory_mb: u64,
    kvm: bool,
}

/// One that is ready to be started.
pub(crate) struct Prepared {
    command: Command,
    listener: UnixListener,
    /// Where the agent of its guest is spoken with.
    port: PathBuf,
}

/// One that answered. Dropping it kills it.
pub(crate) struct Ready {
    process: Child,
    pub(crate) took: Duration,
    pub(crate) port: PathBuf,
}

impl Bare {
    /// With its files in `folder`, on top of the image `base`.
    pub(crate) fn new(folder: &Path, base: &Path, memory_mb: u64, kvm: bool) -> anyhow::Result<Self> {
        let base = base.canonicalize().with_context(|| base.display().to_string())?;
        Ok(Self { folder: folder.to_owned(), base, memory_mb, kvm })
    }

    /// Makes what one needs before it can be started.
    pub(crate) async fn prepare(&self, number: usize) -> anyhow::Result<Prepared> {
        let file = |kind: &str| self.folder.join(format!("bare-{number}.{kind}"));
        let (disk, socket, port) = (file("qcow2"), file("sock"), file("agent"));
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .args([&self.base, &disk])
            .status();
        ensure!(made.await?.success(), "qemu-img failed");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)?;
        let (console, screen) = (free_address()?.port(), free_address()?.port());
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
            .arg(format!("addr=127.0.0.1,port={screen},disable-ticketing=on"))
            .args(["-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,rng=rng"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        Ok(Prepared { command, listener, port })
    }
}

impl Prepared {
    /// Starts it, halted, and waits until it has answered.
    pub(crate) async fn start(self) -> anyhow::Result<Ready> {
        self.start_and(&["qmp_capabilities"]).await
    }

    /// Starts it, and lets its guest boot.
    pub(crate) async fn boot(self) -> anyhow::Result<Ready> {
        self.start_and(&["qmp_capabilities", "cont"]).await
    }

    async fn start_and(mut self, commands: &[&str]) -> anyhow::Result<Ready> {
        let began = Instant::now();
        let mut process = self.command.spawn().context(PROGRAM)?;
        let answered = async {
            let (stream, _) = self.listener.accept().await?;
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            for command in commands {
                stream.write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes()).await?;
                line.clear();
                stream.read_line(&mut line).await?;
                let answer: Value = serde_json::from_str(&line)?;
                ensure!(answer.get("error").is_none(), "QEMU said {line}");
            }
            Ok(())
        };
        tokio::select! {
            answered = tokio::time::timeout(PATIENCE, answered) => answered.context("QEMU says nothing")??,
            ended = process.wait() => anyhow::bail!("QEMU ended: {}", ended?),
        }
        Ok(Ready { process, took: began.elapsed(), port: self.port })
    }
}

impl Ready {
    /// What it has used of the processors so far.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let pid = self.process.id().context("QEMU is gone")?;
        Ok(ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid)?))?.now()?.into())
    }

    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        Ok(self.process.kill().await?)
    }
}

/// Whether this machine has what real instances need; otherwise what is missing.
pub(crate) async fn missing(image: &Path) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root".into());
    }
    for program in [PROGRAM, "qemu-img"] {
        let found = Command::new(program).arg("--version").stdout(Stdio::null()).status().await;
        if !found.is_ok_and(|status| status.success()) {
            return Some(format!("{program} is not installed"));
        }
    }
    (!image.is_file()).then(|| format!("there is no {}: make image", image.display()))
}
