//! Encryption of both ports by rustls: certificates and keys come from PEM files.

use std::fmt::Display;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use recstore::FileError;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// A certificate or key that is of no use.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", path.display())]
pub struct TlsError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub message: String,
}

/// The files by which a program proves who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Its certificate, and those between it and one that others trust.
    pub certificate: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
}

/// How a server proves who it is, and whom it lets in.
#[derive(Debug, Clone)]
pub struct ServerTls {
    pub(crate) config: Arc<ServerConfig>,
}

/// Whom a client trusts, and how it proves who it is.
#[derive(Debug, Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
}

impl ServerTls {
    /// Reads a server's files. With `client_ca` clients must show a certificate signed by one of those in it.
    ///
    /// # Errors
    /// [`TlsError`] names the file.
    pub fn from_files(identity: &IdentityFiles, client_ca: Option<&Path>) -> Result<Self, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(refused(&identity.certificate))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path)?), provider())
                        .build()
                        .map_err(refused(path))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let (chain, key) = identity.read()?;
        let config = builder.with_single_cert(chain, key).map_err(refused(&identity.certificate))?;
        Ok(Self { config: Arc::new(config) })
    }
}

impl ClientTls {
    /// Reads a client's files: the certificates that it trusts, and its own for servers that ask for one.
    ///
    /// `server_name` is what servers' certificates must be of; without it the name or address by which each is called.
    ///
    /// # Errors
    /// [`TlsError`] names the file.
    pub fn from_files(
        ca: &Path,
        identity: Option<&IdentityFiles>,
        server_name: Option<&str>,
    ) -> Result<Self, TlsError> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(refused(ca))?
            .with_root_certificates(roots(ca)?);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let (chain, key) = identity.read()?;
                builder.with_client_auth_cert(chain, key).map_err(refused(&identity.certificate))?
            }
        };
        let server_name = server_name.map(|name| name_of(name).map_err(refused(ca))).transpose()?;
        Ok(Self { config: Arc::new(config), server_name })
    }

    /// Returns what begins a connection to the server at `address`, `host:port`.
    ///
    /// # Errors
    /// Says why its host cannot be of a certificate.
    pub(crate) fn connection(&self, address: &str) -> Result<rustls::ClientConnection, String> {
        // At the last colon: an address of IPv6 has others, within its brackets.
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => name_of(host)?,
        };
        rustls::ClientConnection::new(Arc::clone(&self.config), name).map_err(|error| error.to_string())
    }
}

impl IdentityFiles {
    fn read(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
        let mut key = opened(&self.key)?;
        let key = PrivateKeyDer::from_pem_reader(&mut key).map_err(refused(&self.key))?;
        Ok((certificates(&self.certificate)?, key))
    }
}

fn provider() -> Arc<CryptoProvider> {
    // Named rather than the process's default, which is its program's to choose and may be absent.
    Arc::new(ring::default_provider())
}

fn name_of(host: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(host.to_owned())
        .map_err(|_| format!("\"{host}\" is not a name that a certificate can have"))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_reader_iter(&mut opened(path)?).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(refused(path))?;
    match found.is_empty() {
        true => Err(refused(path)("there is no certificate in it")),
        false => Ok(found),
    }
}

/// Opens a file, which is a regular one: from a FIFO without a writer, a server would read for ever, whatever signals say.
fn opened(path: &Path) -> Result<BufReader<File>, TlsError> {
    let opened = recstore::open_file(path);
    opened.map(BufReader::new).map_err(|error| refused(path)(FileError::at(path, &error).reason))
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(refused(path))?;
    }
    Ok(roots)
}

fn refused<E: Display>(path: &Path) -> impl FnOnce(E) -> TlsError {
    move |error| TlsError { path: path.to_owned(), message: error.to_string() }
}
