//! TLS certificates for the displays of this node: a CA that is created once, and the node's certificate signed by it.
//!
//! ```text
//! pki/ca.pem  pki/ca-key.pem  pki/cert.pem  pki/key.pem  pki/subject
//! ```

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use muster_types::vm::DisplayIdentity;
use muster_types::{Error, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use super::vm_dir::{VmDir, file};
use crate::files::io_error;

const ORGANIZATION: &str = "Muster";

/// The display certificates of the node.
#[derive(Debug, Clone)]
pub(super) struct DisplayCertificates {
    dir: PathBuf,
    pub(super) identity: DisplayIdentity,
}

impl DisplayCertificates {
    /// Loads the certificates from `storage`, and creates them if they do not exist.
    pub(super) fn open(storage: &Path, node: &str, ip: &str) -> Result<Self> {
        let dir = storage.join("pki");
        if !dir.exists() {
            create(storage, &dir, node, ip)?;
        }
        let read = |name: &str| fs::read_to_string(dir.join(name));
        let identity = read("ca.pem").and_then(|authority| {
            Ok(DisplayIdentity { authority, subject: read("subject")?.trim().to_owned() })
        });
        Ok(Self { identity: identity.map_err(io_error("failed to read display certificates"))?, dir })
    }

    /// Copies the certificates into the directory of a VM.
    pub(super) fn copy_to(&self, vm_dir: &VmDir, user: Option<u32>) -> Result<()> {
        for (from, to) in
            [("ca.pem", file::CA_CERTIFICATE), ("cert.pem", file::CERTIFICATE), ("key.pem", file::KEY)]
        {
            vm_dir.remove(to)?;
            vm_dir.ensure(to, None)?;
            let copied = fs::read(self.dir.join(from)).and_then(|data| fs::write(vm_dir.file(to), data));
            copied.map_err(io_error("failed to copy display certificates"))?;
            vm_dir.set_owner(to, user)?;
        }
        Ok(())
    }
}

fn create(storage: &Path, dir: &Path, node: &str, ip: &str) -> Result<()> {
    let files = certificates(node, ip)
        .map_err(|error| Error::Internal(format!("failed to create display certificates: {error}")))?;
    let write = || -> std::io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(storage)?;
        // Renamed into place, so that either all files exist or none.
        let new = storage.join(format!("pki-{}", uuid::Uuid::new_v4()));
        DirBuilder::new().mode(0o700).create(&new)?;
        for (name, text) in &files {
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(new.join(name))?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
        }
        match fs::rename(&new, dir) {
            // Another process created them meanwhile.
            Err(error) if matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => {
                fs::remove_dir_all(&new)
            }
            result => result,
        }
    };
    write().map_err(io_error("failed to write display certificates"))
}

fn certificates(node: &str, ip: &str) -> Result<[(&'static str, String); 5], rcgen::Error> {
    let distinguished_name = |common: &str| {
        let mut name = DistinguishedName::new();
        name.push(DnType::OrganizationName, ORGANIZATION);
        name.push(DnType::CommonName, common);
        name
    };
    let mut authority = CertificateParams::default();
    authority.distinguished_name = distinguished_name(&format!("screens of {node}"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;

    let mut server = CertificateParams::new(vec![node.to_owned(), ip.to_owned()])?;
    server.distinguished_name = distinguished_name(node);
    server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let server_key = KeyPair::generate()?;
    let authority_key_text = authority_key.serialize_pem();
    let certificate = server.signed_by(&server_key, &Issuer::new(authority, authority_key))?;
    // Viewers split the subject at commas.
    let subject = format!("O={ORGANIZATION},CN={}", node.replace(',', "\\,"));
    let files = [
        ("ca.pem", authority_certificate.pem()),
        ("ca-key.pem", authority_key_text),
        ("cert.pem", certificate.pem()),
        ("key.pem", server_key.serialize_pem()),
        ("subject", subject),
    ];
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn creates_private_certificates_once() {
        let storage = tempfile::tempdir().unwrap();
        let first = DisplayCertificates::open(storage.path(), "node-1", "10.0.0.1").unwrap();
        assert_eq!(first.identity.subject, "O=Muster,CN=node-1");
        assert!(first.identity.authority.starts_with("-----BEGIN CERTIFICATE-----"));
        let again = DisplayCertificates::open(storage.path(), "node-2", "10.0.0.2").unwrap();
        assert_eq!(again.identity, first.identity);
        let mode = |name: &str| fs::metadata(storage.path().join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("pki"), mode("pki/key.pem")), (0o700, 0o600));
        assert_eq!(fs::read_dir(storage.path()).unwrap().count(), 1);
    }
}
