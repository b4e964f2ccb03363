//! The gRPC service: the same requests as on the bulk port, for programs of any language.

mod accepted;
mod messages;
mod probe;
mod service;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{self, Runtime};
use tokio::sync::oneshot;
use tonic::service::InterceptorLayer;
use tonic::transport::server::Server as Builder;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use crate::config::ServerConfig;
use crate::handler::Handler;
use accepted::accepted;
use service::{Service, TokenCheck};

/// What is generated from `proto/recstore.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    reason = "generated; the proto file documents it"
)]
pub mod proto {
    tonic::include_proto!("recstore.v1");

    /// The service's description, for reflection.
    pub const DESCRIPTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/recstore_descriptor.bin"));
}

use proto::rec_store_server::RecStoreServer;

/// Room for what is around a frame in a message.
const MESSAGE_MARGIN: u64 = 1 << 12;

/// How often a silent peer is asked whether it is there, and how long it may take to say so.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// Requests that one connection may have under way.
const MOST_STREAMS: u32 = 64;

/// A gRPC server on threads of its own.
#[derive(Debug)]
pub(crate) struct Grpc {
    address: SocketAddr,
    runtime: Runtime,
    stop: oneshot::Sender<()>,
}

impl Grpc {
    /// Serves `handler` at `address`, and tells clients of the bulk port.
    pub(crate) fn start(
        handler: Arc<Handler>,
        config: &ServerConfig,
        address: SocketAddr,
        bulk_port: u16,
    ) -> io::Result<Self> {
        let (builder, service) = (builder(config)?, Service::new(handler, config, bulk_port));
        let config = config.clone();
        Self::launch(address, 2, |listener, stopped| serve(listener, builder, service, config, stopped))
    }

    /// Runs on threads of its own what `serving` makes of a listener and of the word to stop.
    fn launch<F: Future<Output = ()> + Send + 'static>(
        address: SocketAddr,
        threads: usize,
        serving: impl FnOnce(TcpListener, oneshot::Receiver<()>) -> F,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("recstore-grpc")
            .enable_all()
            .build()?;
        let (stop, stopped) = oneshot::channel();
        runtime.spawn(serving(listener, stopped));
        Ok(Self { address, runtime, stop })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more requests and waits for those under way.
    pub(crate) fn stop(self, grace: Duration) {
        _ = self.stop.send(());
        self.runtime.shutdown_timeout(grace);
    }
}

/// Returns what builds the server, encrypted as the bulk port is.
fn builder(config: &ServerConfig) -> io::Result<Builder> {
    let builder = Builder::default()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_concurrent_streams(MOST_STREAMS);
    let Some(tls) = &config.tls else { return Ok(builder) };
    let mut encryption = ServerTlsConfig::new().identity(Identity::from_pem(&tls.certificate, &tls.key));
    if let Some(client_ca) = &tls.client_ca {
        encryption = encryption.client_ca_root(Certificate::from_pem(client_ca));
    }
    builder.tls_config(encryption).map_err(io::Error::other)
}

async fn serve(
    listener: TcpListener,
    builder: Builder,
    service: Service,
    config: ServerConfig,
    stopped: oneshot::Receiver<()>,
) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let handler = Arc::clone(service.handler());
    let connections = accepted(listener, config.max_connections, Arc::clone(&handler.metrics().grpc));
    let limit = usize::try_from(config.max_frame_bytes + MESSAGE_MARGIN).unwrap_or(usize::MAX);
    let recstore =
        RecStoreServer::new(service).max_decoding_message_size(limit).max_encoding_message_size(limit);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<RecStoreServer<Service>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTOR)
        .build_v1();
    let Ok(reflection) = reflection else { return };
    let server = builder
        .layer(InterceptorLayer::new(TokenCheck::new(config.token, handler)))
        .add_service(recstore)
        .add_service(health)
        .add_service(reflection);
    let stop = async { _ = stopped.await };
    _ = server.serve_with_incoming_shutdown(connections, stop).await;
}
