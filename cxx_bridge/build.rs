//! Compiles the operators against libtorch's stable headers and says how to link libtorch.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Asks a Python where its torch is, without importing torch, which takes seconds.
const FIND_TORCH: &str = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";

fn main() {
    let torch = torch_dir();
    let include = torch.join("include");
    let source = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));

    let mut build = cxx_build::bridge("src/lib.rs");
    build
        .file("ops.cpp")
        .std("c++20")
        // Only what libtorch 2.11 has, so that one binary serves every torch from there on.
        .define("TORCH_TARGET_VERSION", "0x020b000000000000")
        .flag("-isystem")
        .flag(&include)
        .flag("-fvisibility=hidden")
        .flag("-Wall")
        .flag("-Wextra")
        // Messages of libtorch's checks quote __FILE__.
        .flag(prefix_map(&out, "cxx_bridge"))
        .flag(prefix_map(&source, "cxx_bridge"))
        .flag(prefix_map(&include.join("torch"), "torch"));
    if env::var("PROFILE").as_deref() == Ok("debug") {
        // Not in a wheel: a newer compiler of a user may warn of more.
        build.flag("-Werror");
    }
    build.compile("recstore_ops");

    // For crates that compile against the same headers.
    println!("cargo::metadata=torch={}", torch.display());
    println!("cargo::rustc-link-search=native={}", torch.join("lib").display());
    println!("cargo::rustc-link-lib=dylib=torch_cpu");
    for path in [
        "arguments.h",
        "build.rs",
        "id_columns.h",
        "id_ops.h",
        "kept_tensors.h",
        "new_tensor.h",
        "ops.cpp",
        "ops.h",
        "rank_ops.h",
        "src/lib.rs",
        "tensor_check.h",
    ] {
        println!("cargo::rerun-if-changed={path}");
    }
    // Another torch in the same place brings other headers.
    println!("cargo::rerun-if-changed={}", torch.join("version.py").display());
}

fn prefix_map(from: &Path, to: &str) -> String {
    format!("-ffile-prefix-map={}={to}", from.display())
}

/// The folder of the torch package: `RECSTORE_TORCH_DIR`, or where the active Python keeps it.
fn torch_dir() -> PathBuf {
    if let Some(dir) = variable("RECSTORE_TORCH_DIR") {
        let dir = PathBuf::from(dir);
        assert!(
            has_headers(&dir),
            "RECSTORE_TORCH_DIR={} holds no include/torch/csrc/stable/library.h; it should be the folder of an installed torch package",
            dir.display()
        );
        return dir;
    }
    let venv = variable("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("bin/python").into_os_string());
    let pythons = [variable("PYO3_PYTHON"), venv, Some("python3".into())];
    for python in pythons.into_iter().flatten() {
        let Ok(found) = Command::new(&python).args(["-c", FIND_TORCH]).output() else {
            continue;
        };
        let dir = PathBuf::from(String::from_utf8_lossy(&found.stdout).trim());
        if has_headers(&dir) {
            return fs::canonicalize(&dir).unwrap_or(dir);
        }
    }
    panic!(
        "no torch to build against: install torch in the active Python, or set RECSTORE_TORCH_DIR to the folder of an installed torch package"
    );
}

/// An environment variable; the build runs again when it changes.
fn variable(name: &str) -> Option<OsString> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var_os(name)
}

fn has_headers(torch: &Path) -> bool {
    torch.join("include/torch/csrc/stable/library.h").is_file()
}
