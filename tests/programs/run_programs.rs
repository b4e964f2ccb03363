//! Runs the bundles of a list in Rust and shows what they gave; `tests/python/graph_programs.py` says how files lie.
//!
//! Each is asked by two threads at once, of buffers that are aligned as those of libtorch or not. What it gave must be
//! the same, and stay so when inputs are freed.

#![expect(clippy::print_stdout, reason = "it shows what bundles give")]

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, thread};

use recstore_runtime::{Bundle, DType, FrozenMemory, Input, Output};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const WORD: usize = size_of::<i64>();
const ALIGNMENT: usize = 64;

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let Some(list) = arguments.next() else {
        eprintln!("usage: run_programs LIST [OPERATOR...]");
        return ExitCode::from(2);
    };
    let operators: Vec<_> = arguments.collect();
    let operators: Vec<_> = operators.iter().map(String::as_str).collect();
    for program in fs::read_to_string(list).expect("the list can be read").lines() {
        match answer(Path::new(program), &operators) {
            Ok(outputs) => println!("{program}\tgave {outputs}"),
            Err(error) => println!("{program}\trefused: {}", error.to_string().replace(['\n', '\t'], " ")),
        }
    }
    ExitCode::SUCCESS
}

/// A tensor of a file: the number of its type, how many sizes, these, and its elements.
struct Stored {
    dtype: DType,
    shape: Vec<i64>,
    bytes: Vec<u8>,
}

impl Stored {
    fn read(path: &Path) -> Self {
        let file = fs::read(path).expect("inputs can be read");
        let word = |place: usize| {
            i64::from_le_bytes(file[place * WORD..][..WORD].try_into().expect("these are eight bytes"))
        };
        let rank = word(1) as usize;
        let shape = (2..2 + rank).map(word).collect();
        Self { dtype: DType::ALL[word(0) as usize], shape, bytes: file[(2 + rank) * WORD..].to_vec() }
    }

    /// Its bytes at an offset from what is aligned.
    fn at(&self, offset: usize) -> (Vec<u8>, usize) {
        let mut memory = vec![0; self.bytes.len() + ALIGNMENT + offset];
        let start = memory.as_ptr().align_offset(ALIGNMENT) + offset;
        memory[start..start + self.bytes.len()].copy_from_slice(&self.bytes);
        (memory, start)
    }
}

/// Asks a bundle of buffers that are gone when it returns.
fn ask(bundle: &Bundle, inputs: &[Stored], offset: usize) -> Result<Vec<Output>> {
    let buffers: Vec<_> = inputs.iter().map(|input| input.at(offset)).collect();
    let tensors = inputs.iter().zip(&buffers).map(|(input, (memory, start))| {
        Input::of_bytes(input.dtype, &memory[*start..*start + input.bytes.len()], &input.shape)
    });
    let outputs = bundle.run(&tensors.collect::<std::result::Result<Vec<_>, _>>()?)?;
    for (input, (memory, start)) in inputs.iter().zip(&buffers) {
        assert_eq!(memory[*start..*start + input.bytes.len()], input.bytes, "a run wrote to an input");
    }
    Ok(outputs)
}

/// An output as its file.
fn file_of(output: &Output) -> Vec<u8> {
    let number = DType::ALL.iter().position(|&each| each == output.dtype()).expect("there are no others");
    let head = [number as i64, output.shape().len() as i64];
    let words = head.iter().chain(output.shape()).flat_map(|word| word.to_le_bytes());
    words.chain(output.bytes().iter().copied()).collect()
}

/// Writes what the bundle of a program gave, and returns how much that is.
fn answer(program: &Path, operators: &[&str]) -> Result<usize> {
    let bundle = Bundle::open_with(&program.join("bundle"), FrozenMemory::Mapped, operators)?;
    let inputs: Vec<_> = (0..bundle.inputs().len())
        .map(|place| Stored::read(&program.join("inputs").join(place.to_string())))
        .collect();
    let [first, second] = thread::scope(|scope| {
        [0, 16]
            .map(|offset| {
                scope.spawn({
                    let (bundle, inputs) = (&bundle, &inputs);
                    move || ask(bundle, inputs, offset)
                })
            })
            .map(|asked| asked.join().expect("a bundle does not panic"))
    });
    assert_eq!(first.is_ok(), second.is_ok(), "one run was refused, and one was not");
    let (first, second) = (first?, second?);
    drop(bundle);
    let files: Vec<_> = first.iter().map(file_of).collect();
    assert_eq!(files, second.iter().map(file_of).collect::<Vec<_>>(), "another thread got something else");
    for (place, file) in files.iter().enumerate() {
        fs::write(program.join("rust").join(place.to_string()), file)?;
    }
    Ok(files.len())
}
