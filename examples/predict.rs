//! A bundle that answers in Rust, without Python.
//!
//!     predict BUNDLE [INPUTS OUTPUTS]
//!
//! Reads `INPUTS/<name>.bin` for each tensor that the bundle takes, its elements one behind the other, and writes
//! `OUTPUTS/<name>.bin` for each that it gives. With a bundle alone it prints what those are.

#![expect(clippy::print_stdout, reason = "it shows what a bundle gives")]

use std::error::Error;
use std::path::{Path, PathBuf};
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
    let paths = bundle.outputs().iter().map(|tensor| file_of(outputs, &tensor.name));
    let paths = paths.collect::<Result<Vec<_>, _>>()?;
    let read = |tensor: &Described| Ok(fs::read(file_of(inputs, &tensor.name)?)?);
    let files = bundle.inputs().iter().map(read).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let shapes = bundle.inputs().iter().zip(&files).map(|(tensor, bytes)| whole(tensor, bytes.len()));
    let shapes = shapes.collect::<Result<Vec<_>, _>>()?;
    let tensors = bundle.inputs().iter().zip(&files).zip(&shapes);
    let tensors = tensors.map(|((tensor, bytes), shape)| Input::of_bytes(tensor.dtype, bytes, shape));
    let given = bundle.run(&tensors.collect::<Result<Vec<_>, _>>()?)?;
    for (output, path) in given.iter().zip(paths) {
        println!("{} {} {:?}", output.name(), output.dtype().name(), output.shape());
        fs::write(path, output.bytes())?;
    }
    Ok(())
}

/// The file of a tensor in a folder. A name that leads elsewhere is refused: names are those that a bundle says.
fn file_of(folder: &Path, name: &str) -> Result<PathBuf, String> {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if name.is_empty() || name.starts_with('.') || !name.bytes().all(is_known) {
        return Err(format!("the name of a tensor is none of a file: {name}"));
    }
    Ok(folder.join(format!("{name}.bin")))
}

/// The shape of a tensor of so many bytes, of which one size varies.
fn whole(tensor: &Described, bytes: usize) -> Result<Vec<i64>, String> {
    let mut known = tensor.shape.iter().filter(|&&size| size > 0);
    let row = known.try_fold(tensor.dtype.size() as i64, |row, &size| row.checked_mul(size));
    let rows = bytes as i64 / row.ok_or_else(|| format!("{} is too large", tensor.name))?;
    Ok(tensor.shape.iter().map(|&size| if size == -1 { rows } else { size }).collect())
}
