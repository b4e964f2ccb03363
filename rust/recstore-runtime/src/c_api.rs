//! What C and C++ call: `include/recstore_runtime.h`, which says what each function does.

#![expect(unsafe_code, reason = "C passes pointers")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::{ptr, slice};

use recstore::FrozenMemory;

use crate::bundle::{Bundle, Output};
use crate::element::DType;
use crate::error::{Error, Result};
use crate::inputs::Input;
use crate::manifest::Described;
use crate::program;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// `recstore_bundle`.
pub(crate) struct CBundle {
    bundle: Bundle,
    inputs: Vec<CString>,
    outputs: Vec<CString>,
}

/// `recstore_outputs`.
pub(crate) struct COutputs {
    outputs: Vec<Output>,
    names: Vec<CString>,
}

/// `recstore_tensor`.
#[repr(C)]
pub(crate) struct CTensor {
    name: *const c_char,
    dtype: c_int,
    rank: usize,
    shape: *const i64,
    data: *const c_void,
    bytes: usize,
}

const NO_TENSOR: CTensor =
    CTensor { name: ptr::null(), dtype: -1, rank: 0, shape: ptr::null(), data: ptr::null(), bytes: 0 };

/// Runs the body of a function that C calls: an error or a panic is kept for `recstore_last_error`.
fn guard<T>(body: impl FnOnce() -> Result<T>) -> Option<T> {
    let message = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return Some(value),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "recstore: internal panic".to_owned(),
    };
    LAST_ERROR.set(c_text(&message));
    None
}

fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

fn number_of(dtype: DType) -> c_int {
    DType::ALL.iter().position(|&each| each == dtype).map_or(-1, |place| place as c_int)
}

fn names_of(tensors: &[Described]) -> Vec<CString> {
    tensors.iter().map(|tensor| c_text(&tensor.name)).collect()
}

/// The text of a pointer.
///
/// # Safety
/// It is null, or points to a text that ends with a zero and outlives the result.
unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(Error::Input("a text is missing".to_owned()));
    }
    // SAFETY: 1. the caller's.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Error::Input(format!("{} is no text in UTF-8", text.to_string_lossy())))
}

/// The elements that a pointer stands for.
///
/// # Safety
/// They are there and outlive the result, if there are any.
unsafe fn elements<'a, T>(start: *const T, count: usize) -> Result<&'a [T]> {
    match (start.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::Input("memory is missing".to_owned())),
        // SAFETY: 1. the caller's.
        (false, _) => Ok(unsafe { slice::from_raw_parts(start, count) }),
    }
}

/// The tensor that C describes.
///
/// # Safety
/// Its shape and data are there and outlive the result.
unsafe fn input<'a>(tensor: &CTensor) -> Result<Input<'a>> {
    let known = usize::try_from(tensor.dtype).ok().and_then(|place| DType::ALL.get(place));
    let dtype = *known.ok_or_else(|| Error::Input(format!("{} is no type of a tensor", tensor.dtype)))?;
    // SAFETY: 1. the caller's.
    let shape = unsafe { elements(tensor.shape, tensor.rank) }?;
    // SAFETY: 1. the caller's.
    let bytes = unsafe { elements(tensor.data.cast::<u8>(), tensor.bytes) }?;
    Input::of_bytes(dtype, bytes, shape)
}

/// See the header.
///
/// # Safety
/// `directory` and `memory` are null or texts that end with a zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_open(
    directory: *const c_char,
    memory: *const c_char,
) -> *mut CBundle {
    // SAFETY: 1. the caller's.
    unsafe { recstore_bundle_open_with(directory, memory, ptr::null(), 0) }
}

