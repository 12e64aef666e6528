//! Error messages of other libraries in the style of ours.

use std::error::Error;
use std::io;
use std::iter;

use muster_types::server_trust::tls_error;
use rustls::CertificateError;

/// Returns the message of an I/O error in lower case and without the OS error number.
pub(crate) fn io_error_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| first.to_lowercase().chain(characters).collect())
}

/// Returns the message of the innermost cause of an HTTP error. The outer layers only repeat that something failed.
pub(crate) fn root_cause(error: &reqwest::Error) -> String {
    match causes(error).last() {
        Some(cause) => match cause.downcast_ref::<io::Error>() {
            Some(cause) => io_error_text(cause),
            None => cause.to_string(),
        },
        None => error.to_string(),
    }
}

/// Returns whether the server's host refused the TCP connection.
pub(crate) fn is_connection_refused(error: &reqwest::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::ConnectionRefused)
}

/// Returns whether no trusted certificate authority issued the server's certificate.
pub(crate) fn is_unknown_issuer(error: &reqwest::Error) -> bool {
    let unknown_issuer = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
    tls_error(error) == Some(&unknown_issuer)
}

fn causes<'a>(error: &'a reqwest::Error) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(error.source(), |cause| (*cause).source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_errors_are_lower_case_without_number() {
        assert_eq!(io_error_text(&io::Error::from_raw_os_error(2)), "no such file or directory");
    }
}
