//! The HTTP client by which the daemons of one cluster reach each other.

use std::sync::OnceLock;
use std::time::Duration;

use muster_types::server_trust::{HostAuthorities, client_config};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The maximum time between two reads. A peer may read a large file before it responds.
const READ_TIMEOUT: Duration = Duration::from_secs(600);

/// A client for other daemons, created on first use. It also trusts the cluster's own certificate.
#[derive(Debug, Default)]
pub struct PeerClient {
    certificate: String,
    client: OnceLock<Result<reqwest::Client, String>>,
}

impl PeerClient {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self { certificate: settings.tls_certificate.clone(), client: OnceLock::new() }
    }

    /// Returns the client. The error of a failed creation is permanent.
    pub fn get(&self) -> Result<&reqwest::Client> {
        let client = self.client.get_or_init(|| self.build());
        client.as_ref().map_err(|error| Error::Internal(format!("failed to create the peer client: {error}")))
    }

    fn build(&self) -> Result<reqwest::Client, String> {
        let mut builder =
            reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(READ_TIMEOUT).no_proxy();
        if !self.certificate.is_empty() {
            let pem = std::fs::read(&self.certificate).map_err(|error| error.to_string())?;
            let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
            let certificates = certificates.map_err(|error| error.to_string())?;
            let tls = client_config(&certificates, HostAuthorities::Trusted);
            builder = builder.tls_backend_preconfigured(tls.map_err(|error| error.to_string())?);
        }
        builder.build().map_err(|error| error.to_string())
    }
}
