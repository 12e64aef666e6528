//! `muster up`: from an installed program to a running single-node cluster.

mod demo;

use std::fs::{DirBuilder, OpenOptions};
use std::io::IsTerminal as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use muster_client::Options;
use muster_client::credentials::CredentialFiles;
use muster_types::settings::{SettingSource, Settings};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::running::{ClusterDir, program};
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

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let settings = config::load(arguments.config.as_deref())?;
    let context = || format!("data directory {}", arguments.data_dir.display());
    DirBuilder::new().recursive(true).mode(0o700).create(&arguments.data_dir).with_context(context)?;
    let dir = ClusterDir::new(&arguments.data_dir);
    if dir.is_running() {
        bail!("{}", already_runs(&dir));
    }
    let is_rootless = arguments.simulate.is_none() && !geteuid().is_root();
    if is_rootless {
        rootless::require().await?;
    }
    let image = find_image(arguments.image.as_deref(), &program()?)?;
    if arguments.demo && image.is_none() {
        bail!(
            "--demo needs the small guest image, which is not installed: build it with `make image` in the source directory, and \
             give its path with --image target/image/tiny.qcow2"
        );
    }
    let listen = arguments.listen.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, settings.api_port).into());
    if listen.port() == 0 {
        bail!("--listen needs a port other than 0");
    }

    let mut command = daemon_command(&arguments, &settings, (&dir, listen, image.as_deref()), is_rootless)?;
    // The console of the demo uses the terminal.
    if arguments.background || arguments.demo {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.log_file());
        command.stderr(file.with_context(|| dir.log_file().display().to_string())?);
    }
    let mut child = command.spawn().context("failed to start the daemon")?;
    let pid = child.id().context("the daemon has ended")?;
    dir.save_pid(pid)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let ready = tokio::select! {
        ready = wait_until_ready(&mut child, &settings, listen) => ready,
        _ = terminate.recv() => Err(anyhow::anyhow!("interrupted")),
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
    };
    if let Err(error) = ready {
        stop(&mut child, Signal::SIGTERM).await;
        dir.remove_pid();
        let has_log = arguments.background || arguments.demo;
        let log = if has_log { format!("; see {}", dir.log_file().display()) } else { String::new() };
        bail!("{error:#}{log}");
    }
    crate::stdout::print(welcome(&dir, &arguments, is_rootless).await.as_bytes())?;
    if arguments.demo
        && let Err(error) = demo::run(&dir, std::io::stdin().is_terminal()).await
    {
        if !arguments.background {
            stop(&mut child, Signal::SIGINT).await;
            dir.remove_pid();
        }
        return Err(error);
    }
    if arguments.background {
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.demo {
        eprintln!("the cluster runs until Ctrl-C; its log is in {}", dir.log_file().display());
    }
    let status = loop {
        let received = tokio::select! {
            status = child.wait() => break status?,
            _ = terminate.recv() => Signal::SIGTERM,
            _ = interrupt.recv() => Signal::SIGINT,
            _ = hangup.recv() => Signal::SIGINT,
        };
        forward(&child, received);
    };
    dir.remove_pid();
    Ok(exit_code(status))
}

fn already_runs(dir: &ClusterDir) -> String {
    let process = dir.pid().map(|pid| format!(" (process {pid})")).unwrap_or_default();
    format!(
        "a cluster already runs with data directory {}{process}; `muster ui` prints the URL of its web UI, and `muster \
         down{}` stops it",
        dir.path().display(),
        dir.option()
    )
}

/// Returns the command that runs the daemon in its own process group, so that only we forward signals of the terminal.
fn daemon_command(
    arguments: &Arguments,
    settings: &Settings,
    (dir, listen, image): (&ClusterDir, SocketAddr, Option<&Path>),
    is_rootless: bool,
) -> anyhow::Result<Command> {
    let mut command = Command::new(program()?);
    if is_rootless {
        command.arg("rootless").arg("--data-dir").arg(dir.path());
        command.args(["--listen", &listen.to_string(), "--interface", &settings.node_egress_nic, "--"]);
        if is_default(settings, "DNS_SERVER") {
            command.env("MUSTER_DNS_SERVER", rootless::RESOLVER.to_string());
        }
    } else {
        command.arg("serve").args(["--listen", &listen.to_string()]);
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
    command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
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

/// Returns whether the API is ready. With TLS, it is assumed to be when it accepts connections.
async fn is_ready(address: SocketAddr, is_tls: bool) -> bool {
    let request = async {
        let mut stream = TcpStream::connect(address).await?;
        if is_tls {
            return Ok(true);
        }
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
        let mut status = [0; 12];
        stream.read_exact(&mut status).await?;
        Ok::<_, std::io::Error>(status == *b"HTTP/1.1 200")
    };
    request.await.unwrap_or(false)
}

/// Returns what is shown when the cluster is ready.
async fn welcome(dir: &ClusterDir, arguments: &Arguments, is_rootless: bool) -> String {
    let options = Options { credentials: Some(dir.credentials()), ..Options::default() };
    let ticket = match options.client() {
        Ok(client) => {
            client.create_login_ticket().await.and_then(muster_client::api::ApiResponse::value).ok().map(
                |ticket| {
                    format!(
                        "{}/ui/#ticket={} (for one login within a minute; `muster ui` prints another)",
                        client.url(),
                        ticket.ticket
                    )
                },
            )
        }
        Err(_) => None,
    };
    let log = if arguments.background || arguments.demo {
        format!("log          {}\n", dir.log_file().display())
    } else {
        String::new()
    };
    let network = if is_rootless {
        "network      its own, behind pasta; `muster forward PORT ADDRESS:PORT` makes a floating address reachable\n"
    } else {
        ""
    };
    let credentials = match &ticket {
        Some(_) => dir.credentials().display().to_string(),
        None => "those of SYSTEM_KEY: `muster login` saves them".to_owned(),
    };
    format!(
        "web UI       {}\ncredentials  {credentials}\ndata         {}\n{log}{network}\nThree things to try:\n{}  \
         muster network create lan 10.0.0.0/24 --dns\n  \
         muster instance create web --cpus 1 --memory 256 --disk 2@tiny --network lan\n  \
         muster console web\n\nStop it with `muster down{}`.\n",
        ticket.unwrap_or_else(|| "see the log".into()),
        dir.path().display(),
        environment(dir),
        dir.option()
    )
}

/// Returns the line that lets commands use this cluster, if they would not by themselves.
fn environment(dir: &ClusterDir) -> String {
    let files = CredentialFiles::for_current_user();
    let is_found = files.daemon == dir.credentials() && !files.login.is_some_and(|file| file.exists());
    if is_found {
        String::new()
    } else {
        format!("  export MUSTER_CREDENTIALS={}\n", dir.credentials().display())
    }
}

fn forward(child: &Child, signal: Signal) {
    // Fails only if the daemon has ended.
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

async fn stop(child: &mut Child, signal: Signal) {
    forward(child, signal);
    let _ = child.wait().await;
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
