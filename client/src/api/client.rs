//! The HTTP client: logs in when first needed, caches the token, and never shows a secret.

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use muster_types::key::Secret;
use muster_types::server_trust::{HostAuthorities, client_config};
use reqwest::header::{CONNECTION, LOCATION, UPGRADE};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Upgraded, Url, redirect};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::error::{Error, Result};
use super::response::{ApiResponse, RawResponse};
use crate::credentials::Credentials;
use crate::error_text::{io_error_text, is_connection_refused, is_unknown_issuer, root_cause};
use crate::output::escape_control;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);
/// The timeout of one request that transfers a large body. Callers detect stalled connections themselves.
pub(super) const TRANSFER_TIMEOUT: Duration = Duration::from_secs(86_400);

/// The header with the start of the next page of a list.
const NEXT_CURSOR: &str = "x-next-cursor";

/// The delay before the first repetition of a login that is refused because too many wait. It doubles each time.
const LOGIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_LOGIN_RETRY_DELAY: Duration = Duration::from_secs(8);

/// A client of one cluster that acts as one namespace.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    /// The URL of the API without a trailing slash.
    base: String,
    credentials: Credentials,
    token: Arc<Mutex<Option<Secret>>>,
    /// Whether the server only checks creations.
    is_dry_run: bool,
}

impl Client {
    /// Creates a client that trusts the host's certificate authorities for HTTPS. Sends nothing yet.
    pub fn new(credentials: Credentials) -> Result<Self> {
        Self::build(credentials, None)
    }

