//! Accepts connections, with or without TLS, and passes their requests to a service.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::connection::ClientStream;
use crate::write_timeout::WriteTimeout;

/// The maximum number of headers of a request.
const MAX_HEADERS: usize = 100;
/// Size of the buffer for a request's head, in bytes. Longer heads are rejected.
const HEAD_BUFFER_SIZE: usize = 64 << 10;
/// How long open requests may continue after a shutdown was requested.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// A certificate and its private key.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Serves with an existing configuration.
    #[must_use]
    pub fn new(config: Arc<rustls::ServerConfig>) -> Self {
        Self(TlsAcceptor::from(config))
    }

    /// Loads PEM files.
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, String> {
        let named = |path: &Path, reason: &dyn std::fmt::Display| format!("{}: {reason}", path.display());
        let chain: Vec<_> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .map_err(|e| named(certificate, &e))?;
        if chain.is_empty() {
            return Err(named(certificate, &"TLS_CERTIFICATE contains no PEM certificate"));
        }
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| named(key, &e))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .with_no_client_auth()
            .with_single_cert(chain, private)
            .map_err(|e| named(certificate, &e))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}

/// A listening socket and its limits.
#[derive(Debug)]
pub struct Listener {
    pub socket: TcpListener,
    pub tls: Option<Tls>,
    /// How long a peer may take to send a request's head, and to read a part of the response.
    pub timeout: Duration,
    pub max_connections: usize,
}

/// Serves requests until `stop` becomes true, then waits for open requests to finish.
pub async fn serve<S, F>(listener: Listener, service: S, mut stop: watch::Receiver<bool>)
where
    S: Fn(Request<Incoming>, SocketAddr) -> F + Clone + Send + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(listener.max_connections));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(listener.timeout)
        .max_headers(MAX_HEADERS)
        .max_buf_size(HEAD_BUFFER_SIZE);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener.socket, &slots) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let (stream, peer, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Most likely out of file descriptors: the backlog queues connections until some are free.
                tracing::warn!(%error, "failed to accept connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (http, service, mut stop) = (http.clone(), service.clone(), stop.clone());
        let (tls, timeout) = (listener.tls.clone(), listener.timeout);
        tokio::spawn(async move {
            let _slot = slot;
            let stream = ClientStream::new(stream);
            let client = stream.connection();
            let stream: Box<dyn Connection> = match tls {
                None => Box::new(stream),
                Some(Tls(acceptor)) => match tokio::time::timeout(timeout, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => Box::new(stream),
                    Ok(Err(_)) | Err(_) => return,
                },
            };
            let handler = service_fn(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(client.clone());
                let response = service(request, peer);
                async move { Ok::<_, Infallible>(response.await) }
            });
            let stream = TokioIo::new(WriteTimeout::new(stream, timeout));
            let mut connection = pin!(http.serve_connection(stream, handler).with_upgrades());
            let stopping = async { drop(stop.wait_for(|stop| *stop).await) };
            let served = tokio::select! {
                served = connection.as_mut() => served,
                () = stopping => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = served {
                tracing::debug!(%error, %peer, "connection failed");
            }
        });
    }
    // Every connection has a slot until its requests are finished.
    let all = u32::try_from(listener.max_connections).unwrap_or(u32::MAX);
    drop(listener);
    if tokio::time::timeout(SHUTDOWN_GRACE, slots.acquire_many(all)).await.is_err() {
        tracing::warn!("closed connections with unfinished requests");
    }
}

async fn accept(
    socket: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = socket.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, peer, slot))
}

/// A bidirectional stream.
trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}
