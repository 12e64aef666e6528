//! Tests of the calls between daemons, with a server that responds to every request.

use muster_types::node::NodeState;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

const SEED: &str = "the seed of the cluster";

async fn store() -> (tempfile::TempDir, Arc<Store>) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("sqlite:{}", directory.path().join("db").display())).await.unwrap();
    (directory, Arc::new(store))
}

fn peers(store: &Arc<Store>, seed: &str, node: NodeId) -> Peers {
    with_settings(Arc::clone(store), seed, node, &Settings::defaults())
}

fn with_settings(store: Arc<Store>, seed: &str, node: NodeId, settings: &Settings) -> Peers {
    Peers::new(store, Secret::new(seed), vec![node], settings, Arc::new(Traces::new(settings, "peer")))
}

fn row(id: NodeId, address: SocketAddr) -> NodeRow {
    NodeRow {
        identity: NodeIdentity {
            id,
            name: "peer".into(),
            ip: Ipv4Addr::LOCALHOST,
            release: String::new(),
            simulated: false,
            is_hypervisor: true,
            is_network_node: false,
            is_database_node: false,
        },
        state: NodeState::Created,
        lastseen: 0.0,
        report: NodeReport { node_address: Some(address), ..NodeReport::default() },
        created: 0.0,
        version: 1,
        epoch: 1,
        started: 0.0,
        lock_file: String::new(),
        clock_skew: 0.0,
        cordon: None,
    }
}

/// Responds to every request on a free port and returns its address.
async fn serve(peers: &Peers) -> SocketAddr {
    serve_after(peers, Duration::ZERO).await
}

/// Like [`serve`], after a delay.
async fn serve_after(peers: &Peers, delay: Duration) -> SocketAddr {
    let acceptor = TlsAcceptor::from(peers.server_config().await.unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut buffer = [0; 4096];
            if stream.read(&mut buffer).await.is_ok() {
                tokio::time::sleep(delay).await;
                let _ = stream
                    .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    .await;
                let _ = stream.shutdown().await;
            }
        }
    });
    address
}

#[tokio::test]
async fn daemons_of_a_cluster_authenticate_each_other() {
    let (_directory, store) = store().await;
    let (first, second, other) = (NodeId::new(), NodeId::new(), NodeId::new());
    let address = serve(&peers(&store, SEED, first)).await;
    let client = peers(&store, SEED, second);
    let timeout = Duration::from_secs(20);
    client.probe(&row(first, address), timeout).await.unwrap();
    // The certificate of a peer must have the id of the wanted node.
    assert!(client.probe(&row(other, address), timeout).await.is_err());

    // A client without a certificate of the cluster.
    let anonymous = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).build().unwrap();
    assert!(anonymous.get(format!("https://{address}/livez")).send().await.is_err());
    let (_elsewhere, other_store) = self::store().await;
    let stranger = peers(&other_store, SEED, second);
    assert!(stranger.probe(&row(first, address), timeout).await.is_err());
    // A daemon with another seed cannot use the authority of the cluster.
    assert!(peers(&store, "another seed altogether", first).server_config().await.is_err());
}

#[tokio::test]
async fn peer_that_does_not_respond_times_out() {
    let (_directory, store) = store().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = Settings::from_pairs(&[("NODE_RESPONSE_TIMEOUT", "0.2")]).unwrap();
    let client = with_settings(store, SEED, NodeId::new(), &settings);
    let node = row(NodeId::new(), silent.local_addr().unwrap());
    let request = client.request(&node, Method::GET, "/").await.unwrap();
    assert!(matches!(client.send(&node, request).await, Err(PeerError::TimedOut)));
}

#[tokio::test]
async fn nodes_are_sorted_by_their_round_trip_times() {
    let (_directory, store) = store().await;
    let client = peers(&store, SEED, NodeId::new());
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (slow, fast, degraded, unreachable) = (NodeId::new(), NodeId::new(), NodeId::new(), NodeId::new());
    let slow_address = serve_after(&peers(&store, SEED, slow), Duration::from_millis(500)).await;
    let fast_address = serve(&peers(&store, SEED, fast)).await;
    let degraded_address = serve(&peers(&store, SEED, degraded)).await;
    let mut rows = vec![
        row(degraded, degraded_address),
        row(unreachable, closed),
        row(slow, slow_address),
        row(fast, fast_address),
    ];
    rows[0].report.degraded = Some(NodeDegradation { reason: String::new(), since: 0.0 });
    client.sort_by_distance(&mut rows).await;
    let order: Vec<NodeId> = rows.iter().map(|row| row.identity.id).collect();
    assert_eq!(order, [fast, slow, unreachable, degraded]);

    // A probe that took longer counts only gradually, a faster one immediately.
    let first = RoundTrip::update(None, Duration::from_millis(100));
    let slower = RoundTrip::update(Some(first), Duration::from_secs(9));
    assert_eq!(slower.time, Duration::from_millis(125));
    assert_eq!(RoundTrip::update(Some(slower), Duration::from_millis(1)).time, Duration::from_millis(1));
}
