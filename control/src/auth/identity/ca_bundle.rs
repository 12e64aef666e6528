//! The certificates by which the servers of issuers are authenticated: the CAs of this host, and the CAs and certificates
//! of servers in FEDERATION_JWKS_CA_BUNDLE. Every verification checks whether that file has changed.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use muster_types::server_trust::{HostAuthorities, client_config};
use muster_types::settings::Settings;
use parking_lot::Mutex;
use reqwest::Client;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::sync::OnceCell;

use crate::fetch::address::AddressFilter;

/// The maximum size of the file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// One version of the trusted certificates. Keys that were fetched with another version are not used.
pub(super) struct TrustedRoots {
    /// Identifies this version.
    pub(super) generation: u64,
    certificates: Vec<CertificateDer<'static>>,
    clients: OnceCell<KeyClients>,
}

/// The HTTP clients for keys, which differ in the addresses that they connect to.
#[derive(Debug, Clone)]
pub(super) struct KeyClients {
    /// For the URL that an operator configured.
    pub(super) configured: Client,
    /// For URLs that a server redirects to.
    pub(super) redirected: Client,
}

/// Metadata that changes whenever a file is changed.
#[derive(PartialEq, Eq)]
struct FileStamp {
    times: [i64; 4],
    identity: [u64; 3],
}

/// The result of the last load.
struct LastLoad {
    /// `None` if the file must be read again.
    stamp: Option<FileStamp>,
    result: Result<Arc<TrustedRoots>, String>,
}

pub(super) struct CaBundle {
    /// Empty if FEDERATION_JWKS_CA_BUNDLE is not set.
    path: PathBuf,
    proxy: String,
    filter: AddressFilter,
    last: Mutex<Option<LastLoad>>,
    next_generation: AtomicU64,
}

impl CaBundle {
    /// Creates the bundle. Logs an error if the file cannot be loaded.
    pub(super) fn new(settings: &Settings, filter: AddressFilter) -> Self {
        let bundle = Self {
            path: PathBuf::from(&settings.federation_jwks_ca_bundle),
            proxy: settings.http_proxy_server.clone(),
            filter,
            last: Mutex::new(None),
            next_generation: AtomicU64::new(0),
        };
        // The error is logged, and every verification returns it again.
        let _ = bundle.load();
        bundle
    }

    /// Returns the current certificates, or why they cannot be loaded.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Arc<TrustedRoots>, String> {
        if self.path.as_os_str().is_empty() {
            return self.load();
        }
        let bundle = Arc::clone(self);
        let load = tokio::task::spawn_blocking(move || bundle.load());
        load.await.unwrap_or_else(|error| Err(format!("failed to load the CA bundle: {error}")))
    }

    fn load(&self) -> Result<Arc<TrustedRoots>, String> {
        let is_set = !self.path.as_os_str().is_empty();
        let stamp = if is_set { file_stamp(&self.path) } else { None };
        if let Some(last) = &*self.last.lock()
            && (last.stamp == stamp && stamp.is_some() || !is_set)
        {
            return last.result.clone();
        }
        let read = if is_set { read_certificates(&self.path) } else { Ok(vec![]) };
        // A file that could not be read may be readable the next time although its metadata is the same.
        let stamp = stamp.filter(|_| !matches!(read, Err(BundleError::Io(_))));
        let mut last = self.last.lock();
        let before = last.take().map(|last| last.result);
        let result = match (read, &before) {
            (Ok(certificates), Some(Ok(same))) if same.certificates == certificates => Ok(Arc::clone(same)),
            (Ok(certificates), _) => Ok(self.new_roots(certificates)),
            (Err(BundleError::Io(why) | BundleError::Content(why)), _) => Err(why),
        };
        match (&result, &before) {
            (Err(why), Some(Err(logged))) if why == logged => {}
            (Err(why), _) => tracing::error!(why, "failed to load FEDERATION_JWKS_CA_BUNDLE"),
            (Ok(roots), _) if is_set => {
                let certificates = roots.certificates.len();
                tracing::info!(certificates, "loaded FEDERATION_JWKS_CA_BUNDLE");
            }
            (Ok(_), _) => {}
        }
        *last = Some(LastLoad { stamp, result: result.clone() });
        result
    }

    fn new_roots(&self, certificates: Vec<CertificateDer<'static>>) -> Arc<TrustedRoots> {
        let generation = self.next_generation.fetch_add(1, Ordering::Relaxed);
        Arc::new(TrustedRoots { generation, certificates, clients: OnceCell::new() })
    }

    /// Returns clients that trust these certificates. They are built once, because that reads all certificates of the
    /// host.
    pub(super) async fn clients(self: &Arc<Self>, roots: &Arc<TrustedRoots>) -> Result<KeyClients, String> {
        let clients = roots.clients.get_or_try_init(|| async {
            let (bundle, roots) = (Arc::clone(self), Arc::clone(roots));
            let build = tokio::task::spawn_blocking(move || bundle.build_clients(&roots));
            build.await.unwrap_or_else(|error| Err(format!("failed to build the HTTP client: {error}")))
        });
        clients.await.cloned()
    }

    fn build_clients(&self, roots: &TrustedRoots) -> Result<KeyClients, String> {
        let tls = client_config(&roots.certificates, HostAuthorities::Trusted)
            .map_err(|error| format!("failed to build the HTTP client: {error}"))?;
        Ok(KeyClients {
            configured: self.build_client(tls.clone(), self.filter.allowing_private())?,
            redirected: self.build_client(tls, self.filter.clone())?,
        })
    }

    fn build_client(&self, tls: ClientConfig, filter: AddressFilter) -> Result<Client, String> {
        let failed = |error: reqwest::Error| format!("failed to build the HTTP client: {error}");
        let mut builder = Client::builder()
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .tls_backend_preconfigured(tls)
            .dns_resolver(Arc::new(filter))
            // Every fetch resolves the name and checks the certificate again.
            .pool_max_idle_per_host(0)
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")));
        builder = if self.proxy.is_empty() {
            builder.no_proxy()
        } else {
            builder.proxy(reqwest::Proxy::all(&self.proxy).map_err(|_| "HTTP_PROXY_SERVER is not valid")?)
        };
        builder.build().map_err(failed)
    }
}

/// Returns `None` if the file is not accessible: reading it reports why.
fn file_stamp(path: &Path) -> Option<FileStamp> {
    let data = std::fs::metadata(path).ok()?;
    let times = [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()];
    Some(FileStamp { times, identity: [data.dev(), data.ino(), data.size()] })
}

/// Why a file cannot be used.
enum BundleError {
    /// It could not be read.
    Io(String),
    /// Its content is not valid.
    Content(String),
}

impl From<std::io::Error> for BundleError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error.to_string())
    }
}

/// Reads the certificates in a file, and checks that each can be parsed.
fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, BundleError> {
    let invalid = |why: &str| BundleError::Content(why.into());
    let data = std::fs::metadata(path)?;
    if !data.is_file() || data.len() > MAX_FILE_BYTES {
        return Err(invalid("it is not a regular file, or it is too large"));
    }
    let mut text = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    let mut store = RootCertStore::empty();
    let mut certificates = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let certificate = certificate.map_err(|_| invalid("it is not valid PEM"))?;
        store.add(certificate.clone()).map_err(|_| invalid("it contains an invalid certificate"))?;
        certificates.push(certificate);
    }
    if certificates.is_empty() {
        return Err(invalid("it contains no certificate"));
    }
    Ok(certificates)
}
