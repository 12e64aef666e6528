//! Upgraded connections: after the response 101, client and handler exchange bytes of another protocol over the
//! connection of the request.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use muster_types::{Error, Result};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;

/// How long a relayed connection may transfer nothing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long the orderly end of a connection may take.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

const BUFFER_SIZE: usize = 16 << 10;

/// A connection that carries another protocol.
pub(crate) type UpgradedStream = TokioIo<Upgraded>;

/// Extracts the upgrade that a client requests, if any.
#[derive(Debug)]
pub(crate) struct RequestedUpgrade {
    protocol: Option<String>,
    connection: Option<OnUpgrade>,
}

impl<S: Sync> FromRequestParts<S> for RequestedUpgrade {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self { protocol: requested_protocol(&parts.headers), connection: parts.extensions.remove() })
    }
}

/// Returns the protocol that the headers of a request ask for.
pub(crate) fn requested_protocol(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let mut options = text(header::CONNECTION)?.split(',').map(str::trim);
    options.any(|option| option.eq_ignore_ascii_case("upgrade")).then_some(())?;
    text(header::UPGRADE).map(|protocol| protocol.trim().to_ascii_lowercase())
}

impl RequestedUpgrade {
    /// Returns whether the client requests this protocol, whose name is lower case.
    pub(crate) fn requests(&self, protocol: &str) -> bool {
        self.protocol.as_deref() == Some(protocol)
    }

    /// Returns the upgrade if the client requests this protocol, whose name is lower case.
    pub(crate) fn require(self, protocol: &'static str) -> Result<Upgrade> {
        match (self.protocol, self.connection) {
            (Some(requested), Some(connection)) if requested == protocol => {
                Ok(Upgrade { protocol, connection })
            }
            _ => Err(Error::Invalid(format!(
                "this call needs the headers \"Connection: Upgrade\" and \"Upgrade: {protocol}\" on an HTTP/1.1 connection"
            ))),
        }
    }
}

/// A requested upgrade of a connection.
#[derive(Debug)]
pub(crate) struct Upgrade {
    protocol: &'static str,
    connection: OnUpgrade,
}

impl Upgrade {
    /// Returns the protocol of the upgraded connection.
    pub(crate) fn protocol(&self) -> &'static str {
        self.protocol
    }

    /// Accepts the upgrade, and runs `serve` with the connection in a task of its own.
    pub(crate) fn accept<F>(self, serve: impl FnOnce(UpgradedStream) -> F + Send + 'static) -> Response
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut response = Response::default();
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(self.protocol));
        tokio::spawn(async move {
            // The client may disconnect before it reads the response.
            if let Ok(stream) = self.connection.await {
                serve(TokioIo::new(stream)).await;
            }
        });
        response
    }

    /// Accepts the upgrade, and exchanges bytes with `peer` until one side closes its connection or both are idle.
    pub(crate) fn relay(self, peer: impl AsyncRead + AsyncWrite + Send + 'static) -> Response {
        self.accept(move |client| relay(client, peer, IDLE_TIMEOUT))
    }
}

async fn relay(one: impl AsyncRead + AsyncWrite, other: impl AsyncRead + AsyncWrite, idle_timeout: Duration) {
    let (one_reader, one_writer) = tokio::io::split(one);
    let (other_reader, other_writer) = tokio::io::split(other);
    let (mut one_writer, mut other_writer) = (Box::pin(one_writer), Box::pin(other_writer));
    let activity = Notify::new();
    let idle = async { while tokio::time::timeout(idle_timeout, activity.notified()).await.is_ok() {} };
    tokio::select! {
        () = copy(one_reader, &mut other_writer, &activity) => {}
        () = copy(other_reader, &mut one_writer, &activity) => {}
        () = idle => {}
    }
    // A connection with TLS that ends without this looks like one that failed.
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, one_writer.shutdown()).await;
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, other_writer.shutdown()).await;
}

async fn copy(reader: impl AsyncRead, writer: &mut (impl AsyncWrite + Unpin), activity: &Notify) {
    let mut reader = Box::pin(reader);
    let mut buffer = vec![0; BUFFER_SIZE];
    while let Ok(size @ 1..) = reader.read(&mut buffer).await {
        activity.notify_one();
        if writer.write_all(&buffer[..size]).await.is_err() || writer.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_requested_protocol() {
        let requested = |connection: &'static str, upgrade: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONNECTION, HeaderValue::from_static(connection));
            headers.insert(header::UPGRADE, HeaderValue::from_static(upgrade));
            requested_protocol(&headers)
        };
        assert_eq!(requested("keep-alive, Upgrade", "Muster-Terminal").as_deref(), Some("muster-terminal"));
        assert_eq!(requested("keep-alive", "muster-terminal"), None);
        assert_eq!(requested_protocol(&HeaderMap::new()), None);
    }
    #[tokio::test]
    async fn relay_ends_when_one_side_closes_or_both_are_idle() {
        let (mut user, one) = tokio::io::duplex(64);
        let (mut guest, other) = tokio::io::duplex(64);
        let relaying = tokio::spawn(relay(one, other, Duration::from_secs(60)));
        user.write_all(b"ls").await.unwrap();
        let mut received = [0; 2];
        guest.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"ls");
        drop(guest);
        relaying.await.unwrap();
        assert_eq!(user.read(&mut received).await.unwrap(), 0);
        let ((_user, one), (_guest, other)) = (tokio::io::duplex(64), tokio::io::duplex(64));
        relay(one, other, Duration::from_millis(1)).await;
    }
}
