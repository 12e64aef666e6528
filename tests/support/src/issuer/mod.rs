//! An issuer of identity tokens: an https server with its own certificate authority, whose responses and keys a test
//! controls.

mod keys;

use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{oneshot, watch};
use tokio_rustls::TlsAcceptor;

pub use keys::Signer;
use keys::{Keys, fresh};

/// The duration of a slow response.
const SLOW_RESPONSE_TIME: Duration = Duration::from_secs(20);
/// The number of chunks of a slow response.
const SLOW_RESPONSE_CHUNKS: usize = 40;
/// The number of blanks before the keys of a huge response.
const HUGE_PADDING: usize = 16 << 20;

/// The response to requests for the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    Keys,
    /// No response until the mode changes.
    Hang,
    /// The keys, in chunks over [`SLOW_RESPONSE_TIME`].
    Slow,
    /// The keys after [`HUGE_PADDING`], without `Content-Length`.
    Huge,
    NotJson,
    Redirect(String),
    /// The keys with another status.
    Status(u16),
}

/// The certificate that the server presents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certificate {
    Good,
    /// For another host.
    WrongHost,
    Expired,
    /// Its own authority, but not marked as one.
    SelfSigned,
    /// Its own authority, and marked as one, as `openssl req -x509` does.
    SelfSignedAuthority,
}

/// A running issuer. Dropping it ends its server.
#[derive(Debug)]
pub struct Issuer {
    host: String,
    port: u16,
    authority: String,
    state: Arc<State>,
    /// Dropping it ends the server.
    _running: oneshot::Sender<()>,
}

#[derive(Debug)]
struct State {
    mode: watch::Sender<Mode>,
    keys: Mutex<Keys>,
    /// The published keys.
    published: Mutex<Vec<Value>>,
    fetches: AtomicUsize,
}

impl Issuer {
    /// Starts an issuer that publishes an RS256 key `rsa-1` and an ES256 key `ec-1`.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(Certificate::Good)
    }

    /// Like [`start`](Self::start), with a certificate that may be invalid.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn start_with(certificate: Certificate) -> Self {
        Self::start_on("localhost", certificate)
    }

    /// Like [`start`](Self::start), on an address of this host that other hosts reach.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn start_at(address: &str) -> Self {
        Self::start_on(address, Certificate::Good)
    }

    fn start_on(host: &str, certificate: Certificate) -> Self {
        let (authority, config) = certified(host, certificate);
        let address = if host == "localhost" { "127.0.0.1" } else { host };
        let listener = TcpListener::bind((address, 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let port = listener.local_addr().expect("an address").port();
        let keys = Keys::generate(1);
        let state = Arc::new(State {
            mode: watch::Sender::new(Mode::Keys),
            published: Mutex::new(keys.published()),
            keys: Mutex::new(keys),
            fetches: AtomicUsize::new(0),
        });
        let (running, ended) = oneshot::channel::<()>();
        let served = Arc::clone(&state);
        // In its own runtime, since the test's may be blocked.
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, config, served) => {}
                    _ = ended => {}
                }
            });
        });
        Self { host: host.to_owned(), port, authority, state, _running: running }
    }

    /// Returns the `iss` of its tokens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}:{}", self.host, self.port)
    }

    /// Returns the URL of its keys; the response depends on the [`Mode`].
    #[must_use]
    pub fn jwks_uri(&self) -> String {
        format!("{}/keys", self.url())
    }

    /// Returns another URL of its keys, which ignores the [`Mode`].
    #[must_use]
    pub fn moved_uri(&self) -> String {
        format!("{}/moved", self.url())
    }

    /// Returns the certificate authority of its certificate.
    #[must_use]
    pub fn ca_pem(&self) -> String {
        self.authority.clone()
    }

    /// Writes the certificate authority to a file.
    ///
    /// # Panics
    /// When that fails.
    pub fn write_ca(&self, path: &Path) {
        std::fs::write(path, &self.authority).expect("a file");
    }

    /// Returns the number of requests so far.
    #[must_use]
    pub fn fetches(&self) -> usize {
        self.state.fetches.load(Ordering::SeqCst)
    }

    /// Changes the response to requests for the keys.
    pub fn serve(&self, mode: Mode) {
        self.state.mode.send_replace(mode);
    }

    /// Replaces all published keys with new ones that have new IDs.
    pub fn rotate(&self) {
        let mut keys = lock(&self.state.keys);
        *keys = Keys::generate(keys.number + 1);
        *lock(&self.state.published) = keys.published();
    }

    /// Returns the published key set.
    #[must_use]
    pub fn jwks(&self) -> Value {
        json!({ "keys": *lock(&self.state.published) })
    }

    /// Replaces all published keys.
    pub fn publish(&self, keys: Vec<Value>) {
        *lock(&self.state.published) = keys;
    }

    /// Returns the current RSA key as JWK, without an ID and algorithm.
    #[must_use]
    pub fn rsa_jwk(&self) -> Value {
        lock(&self.state.keys).rsa_jwk()
    }

    /// Returns the current key of the algorithm's curve as JWK, without an ID.
    #[must_use]
    pub fn ec_jwk(&self, algorithm: &str) -> Value {
        lock(&self.state.keys).ec_jwk(algorithm)
    }

    /// Returns the public RSA key in all usual encodings.
    #[must_use]
    pub fn public_key_texts(&self) -> Vec<Vec<u8>> {
        lock(&self.state.keys).public_texts()
    }

    /// Returns the claims of a valid token for an audience, with a unique `jti`.
    #[must_use]
    pub fn claims(&self, audience: &str) -> Value {
        json!({"iss": self.url(), "aud": audience, "sub": "repo:x", "exp": now() + 300, "jti": fresh()})
    }

    /// Returns a token that is signed with the RSA key by RS256.
    #[must_use]
    pub fn token(&self, claims: Value) -> String {
        let id = lock(&self.state.keys).rsa_id();
        self.token_with(json!({"alg": "RS256", "typ": "JWT", "kid": id}), claims, Signer::Rsa("RS256"))
    }

    /// Returns a token with any header, signed by any signer.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "tests pass temporaries")]
    pub fn token_with(&self, header: Value, claims: Value, signer: Signer) -> String {
        lock(&self.state.keys).token(&header, &claims, &signer)
    }
}

