//! Which TLS servers a client trusts: those with a certificate of a trusted authority, and those whose own certificate is
//! trusted.
//!
//! Only certificates that are marked as authorities can issue others. Every other one is pinned: a server can present
//! exactly that certificate. An operator with one private server often gives its self-signed certificate in place of an
//! authority. `openssl req -x509` marks it as an authority by default, so a self-signed authority is pinned as well: the
//! usual verifiers reject an authority as the certificate of a server.

use std::error::Error;
use std::sync::Arc;
use std::{io, iter};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
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

/// Returns the TLS configuration of a client that trusts these certificates: those that are marked as authorities as
/// authorities, the others and self-signed ones as certificates of servers.
pub fn client_config(
    trusted: &[CertificateDer<'static>],
    host: HostAuthorities,
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(default_provider());
    let verifier = TrustVerifier::new(trusted, host, &provider)?;
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth())
}

/// Accepts pinned certificates of servers, and those of trusted authorities.
#[derive(Debug)]
struct TrustVerifier {
    pinned: Vec<CertificateDer<'static>>,
    /// `None` if no authority is trusted.
    authorities: Option<Arc<dyn ServerCertVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl TrustVerifier {
    fn new(
        trusted: &[CertificateDer<'static>],
        host: HostAuthorities,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, rustls::Error> {
        let (mut authorities, mut pinned) = (Vec::new(), Vec::new());
        for certificate in trusted {
            let parsed = parse(certificate)?;
            if !parsed.is_ca() || parsed.subject() == parsed.issuer() {
                pinned.push(certificate.clone());
            }
            if parsed.is_ca() {
                authorities.push(certificate.clone());
            }
        }
        let authorities = authority_verifier(authorities, host, Arc::clone(provider))?;
        Ok(Self { pinned, authorities, provider: Arc::clone(provider) })
    }
}

fn authority_verifier(
    authorities: Vec<CertificateDer<'static>>,
    host: HostAuthorities,
    provider: Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ServerCertVerifier>>, rustls::Error> {
    if host == HostAuthorities::Trusted {
        let verifier = rustls_platform_verifier::Verifier::new_with_extra_roots(authorities, provider)?;
        return Ok(Some(Arc::new(verifier)));
    }
    if authorities.is_empty() {
        return Ok(None);
    }
    let mut roots = RootCertStore::empty();
    for certificate in authorities {
        roots.add(certificate)?;
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
    Ok(Some(verifier.map_err(|error| rustls::Error::General(error.to_string()))?))
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
        if self.pinned.iter().any(|pinned| pinned.as_ref() == end_entity.as_ref()) {
            verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            verify_dates(end_entity, now)?;
            return Ok(ServerCertVerified::assertion());
        }
        match &self.authorities {
            Some(authorities) => {
                authorities.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            }
            None => Err(CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, rustls::Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| CertificateError::BadEncoding)?;
    Ok(parsed)
}

/// Returns the TLS error that an error is, wraps as an I/O error, or is caused by.
#[must_use]
pub fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    iter::successors(Some(error), |&cause| wrapped_error(cause).or_else(|| cause.source()))
        .find_map(|cause| cause.downcast_ref())
}

/// Returns the error that an I/O error wraps. Its source is only the source of that error.
fn wrapped_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    let wrapped = error.downcast_ref::<io::Error>()?.get_ref()?;
    Some(wrapped)
}

/// Returns what is wrong with the certificate of a server, if that is why a request failed.
#[must_use]
pub fn certificate_problem(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let rustls::Error::InvalidCertificate(problem) = tls_error(error)? else { return None };
    Some(match problem {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "is not valid yet",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "is for another host name"
        }
        CertificateError::Revoked => "is revoked",
        // The other error is that of a self-signed authority.
        CertificateError::UnknownIssuer | CertificateError::Other(_) => {
            "is not issued by a trusted certificate authority"
        }
        _ => "is not valid",
    })
}

/// Checks that a certificate is valid at a time.
fn verify_dates(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), rustls::Error> {
    let parsed = parse(certificate)?;
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

    use rcgen::{
        BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd,
    };

    use super::*;

    const AUTHORITY: IsCa = IsCa::Ca(BasicConstraints::Unconstrained);

    /// Returns the parameters of a certificate for `localhost` that is valid in 2026.
    fn params(name: &str, is_ca: IsCa) -> CertificateParams {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = is_ca;
        params.not_before = date_time_ymd(2026, 1, 1);
        params.not_after = date_time_ymd(2027, 1, 1);
        params
    }

    /// Verifies a certificate of a server with one that is trusted.
    fn verify(
        trusted: &Certificate,
        server: &Certificate,
        host: &str,
        now: i64,
    ) -> Result<(), rustls::Error> {
        let provider = Arc::new(default_provider());
        let verifier = TrustVerifier::new(&[trusted.der().clone()], HostAuthorities::Ignored, &provider)?;
        let now = UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(now).unwrap()));
        let host = ServerName::try_from(host.to_owned()).unwrap();
        verifier.verify_server_cert(server.der(), &[], &host, &[], now).map(|_| ())
    }

    fn summer() -> i64 {
        date_time_ymd(2026, 7, 1).unix_timestamp()
    }

    #[test]
    fn finds_tls_errors_inside_io_errors() {
        let tls = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let wrapped = io::Error::other(io::Error::other(tls.clone()));
        assert_eq!(tls_error(&wrapped), Some(&tls));
        assert_eq!(tls_error(&tls), Some(&tls));
        assert_eq!(tls_error(&io::Error::other("other")), None);
        assert_eq!(certificate_problem(&wrapped), Some("is not issued by a trusted certificate authority"));
        assert_eq!(certificate_problem(&rustls::Error::DecryptError), None);
    }

    #[test]
    fn accepts_trusted_server_certificate_with_valid_name_and_dates() {
        for is_ca in [IsCa::NoCa, IsCa::ExplicitNoCa, AUTHORITY] {
            let own = params("own", is_ca).self_signed(&KeyPair::generate().unwrap()).unwrap();
            verify(&own, &own, "localhost", summer()).unwrap();
            let name = verify(&own, &own, "elsewhere", summer()).unwrap_err().to_string();
            assert!(name.contains("not valid for name"), "{name}");
            let early = verify(&own, &own, "localhost", date_time_ymd(2025, 7, 1).unix_timestamp());
            assert_eq!(early.unwrap_err(), CertificateError::NotValidYet.into());
            let late = verify(&own, &own, "localhost", date_time_ymd(2027, 7, 1).unix_timestamp());
            assert_eq!(late.unwrap_err(), CertificateError::Expired.into());
        }
    }

    #[test]
    fn only_authorities_can_issue_certificates_of_servers() {
        for (is_ca, is_accepted) in [(IsCa::NoCa, false), (IsCa::ExplicitNoCa, false), (AUTHORITY, true)] {
            let key = KeyPair::generate().unwrap();
            let trusted = params("trusted", is_ca).self_signed(&key).unwrap();
            // The parameters of an issuer do not restrict its signatures here.
            let issuer = Issuer::new(params("trusted", AUTHORITY), key);
            let server = params("server", IsCa::NoCa);
            let server = server.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap();
            assert_eq!(verify(&trusted, &server, "localhost", summer()).is_ok(), is_accepted, "{is_ca:?}");
        }
    }

    #[test]
    fn intermediate_authority_is_not_the_certificate_of_a_server() {
        let root = Issuer::new(params("root", AUTHORITY), KeyPair::generate().unwrap());
        let intermediate = params("intermediate", AUTHORITY);
        let intermediate = intermediate.signed_by(&KeyPair::generate().unwrap(), &root).unwrap();
        assert!(verify(&intermediate, &intermediate, "localhost", summer()).is_err());
    }
}
