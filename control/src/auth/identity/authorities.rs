//! Whom to believe that a server is the issuer's: the authorities of this machine, and those of the operator's file,
//! which is looked at for every token and read again when it has changed.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use muster_types::settings::Settings;
use reqwest::Client;
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::sync::OnceCell;

use crate::fetch::address::Guard;

/// Largest file of authorities, in bytes.
const LARGEST: u64 = 4 << 20;

/// Authorities as they were at some time. Keys that were fetched under others are not used.
pub(super) struct Trust {
    /// Tells them from those before and after.
    pub(super) number: u64,
    certificates: Vec<CertificateDer<'static>>,
    client: OnceCell<Client>,
}

/// What a file looks like from outside.
#[derive(PartialEq, Eq)]
struct Stamp([i64; 4], [u64; 3]);

/// The last look at the file.
struct Look {
    /// `None` if the file must be read the next time.
    stamp: Option<Stamp>,
    found: Result<Arc<Trust>, String>,
}

pub(super) struct Authorities {
    /// Empty if the operator has none.
    path: PathBuf,
    proxy: String,
    guard: Guard,
    last: Mutex<Option<Look>>,
    count: AtomicU64,
}

impl Authorities {
    /// Says in the log if the file cannot be used.
    pub(super) fn new(settings: &Settings, guard: Guard) -> Self {
        let authorities = Self {
            path: PathBuf::from(&settings.federation_jwks_ca_bundle),
            proxy: settings.http_proxy_server.clone(),
            guard,
            last: Mutex::new(None),
            count: AtomicU64::new(0),
        };
        // That they cannot be used is in the log now; who needs them hears it again.
        let _ = authorities.look();
        authorities
    }

    fn last(&self) -> MutexGuard<'_, Option<Look>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The authorities as they are now, or why they cannot be used.
    pub(super) async fn current(self: &Arc<Self>) -> Result<Arc<Trust>, String> {
        if self.path.as_os_str().is_empty() {
            return self.look();
        }
        let authorities = Arc::clone(self);
        let look = tokio::task::spawn_blocking(move || authorities.look());
        look.await.unwrap_or_else(|_| Err("nobody could look at the authorities".into()))
    }

    fn look(&self) -> Result<Arc<Trust>, String> {
        let is_used = !self.path.as_os_str().is_empty();
        let stamp = if is_used { stamp(&self.path) } else { None };
        if let Some(last) = &*self.last()
            && (last.stamp == stamp && stamp.is_some() || !is_used)
        {
            return last.found.clone();
        }
        let read = if is_used { read(&self.path) } else { Ok(vec![]) };
        // What could not be read may be readable the next time, though it looks the same.
        let stamp = stamp.filter(|_| !matches!(read, Err(Fault::Passing(_))));
        let mut last = self.last();
        let before = last.take().map(|last| last.found);
        let found = match (read, &before) {
            (Ok(certificates), Some(Ok(same))) if same.certificates == certificates => Ok(Arc::clone(same)),
            (Ok(certificates), _) => Ok(self.trust(certificates)),
            (Err(Fault::Passing(why) | Fault::Lasting(why)), _) => Err(why),
        };
        match (&found, &before) {
            (Err(why), Some(Err(known))) if why == known => {}
            (Err(why), _) => tracing::error!(why, "FEDERATION_JWKS_CA_BUNDLE cannot be used"),
            (Ok(trust), _) if is_used => {
                let authorities = trust.certificates.len();
                tracing::info!(authorities, "read FEDERATION_JWKS_CA_BUNDLE");
            }
            (Ok(_), _) => {}
        }
        *last = Some(Look { stamp, found: found.clone() });
        found
    }

    fn trust(&self, certificates: Vec<CertificateDer<'static>>) -> Arc<Trust> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        Arc::new(Trust { number, certificates, client: OnceCell::new() })
    }

    /// A client that believes them. Made once, as it reads all that this machine trusts.
    pub(super) async fn client(self: &Arc<Self>, trust: &Arc<Trust>) -> Result<Client, String> {
        let made = trust.client.get_or_try_init(|| async {
            let (authorities, trust) = (Arc::clone(self), Arc::clone(trust));
            let make = tokio::task::spawn_blocking(move || authorities.make(&trust));
            make.await.unwrap_or_else(|_| Err("nobody could read the authorities".into()))
        });
        made.await.cloned()
    }

    fn make(&self, trust: &Trust) -> Result<Client, String> {
        let bad = |error: reqwest::Error| format!("no client can be made: {error}");
        let certificates = trust.certificates.iter().map(|der| reqwest::Certificate::from_der(der));
        let mut builder = Client::builder()
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .tls_certs_merge(certificates.collect::<Result<Vec<_>, _>>().map_err(bad)?)
            .dns_resolver(Arc::new(self.guard.clone()))
            // Each fetch looks the name up and checks the certificate.
            .pool_max_idle_per_host(0)
            .user_agent(concat!("muster/", env!("CARGO_PKG_VERSION")));
        builder = if self.proxy.is_empty() {
            builder.no_proxy()
        } else {
            builder.proxy(reqwest::Proxy::all(&self.proxy).map_err(|_| "HTTP_PROXY_SERVER cannot be used")?)
        };
        builder.build().map_err(bad)
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let data = std::fs::metadata(path).ok()?;
    let times = [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()];
    Some(Stamp(times, [data.dev(), data.ino(), data.size()]))
}

/// Why a file cannot be used.
enum Fault {
    /// It could not be read.
    Passing(String),
    /// What is in it is wrong.
    Lasting(String),
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::Passing(error.to_string())
    }
}

/// The certificates in a file; each of them can be an authority.
fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let lasting = |why: &str| Fault::Lasting(why.into());
    let data = std::fs::metadata(path)?;
    if !data.is_file() || data.len() > LARGEST {
        return Err(lasting("it is no file, or a too large one"));
    }
    let mut text = Vec::new();
    File::open(path)?.take(LARGEST).read_to_end(&mut text)?;
    let mut store = RootCertStore::empty();
    let mut certificates = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let certificate = certificate.map_err(|_| lasting("it is not PEM"))?;
        store.add(certificate.clone()).map_err(|_| lasting("a certificate in it cannot be read"))?;
        certificates.push(certificate);
    }
    if certificates.is_empty() {
        return Err(lasting("there is no certificate in it"));
    }
    Ok(certificates)
}
