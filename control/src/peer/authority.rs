//! The certificate authority of the cluster: created at the first start, and stored in the database with its private key
//! encrypted by a key that is derived from the cluster's seed. See docs/decisions/0056.

use aws_lc_rs::aead::{AES_256_GCM, Aad, Nonce, RandomizedNonceKey};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muster_store::{Store, StoreError, cluster_values, transaction};
use muster_types::key::Secret;
use muster_types::{Error, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

/// The name of the cluster value that stores the authority.
const STORED_AS: &str = "CLUSTER_CA";

/// The certificate and the private key that sign the certificates of all daemons.
pub(super) struct ClusterAuthority {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) issuer: Issuer<'static, KeyPair>,
}

#[derive(Serialize, Deserialize)]
struct StoredAuthority {
    /// The certificate, DER in base64.
    certificate: String,
    nonce: String,
    /// The encrypted private key, PKCS #8 in base64.
    key: String,
}

impl ClusterAuthority {
    /// Loads the authority of the cluster. The first daemon of a cluster creates it.
    pub(super) async fn load(store: &Store, seed: &Secret) -> Result<Self> {
        let new = create(seed)?;
        let stored = transaction!(store, |tx| {
            if let Some(stored) = cluster_values::get(&mut *tx, STORED_AS).await? {
                return Ok(stored);
            }
            // If two daemons create a cluster, the one that does not insert retries and reads.
            cluster_values::insert(tx, STORED_AS, &new).await.map_err(StoreError::retry_duplicate)?;
            Ok(new.clone())
        })?;
        open(seed, &stored)
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Internal(format!("failed to create the certificate authority of the cluster: {error}"))
}

/// Returns the parameters of the authority's certificate. They must never change: certificates that it signs name them.
fn parameters() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::OrganizationName, "Muster");
    parameters.distinguished_name.push(DnType::CommonName, "Muster cluster");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    parameters.not_before = date_time_ymd(2020, 1, 1);
    parameters.not_after = date_time_ymd(2120, 1, 1);
    parameters
}

fn encryption_key(seed: &Secret) -> Result<RandomizedNonceKey> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes());
    let derived = hmac::sign(&key, b"muster cluster certificate authority 1");
    RandomizedNonceKey::new(&AES_256_GCM, derived.as_ref()).map_err(failed)
}

/// Creates an authority and returns it as it is stored.
fn create(seed: &Secret) -> Result<String> {
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = parameters().self_signed(&key).map_err(failed)?;
    let mut sealed = key.serialize_der();
    let aad = Aad::from(certificate.der().as_ref());
    let nonce = encryption_key(seed)?.seal_in_place_append_tag(aad, &mut sealed).map_err(failed)?;
    let stored = StoredAuthority {
        certificate: BASE64.encode(certificate.der()),
        nonce: BASE64.encode(nonce.as_ref()),
        key: BASE64.encode(sealed),
    };
    serde_json::to_string(&stored).map_err(failed)
}

/// Decrypts a stored authority.
fn open(seed: &Secret, stored: &str) -> Result<ClusterAuthority> {
    let damaged =
        || Error::Internal("the certificate authority of the cluster is damaged in the database".into());
    let stored: StoredAuthority = serde_json::from_str(stored).map_err(|_| damaged())?;
    let decode = |text: &str| BASE64.decode(text).map_err(|_| damaged());
    let certificate = decode(&stored.certificate)?;
    let nonce = Nonce::try_assume_unique_for_key(&decode(&stored.nonce)?).map_err(|_| damaged())?;
    let mut sealed = decode(&stored.key)?;
    let key = encryption_key(seed)?.open_in_place(nonce, Aad::from(&certificate), &mut sealed);
    let key = KeyPair::try_from(&*key.map_err(|_| damaged())?).map_err(|_| damaged())?;
    Ok(ClusterAuthority { certificate: certificate.into(), issuer: Issuer::new(parameters(), key) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_authority_only_with_seed_of_cluster() {
        let seed = Secret::new("the seed of the cluster");
        let stored = create(&seed).unwrap();
        let opened = open(&seed, &stored).unwrap();
        assert_eq!(opened.certificate, open(&seed, &stored).unwrap().certificate);
        assert!(!stored.contains(&BASE64.encode(opened.issuer.key().serialize_der())));
        assert!(open(&Secret::new("the seed of another one"), &stored).is_err());
        assert!(open(&seed, "{}").is_err());
    }
}
