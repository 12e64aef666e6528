//! `muster up`: from an installed program to a running single-node cluster.

mod demo;
mod welcome;

use std::fs::{DirBuilder, OpenOptions};
use std::io::IsTerminal as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use muster_client::{Outcome, error_with_outcome, interrupted, message};
use muster_types::settings::{SettingSource, Settings};
use nix::sys::signal::{self as unix_signal, kill};
use nix::unistd::{Pid, geteuid};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::running::{ClusterDir, end_with_this_process, program};
use crate::{config, rootless, serve};

/// The interval at which the API is polled until it is ready.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long one request of this poll may take.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
#[command(
    after_help = "As root, the cluster uses the network of this host. As another user, it runs in its own user, network and mount \
                  namespaces, with pasta (Debian package passt) as its uplink: see `muster doctor` for what that needs."
)]
pub(crate) struct Arguments {
    /// Return when the API is ready; the log goes to muster.log in the data directory
    #[arg(long)]
    background: bool,
    /// Directory for the data of the cluster
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Address to serve the API on [default: 127.0.0.1 with the port API_PORT]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Create a network and an instance from the small image, and open its console
    #[arg(long)]
    demo: bool,
    /// Small guest image to publish as tiny [default: the one that is installed with this program]
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// Run this many simulated nodes instead of this host; needs neither root nor QEMU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    simulate: Option<u16>,
    /// Settings file with one NAME = value per line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The signals that end a cluster in the foreground.
struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl EndSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal, and returns the one to send to the daemon. After SIGTERM it drains, after SIGINT it ends immediately.
    async fn recv(&mut self) -> unix_signal::Signal {
        tokio::select! {
            _ = self.terminate.recv() => unix_signal::Signal::SIGTERM,
            _ = self.interrupt.recv() => unix_signal::Signal::SIGINT,
            _ = self.hangup.recv() => unix_signal::Signal::SIGINT,
        }
    }
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let settings = config::load(arguments.config.as_deref())?;
    let context = || format!("data directory {}", arguments.data_dir.display());
    DirBuilder::new().recursive(true).mode(0o700).create(&arguments.data_dir).with_context(context)?;
    let dir = ClusterDir::new(&arguments.data_dir);
    // Held until the cluster runs: of two concurrent starts, one succeeds.
    let Some(starting) = dir.lock()? else {
        let text = format!(
            "another `muster up` or `muster down` is in progress with data directory {}",
            dir.path().display()
        );
        return Err(error_with_outcome(Outcome::Conflict, text));
    };
    if dir.is_running()? || dir.process().is_some() {
        return Err(error_with_outcome(Outcome::Conflict, already_runs(&dir)));
    }
    let is_rootless = arguments.simulate.is_none() && !geteuid().is_root();
    if is_rootless {
        rootless::require().await?;
    }
    let image = find_image(arguments.image.as_deref(), &program()?)?;
    if arguments.demo && image.is_none() && arguments.simulate.is_none() {
        bail!(
            "--demo needs the small guest image, which is not installed: build it with `make image` in the source directory, and \
             give its path with --image target/image/tiny.qcow2"
        );
    }
    let listen = arguments.listen.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, settings.api_port).into());
    let socket = bind(listen).await?;
    let address = socket.local_addr()?;

    // Handled before the daemon starts, so that none of them ends only this process.
    let mut signals = EndSignals::new()?;
    let mut child = start_daemon(&arguments, &settings, &dir, image.as_deref(), is_rootless, socket)?;
    let pid = Pid::from_raw(i32::try_from(child.id().context("the daemon has ended")?)?);
    let ready = tokio::select! {
        ready = async {
            dir.save_process(pid)?;
            wait_until_ready(&mut child, &settings, address).await
        } => ready,
        _ = signals.recv() => Err(interrupted("interrupted")),
    };
    if let Err(error) = ready {
        stop(&mut child, &mut signals).await;
        dir.remove_process(pid);
        let has_log = arguments.background || arguments.demo;
        let log = if has_log { format!("; see {}", dir.log_file().display()) } else { String::new() };
        return Err(error_with_outcome(Outcome::of(&error), format!("{error:#}{log}")));
    }
    drop(starting);
    let cluster = welcome::StartedCluster {
        dir: &dir,
        has_log: arguments.background || arguments.demo,
        is_rootless,
        is_simulated: arguments.simulate.is_some(),
        has_image: image.is_some(),
    };
    let shown = tokio::select! {
        shown = show(&cluster, arguments.demo) => shown,
        _ = signals.recv() => Err(interrupted("interrupted")),
    };
    if let Err(error) = shown {
        if !arguments.background {
            stop(&mut child, &mut signals).await;
            dir.remove_process(pid);
        }
        return Err(error);
    }
    if arguments.demo && std::io::stdin().is_terminal() && arguments.simulate.is_none() {
        demo::open_console(&dir, &mut signals).await?;
    }
    if arguments.background {
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.demo {
        message!("the cluster runs until Ctrl-C; its log is in {}", dir.log_file().display());
    }
    let status = loop {
        let received = tokio::select! {
            status = child.wait() => break status?,
            received = signals.recv() => received,
        };
        forward(&child, received);
    };
    dir.remove_process(pid);
    Ok(exit_code(status))
}

/// Shows how to use the cluster, and creates what the demo needs.
async fn show(cluster: &welcome::StartedCluster<'_>, is_demo: bool) -> anyhow::Result<()> {
    cluster.wait_for_image().await;
    crate::stdout::print(cluster.text().await.as_bytes())?;
    if is_demo { demo::create(cluster).await } else { Ok(()) }
}

