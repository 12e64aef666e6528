//! The certificate of a daemon, which authenticates it to the other daemons as server and as client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use muster_types::ids::NodeId;
use muster_types::time::now;
use parking_lot::Mutex;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, date_time_ymd};
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::crypto::aws_lc_rs::sign::any_ecdsa_type;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::authority::ClusterAuthority;

/// The lifetime of a certificate, in seconds. It is renewed after a third of it.
const LIFETIME: f64 = 30.0 * 86400.0;
/// How long before its creation a certificate is valid, in seconds, because clocks differ.
const CLOCK_TOLERANCE: f64 = 3600.0;

/// The certificate of this daemon with the ids of its nodes as names. It is issued by the daemon itself, and again when a
/// third of its lifetime has passed.
pub(super) struct NodeCertificate {
    authority: ClusterAuthority,
    names: Vec<String>,
    current: Mutex<IssuedCertificate>,
}

struct IssuedCertificate {
    key: Arc<CertifiedKey>,
    renew_at: f64,
}

impl fmt::Debug for NodeCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCertificate").field("names", &self.names).finish_non_exhaustive()
    }
}

impl NodeCertificate {
    pub(super) fn new(authority: ClusterAuthority, nodes: &[NodeId]) -> Result<Self, String> {
        let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let current = Mutex::new(issue(&authority, &names, now())?);
        Ok(Self { authority, names, current })
    }

    /// Returns the certificate at the given time, renewed if it is due.
    fn at(&self, time: f64) -> Arc<CertifiedKey> {
        let mut current = self.current.lock();
        if time >= current.renew_at {
            match issue(&self.authority, &self.names, time) {
                Ok(issued) => *current = issued,
                Err(error) => tracing::error!(error, "failed to renew the node certificate"),
            }
        }
        Arc::clone(&current.key)
    }
}

fn issue(authority: &ClusterAuthority, names: &[String], time: f64) -> Result<IssuedCertificate, String> {
    let at = |seconds: f64| date_time_ymd(1970, 1, 1) + Duration::from_secs_f64(seconds.max(0.0));
    let mut parameters = CertificateParams::new(names).map_err(|error| error.to_string())?;
    parameters.distinguished_name.push(DnType::CommonName, names.first().map_or("", String::as_str));
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    parameters.not_before = at(time - CLOCK_TOLERANCE);
    parameters.not_after = at(time + LIFETIME);
    let key = KeyPair::generate().map_err(|error| error.to_string())?;
    let certificate = parameters.signed_by(&key, &authority.issuer).map_err(|error| error.to_string())?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let key = any_ecdsa_type(&key).map_err(|error| error.to_string())?;
    let key = CertifiedKey::new(vec![certificate.der().clone()], key);
    Ok(IssuedCertificate { key: Arc::new(key), renew_at: time + LIFETIME / 3.0 })
}

impl ResolvesServerCert for NodeCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.at(now()))
    }
}

impl ResolvesClientCert for NodeCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.at(now()))
    }

    fn has_certs(&self) -> bool {
        true
    }
}
