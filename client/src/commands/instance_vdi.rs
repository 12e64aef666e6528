//! `muster instance vdi`: the screen of an instance in a viewer, through WebSockets of the API.

use std::fs::DirBuilder;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, bail};
use clap::Args;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use muster_types::session::ConsoleKind;
use muster_types::spec::Vdi;
use muster_websocket::{Role, relay};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use super::arguments::path_parser;
use super::console::{check_end, running_instance};
use super::session::Session;
use crate::api::{Client, Error};
use crate::credentials::write_private;
use crate::output::{self, escape_control};
use crate::terminal::EndSignals;
use crate::time::format_utc;

/// Arguments of `muster instance vdi`.
#[derive(Debug, Args)]
#[command(
    after_help = "Listens on a port of 127.0.0.1, forwards connections to the screen through the API, and starts the viewer. \
                  Without a desktop, and with --no-viewer, prints the address and the password for any VNC or SPICE viewer \
                  instead, and forwards until it is interrupted. The password changes whenever the instance is powered on."
)]
pub struct Arguments {
    pub(super) instance: String,
    /// Port of 127.0.0.1 to listen on; 0 chooses a free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// Print the address and the password instead of starting a viewer
    #[arg(long)]
    no_viewer: bool,
    /// Viewer to start with a virt-viewer file
    #[arg(long, value_name = "PROGRAM", default_value = "remote-viewer", conflicts_with = "no_viewer")]
    viewer: String,
    /// Write a file for a viewer that connects to the node itself, and do nothing else; - is standard output
    #[arg(long, value_name = "FILE", value_parser = path_parser(),
          conflicts_with_all = ["url", "port", "no_viewer", "viewer"])]
    output: Option<PathBuf>,
    /// Print a URL that shows the screen for a short time, if the cluster has a console proxy
    #[arg(long, conflicts_with_all = ["port", "no_viewer", "viewer"])]
    url: bool,
}

pub(super) async fn run(session: &Session, arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.output {
        Some(file) => write_viewer_file(session, &arguments.instance, file).await,
        None if arguments.url => print_link(session, &arguments.instance).await,
        None => forward(session, arguments).await,
    }
}

async fn print_link(session: &Session, instance: &str) -> anyhow::Result<()> {
    let response = session.client.screen_link(instance).await?;
    if session.is_structured() {
        return session.print_value(response.json());
    }
    let link = response.value()?;
    #[expect(clippy::cast_precision_loss, reason = "Unix times are exact as f64")]
    let until = format_utc(link.expires_at as f64);
    crate::message!("valid until {until}");
    output::print(&format!("{}\n", escape_control(&link.url)))
}

async fn write_viewer_file(session: &Session, instance: &str, file: &Path) -> anyhow::Result<()> {
    let text = session.client.viewer_file(instance).await?;
    if file != Path::new("-") {
        write_private(file, &text)?;
        crate::message!("open the screen with `remote-viewer {}`", file.display());
        return Ok(());
    }
    if session.is_structured() {
        return session.print_value(&json!(text));
    }
    // Escaped, because the lines may be printed to a terminal.
    output::print(&text.lines().map(|line| escape_control(line) + "\n").collect::<String>())
}

/// The screen of an instance, at a port of this host.
struct Screen {
    name: String,
    kind: ConsoleKind,
    address: SocketAddr,
    /// Absent if the VM was started by a release without passwords.
    password: Option<String>,
}

impl Screen {
    fn url(&self) -> String {
        format!("{}://{}", self.kind, self.address)
    }

    /// Returns a file with which virt-viewer connects to the port.
    fn viewer_file(&self) -> String {
        let password =
            self.password.as_ref().map(|password| format!("password={}\n", escape_control(password)));
        format!(
            "[virt-viewer]\ntype={}\nhost={}\nport={}\n{}title={}\ndelete-this-file=1\n",
            self.kind,
            self.address.ip(),
            self.address.port(),
            password.unwrap_or_default(),
            escape_control(&self.name),
        )
    }

    fn print(&self, session: &Session) -> anyhow::Result<()> {
        if session.is_structured() {
            return session.print_value(&json!({ "address": self.url(), "password": self.password }));
        }
        let password = self.password.as_deref().map_or_else(|| "none".to_owned(), escape_control);
        output::print(&format!("address   {}\npassword  {password}\n", self.url()))
    }
}

