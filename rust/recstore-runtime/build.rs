//! Compiles what calls libtorch's dispatcher, against the headers that the operators were compiled against.
//!
//! Unlike the operators it uses libtorch's C++: what it builds runs with that release of libtorch only.

use std::env;
use std::path::PathBuf;

fn main() {
    let torch =
        PathBuf::from(env::var("DEP_RECSTORE_OPS_TORCH").expect("the build of recstore-bridge says it"));
    let include = torch.join("include");
    let source = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let out = env::var("OUT_DIR").expect("cargo sets it");

    let mut build = cxx_build::bridge("src/program.rs");
    for room in ["arguments", "kernels", "program", "size_functions", "tensors"] {
        build.file(format!("cpp/{room}.cpp"));
    }
    build.std("c++20").flag("-isystem").flag(&include);
    build.flag("-isystem").flag(include.join("torch/csrc/api/include"));
    build.flag("-fvisibility=hidden").flag("-Wall").flag("-Wextra");
    for (from, to) in [(out.as_str(), "runtime"), (&source, "runtime"), (&include.to_string_lossy(), "torch")]
    {
        build.flag(format!("-ffile-prefix-map={from}={to}"));
    }
    if env::var("PROFILE").as_deref() == Ok("debug") {
        // As in the bridge: a newer compiler of a user may warn of more.
        build.flag("-Werror");
    }
    build.compile("recstore_runtime_cpp");

    println!("cargo::rustc-link-search=native={}", torch.join("lib").display());
    println!("cargo::rustc-link-lib=dylib=torch_cpu");
    println!("cargo::rustc-link-lib=dylib=c10");
    for path in ["build.rs", "cpp", "src/program.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
}
