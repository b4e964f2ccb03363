//! Generates the gRPC service from `proto/recstore.proto`, without protoc.

use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

use tonic_prost_build::configure;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/recstore.proto");
    let descriptors = protox::compile(["recstore.proto"], ["proto"])?;
    let path = PathBuf::from(env::var("OUT_DIR")?).join("recstore_descriptor.bin");
    fs::write(path, prost::Message::encode_to_vec(&descriptors))?;
    Ok(configure().bytes(".").compile_fds(descriptors)?)
}
