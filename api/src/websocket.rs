//! WebSockets that clients open with a ticket. See docs/decisions/0080.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use muster_types::key::Secret;
use muster_types::{Error, Result};
use muster_websocket::{BINARY, Role, TICKET_PREFIX, WEBSOCKET, accept_key, relay};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::browser_session::NoForeignOrigin;
use crate::error::ApiError;
use crate::upgrade::{RequestedUpgrade, Upgrade};

/// Extracts the WebSocket that a client requests with a ticket. A page of another server cannot request one.
#[derive(Debug)]
pub(crate) struct TicketSocket {
    upgrade: Upgrade,
    accept: HeaderValue,
    pub(crate) ticket: Secret,
}

impl<S: Sync> FromRequestParts<S> for TicketSocket {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        NoForeignOrigin::from_request_parts(parts, state).await?;
        let Ok(upgrade) = RequestedUpgrade::from_request_parts(parts, state).await;
        let upgrade = upgrade.require(WEBSOCKET)?;
        let (accept, ticket) = read_headers(&parts.headers)?;
        Ok(Self { upgrade, accept, ticket })
    }
}

impl TicketSocket {
    /// Accepts the upgrade, and exchanges bytes with `peer` until one side closes its connection or neither sends any.
    pub(crate) fn relay(self, peer: impl AsyncRead + AsyncWrite + Send + 'static) -> Response {
        let mut response = self.upgrade.accept(move |client| async move {
            relay(client, peer, Role::Server).await;
        });
        response.headers_mut().insert(header::SEC_WEBSOCKET_ACCEPT, self.accept);
        response.headers_mut().insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(BINARY));
        response
    }
}

/// Reads the headers of a request, which must offer the subprotocols `binary` and `muster-ticket.TICKET`. Returns the
/// response to the key of the client, and the ticket.
fn read_headers(headers: &HeaderMap) -> Result<(HeaderValue, Secret)> {
    let invalid = |text: &str| Err(Error::Invalid(text.to_owned()));
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if text(header::SEC_WEBSOCKET_VERSION) != Some("13") {
        return invalid("Sec-WebSocket-Version: must be 13");
    }
    let key = text(header::SEC_WEBSOCKET_KEY).unwrap_or_default();
    if !STANDARD.decode(key).is_ok_and(|bytes| bytes.len() == 16) {
        return invalid("Sec-WebSocket-Key: must be 16 bytes in base64");
    }
    let offered = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    let offered = offered.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let offered: Vec<&str> = offered.map(str::trim).collect();
    let ticket = offered.iter().find_map(|protocol| protocol.strip_prefix(TICKET_PREFIX));
    let Some(ticket) = ticket.filter(|_| offered.contains(&BINARY)) else {
        return invalid("Sec-WebSocket-Protocol: must be binary and muster-ticket.TICKET");
    };
    let accept =
        HeaderValue::from_str(&accept_key(key)).expect("base64 consists of visible ASCII characters");
    Ok((accept, Secret::new(ticket)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_headers_of_a_client() {
        let headers = |version: &str, key: &str, protocols: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::SEC_WEBSOCKET_VERSION, version.parse().unwrap());
            headers.insert(header::SEC_WEBSOCKET_KEY, key.parse().unwrap());
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocols.parse().unwrap());
            headers
        };
        let key = "dGhlIHNhbXBsZSBub25jZQ==";
        let (accept, ticket) = read_headers(&headers("13", key, "binary, muster-ticket.abc")).unwrap();
        // The example of RFC 6455.
        assert_eq!((accept.to_str().unwrap(), ticket.expose()), ("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", "abc"));
        for (version, key, protocols) in [
            ("8", key, "binary, muster-ticket.abc"),
            ("13", "short", "binary, muster-ticket.abc"),
            ("13", key, "binary"),
            ("13", key, "muster-ticket.abc"),
            ("13", key, ""),
        ] {
            assert!(read_headers(&headers(version, key, protocols)).is_err(), "{version} {protocols}");
        }
        assert!(read_headers(&HeaderMap::new()).is_err());
    }
}
