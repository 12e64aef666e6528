//! Which TLS servers a client trusts: those with a certificate of a trusted authority, and those whose own certificate is
//! trusted.
//!
//! An operator with one private server often gives its self-signed certificate in place of an authority. The usual
//! verifiers reject it when it is marked as an authority, which is what `openssl req -x509` creates by default.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Whether the authorities of the host are trusted as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostAuthorities {
    Trusted,
    Ignored,
}

/// Returns the TLS configuration of a client that trusts these certificates, as authorities and as certificates of servers.
pub fn client_config(
    trusted: &[CertificateDer<'static>],
    host: HostAuthorities,
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(default_provider());
    let verifier = TrustVerifier {
        trusted: trusted.to_vec(),
        authorities: authority_verifier(trusted, host, Arc::clone(&provider))?,
    };
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth())
}

fn authority_verifier(
    trusted: &[CertificateDer<'static>],
    host: HostAuthorities,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, rustls::Error> {
    if host == HostAuthorities::Trusted {
        let trusted = trusted.iter().cloned();
        let verifier = rustls_platform_verifier::Verifier::new_with_extra_roots(trusted, provider)?;
        return Ok(Arc::new(verifier));
    }
    let mut roots = RootCertStore::empty();
    for certificate in trusted {
        roots.add(certificate.clone())?;
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
    Ok(verifier.map_err(|error| rustls::Error::General(error.to_string()))?)
}

/// Accepts trusted certificates of servers, and otherwise leaves the decision to the verifier of authorities.
#[derive(Debug)]
struct TrustVerifier {
    trusted: Vec<CertificateDer<'static>>,
    authorities: Arc<dyn ServerCertVerifier>,
}

impl ServerCertVerifier for TrustVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if !self.trusted.iter().any(|certificate| certificate.as_ref() == end_entity.as_ref()) {
            return self.authorities.verify_server_cert(
                end_entity,
                intermediates,
                server_name,
                ocsp_response,
                now,
            );
        }
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
        verify_dates(end_entity, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authorities.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authorities.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

/// Checks that a certificate is valid at a time.
fn verify_dates(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), rustls::Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| CertificateError::BadEncoding)?;
    let now = i64::try_from(now.as_secs()).map_err(|_| CertificateError::Expired)?;
    if now < parsed.validity().not_before.timestamp() {
        return Err(CertificateError::NotValidYet.into());
    }
    if now > parsed.validity().not_after.timestamp() {
        return Err(CertificateError::Expired.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};

    use super::*;

    /// Verifies a self-signed server certificate for `localhost` that is valid in 2026, and is trusted itself.
    fn verify(is_ca: IsCa, host: &str, now: i64) -> Result<(), rustls::Error> {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.is_ca = is_ca;
        params.not_before = date_time_ymd(2026, 1, 1);
        params.not_after = date_time_ymd(2027, 1, 1);
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone();
        let trusted = [certificate.clone()];
        let provider = Arc::new(default_provider());
        let verifier = TrustVerifier {
            trusted: trusted.to_vec(),
            authorities: authority_verifier(&trusted, HostAuthorities::Ignored, provider).unwrap(),
        };
        let now = UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(now).unwrap()));
        let host = ServerName::try_from(host.to_owned()).unwrap();
        verifier.verify_server_cert(&certificate, &[], &host, &[], now).map(|_| ())
    }

    #[test]
    fn accepts_trusted_server_certificate_with_valid_name_and_dates() {
        let summer = date_time_ymd(2026, 7, 1).unix_timestamp();
        for is_ca in [IsCa::NoCa, IsCa::ExplicitNoCa, IsCa::Ca(BasicConstraints::Unconstrained)] {
            verify(is_ca, "localhost", summer).unwrap();
            let name = verify(is_ca, "elsewhere", summer).unwrap_err().to_string();
            assert!(name.contains("not valid for name"), "{name}");
            let early = verify(is_ca, "localhost", date_time_ymd(2025, 7, 1).unix_timestamp());
            assert_eq!(early.unwrap_err(), CertificateError::NotValidYet.into());
            let late = verify(is_ca, "localhost", date_time_ymd(2027, 7, 1).unix_timestamp());
            assert_eq!(late.unwrap_err(), CertificateError::Expired.into());
        }
    }
}
