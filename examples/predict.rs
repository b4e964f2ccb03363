//! A bundle that answers in Rust, without Python.
//!
//!     predict BUNDLE [INPUTS OUTPUTS]
//!
//! Reads `INPUTS/<name>.bin` for each tensor that the bundle takes, its elements one behind the other, and writes
//! `OUTPUTS/<name>.bin` for each that it gives. With a bundle alone it prints what those are.

#![expect(clippy::print_stdout, reason = "it shows what a bundle gives")]

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs};

use recstore_runtime::{Bundle, Described, Input};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("predict: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(Path::new).collect::<Vec<_>>()[..] {
        [bundle] => describe(&Bundle::open(bundle)?),
        [bundle, inputs, outputs] => predict(&Bundle::open(bundle)?, inputs, outputs)?,
        _ => return Err("usage: predict BUNDLE [INPUTS OUTPUTS]".into()),
    }
    Ok(())
}

fn describe(bundle: &Bundle) {
    for (what, tensors) in [("takes", bundle.inputs()), ("gives", bundle.outputs())] {
        for Described { name, dtype, shape, .. } in tensors {
            println!("{what} {name} {} {shape:?}", dtype.name());
        }
    }
}

fn predict(bundle: &Bundle, inputs: &Path, outputs: &Path) -> Result<(), Box<dyn Error>> {
    let read = |tensor: &Described| fs::read(inputs.join(format!("{}.bin", tensor.name)));
    let files = bundle.inputs().iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let shapes: Vec<_> =
        bundle.inputs().iter().zip(&files).map(|(tensor, bytes)| whole(tensor, bytes.len())).collect();
    let tensors = bundle.inputs().iter().zip(&files).zip(&shapes);
    let tensors = tensors.map(|((tensor, bytes), shape)| Input::of_bytes(tensor.dtype, bytes, shape));
    for output in bundle.run(&tensors.collect::<Result<Vec<_>, _>>()?)? {
        println!("{} {} {:?}", output.name(), output.dtype().name(), output.shape());
        fs::write(outputs.join(format!("{}.bin", output.name())), output.bytes())?;
    }
    Ok(())
}

/// The shape of a tensor of so many bytes, of which one size varies.
fn whole(tensor: &Described, bytes: usize) -> Vec<i64> {
    let row: i64 = tensor.shape.iter().filter(|&&size| size != -1).product();
    let rows = bytes as i64 / (row * tensor.dtype.size() as i64).max(1);
    tensor.shape.iter().map(|&size| if size == -1 { rows } else { size }).collect()
}