async fn forward(session: &Session, arguments: &Arguments) -> anyhow::Result<()> {
    let client = &session.client;
    let record = running_instance(client, &arguments.instance).await?;
    let id = record.uuid.to_string();
    let kind = if record.video.vdi == Vdi::Vnc { ConsoleKind::Vnc } else { ConsoleKind::Spice };
    // Refused if the caller may not open the screen. Only its password is used.
    let ticket = client.create_console_ticket(&id, kind).await?.value()?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let screen =
        Screen { name: record.name, kind, address: listener.local_addr()?, password: ticket.password };
    let mut signals = EndSignals::new()?;
    let mut viewer = Viewer::start(&screen, arguments)?;
    if viewer.is_none() {
        screen.print(session)?;
        crate::message!("forwarding the screen of {}; press Ctrl-C to end", escape_control(&screen.name));
    }
    let mut connections = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.context("cannot accept connections")?;
                connections.push(relay_connection(client, &id, kind, stream));
            }
            Some(ended) = connections.next() => ended
                .with_context(|| format!("lost the screen of {}", escape_control(&screen.name)))?,
            ended = wait_for_viewer(&mut viewer) => return ended,
            () = signals.recv() => return Ok(()),
        }
    }
}

/// Forwards a connection of a viewer. Returns an error if others would fail, too.
async fn relay_connection(
    client: &Client,
    instance: &str,
    kind: ConsoleKind,
    stream: TcpStream,
) -> anyhow::Result<()> {
    // Keys and movements of the pointer are small and must not be delayed.
    stream.set_nodelay(true)?;
    match client.open_console(instance, kind).await {
        Ok(socket) => check_end(&relay(socket, stream, Role::Client).await),
        Err(error @ Error::Unreachable { .. }) => Err(error.into()),
        // For example while the instance is off.
        Err(error) => {
            crate::message!("error: cannot open the screen: {error}");
            Ok(())
        }
    }
}

/// A running viewer.
struct Viewer {
    process: Child,
    program: String,
    /// The directory of the file with which it was started.
    _directory: PrivateDirectory,
}

impl Viewer {
    /// Starts the viewer, unless the user wants none or no desktop is running.
    fn start(screen: &Screen, arguments: &Arguments) -> anyhow::Result<Option<Self>> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if arguments.no_viewer || !["DISPLAY", "WAYLAND_DISPLAY"].into_iter().any(is_set) {
            return Ok(None);
        }
        let directory = PrivateDirectory::new().context("cannot create a temporary directory")?;
        let file = directory.0.join("screen.vv");
        write_private(&file, &screen.viewer_file())?;
        let program = arguments.viewer.clone();
        match Command::new(&program).arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).spawn() {
            Ok(process) => Ok(Some(Self { process, program, _directory: directory })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                crate::message!("{} is not installed: use another viewer", escape_control(&program));
                Ok(None)
            }
            Err(error) => Err(error).with_context(|| format!("cannot start {program}")),
        }
    }
}

/// A directory that only its owner can read, and that is deleted with its contents.
struct PrivateDirectory(PathBuf);

impl PrivateDirectory {
    fn new() -> io::Result<Self> {
        let mut random = [0; 16];
        aws_lc_rs::rand::fill(&mut random).map_err(io::Error::other)?;
        let directory = std::env::temp_dir().join(format!("muster-{}", hex::encode(random)));
        // Fails if it exists.
        DirBuilder::new().mode(0o700).create(&directory)?;
        Ok(Self(directory))
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Waits for the end of the viewer, or forever without one.
async fn wait_for_viewer(viewer: &mut Option<Viewer>) -> anyhow::Result<()> {
    let Some(viewer) = viewer else { return std::future::pending().await };
    let status = viewer.process.wait().await?;
    if !status.success() {
        bail!("{} failed: {status}", viewer.program);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn viewer_connects_to_the_loopback_address() {
        let mut screen = Screen {
            name: "web\nhost=evil.example".into(),
            kind: ConsoleKind::Spice,
            address: "127.0.0.1:40123".parse().unwrap(),
            password: Some("secret".into()),
        };
        let file = screen.viewer_file();
        assert!(
            file.starts_with(
                "[virt-viewer]\ntype=spice\nhost=127.0.0.1\nport=40123\npassword=secret\ntitle=web"
            ),
            "{file}"
        );
        assert!(!file.contains("\nhost=evil.example"), "{file}");
        screen.password = None;
        assert!(!screen.viewer_file().contains("password"));
        assert_eq!(screen.url(), "spice://127.0.0.1:40123");
    }
}
