//! What runs a graph: libtorch's dispatcher, called by `cpp/program.cpp`.

#![expect(unsafe_code, reason = "libtorch is C++")]

pub(crate) use ffi::{Argument, Call, Kept, Kind, Program, View, has_operators, new_program};

/// Sets how many threads libtorch's loops run on, in every bundle of the process.
pub fn set_num_threads(threads: usize) {
    ffi::set_num_threads(threads.max(1));
}

// SAFETY: 1. a program changes nothing after it was made: no operator of it writes to an argument. Each run has values
// of its own, and libtorch's operators may be called from any thread.
unsafe impl Send for Program {}
// SAFETY: 1. as for `Send`.
unsafe impl Sync for Program {}

// SAFETY: 1. a kept tensor alone holds its memory, and it is only read.
unsafe impl Send for Kept {}
// SAFETY: 1. as for `Send`.
unsafe impl Sync for Kept {}

#[allow(unreachable_pub, missing_docs, clippy::missing_errors_doc, reason = "the glue that cxx writes")]
#[cxx::bridge(namespace = "recstore::runtime")]
mod ffi {
    /// What an argument is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Kind {
        Nothing,
        Bool,
        Int,
        Float,
        Text,
        Value,
        /// As many arguments as `number` says follow it.
        List,
        DType,
        Device,
        Layout,
        MemoryFormat,
    }

    /// An argument of a call; its kind says which of the fields has it.
    struct Argument {
        kind: Kind,
        number: i64,
        real: f64,
        text: String,
    }

    /// A call of an operator: arguments by place, then those by name.
    struct Call {
        name: String,
        overload: String,
        /// What the operator must have; empty for what the caller allowed.
        schema: String,
        positional: usize,
        keys: Vec<String>,
        arguments: Vec<Argument>,
    }

    /// A tensor in memory of Rust, element behind element.
    struct View<'a> {
        dtype: &'a str,
        shape: &'a [i64],
        bytes: &'a [u8],
        /// Whether it is the handle of a table.
        is_handle: bool,
    }

    // SAFETY:
    // 1. `new_program` copies the tensors of the state; `run` reads inputs only before it returns.
    // 2. What `Kept` gives lives as long as it does, and is of no memory of the inputs or the state.
    // 3. Views were checked: their bytes are as many as their shape and type need, and aligned to the type.
    unsafe extern "C++" {
        include!("recstore-runtime/cpp/program.h");

        type Program;
        type Kept;
        type Outputs;

        fn new_program(
            state: &[View],
            inputs: usize,
            calls: &[Call],
            outputs: &[usize],
        ) -> Result<UniquePtr<Program>>;
        fn run(self: &Program, inputs: &[View]) -> Result<UniquePtr<Outputs>>;

        fn take(self: Pin<&mut Outputs>, place: usize) -> Result<UniquePtr<Kept>>;

        fn dtype(self: &Kept) -> &str;
        fn shape(self: &Kept) -> &[i64];
        fn bytes(self: &Kept) -> &[u8];

        fn has_operators() -> bool;
        fn set_num_threads(threads: usize);
    }
}
