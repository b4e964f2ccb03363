//! The gRPC service: the same requests as on the bulk port, for programs of any language.

mod calls;
mod messages;
mod service;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use tonic::service::Routes;

use crate::config::ServerConfig;
use crate::handler::Handler;
use crate::ports::{Encryption, Listening, Rules, serve_http2};
use calls::{Calls, answer_health};
use proto::rec_store_server::RecStoreServer;
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

/// Room for what is around a frame in a message.
const MESSAGE_MARGIN: u64 = 1 << 12;

/// The protocol that clients of gRPC ask for when they encrypt.
pub(crate) const PROTOCOL: &[u8] = b"h2";

/// Serves `handler` at `address`, and tells clients of the bulk port.
pub(crate) fn start(
    handler: &Arc<Handler>,
    config: &ServerConfig,
    address: SocketAddr,
    bulk_port: u16,
) -> io::Result<Listening> {
    let limit = usize::try_from(config.max_frame_bytes + MESSAGE_MARGIN).unwrap_or(usize::MAX);
    let recstore = RecStoreServer::new(Service::new(Arc::clone(handler), config, bulk_port))
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTOR)
        .build_v1()
        .map_err(io::Error::other)?;
    let routes = health().add_service(recstore).add_service(reflection);
    let token = TokenCheck::new(config.token.clone());
    let calls = Arc::new(Calls { routes, token, timeout: config.transfer_timeout });
    let rules = Rules {
        port: config.port_of(&handler.metrics().grpc),
        encryption: config.tls.as_ref().map(|tls| Encryption::new(&tls.config, PROTOCOL)),
        farewell: b"",
    };
    Listening::start(address, 2, rules, move |stream, seat, stop| {
        let calls = Arc::clone(&calls);
        serve_http2(stream, seat, stop, move |call, seat| Arc::clone(&calls).answer(call, seat))
    })
}

/// Answers at `address` that the server serves, without encryption, and nothing else: for those who watch a server and
/// have neither its certificates nor its token.
pub(crate) fn start_probe(
    handler: &Handler,
    config: &ServerConfig,
    address: SocketAddr,
) -> io::Result<Listening> {
    let (routes, port) = (health(), config.port_of(&handler.metrics().health));
    let rules = Rules { port, encryption: None, farewell: b"" };
    Listening::start(address, 1, rules, move |stream, seat, stop| {
        let routes = routes.clone();
        serve_http2(stream, seat, stop, move |call, seat| answer_health(routes.clone(), call, seat))
    })
}

/// Returns the service of health, which says that the server serves for as long as it does.
fn health() -> Routes {
    let (reporter, health) = tonic_health::server::health_reporter();
    let mut told = pin!(reporter.set_serving::<RecStoreServer<Service>>());
    // It waits for a lock that nobody else has yet.
    let is_told = told.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    debug_assert!(is_told, "the service of health is new");
    Routes::new(health)
}
