//! The HTTP client for URLs of users: it connects only to addresses that a filter allows.

use std::sync::Arc;
use std::time::Duration;

use muster_types::server_trust::certificate_problem;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use reqwest::{Client, Url};

use super::address::{AddressFilter, BlockedAddress, UnresolvedName};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends requests to allowed addresses. It does not follow redirects, and does not keep connections.
#[derive(Debug)]
pub(crate) struct GuardedClient {
    client: Client,
    filter: AddressFilter,
    has_proxy: bool,
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum RequestFailure {
    Blocked(BlockedAddress),
    /// No server responded.
    NoResponse(String),
    /// The server is not trusted.
    Untrusted(String),
    /// The server did not send a complete response.
    Interrupted(String),
}

impl GuardedClient {
    /// Creates a client that uses the HTTP proxy of the settings, if there is one.
    pub(crate) fn new(settings: &Settings, filter: AddressFilter) -> Result<Self> {
        let mut builder = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(0)
            .dns_resolver(Arc::new(filter.clone()))
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")));
        let has_proxy = !settings.http_proxy_server.is_empty();
        builder = if has_proxy {
            let proxy = reqwest::Proxy::all(&settings.http_proxy_server);
            builder.proxy(proxy.map_err(|error| Error::Internal(format!("HTTP_PROXY_SERVER: {error}")))?)
        } else {
            builder.no_proxy()
        };
        let client = builder.build().map_err(|error| Error::Internal(error.to_string()))?;
        Ok(Self { client, filter, has_proxy })
    }

    /// Rejects a URL whose address is not allowed. The names of other URLs are checked when they are resolved.
    pub(crate) async fn check(&self, url: &Url) -> Result<(), BlockedAddress> {
        self.filter.check_literal(url)?;
        if self.has_proxy { self.filter.check_name(url).await } else { Ok(()) }
    }

    /// Returns the client. Call [`check`](Self::check) for each URL first.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Classifies the error of a request.
    pub(crate) fn classify(&self, url: &Url, error: &reqwest::Error) -> RequestFailure {
        let mut source: Option<&dyn std::error::Error> = Some(error);
        while let Some(cause) = source {
            if let Some(blocked) = cause.downcast_ref::<BlockedAddress>() {
                return RequestFailure::Blocked(blocked.clone());
            }
            if let Some(unresolved) = cause.downcast_ref::<UnresolvedName>() {
                return RequestFailure::NoResponse(unresolved.to_string());
            }
            source = cause.source();
        }
        let host = host_of(url);
        if let Some(problem) = certificate_problem(error) {
            return RequestFailure::Untrusted(format!("the certificate of {host} {problem}"));
        }
        match (error.is_connect(), self.has_proxy) {
            (true, false) => RequestFailure::NoResponse(format!("cannot connect to {host}")),
            (true, true) => {
                RequestFailure::NoResponse(format!("cannot connect to {host} through HTTP_PROXY_SERVER"))
            }
            (false, _) if error.is_timeout() => RequestFailure::NoResponse(no_response(url)),
            (false, _) => RequestFailure::Interrupted(format!("the request to {host} failed")),
        }
    }
}

/// Returns the host of a URL for error messages.
pub(crate) fn host_of(url: &Url) -> String {
    url.host_str().unwrap_or("the server").to_owned()
}

/// Returns the error for a server that does not respond in time.
pub(crate) fn no_response(url: &Url) -> String {
    format!("{} does not respond", host_of(url))
}