    /// Creates a client that trusts only the certificates in a PEM file for HTTPS: authorities, or the server's own. Sends nothing yet.
    pub fn with_cacert(credentials: Credentials, file: &Path) -> Result<Self> {
        let invalid = |reason: &dyn fmt::Display| {
            Error::InvalidInput(format!("certificates {}: {reason}", file.display()))
        };
        let pem = fs::read(file).map_err(|error| invalid(&io_error_text(&error)))?;
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem)
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| invalid(&error))?;
        if certificates.is_empty() {
            return Err(invalid(&"the file contains no PEM certificate"));
        }
        let tls = client_config(&certificates, HostAuthorities::Ignored).map_err(|error| invalid(&error))?;
        Self::build(credentials, Some(tls))
    }

    fn build(credentials: Credentials, tls: Option<ClientConfig>) -> Result<Self> {
        let invalid = |reason: &dyn fmt::Display| {
            Error::InvalidInput(format!("API URL {:?}: {reason}", escape_control(&credentials.apiurl)))
        };
        let url = Url::parse(&credentials.apiurl).map_err(|error| invalid(&error))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(invalid(&"must start with http:// or https:// and a host"));
        }
        if !url.username().is_empty()
            || url.password().is_some()
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(invalid(&"must consist only of scheme, host, port and path"));
        }
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(RESPONSE_TIMEOUT)
            // A token must not follow a redirect, and the API does not redirect.
            .redirect(redirect::Policy::none());
        if let Some(tls) = tls {
            http = http.tls_backend_preconfigured(tls);
        } else if url.scheme() == "http" {
            // The host's certificates are not needed, and a minimal host may not have any.
            http = http.tls_certs_only([]);
        }
        let http = http.build().map_err(|error| {
            Error::InvalidInput(format!("cannot create the HTTPS client: {}", root_cause(&error)))
        })?;
        let base = url.as_str().trim_end_matches('/').to_owned();
        Ok(Self { http, base, credentials, token: Arc::default(), is_dry_run: false })
    }

    /// Returns this client for creations that the server only checks, if `is_dry_run` is set. The response is the record that
    /// would be created.
    #[must_use]
    pub fn with_dry_run(&self, is_dry_run: bool) -> Self {
        Self { is_dry_run, ..self.clone() }
    }

    /// Returns the URL of the API.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.base
    }

    /// Returns the namespace that the client acts as.
    #[must_use]
    pub fn own_namespace(&self) -> &str {
        &self.credentials.namespace
    }

    /// Logs in now instead of with the first call.
    pub async fn log_in(&self) -> Result<()> {
        self.token(None).await.map(drop)
    }

    pub(super) async fn get<T>(&self, path: String) -> Result<ApiResponse<T>> {
        self.call(Method::GET, path, None).await
    }

    pub(super) async fn delete<T>(&self, path: String) -> Result<ApiResponse<T>> {
        self.call(Method::DELETE, path, None).await
    }

    pub(super) async fn call<T>(
        &self,
        method: Method,
        path: String,
        mut body: Option<Value>,
    ) -> Result<ApiResponse<T>> {
        if self.is_dry_run && method == Method::POST {
            // A server rejects the field if it cannot check a request without executing it.
            body.get_or_insert_with(|| json!({}))["dry_run"] = true.into();
        }
        let raw = self.send_authenticated(method, &path, body).await?;
        self.decode(&raw)
    }

    /// Sends a request with a token and returns the response whatever its status.
    pub(super) async fn send_authenticated(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<RawResponse> {
        let (token, fresh) = self.token(None).await?;
        let mut raw = self.send(method.clone(), path, Some(&token), body.as_ref()).await?;
        // A token that was issued just now has not expired, so a new one would be refused as well.
        if raw.status == StatusCode::UNAUTHORIZED && !fresh {
            let (token, _) = self.token(Some(&token)).await?;
            raw = self.send(method, path, Some(&token), body.as_ref()).await?;
        }
        Ok(raw)
    }

    /// Returns the successful response, or the refusal.
    pub(super) fn decode<T>(&self, raw: &RawResponse) -> Result<ApiResponse<T>> {
        match raw.status {
            StatusCode::OK | StatusCode::ACCEPTED => self.parse_json(&raw.body).map(ApiResponse::new),
            StatusCode::UNAUTHORIZED => Err(Error::NotAllowed {
                namespace: self.credentials.namespace.clone(),
                message: raw.refusal_message(),
            }),
            _ => Err(raw.refusal()),
        }
    }

    /// Returns a response body that is not JSON.
    pub(super) async fn get_bytes(&self, path: String) -> Result<Vec<u8>> {
        let raw = self.send_authenticated(Method::GET, &path, None).await?;
        if raw.status == StatusCode::OK {
            return Ok(raw.body);
        }
        let refusal = self.decode::<()>(&raw).err();
        Err(refusal
            .unwrap_or_else(|| self.unexpected_response(&format!("{} instead of content", raw.status))))
    }

    /// Sends a request that changes the protocol of its connection, and returns that connection.
    pub(super) async fn upgrade(
        &self,
        method: Method,
        path: &str,
        protocol: &str,
        body: Option<&Value>,
    ) -> Result<Upgraded> {
        let mut refused = None;
        loop {
            let (token, fresh) = self.token(refused.as_ref()).await?;
            let mut request = self
                .request(method.clone(), path, Some(&token))
                .header(CONNECTION, "upgrade")
                .header(UPGRADE, protocol)
                .timeout(TRANSFER_TIMEOUT);
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = self.send_request(request).await?;
            if response.status() == StatusCode::UNAUTHORIZED && !fresh {
                refused = Some(token);
                continue;
            }
            return self.upgraded(path, response).await;
        }
    }

    /// Returns the connection whose protocol a response has changed, or the refusal.
    pub(super) async fn upgraded(&self, path: &str, response: Response) -> Result<Upgraded> {
        let status = response.status();
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return response.upgrade().await.map_err(|error| self.unreachable(&error));
        }
        let body = response.bytes().await.map_err(|error| self.unreachable(&error))?.to_vec();
        let refusal = self.decode::<()>(&RawResponse::new(path, status, body)).err();
        let unexpected = || self.unexpected_response(&format!("{status} instead of an upgraded connection"));
        Err(refusal.unwrap_or_else(unexpected))
    }

    /// Returns the token and whether it was issued just now. A `refused` token is replaced, unless a concurrent call
    /// has already done so.
    pub(super) async fn token(&self, refused: Option<&Secret>) -> Result<(Secret, bool)> {
        let mut cached = self.token.lock().await;
        if let Some(token) = cached.as_ref().filter(|token| Some(*token) != refused) {
            return Ok((token.clone(), false));
        }
        let token = self.fetch_token().await?;
        *cached = Some(token.clone());
        Ok((token, true))
    }

    async fn fetch_token(&self) -> Result<Secret> {
        let body = json!({ "namespace": self.credentials.namespace, "key": self.credentials.key.expose() });
        let mut delay = LOGIN_RETRY_DELAY;
        let raw = loop {
            let raw = self.send(Method::POST, "/auth", None, Some(&body)).await?;
            if raw.status != StatusCode::TOO_MANY_REQUESTS || delay > MAX_LOGIN_RETRY_DELAY {
                break raw;
            }
            tokio::time::sleep(delay).await;
            delay *= 2;
        };
        if raw.status != StatusCode::OK {
            return Err(Error::LoginRefused {
                url: self.base.clone(),
                namespace: self.credentials.namespace.clone(),
                status: raw.status.as_u16(),
                message: raw.refusal_message(),
            });
        }
        let json = self.parse_json(&raw.body)?;
        let token = json.get("access_token").and_then(Value::as_str);
        token.map(Secret::new).ok_or_else(|| self.unexpected_response("a login without a token"))
    }

    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        token: Option<&Secret>,
        body: Option<&Value>,
    ) -> Result<RawResponse> {
        let mut request = self.request(method, path, token);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.receive(path, request).await
    }

    pub(super) fn request(&self, method: Method, path: &str, token: Option<&Secret>) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match token {
            Some(token) => request.bearer_auth(token.expose()),
            None => request,
        }
    }

    /// Sends a request and reads the whole response.
    pub(super) async fn receive(&self, path: &str, request: RequestBuilder) -> Result<RawResponse> {
        let response = self.send_request(request).await?;
        let status = response.status();
        let next_cursor = response.headers().get(NEXT_CURSOR).and_then(|cursor| cursor.to_str().ok());
        let next_cursor = next_cursor.map(str::to_owned);
        let body = response.bytes().await.map_err(|error| self.unreachable(&error))?.to_vec();
        Ok(RawResponse { next_cursor, ..RawResponse::new(path, status, body) })
    }

    /// Sends a request and returns the response with its body unread.
    pub(super) async fn send_request(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        if response.status().is_redirection() {
            let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
            let location = escape_control(location.unwrap_or("an unnamed location"));
            return Err(self.unexpected_response(&format!("a redirect to {location}")));
        }
        Ok(response)
    }

    pub(super) fn parse_json(&self, body: &[u8]) -> Result<Value> {
        serde_json::from_slice(body).map_err(|error| self.unexpected_response(&format!("not JSON, {error}")))
    }

    pub(super) fn unexpected_response(&self, reason: &str) -> Error {
        Error::UnexpectedResponse { url: self.base.clone(), reason: reason.to_owned() }
    }

    /// Returns the error of a connection that transferred nothing for the duration of `timeout`.
    pub(crate) fn stalled(&self, timeout: Duration) -> Error {
        let reason = format!("no data was transferred for {} seconds", timeout.as_secs());
        Error::Unreachable { url: self.base.clone(), reason }
    }

    pub(super) fn unreachable(&self, error: &reqwest::Error) -> Error {
        let mut reason =
            if error.is_timeout() { "the request timed out".to_owned() } else { root_cause(error) };
        if is_connection_refused(error) {
            reason.push_str("; is `muster serve` running?");
        } else if is_unknown_issuer(error) {
            reason.push_str("; give its certificate authority with --cacert");
        }
        Error::Unreachable { url: self.base.clone(), reason }
    }
}