/// See the header.
///
/// # Safety
/// `directory`, `memory` and the `operators`, as many as it is said, are null or texts that end with a zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_open_with(
    directory: *const c_char,
    memory: *const c_char,
    operators: *const *const c_char,
    num_operators: usize,
) -> *mut CBundle {
    let opened = guard(|| {
        // SAFETY: 1. the caller's.
        let (directory, memory) = unsafe { (text(directory)?, text(memory)?) };
        // SAFETY: 1. the caller's.
        let operators = unsafe { elements(operators, num_operators)? };
        // SAFETY: 1. the caller's.
        let operators: Result<Vec<_>> = operators.iter().map(|&name| unsafe { text(name) }).collect();
        let memory: FrozenMemory = memory.parse()?;
        let bundle = Bundle::open_with(Path::new(directory), memory, &operators?)?;
        let (inputs, outputs) = (names_of(bundle.inputs()), names_of(bundle.outputs()));
        Ok(Box::new(CBundle { bundle, inputs, outputs }))
    });
    opened.map_or(ptr::null_mut(), Box::into_raw)
}

/// See the header.
///
/// # Safety
/// `bundle` is null, or was opened and not closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_close(bundle: *mut CBundle) {
    if !bundle.is_null() {
        // SAFETY: 1. `recstore_bundle_open` made it from a box, and nobody uses it any more.
        drop(unsafe { Box::from_raw(bundle) });
    }
}

/// See the header.
///
/// # Safety
/// `bundle` is null, or was opened and not closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_num_inputs(bundle: *const CBundle) -> usize {
    // SAFETY: 1. the caller's.
    unsafe { bundle.as_ref() }.map_or(0, |bundle| bundle.inputs.len())
}

/// See the header.
///
/// # Safety
/// `bundle` is null, or was opened and not closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_num_outputs(bundle: *const CBundle) -> usize {
    // SAFETY: 1. the caller's.
    unsafe { bundle.as_ref() }.map_or(0, |bundle| bundle.outputs.len())
}

/// See the header.
///
/// # Safety
/// `bundle` is null, or was opened and not closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_input(bundle: *const CBundle, place: usize) -> CTensor {
    // SAFETY: 1. the caller's.
    let bundle = unsafe { bundle.as_ref() };
    bundle.map_or(NO_TENSOR, |bundle| described(bundle.bundle.inputs(), &bundle.inputs, place))
}

/// See the header.
///
/// # Safety
/// `bundle` is null, or was opened and not closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_output(bundle: *const CBundle, place: usize) -> CTensor {
    // SAFETY: 1. the caller's.
    let bundle = unsafe { bundle.as_ref() };
    bundle.map_or(NO_TENSOR, |bundle| described(bundle.bundle.outputs(), &bundle.outputs, place))
}

fn described(tensors: &[Described], names: &[CString], place: usize) -> CTensor {
    let (Some(tensor), Some(name)) = (tensors.get(place), names.get(place)) else { return NO_TENSOR };
    CTensor {
        name: name.as_ptr(),
        dtype: number_of(tensor.dtype),
        rank: tensor.shape.len(),
        shape: tensor.shape.as_ptr(),
        ..NO_TENSOR
    }
}

/// See the header.
///
/// # Safety
/// `bundle` is null, or was opened and not closed; `inputs` are as many as it is said, and so are their shapes and bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_bundle_run(
    bundle: *const CBundle,
    inputs: *const CTensor,
    num_inputs: usize,
) -> *mut COutputs {
    let given = guard(|| {
        // SAFETY: 1. the caller's.
        let (bundle, inputs) = unsafe { (bundle.as_ref(), elements(inputs, num_inputs)?) };
        let bundle = bundle.ok_or_else(|| Error::Input("the bundle is missing".to_owned()))?;
        // SAFETY: 1. the caller's.
        let inputs: Result<Vec<_>> = inputs.iter().map(|tensor| unsafe { input(tensor) }).collect();
        let outputs = bundle.bundle.run(&inputs?)?;
        let names = outputs.iter().map(|output| c_text(output.name())).collect();
        Ok(Box::new(COutputs { outputs, names }))
    });
    given.map_or(ptr::null_mut(), Box::into_raw)
}

