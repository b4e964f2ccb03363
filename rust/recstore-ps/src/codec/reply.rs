//! The answer of a server as a value, and as a frame.

use recstore::Error;

use super::error::WireError;
use super::frame::{Frame, FrameError, Header, Kind, Received};
use super::management::Managed;
use super::request::unexpected;
use super::section::Section;

/// What a request gives.
#[expect(clippy::large_enum_variant, reason = "there is one at a time for each connection")]
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Of a management request.
    Managed(Managed),
    /// It was done.
    Done,
    /// Values of a slot.
    Slot(Vec<f32>),
    /// Rows, a matrix for each table.
    Rows(Vec<Vec<f32>>),
    /// Ids.
    Ids(Vec<i64>),
    /// Indices and rows.
    Found {
        /// An index for each id.
        indices: Vec<i64>,
        /// A row for each id.
        rows: Vec<f32>,
    },
    /// How many rows were deleted.
    Count(u64),
    /// There is no such slot.
    NoSlot,
}

/// What a client gets for a request: an answer that lies in the frame it came in, or the store's error.
#[derive(Debug)]
pub struct Reply(Received);

impl Answer {
    /// Returns the bytes of rows and ids in it, about.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Self::Slot(values) => size_of_val(&values[..]),
            Self::Rows(rows) => rows.iter().map(|rows| size_of_val(&rows[..])).sum(),
            Self::Ids(ids) => size_of_val(&ids[..]),
            Self::Found { indices, rows } => size_of_val(&indices[..]) + size_of_val(&rows[..]),
            Self::Managed(_) | Self::Done | Self::Count(_) | Self::NoSlot => 0,
        }
    }
}

/// Calls `send` with the frame of what a request gave.
///
/// # Errors
/// [`FrameError::Malformed`] if it cannot be written as JSON.
pub(crate) fn with_reply_frame<R>(
    request: u64,
    outcome: &Result<Answer, Error>,
    send: impl FnOnce(&Frame<'_>) -> R,
) -> Result<R, FrameError> {
    let (text, count);
    let mut header = Header::new(Kind::Reply, request);
    let unwritable = |error: serde_json::Error| FrameError::Malformed(error.to_string());
    let sections = match outcome {
        Ok(Answer::Managed(managed)) => {
            text = serde_json::to_string(managed).map_err(unwritable)?;
            vec![Section::Json(&text)]
        }
        Ok(Answer::Done | Answer::NoSlot) => vec![],
        Ok(Answer::Slot(values)) => vec![Section::F32(values)],
        Ok(Answer::Rows(rows)) => rows.iter().map(|rows| Section::F32(rows)).collect(),
        Ok(Answer::Ids(ids)) => vec![Section::I64(ids)],
        Ok(Answer::Found { indices, rows }) => vec![Section::I64(indices), Section::F32(rows)],
        Ok(Answer::Count(number)) => {
            count = [*number as i64];
            vec![Section::I64(&count)]
        }
        Err(error) => {
            header.kind = Kind::Refused;
            text = serde_json::to_string(&WireError::from(error)).map_err(unwritable)?;
            vec![Section::Json(&text)]
        }
    };
    Ok(send(&Frame { header, sections }))
}

impl Reply {
    /// Reads what came for the request numbered `request`.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] for the reply to another request, or a request. Within: the error of the store.
    pub fn of(frame: Received, request: u64) -> Result<Result<Self, Error>, FrameError> {
        if frame.header.request != request {
            let other = frame.header.request;
            return Err(FrameError::Malformed(format!("a reply to request {other}, expected {request}")));
        }
        match (frame.header.kind, &frame.sections()?[..]) {
            (Kind::Reply, _) => {}
            (Kind::Refused, [Section::Json(text)]) => {
                let error: WireError = parse(text)?;
                return Ok(Err(error.into()));
            }
            (kind, sections) => return Err(unexpected(&format!("{kind:?}"), sections)),
        }
        Ok(Ok(Self(frame)))
    }

    /// Returns the answer to a management request.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] for another answer; so below.
    pub fn managed(&self) -> Result<Managed, FrameError> {
        match &self.0.sections()?[..] {
            [Section::Json(text)] => parse(text),
            sections => Err(unexpected("an answer in JSON", sections)),
        }
    }

    /// Checks that there is nothing but that it was done.
    ///
    /// # Errors
    /// As above.
    pub fn done(&self) -> Result<(), FrameError> {
        match &self.0.sections()?[..] {
            [] => Ok(()),
            sections => Err(unexpected("nothing", sections)),
        }
    }

    /// Returns matrices of as many floats as `counts` says.
    ///
    /// # Errors
    /// As above, and for other numbers.
    pub fn rows(&self, counts: &[usize]) -> Result<Vec<&[f32]>, FrameError> {
        let sections = self.0.sections()?;
        let of_count = |(section, count): (&Section<'_>, &usize)| matches!(section, Section::F32(rows) if rows.len() == *count);
        if sections.len() != counts.len() || !sections.iter().zip(counts).all(of_count) {
            return Err(unexpected(&format!("{} matrices", counts.len()), &sections));
        }
        let rows = |section| if let Section::F32(rows) = section { rows } else { &[] };
        Ok(sections.into_iter().map(rows).collect())
    }

    /// Returns all matrices.
    ///
    /// # Errors
    /// As above.
    pub fn matrices(&self) -> Result<Vec<&[f32]>, FrameError> {
        let rows = |section| match section {
            Section::F32(rows) => Ok(rows),
            other => Err(unexpected("matrices", &[other])),
        };
        self.0.sections()?.into_iter().map(rows).collect()
    }

    /// Returns ids.
    ///
    /// # Errors
    /// As above.
    pub fn ids(&self) -> Result<&[i64], FrameError> {
        match self.0.sections()?[..] {
            [Section::I64(ids)] => Ok(ids),
            ref sections => Err(unexpected("ids", sections)),
        }
    }

    /// Returns `count` indices and rows of `dim` floats for each.
    ///
    /// # Errors
    /// As above, and for other numbers.
    pub fn found(&self, count: usize, dim: usize) -> Result<(&[i64], &[f32]), FrameError> {
        match self.0.sections()?[..] {
            [Section::I64(indices), Section::F32(rows)]
                if indices.len() == count && rows.len() == count * dim =>
            {
                Ok((indices, rows))
            }
            ref sections => Err(unexpected(&format!("{count} indices and rows"), sections)),
        }
    }

    /// Returns a count.
    ///
    /// # Errors
    /// As above.
    pub fn count(&self) -> Result<u64, FrameError> {
        match self.0.sections()?[..] {
            [Section::I64(&[count])] => Ok(count as u64),
            ref sections => Err(unexpected("a count", sections)),
        }
    }

    /// Returns `count` values of a slot, or `None` where there is no such slot.
    ///
    /// # Errors
    /// As above, and for another number.
    pub fn slot(&self, count: usize) -> Result<Option<&[f32]>, FrameError> {
        if self.0.sections()?.is_empty() {
            return Ok(None);
        }
        Ok(self.rows(&[count])?.pop())
    }
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, FrameError> {
    serde_json::from_str(text).map_err(|error| FrameError::Malformed(error.to_string()))
}
