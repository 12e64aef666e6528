//! How the daemons of one cluster reach each other: mutual TLS with certificates of the cluster's own authority, on a port of
//! its own. See docs/decisions/0056.

mod authority;
mod certificate;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::{Stream, StreamExt as _, stream};
use muster_store::Store;
use muster_store::nodes::NodeRow;
use muster_types::ids::NodeId;
use muster_types::key::Secret;
use muster_types::node::{NodeDegradation, NodeIdentity, NodeReport};
use muster_types::settings::Settings;
use muster_types::time::now;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use reqwest::Method;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::sync::OnceCell;

use authority::ClusterAuthority;
use certificate::NodeCertificate;

use crate::traces::{SpanKind, TRACEPARENT, Traces};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a measured round-trip time is used.
const ROUND_TRIP_TTL: Duration = Duration::from_secs(60);
/// The maximum time that a peer which is alive may work on a request before it responds.
const WORK_TIMEOUT: Duration = Duration::from_secs(600);
/// The header that marks a request of a peer, which is not forwarded again.
pub const FORWARDED: &str = "x-muster-handed-on";
/// The maximum time between two parts of a response.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a peer did not respond.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    #[error("{0}")]
    Failed(reqwest::Error),
    #[error("it did not respond in time")]
    TimedOut,
    #[error("it has no address for other nodes")]
    NoAddress,
    #[error("{0}")]
    Internal(Error),
}

/// Calls the other daemons of the cluster, and authenticates their calls.
#[derive(Debug)]
pub struct Peers {
    store: Arc<Store>,
    seed: Secret,
    nodes: Vec<NodeId>,
    response_timeout: Duration,
    listener: OnceLock<SocketAddr>,
    degraded: Mutex<Option<NodeDegradation>>,
    /// The round-trip times of the peers that responded to their last probe.
    round_trips: Mutex<HashMap<NodeId, RoundTrip>>,
    /// Created on first use, because a cluster with one daemon does not need it.
    identity: OnceCell<PeerIdentity>,
    traces: Arc<Traces>,
}

/// How long a peer takes to respond to a probe.
#[derive(Debug, Clone, Copy)]
struct RoundTrip {
    time: Duration,
    measured: Instant,
}

impl RoundTrip {
    /// Returns the round-trip time after a probe that took `time`. A slower probe counts only gradually, because it may
    /// include the establishment of a connection.
    fn update(previous: Option<Self>, time: Duration) -> Self {
        let time = previous.map_or(time, |previous| time.min(previous.time.mul_f64(1.25)));
        Self { time, measured: Instant::now() }
    }
}

/// The certificate of this daemon, as client and as server.
struct PeerIdentity {
    client: reqwest::Client,
    addresses: Arc<PeerAddresses>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerIdentity")
    }
}

