//! Other daemons of a cluster, as far as a test needs them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Request;
use axum::http::request::Parts;
use axum::response::Response;
use hyper::body::Incoming;
use muster_api::{Listener, Tls};
use muster_control::peer::Peers;
use muster_test_cluster::{Cluster, seed};
use muster_types::ids::NodeId;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// The requests that another daemon has received.
pub(crate) type Received = Arc<Mutex<Vec<Parts>>>;

/// Starts another daemon of the cluster, which responds to requests with `respond`.
pub(crate) async fn remote_daemon(
    cluster: &Cluster,
    id: NodeId,
    respond: impl Fn(&Parts) -> Response + Send + Sync + 'static,
) -> (SocketAddr, Received) {
    let app = &cluster.app;
    let peers = Peers::new(Arc::clone(&app.store), seed(), vec![id], &app.settings, Arc::clone(&app.traces));
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let tls = Some(Tls::new(peers.server_config().await.unwrap()));
    let listener = Listener { socket, tls, timeout: Duration::from_secs(60), max_connections: 16 };
    let (received, respond) = (Received::default(), Arc::new(respond));
    let requests = Arc::clone(&received);
    let handle = move |request: Request<Incoming>, _| {
        let parts = request.into_parts().0;
        let response = respond(&parts);
        requests.lock().push(parts);
        async move { response }
    };
    tokio::spawn(async move {
        let stop = watch::Sender::new(false);
        muster_api::serve(listener, handle, stop.subscribe()).await;
    });
    (address, received)
}