/// See the header.
///
/// # Safety
/// `outputs` is null, or came of `recstore_bundle_run` and was not freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_outputs_get(outputs: *const COutputs, place: usize) -> CTensor {
    // SAFETY: 1. the caller's.
    let outputs = unsafe { outputs.as_ref() };
    let found = outputs.and_then(|given| given.outputs.get(place).zip(given.names.get(place)));
    let Some((output, name)) = found else { return NO_TENSOR };
    CTensor {
        name: name.as_ptr(),
        dtype: number_of(output.dtype()),
        rank: output.shape().len(),
        shape: output.shape().as_ptr(),
        data: output.bytes().as_ptr().cast(),
        bytes: output.bytes().len(),
    }
}

/// See the header.
///
/// # Safety
/// `outputs` is null, or came of `recstore_bundle_run` and was not freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recstore_outputs_free(outputs: *mut COutputs) {
    if !outputs.is_null() {
        // SAFETY: 1. `recstore_bundle_run` made it from a box, and nobody uses it any more.
        drop(unsafe { Box::from_raw(outputs) });
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn recstore_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|error| error.as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn recstore_set_num_threads(threads: usize) {
    program::set_num_threads(threads);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        LAST_ERROR.with_borrow(|error| error.to_string_lossy().into_owned())
    }

    #[test]
    fn what_is_missing_is_an_error() {
        // SAFETY: 1. null is allowed.
        let opened = unsafe { recstore_bundle_open(ptr::null(), c"mapped".as_ptr()) };
        assert!(opened.is_null());
        assert_eq!(last_error(), "a text is missing");
        // SAFETY: 1. texts of this program.
        let opened = unsafe { recstore_bundle_open(c"/nowhere".as_ptr(), c"flying".as_ptr()) };
        assert!(opened.is_null() && last_error().contains("flying"));
        let operators = [c"mine".as_ptr(), ptr::null()];
        for (count, told) in [(1, "\"mine\" names no operator"), (2, "a text is missing")] {
            // SAFETY: 1. texts of this program, and null, which is allowed.
            let opened = unsafe {
                recstore_bundle_open_with(c"/nowhere".as_ptr(), c"mapped".as_ptr(), operators.as_ptr(), count)
            };
            assert!(opened.is_null() && last_error().starts_with(told), "{}", last_error());
        }
        // SAFETY: 1. null is allowed.
        let given = unsafe { recstore_bundle_run(ptr::null(), ptr::null(), 0) };
        assert!(given.is_null());
        assert_eq!(last_error(), "the bundle is missing");
        // SAFETY: 1. null is allowed.
        let described =
            unsafe { [recstore_bundle_input(ptr::null(), 0), recstore_outputs_get(ptr::null(), 0)] };
        assert!(described.iter().all(|tensor| tensor.dtype == -1));
    }

    #[test]
    fn a_tensor_of_another_size_or_type_is_an_error() {
        let (shape, data) = ([2_i64], [0_u64; 2]);
        let tensor = |dtype, bytes, skip: usize| CTensor {
            dtype,
            rank: 1,
            shape: shape.as_ptr(),
            data: data.as_ptr().wrapping_byte_add(skip).cast(),
            bytes,
            ..NO_TENSOR
        };
        // SAFETY: 1. shape and data are those above, and have more bytes than are said.
        let error = |tensor: CTensor| unsafe { input(&tensor) }.unwrap_err().to_string();
        assert_eq!(error(tensor(77, 8, 0)), "77 is no type of a tensor");
        assert_eq!(error(tensor(0, 9, 0)), "9 bytes are no float32 tensor of shape [2]");
        assert_eq!(error(tensor(0, 8, 1)), "float32 tensors must begin at a multiple of 4");
        assert_eq!(error(CTensor { shape: ptr::null(), ..tensor(0, 8, 0) }), "memory is missing");
    }

    #[test]
    fn a_panic_is_an_error() {
        assert!(guard::<()>(|| panic!("three")).is_none());
        assert_eq!(last_error(), "recstore: internal panic");
    }
}