impl Peers {
    /// Creates the peers of a daemon that runs the given nodes.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        seed: Secret,
        nodes: Vec<NodeId>,
        settings: &Settings,
        traces: Arc<Traces>,
    ) -> Self {
        let response_timeout = Duration::from_secs_f64(settings.node_response_timeout);
        Self {
            store,
            seed,
            nodes,
            response_timeout,
            listener: OnceLock::new(),
            degraded: Mutex::default(),
            round_trips: Mutex::default(),
            identity: OnceCell::new(),
            traces,
        }
    }

    async fn identity(&self) -> Result<&PeerIdentity> {
        let create = || async {
            let authority = ClusterAuthority::load(&self.store, &self.seed).await?;
            PeerIdentity::new(authority, &self.nodes)
                .map_err(|error| Error::Internal(format!("failed to create the node certificate: {error}")))
        };
        self.identity.get_or_try_init(create).await
    }

    /// Returns the TLS configuration of the port for other daemons. It accepts only clients with a certificate of the
    /// cluster.
    pub async fn server_config(&self) -> Result<Arc<ServerConfig>> {
        Ok(Arc::clone(&self.identity().await?.server))
    }

    /// Sets the address on which this daemon listens for the others. Only the first call has an effect.
    pub fn set_listener(&self, address: SocketAddr) {
        let _ = self.listener.set(address);
    }

    /// Returns the seed of the cluster.
    pub(crate) fn seed(&self) -> &Secret {
        &self.seed
    }

    /// Returns whether this daemon listens for others.
    pub(crate) fn is_listening(&self) -> bool {
        self.listener.get().is_some()
    }

    /// Records whether this daemon reaches its peers. Returns whether that has changed.
    pub(crate) fn set_degraded(&self, reason: Option<String>) -> bool {
        let mut degraded = self.degraded.lock();
        let changed = degraded.is_some() != reason.is_some();
        if changed {
            *degraded = reason.map(|reason| NodeDegradation { reason, since: now() });
        }
        changed
    }

    /// Returns whether this daemon reaches none of its peers.
    pub(crate) fn is_degraded(&self) -> bool {
        self.degraded.lock().is_some()
    }

    /// Adds what the other daemons need to know of this one to the report of its node.
    pub(crate) fn complete_report(&self, identity: &NodeIdentity, report: &mut NodeReport) {
        report.node_address = self.listener.get().map(|listener| {
            let ip = match listener.ip() {
                ip if !ip.is_unspecified() => ip,
                _ if identity.simulated => Ipv4Addr::LOCALHOST.into(),
                _ => identity.ip.into(),
            };
            SocketAddr::new(ip, listener.port())
        });
        report.degraded.clone_from(&self.degraded.lock());
    }

    /// Returns the time within which a peer must start to work on a request.
    #[must_use]
    pub fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    /// Creates a request to the daemon of `node`, which must have a certificate of the cluster with the id of the node.
    pub async fn request(
        &self,
        node: &NodeRow,
        method: Method,
        path: &str,
    ) -> Result<reqwest::RequestBuilder, PeerError> {
        let address = node.report.node_address.ok_or(PeerError::NoAddress)?;
        let identity = self.identity().await.map_err(PeerError::Internal)?;
        let name = node.identity.id.to_string();
        let url = format!("https://{name}:{}{path}", address.port());
        identity.addresses.set(name, address.ip());
        Ok(identity.client.request(method, url))
    }

    /// Sends a request to the daemon of `node` and returns its response. A peer that does not respond within the timeout
    /// must show that it is alive; then it may work longer, because some requests take long.
    pub async fn send(
        &self,
        node: &NodeRow,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, PeerError> {
        let Some(mut span) = self.traces.begin_child(SpanKind::Client, "call daemon") else {
            return self.wait_for_response(node, request).await;
        };
        let request = request.header(TRACEPARENT, span.context().traceparent());
        let response = self.wait_for_response(node, request).await;
        span.set_text("muster.node", &node.identity.name);
        match &response {
            Ok(response) => span.set_number("http.response.status_code", response.status().as_u16().into()),
            Err(error) => span.fail(&error.to_string()),
        }
        self.traces.end(span);
        response
    }

    async fn wait_for_response(
        &self,
        node: &NodeRow,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, PeerError> {
        let mut response = pin!(request.send());
        let probe_time = CONNECT_TIMEOUT.min(self.response_timeout / 2);
        let started = Instant::now();
        loop {
            let waited = tokio::time::timeout(self.response_timeout - probe_time, &mut response).await;
            if let Ok(received) = waited {
                return received.map_err(PeerError::Failed);
            }
            let probe = pin!(self.probe(node, probe_time));
            match select(&mut response, probe).await {
                Either::Left((received, _)) => return received.map_err(PeerError::Failed),
                Either::Right((Ok(()), _)) if started.elapsed() < WORK_TIMEOUT => {}
                Either::Right(_) => return Err(PeerError::TimedOut),
            }
        }
    }

    /// Checks that the daemon of `node` responds within the timeout.
    pub async fn probe(&self, node: &NodeRow, timeout: Duration) -> Result<(), PeerError> {
        let request = self.request(node, Method::GET, "/livez").await?;
        let started = Instant::now();
        let probed = tokio::time::timeout(timeout, request.send()).await;
        let probed = probed.map_err(|_| PeerError::TimedOut).and_then(|sent| sent.map_err(PeerError::Failed));
        let mut round_trips = self.round_trips.lock();
        let previous = round_trips.remove(&node.identity.id);
        if probed.is_ok() {
            round_trips.insert(node.identity.id, RoundTrip::update(previous, started.elapsed()));
        }
        probed.map(drop)
    }

    /// Sorts nodes of other daemons by their distance: the nearest first, degraded and unreachable ones last. Probes those that
    /// were not probed lately.
    pub(crate) async fn sort_by_distance(&self, nodes: &mut [NodeRow]) {
        if nodes.len() < 2 {
            return;
        }
        futures_util::future::join_all(nodes.iter().map(|node| async {
            let known = self.round_trips.lock().get(&node.identity.id).copied();
            if known.is_some_and(|known| known.measured.elapsed() < ROUND_TRIP_TTL) {
                return;
            }
            // The first one establishes the connection.
            for _ in 0..2 {
                if let Err(error) = self.probe(node, CONNECT_TIMEOUT).await {
                    tracing::debug!(node = node.identity.name, %error, "failed to probe peer");
                    return;
                }
            }
        }))
        .await;
        let round_trips = self.round_trips.lock();
        let time =
            |node: &NodeRow| round_trips.get(&node.identity.id).map_or(Duration::MAX, |known| known.time);
        nodes.sort_by_cached_key(|node| (node.report.degraded.is_some(), time(node)));
    }
}

impl PeerIdentity {
    fn new(authority: ClusterAuthority, nodes: &[NodeId]) -> Result<Self, String> {
        let provider = Arc::new(default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate.clone()).map_err(|error| error.to_string())?;
        let roots = Arc::new(roots);
        let certificate = Arc::new(NodeCertificate::new(authority, nodes)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| error.to_string())?
            .with_client_cert_verifier(verifier.build().map_err(|error| error.to_string())?)
            .with_cert_resolver(Arc::clone(&certificate) as _);
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_client_cert_resolver(certificate);
        let addresses = Arc::new(PeerAddresses::default());
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .no_proxy()
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .dns_resolver(Arc::clone(&addresses))
            .tls_backend_preconfigured(client)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { client, addresses, server: Arc::new(server) })
    }
}

