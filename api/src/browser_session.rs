//! The cookie of browser sessions, and the origin of the requests that it authenticates. See docs/decisions/0080.

use axum::extract::FromRequestParts;
use axum::http::header::{COOKIE, HOST, ORIGIN, SET_COOKIE};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use muster_types::key::Secret;
use muster_types::settings::Settings;
use muster_types::{Error, Result};

use crate::error::ApiError;
use crate::response::{Documented, Success};
use crate::upgrade::requested_protocol;

const NAME: &str = "muster_session";

/// Returns the token in the cookie of a request.
pub(crate) fn token(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == NAME).map(|(_, value)| value).filter(|value| !value.is_empty())
}

/// Rejects a request with a cookie that a page of another origin may have sent. Browsers add cookies to requests of any
/// page, but pages cannot forge the header `Origin`, nor read the responses to their requests.
pub(crate) fn require_own_origin(request: &Parts) -> Result<()> {
    let is_read = request.method.is_safe() && requested_protocol(&request.headers).is_none();
    if is_read || is_own_origin(request) == Some(true) { Ok(()) } else { Err(foreign_origin()) }
}

fn foreign_origin() -> Error {
    let text = "requests of a browser session need an Origin header with the host of this server";
    Error::Forbidden(text.into())
}

/// Returns whether the header `Origin` has the host of the request, or `None` without that header. The scheme may differ:
/// a proxy may add TLS.
fn is_own_origin(request: &Parts) -> Option<bool> {
    let origin = request.headers.get(ORIGIN)?;
    let authority = |origin: &HeaderValue| {
        let origin = origin.to_str().ok()?;
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
        Some(host.to_ascii_lowercase())
    };
    let host = request.headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = host.or_else(|| request.uri.authority().map(Authority::as_str));
    Some(authority(origin).is_some_and(|origin| host.is_some_and(|host| host.eq_ignore_ascii_case(&origin))))
}

/// Rejects the requests of pages of other origins. A client that is not a browser sends no `Origin`.
#[derive(Debug)]
pub(crate) struct NoForeignOrigin;

impl<S: Sync> FromRequestParts<S> for NoForeignOrigin {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        if is_own_origin(parts) == Some(false) { Err(foreign_origin().into()) } else { Ok(Self) }
    }
}

/// A response that sets or clears the cookie of a session.
#[derive(Debug)]
pub(crate) struct WithCookie<T> {
    cookie: HeaderValue,
    response: T,
}

impl<T> WithCookie<T> {
    /// Adds the cookie of a session that ends in `lifetime` seconds.
    pub(crate) fn set(transport: Transport, token: &Secret, lifetime: u64, response: T) -> Self {
        Self { cookie: cookie(transport, token.expose(), lifetime), response }
    }

    /// Makes the browser delete the cookie.
    pub(crate) fn clear(transport: Transport, response: T) -> Self {
        Self { cookie: cookie(transport, "", 0), response }
    }
}

/// Whether a browser uses TLS, as far as the server knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Plain,
    Tls,
}

impl Transport {
    /// Returns the transport of a request. A browser whose proxy adds TLS says so in the header `Origin`.
    pub(crate) fn of(settings: &Settings, headers: &HeaderMap) -> Self {
        let is_https = headers.get(ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"));
        if is_https || !settings.tls_certificate.is_empty() { Self::Tls } else { Self::Plain }
    }
}

fn cookie(transport: Transport, token: &str, lifetime: u64) -> HeaderValue {
    let secure = if transport == Transport::Tls { "; Secure" } else { "" };
    let text = format!("{NAME}={token}; Path=/; Max-Age={lifetime}; HttpOnly; SameSite=Strict{secure}");
    let mut value = HeaderValue::from_str(&text).expect("a token consists of visible ASCII characters");
    value.set_sensitive(true);
    value
}

impl<T: IntoResponse> IntoResponse for WithCookie<T> {
    fn into_response(self) -> Response {
        let mut response = self.response.into_response();
        response.headers_mut().insert(SET_COOKIE, self.cookie);
        response
    }
}

impl<T: Documented> Documented for WithCookie<T> {
    fn success() -> Option<Success> {
        T::success()
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    fn parts(request: axum::http::request::Builder) -> Parts {
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn finds_the_cookie_among_others() {
        let request = |cookie: &str| parts(Request::get("/").header(COOKIE, cookie));
        for (cookie, expected) in [
            ("muster_session=a.b-c", Some("a.b-c")),
            ("x=1; muster_session=t; y=2", Some("t")),
            ("muster_session=", None),
            ("xmuster_session=t", None),
            ("x=muster_session=t", None),
        ] {
            assert_eq!(token(&request(cookie).headers), expected, "{cookie}");
        }
        let twice = Request::get("/").header(COOKIE, "a=1").header(COOKIE, "muster_session=t");
        assert_eq!(token(&parts(twice).headers), Some("t"));
    }

    #[test]
    fn cookie_is_secure_over_tls() {
        let (plain, mut tls) = (Settings::defaults(), Settings::defaults());
        tls.tls_certificate = "server.pem".into();
        let is_secure = |settings: &Settings, origin: &'static str| {
            let headers = [(ORIGIN, HeaderValue::from_static(origin))].into_iter().collect();
            let value = cookie(Transport::of(settings, &headers), "t", 9);
            let value = value.to_str().unwrap();
            assert!(
                value.starts_with("muster_session=t; Path=/; Max-Age=9; HttpOnly; SameSite=Strict"),
                "{value}"
            );
            value.ends_with("; Secure")
        };
        assert!(!is_secure(&plain, "http://cloud.example"));
        assert!(is_secure(&plain, "https://cloud.example"), "a proxy adds TLS");
        assert!(is_secure(&tls, "http://cloud.example") && is_secure(&tls, ""));
    }

    #[test]
    fn changes_and_upgrades_need_the_origin_of_the_host() {
        let check = |method: &str, origin: Option<&str>, upgrade: bool| {
            let mut request = Request::builder().method(method).uri("/x").header(HOST, "Cloud.example:13000");
            if let Some(origin) = origin {
                request = request.header(ORIGIN, origin);
            }
            if upgrade {
                request = request.header("connection", "Upgrade").header("upgrade", "websocket");
            }
            require_own_origin(&parts(request)).is_ok()
        };
        for origin in ["http://cloud.example:13000", "https://cloud.EXAMPLE:13000"] {
            assert!(check("POST", Some(origin), false) && check("GET", Some(origin), true), "{origin}");
        }
        for origin in [
            "http://evil.example",
            "http://cloud.example",
            "http://cloud.example:13001",
            "http://cloud.example:13000.evil.example",
            "http://cloud.example:13000/",
            "ftp://cloud.example:13000",
            "cloud.example:13000",
            "null",
            "",
        ] {
            assert!(!check("POST", Some(origin), false) && !check("GET", Some(origin), true), "{origin}");
            assert!(check("GET", Some(origin), false), "a page cannot read the response: {origin}");
        }
        for method in ["POST", "PUT", "DELETE"] {
            assert!(!check(method, None, false), "{method}");
        }
        assert!(check("GET", None, false) && check("HEAD", None, false) && !check("GET", None, true));
    }
}