/// Binds the socket of the API. The daemon inherits it, so that only this daemon can be what answers there.
async fn bind(listen: SocketAddr) -> anyhow::Result<TcpListener> {
    serve::bind(listen).await.with_context(|| {
        format!("cannot listen on {listen} (another program may use it: give --listen ADDRESS:PORT, or stop that program)")
    })
}

fn already_runs(dir: &ClusterDir) -> String {
    let process = dir.process().map(|pid| format!(" (process {pid})")).unwrap_or_default();
    format!(
        "a cluster already runs with data directory {}{process}; `muster ui` prints the URL of its web UI, and `muster \
         down{}` stops it",
        dir.path().display(),
        dir.option()
    )
}

/// Starts the daemon in its own process group, so that only we forward signals of the terminal.
fn start_daemon(
    arguments: &Arguments,
    settings: &Settings,
    dir: &ClusterDir,
    image: Option<&Path>,
    is_rootless: bool,
    socket: TcpListener,
) -> anyhow::Result<Child> {
    let mut command = daemon_command(arguments, settings, (dir, image), is_rootless)?;
    command.stdin(Stdio::from(OwnedFd::from(socket.into_std()?)));
    // The console of the demo uses the terminal.
    if arguments.background || arguments.demo {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.log_file());
        command.stderr(file.with_context(|| dir.log_file().display().to_string())?);
    }
    if !arguments.background {
        end_with_this_process(&mut command);
    }
    command.spawn().context("failed to start the daemon")
}

/// Returns the command that runs the daemon.
fn daemon_command(
    arguments: &Arguments,
    settings: &Settings,
    (dir, image): (&ClusterDir, Option<&Path>),
    is_rootless: bool,
) -> anyhow::Result<Command> {
    let mut command = Command::new(program()?);
    if is_rootless {
        command.arg("rootless").arg("--data-dir").arg(dir.path());
        command.args(["--interface", &settings.node_egress_nic, "--"]);
        if is_default(settings, "DNS_SERVER") {
            command.env("MUSTER_DNS_SERVER", rootless::RESOLVER.to_string());
        }
    } else {
        command.args(["serve", "--listen-stdin"]);
    }
    command.arg("--data-dir").arg(dir.path());
    if let Some(file) = &arguments.config {
        command.arg("--config").arg(file);
    }
    if let Some(count) = arguments.simulate {
        command.args(["--simulate", &count.to_string()]);
    }
    if let Some(image) = image {
        command.arg("--image").arg(format!("tiny={}", image.display()));
    }
    // The daemon's own URL of the web UI would be printed twice.
    command.stdout(Stdio::null()).process_group(0);
    Ok(command)
}

fn is_default(settings: &Settings, name: &str) -> bool {
    let mut named = settings.effective.iter().filter(|setting| setting.name == name);
    named.all(|setting| setting.source == SettingSource::Default)
}

/// Returns the small image: the given one, else the one of the package or of the source directory that this program is in.
fn find_image(given: Option<&Path>, program: &Path) -> anyhow::Result<Option<PathBuf>> {
    if let Some(given) = given {
        let found = given.canonicalize().with_context(|| format!("image {}", given.display()))?;
        return Ok(Some(found));
    }
    let directory = program.canonicalize().ok().and_then(|program| Some(program.parent()?.to_owned()));
    let candidates = ["../share/muster/tiny.qcow2", "../image/tiny.qcow2"];
    let mut found = candidates.iter().filter_map(|path| directory.as_ref()?.join(path).canonicalize().ok());
    Ok(found.next())
}

/// Waits until the API is ready, or the daemon ends.
async fn wait_until_ready(child: &mut Child, settings: &Settings, listen: SocketAddr) -> anyhow::Result<()> {
    let address = serve::local_address(listen);
    let is_tls = !settings.tls_certificate.is_empty();
    let poll = async {
        while !tokio::time::timeout(POLL_TIMEOUT, is_ready(address, is_tls)).await.unwrap_or(false) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        () = poll => Ok(()),
        status = child.wait() => bail!("the daemon ended with {}", status?),
    }
}

/// Returns whether the API is ready. With TLS, it is assumed to be when it answers.
async fn is_ready(address: SocketAddr, is_tls: bool) -> bool {
    let request = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
        let mut status = [0; 12];
        if is_tls {
            // A server that accepts connections rejects this one. Before, nothing answers: the socket was bound here.
            let _answer = stream.read(&mut status).await?;
            return Ok(true);
        }
        stream.read_exact(&mut status).await?;
        Ok::<_, std::io::Error>(status == *b"HTTP/1.1 200")
    };
    request.await.unwrap_or(false)
}

fn forward(child: &Child, signal: unix_signal::Signal) {
    // Fails only if the daemon has ended.
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// Stops the daemon. Another signal kills it.
async fn stop(child: &mut Child, signals: &mut EndSignals) {
    forward(child, unix_signal::Signal::SIGINT);
    tokio::select! {
        _ = child.wait() => return,
        _ = signals.recv() => {}
    }
    let _ = child.kill().await;
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_image_of_the_package_or_of_the_source_directory() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for dir in ["bin", "share/muster", "target/release", "target/image"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        let (installed, built) = (root.join("bin/muster"), root.join("target/release/muster"));
        for file in [&installed, &built] {
            std::fs::write(file, "").unwrap();
        }
        assert_eq!(find_image(None, &installed).unwrap(), None);
        for (program, image) in [(&installed, "share/muster/tiny.qcow2"), (&built, "target/image/tiny.qcow2")]
        {
            std::fs::write(root.join(image), "").unwrap();
            assert_eq!(find_image(None, program).unwrap(), Some(root.join(image)));
        }
        assert!(find_image(Some(Path::new("/nonsense")), &installed).is_err());
    }
}
