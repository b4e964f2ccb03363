//! Encrypted ports: who is let in, who is refused, and in which words.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, config};
use numbered::Numbered;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use recstore::{Error, Serial, TableConfig};
use recstore_ps::{ClientTls, IdentityFiles, RemoteStore, ServerConfig, ServerTls};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::{Certificate, Channel, ClientTlsConfig};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

/// Who signs certificates, and a directory of PEM files.
struct Authority {
    directory: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let (key, directory) = (KeyPair::generate().unwrap(), tempfile::tempdir().unwrap());
        params.distinguished_name.push(DnType::CommonName, directory.path().display().to_string());
        fs::write(directory.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { directory, issuer: Issuer::new(params, key) }
    }

    fn ca(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// Signs a certificate of `name`, after `change`.
    fn identity(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> IdentityFiles {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let [certificate, key_file] =
            ["certificate", "key"].map(|kind| self.directory.path().join(format!("{name}-{kind}.pem")));
        fs::write(&certificate, params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        fs::write(&key_file, key.serialize_pem()).unwrap();
        IdentityFiles { certificate, key: key_file }
    }

    fn server(&self, asks_clients: bool) -> ServerTls {
        let ca = self.ca();
        ServerTls::from_files(&self.identity("127.0.0.1", |_| {}), asks_clients.then_some(&*ca)).unwrap()
    }

    fn client(&self, identity: Option<&IdentityFiles>) -> ClientTls {
        ClientTls::from_files(&self.ca(), identity, None).unwrap()
    }
}

fn encrypted(shards: usize, tls: &ServerTls) -> Cluster {
    Cluster::configured(shards, |config| {
        config.tls = Some(tls.clone());
        config.token = Some("secret".to_owned());
        config.handshake_timeout = Duration::from_millis(400);
    })
}

/// How long a connection is tried.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Connects within [`TIMEOUT`].
fn connect(cluster: &Cluster, tls: Option<ClientTls>) -> Result<RemoteStore, Error> {
    let mut config = config(cluster.addresses(), TIMEOUT);
    (config.tls, config.token) = (tls, Some("secret".to_owned()));
    RemoteStore::connect(config, Box::new(Serial))
}

/// Returns why there is no connection; a refusal comes at once, and is not tried again.
fn refusal(cluster: &Cluster, tls: Option<ClientTls>) -> String {
    let begun = Instant::now();
    let error = connect(cluster, tls).unwrap_err();
    let Error::Unavailable { shard: 0, message, .. } = error else { panic!("{error}") };
    if message.starts_with("no encrypted connection") {
        assert!(begun.elapsed() < TIMEOUT, "{message}");
    }
    message
}

#[test]
fn rows_come_and_go_encrypted() {
    let authority = Authority::new();
    let cluster = encrypted(2, &authority.server(false));
    let store = connect(&cluster, Some(authority.client(None))).unwrap();
    let table = store.open_numbered("t", &TableConfig::new(64)).unwrap();
    let ids: Vec<i64> = (0..20_000).collect();
    let rows: Vec<f32> = (0..ids.len() * 64).map(|value| value as f32).collect();
    store.write(table, &ids, &rows).unwrap();
    let mut read = vec![0.0; rows.len()];
    store.read(table, &ids, &mut read).unwrap();
    assert!(read == rows);
}

#[test]
fn a_server_that_is_not_trusted_is_not_spoken_to() {
    let (authority, other) = (Authority::new(), Authority::new());
    let cluster = encrypted(1, &authority.server(false));
    let unknown = refusal(&cluster, Some(other.client(None)));
    assert!(unknown.contains("invalid peer certificate: UnknownIssuer"), "{unknown}");
    let name = ClientTls::from_files(&authority.ca(), None, Some("another.example")).unwrap();
    let another = refusal(&cluster, Some(name));
    assert!(another.contains("not valid for name"), "{another}");
    let old = authority.identity("127.0.0.1", |params| {
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
    });
    let expired = encrypted(1, &ServerTls::from_files(&old, None).unwrap());
    let expired = refusal(&expired, Some(authority.client(None)));
    assert!(expired.contains("certificate expired"), "{expired}");
}

#[test]
fn one_side_that_does_not_encrypt_is_refused() {
    let authority = Authority::new();
    let (cluster, plain) = (encrypted(1, &authority.server(false)), Cluster::start(1));
    let message = refusal(&cluster, None);
    assert!(message.contains("the server may ask for encryption"), "{message}");
    let message = refusal(&plain, Some(authority.client(None)));
    assert!(message.contains("corrupt message"), "{message}");
}

#[test]
fn clients_show_a_certificate_where_servers_ask_for_one() {
    let (authority, other) = (Authority::new(), Authority::new());
    let cluster = encrypted(1, &authority.server(true));
    let own = authority.identity("worker", |_| {});
    assert!(connect(&cluster, Some(authority.client(Some(&own)))).is_ok());
    let without = refusal(&cluster, Some(authority.client(None)));
    assert!(without.contains("CertificateRequired"), "{without}");
    let foreign = other.identity("worker", |_| {});
    let refused = refusal(&cluster, Some(authority.client(Some(&foreign))));
    assert!(refused.starts_with("no encrypted connection: received fatal alert"), "{refused}");
}

#[test]
fn other_machines_need_encryption_and_a_token() {
    let tls = Authority::new().server(false);
    let start = |tls: Option<&ServerTls>, token: Option<&str>| {
        let mut config = ServerConfig::default();
        config.host = "0.0.0.0".to_owned();
        (config.tls, config.token) = (tls.cloned(), token.map(str::to_owned));
        let store = std::sync::Arc::new(recstore::LocalStore::new(Box::new(Serial)));
        recstore_ps::Server::start(store, config)
    };
    for (tls, token) in [(None, None), (None, Some("secret")), (Some(&tls), None)] {
        let refused = start(tls, token).unwrap_err().to_string();
        assert!(refused.contains("0.0.0.0:0 can be reached from other machines"), "{refused}");
    }
    start(Some(&tls), Some("secret")).unwrap().stop(Duration::ZERO);
}

#[test]
fn grpc_is_encrypted_too() {
    let authority = Authority::new();
    let tls = authority.server(false);
    let cluster = Cluster::configured(1, |config| {
        (config.tls, config.grpc_port) = (Some(tls.clone()), Some(0));
    });
    let address = cluster.servers[0].grpc_address().unwrap();
    let check = |channel: Channel| async move {
        HealthClient::new(channel)
            .check(HealthCheckRequest::default())
            .await
            .map(|answer| answer.into_inner().status)
    };
    Runtime::new().unwrap().block_on(async {
        let ca = Certificate::from_pem(fs::read(authority.ca()).unwrap());
        let encrypted = Channel::from_shared(format!("https://{address}")).unwrap();
        let encrypted = encrypted.tls_config(ClientTlsConfig::new().ca_certificate(ca)).unwrap();
        assert_eq!(check(encrypted.connect().await.unwrap()).await.unwrap(), 1);
        let plain = Channel::from_shared(format!("http://{address}")).unwrap();
        match plain.connect().await {
            Ok(channel) => assert!(check(channel).await.is_err()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

#[test]
fn a_peer_that_begins_byte_by_byte_is_given_up() {
    let authority = Authority::new();
    let cluster = encrypted(1, &authority.server(false));
    let mut stream = TcpStream::connect(&cluster.addresses()[0]).unwrap();
    let begun = Instant::now();
    // The beginning of a record that would have 512 bytes.
    for byte in [22, 3, 1, 2, 0].into_iter().chain(std::iter::repeat(1)) {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "still connected");
        thread::sleep(Duration::from_millis(40));
    }
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    assert!(matches!(stream.read(&mut [0; 8]), Ok(0) | Err(_)));
    assert!(connect(&cluster, Some(authority.client(None))).is_ok());
}

#[test]
fn files_that_are_of_no_use_are_named() {
    let authority = Authority::new();
    let identity = authority.identity("127.0.0.1", |_| {});
    let foreign = IdentityFiles { key: authority.identity("other", |_| {}).key, ..identity.clone() };
    let missing = IdentityFiles { key: "/missing/key.pem".into(), ..identity.clone() };
    let empty = authority.directory.path().join("empty.pem");
    fs::write(&empty, "").unwrap();
    let message = |identity: &IdentityFiles| ServerTls::from_files(identity, None).unwrap_err().to_string();
    assert!(
        message(&foreign).starts_with(&identity.certificate.display().to_string()),
        "{}",
        message(&foreign)
    );
    assert!(message(&missing).starts_with("/missing/key.pem: "), "{}", message(&missing));
    let fifo = authority.directory.path().join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for identity in [
        IdentityFiles { key: fifo.clone(), ..identity.clone() },
        IdentityFiles { certificate: fifo.clone(), ..identity.clone() },
    ] {
        let refused = message(&identity);
        assert_eq!(refused, format!("{}: it is a FIFO, not a regular file", fifo.display()));
    }
    let untrusting = ClientTls::from_files(&empty, None, None).unwrap_err().to_string();
    assert!(untrusting.ends_with("empty.pem: there is no certificate in it"), "{untrusting}");
    let name = ClientTls::from_files(&authority.ca(), None, Some("no name")).unwrap_err().to_string();
    assert!(name.contains("\"no name\" is not a name that a certificate can have"), "{name}");
}
