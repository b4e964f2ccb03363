//! A typed array within the body of a frame.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | kind: 1 i64, 2 f32, 3 u32, 4 JSON in UTF-8; since version 3 of the protocol 5 bfloat16 |
//! | 1 to 7 | zeros |
//! | 8 to 15 | number of elements (of JSON: of bytes), u64 |
//! | 16 on | elements, and zeros up to a multiple of 8 bytes |

use std::io::{self, Write};

use super::frame_error::{FrameError, malformed};

const HEADER_WORDS: usize = 2;
const WORD: usize = 8;

/// A typed array, where it lies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Section<'a> {
    /// Ids, indices, counts.
    I64(&'a [i64]),
    /// Rows and gradients, row-major.
    F32(&'a [f32]),
    /// Flags.
    U32(&'a [u32]),
    /// A JSON text.
    Json(&'a str),
    /// Rows and gradients, row-major, the upper halves of floats.
    Bf16(&'a [u16]),
}

impl<'a> Section<'a> {
    fn kind(&self) -> u8 {
        match self {
            Self::I64(_) => 1,
            Self::F32(_) => 2,
            Self::U32(_) => 3,
            Self::Json(_) => 4,
            Self::Bf16(_) => 5,
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::Json(text) => text.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    fn bytes(&self) -> &'a [u8] {
        match self {
            Self::I64(values) => bytemuck::cast_slice(values),
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::U32(values) => bytemuck::cast_slice(values),
            Self::Json(text) => text.as_bytes(),
            Self::Bf16(values) => bytemuck::cast_slice(values),
        }
    }

    /// Returns how a section is called in messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::U32(_) => "u32",
            Self::Json(_) => "JSON",
            Self::Bf16(_) => "bf16",
        }
    }

    /// Returns the bytes it takes in a frame.
    pub(super) fn encoded_len(&self) -> usize {
        // Whole words: all that follows is aligned, so that its reader takes it where it lies.
        HEADER_WORDS * WORD + self.bytes().len().next_multiple_of(WORD)
    }

    /// Writes its header, elements and padding.
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut header = [0; HEADER_WORDS * WORD];
        header[0] = self.kind();
        header[WORD..].copy_from_slice(&(self.count() as u64).to_le_bytes());
        to.write_all(&header)?;
        let bytes = self.bytes();
        to.write_all(bytes)?;
        to.write_all(&[0; WORD][..bytes.len().next_multiple_of(WORD) - bytes.len()])
    }

    /// Reads the section at the beginning of `words` and returns it with the words behind it.
    pub(super) fn parse(words: &'a [u64]) -> Result<(Self, &'a [u64]), FrameError> {
        let (header, behind) = words
            .split_first_chunk::<HEADER_WORDS>()
            .ok_or_else(|| malformed("a section without a header"))?;
        let size = match header[0] {
            1 => 8,
            2 | 3 => 4,
            4 => 1,
            5 => 2,
            kind => return Err(malformed(format!("a section of the unknown kind {kind:#x}"))),
        };
        // Compared with the bytes that are there before anything is made of it: peers may claim any number.
        let claimed = usize::try_from(header[1]).ok().and_then(|count| count.checked_mul(size));
        let bytes = claimed.filter(|bytes| bytes.div_ceil(WORD) <= behind.len()).ok_or_else(|| {
            malformed(format!("{} elements of {size} bytes in {} bytes", header[1], behind.len() * WORD))
        })?;
        let (own, behind) = behind.split_at(bytes.div_ceil(WORD));
        Self::typed(header[0], &bytemuck::cast_slice(own)[..bytes]).map(|section| (section, behind))
    }

    /// `bytes` begin at a multiple of eight bytes and hold whole elements.
    fn typed(kind: u64, bytes: &'a [u8]) -> Result<Self, FrameError> {
        Ok(match kind {
            1 => Self::I64(bytemuck::cast_slice(bytes)),
            2 => Self::F32(bytemuck::cast_slice(bytes)),
            3 => Self::U32(bytemuck::cast_slice(bytes)),
            5 => Self::Bf16(bytemuck::cast_slice(bytes)),
            _ => Self::Json(std::str::from_utf8(bytes).map_err(malformed)?),
        })
    }
}

/// An error about sections that do not go with a kind of frame.
pub(super) fn unexpected(kind: &str, sections: &[Section<'_>]) -> FrameError {
    const SHOWN: usize = 8;
    let names: Vec<_> = sections.iter().take(SHOWN).map(Section::name).collect();
    malformed(format!("{kind} with {} sections {names:?}", sections.len()))
}
