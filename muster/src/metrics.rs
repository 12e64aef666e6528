//! The ports that serve metrics.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use muster_api::{Listener, MetricsKind, Tls};
use muster_control::App;
use muster_types::settings::Settings;
use tokio::net::TcpListener;
use tokio::sync::watch;

const TIMEOUT: Duration = Duration::from_secs(10);
const MAX_CONNECTIONS: usize = 64;
/// The interval at which a port that is in use is tried again.
const BIND_INTERVAL: Duration = Duration::from_secs(5);

/// Returns the enabled ports with their settings.
fn ports(settings: &Settings) -> impl Iterator<Item = (MetricsKind, &'static str, u16)> {
    [
        (MetricsKind::Daemon, "MARIADB_GATEWAY_METRICS_PORT", settings.mariadb_gateway_metrics_port),
        (MetricsKind::Nodes, "RESOURCES_METRICS_PORT", settings.resources_metrics_port),
        (MetricsKind::Cluster, "CLUSTER_METRICS_PORT", settings.cluster_metrics_port),
    ]
    .into_iter()
    .filter(|(_, _, port)| *port != 0)
}

/// Serves the metrics on the address of the API and with its TLS certificate. Waits for ports that are in use.
pub(crate) async fn serve(app: Arc<App>, ip: IpAddr, tls: Option<Tls>, stop: watch::Receiver<bool>) {
    let mut servers = tokio::task::JoinSet::new();
    for (kind, setting, port) in ports(&app.settings) {
        let (app, tls, stop) = (Arc::clone(&app), tls.clone(), stop.clone());
        servers.spawn(async move {
            let socket = bind(setting, ip, port).await;
            let listener = Listener { socket, tls, timeout: TIMEOUT, max_connections: MAX_CONNECTIONS };
            let handle = move |request, _| {
                let app = Arc::clone(&app);
                async move { muster_api::metrics(&app, kind, &request).await }
            };
            muster_api::serve(listener, handle, stop).await;
        });
    }
    servers.join_all().await;
}

async fn bind(setting: &'static str, ip: IpAddr, port: u16) -> TcpListener {
    let mut warned = false;
    loop {
        match TcpListener::bind((ip, port)).await {
            Ok(socket) => return socket,
            Err(error) if !warned => {
                tracing::warn!(setting, port, %error, "waiting for the port to serve metrics");
                warned = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(BIND_INTERVAL).await;
    }
}