/// Unix time.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns a new certificate authority, and the configuration of a server with a certificate of it.
fn certified(host: &str, certificate: Certificate) -> (String, Arc<ServerConfig>) {
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, format!("authority {}", fresh()));
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate().expect("a key");
    let pem = authority.self_signed(&authority_key).expect("an authority").pem();

    let hosts = match certificate {
        Certificate::WrongHost => vec!["elsewhere.example".to_owned()],
        _ => vec![host.to_owned(), "127.0.0.1".to_owned()],
    };
    let mut server = CertificateParams::new(hosts).expect("names");
    server.distinguished_name.push(DnType::CommonName, "an issuer");
    if certificate == Certificate::Expired {
        server.not_before = date_time_ymd(2020, 1, 1);
        server.not_after = date_time_ymd(2021, 1, 1);
    }
    if certificate == Certificate::SelfSignedAuthority {
        server.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    let key = KeyPair::generate().expect("a key");
    let (signed, pem) = match certificate {
        Certificate::SelfSigned | Certificate::SelfSignedAuthority => {
            let signed = server.self_signed(&key).expect("a certificate");
            let pem = signed.pem();
            (signed, pem)
        }
        _ => {
            let issuer = rcgen::Issuer::new(authority, authority_key);
            (server.signed_by(&key, &issuer).expect("a certificate"), pem)
        }
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("protocol versions")
        .with_no_client_auth()
        .with_single_cert(vec![signed.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
        .expect("a certificate and its key");
    (pem, Arc::new(config))
}

async fn serve(listener: TcpListener, config: Arc<ServerConfig>, state: Arc<State>) {
    let acceptor = TlsAcceptor::from(config);
    let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, state) = (acceptor.clone(), Arc::clone(&state));
        tokio::spawn(async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = respond(stream, &state).await;
            }
        });
    }
}

async fn respond(mut stream: impl AsyncRead + AsyncWrite + Unpin, state: &State) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head);
    state.fetches.fetch_add(1, Ordering::SeqCst);
    let mode = match head.split_whitespace().nth(1) {
        Some("/keys") => {
            let mut mode = state.mode.subscribe();
            tokio::select! {
                // The client disconnected.
                _ = stream.read_u8() => Mode::Hang,
                Ok(mode) = mode.wait_for(|mode| *mode != Mode::Hang) => mode.clone(),
            }
        }
        Some("/moved") => Mode::Keys,
        _ => Mode::Status(404),
    };
    let keys = json!({ "keys": *lock(&state.published) }).to_string();
    let (status, body) = match &mode {
        Mode::Hang => return Ok(()),
        Mode::Keys | Mode::Slow => (200, keys),
        Mode::Huge => (200, " ".repeat(HUGE_PADDING) + &keys),
        Mode::NotJson => (200, "<html>keys</html>".to_owned()),
        Mode::Redirect(_) => (302, keys),
        Mode::Status(status) => (*status, keys),
    };
    let mut head = format!("HTTP/1.1 {status} Status\r\nConnection: close\r\n");
    head.push_str("Content-Type: application/json\r\n");
    if let Mode::Redirect(target) = &mode {
        head.push_str(&format!("Location: {target}\r\n"));
    }
    if mode != Mode::Huge {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await?;
    if mode == Mode::Slow {
        for chunk in body.as_bytes().chunks(body.len().div_ceil(SLOW_RESPONSE_CHUNKS)) {
            stream.write_all(chunk).await?;
            stream.flush().await?;
            tokio::time::sleep(SLOW_RESPONSE_TIME / SLOW_RESPONSE_CHUNKS as u32).await;
        }
    } else {
        stream.write_all(body.as_bytes()).await?;
    }
    stream.shutdown().await
}

#[cfg(test)]
mod tests;