/// The addresses of peers by the names of their certificates, which are the ids of their nodes.
#[derive(Debug, Default)]
struct PeerAddresses(Mutex<HashMap<String, IpAddr>>);

impl PeerAddresses {
    fn set(&self, name: String, address: IpAddr) {
        self.0.lock().insert(name, address);
    }
}

impl Resolve for PeerAddresses {
    fn resolve(&self, name: Name) -> Resolving {
        let found = self.0.lock().get(name.as_str()).copied();
        // The port is the one of the URL.
        let addresses: Addrs = Box::new(found.map(|address| SocketAddr::new(address, 0)).into_iter());
        Box::pin(std::future::ready(Ok(addresses)))
    }
}

/// Returns the parts of a response, which fail if none arrives within the timeout.
pub fn until_stalled(
    parts: impl Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
    timeout: Duration,
) -> impl Stream<Item = Result<Bytes, PeerError>> + Send {
    stream::unfold(Some(Box::pin(parts)), move |parts| async move {
        let mut parts = parts?;
        match tokio::time::timeout(timeout, parts.next()).await {
            Ok(None) => None,
            Ok(Some(Ok(bytes))) => Some((Ok(bytes), Some(parts))),
            Ok(Some(Err(error))) => Some((Err(PeerError::Failed(error)), None)),
            Err(_) => Some((Err(PeerError::TimedOut), None)),
        }
    })
}
