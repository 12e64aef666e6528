//! `muster forward`: makes an address in the network of a rootless cluster reachable at a port of this host.
//!
//! The process inside the namespace (see `rootless/relay.rs`) connects to the address; it is reached through a socket in the
//! data directory, which only the user of the cluster may open.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::signal::unix::{SignalKind, signal};

use crate::running::ClusterDir;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Runs until it is interrupted or the cluster stops. A cluster that runs as root needs no forwarding: its floating \
                  addresses are reachable from the host."
)]
pub(crate) struct Arguments {
    /// Port of this host, on 127.0.0.1 unless an address is given; 0 chooses a free one, and - is standard input and output
    #[arg(value_name = "[ADDRESS:]PORT", value_parser = parse_listen)]
    listen: ForwardSource,
    /// Address and port in the network of the cluster, such as a floating address
    #[arg(value_name = "ADDRESS:PORT")]
    target: SocketAddrV4,
    /// Data directory of the cluster
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
}

/// What is forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ForwardSource {
    /// One connection, for example of ssh.
    Stdio,
    /// Connections to an address of this host.
    Listener(SocketAddr),
}

fn parse_listen(text: &str) -> Result<ForwardSource, String> {
    if text == "-" {
        return Ok(ForwardSource::Stdio);
    }
    if let Ok(port) = u16::from_str(text) {
        return Ok(ForwardSource::Listener((Ipv4Addr::LOCALHOST, port).into()));
    }
    let address = text.parse().map(ForwardSource::Listener);
    address.map_err(|_| "must be a port, an address and a port, or -".to_owned())
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let dir = ClusterDir::new(&arguments.data_dir);
    let socket = dir.forward_socket();
    if !dir.is_running()? || !dir.is_rootless() {
        bail!(
            "no rootless cluster runs with data directory {}; the floating addresses of other clusters are reachable without \
             forwarding",
            dir.path().display()
        );
    }
    let listen = match arguments.listen {
        ForwardSource::Stdio => return relay_stdio(&socket, arguments.target),
        ForwardSource::Listener(listen) => listen,
    };
    let listener = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    crate::stdout::print(
        format!("forwarding {} to {}\n", listener.local_addr()?, arguments.target).as_bytes(),
    )?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    loop {
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => accepted?,
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        };
        if !dir.is_running()? {
            bail!("the cluster has stopped");
        }
        let (socket, target) = (socket.clone(), arguments.target);
        tokio::spawn(async move {
            if let Err(error) = relay(stream, &socket, target).await {
                muster_client::message!("error: {error:#}");
            }
        });
    }
}

/// Connects standard input and output to an address in the network of the cluster. The process ends after it, because reading
/// standard input cannot be cancelled.
fn relay_stdio(socket: &Path, target: SocketAddrV4) -> anyhow::Result<()> {
    let mut stream =
        std::os::unix::net::UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    stream.write_all(format!("{target}\n").as_bytes())?;
    let (mut answer, mut byte) = (Vec::new(), [0]);
    while stream.read(&mut byte)? == 1 && byte != *b"\n" {
        answer.extend(byte);
    }
    if answer != b"ok" {
        bail!("{target}: {}", String::from_utf8_lossy(&answer));
    }
    let mut upload = stream.try_clone()?;
    std::thread::Builder::new().name("forward".into()).spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut upload);
        let _ = upload.shutdown(Shutdown::Write);
    })?;
    // Without the buffer of standard output, which waits for complete lines.
    let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    // A closed connection is the normal end.
    let _ = io::copy(&mut stream, &mut output);
    Ok(())
}

/// Connects a client of the host to an address in the network of the cluster.
async fn relay(mut client: TcpStream, socket: &Path, target: SocketAddrV4) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(socket).await.with_context(|| socket.display().to_string())?;
    stream.write_all(format!("{target}\n").as_bytes()).await?;
    let mut stream = BufReader::new(stream);
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    if answer.trim() != "ok" {
        bail!("{target}: {}", answer.trim());
    }
    // A closed connection is the normal end.
    let _ = copy_bidirectional(&mut client, &mut stream).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listens_on_the_loopback_address_by_default() {
        let listener = |address: &str| ForwardSource::Listener(address.parse().unwrap());
        assert_eq!(parse_listen("8022").unwrap(), listener("127.0.0.1:8022"));
        assert_eq!(parse_listen("0.0.0.0:80").unwrap(), listener("0.0.0.0:80"));
        assert_eq!(parse_listen("-").unwrap(), ForwardSource::Stdio);
        assert!(parse_listen("web:80").is_err() && parse_listen("70000").is_err());
    }
}
