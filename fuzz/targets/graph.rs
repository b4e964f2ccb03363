//! The graph of a bundle, as the runtime without Python reads it: the parser alone, without libtorch.
#![no_main]
#![allow(dead_code, reason = "only the parser runs")]

use libfuzzer_sys::fuzz_target;

#[path = "../../rust/recstore-runtime/src/graph.rs"]
mod graph;

/// The values that libtorch's side takes, as `program.rs` shares them with C++.
mod program {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Kind {
        Nothing,
        Bool,
        Int,
        Float,
        Text,
        Value,
        List,
        DType,
        Device,
        Layout,
        MemoryFormat,
    }

    pub(crate) struct Argument {
        pub(crate) kind: Kind,
        pub(crate) number: i64,
        pub(crate) real: f64,
        pub(crate) text: String,
    }

    pub(crate) struct Call {
        pub(crate) name: String,
        pub(crate) overload: String,
        pub(crate) positional: usize,
        pub(crate) keys: Vec<String>,
        pub(crate) arguments: Vec<Argument>,
    }
}

fuzz_target!(|text: &[u8]| _ = graph::parse(text));
