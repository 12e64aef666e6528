//! The port on which other daemons of the cluster call this one. See docs/decisions/0056.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use muster_api::{Listener, Tls};
use muster_control::App;
use muster_types::key::Secret;
use muster_types::settings::Settings;
use tokio::net::TcpListener;

use crate::serve;

/// Binds the port for other daemons on the address of the API. A cluster with SQLite has only one daemon.
pub(crate) async fn bind(
    settings: &Settings,
    database_url: &Secret,
    ip: IpAddr,
) -> anyhow::Result<Option<TcpListener>> {
    if database_url.expose().starts_with("sqlite:") {
        return Ok(None);
    }
    let port = settings.node_port;
    let socket = serve::bind((ip, port).into()).await;
    socket.map(Some).with_context(|| {
        format!("cannot listen on port {port} for other nodes: set NODE_PORT to another port")
    })
}

/// Returns the listener for other daemons, and publishes its address.
pub(crate) async fn listener(app: &App, socket: TcpListener) -> anyhow::Result<Listener> {
    app.peers.set_listener(socket.local_addr()?);
    Ok(Listener {
        socket,
        tls: Some(Tls::new(app.peers.server_config().await?)),
        timeout: Duration::from_secs(app.settings.api_timeout),
        max_connections: usize::try_from(app.settings.api_max_connections)?,
    })
}
