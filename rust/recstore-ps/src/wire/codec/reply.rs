//! The answer of a server as a value, and as a frame.

use std::io::Write;

use recstore::{ChangedRows, Error};

use super::buffers::Floats;
use super::error::WireError;
use super::frame::{Checksum, Frame, Header, Kind, Received};
use super::frame_error::{FrameError, malformed, parse};
use super::management::Managed;
use super::section::{Section, unexpected};

/// How many bytes of rows go together: few enough to stay in a core's cache from one copy to the next.
const PART_BYTES: usize = 256 << 10;

/// What a request gives.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Of a management request.
    Managed(Managed),
    /// It was done.
    Done,
    /// Values of a slot.
    Slot(Vec<f32>),
    /// Rows, a matrix for each table.
    Rows(Vec<Rows>),
    /// Ids.
    Ids(Vec<i64>),
    /// Indices and rows.
    Found {
        /// An index for each id.
        indices: Vec<i64>,
        /// A row for each id.
        rows: Vec<f32>,
    },
    /// What changed in tables.
    Changed {
        /// Of this answer, among those of the publication.
        number: u64,
        /// For each table.
        tables: Vec<ChangedRows>,
    },
    /// How many rows were deleted.
    Count(u64),
    /// There is no such slot.
    NoSlot,
}

/// The rows of one table's ids.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    /// The floats of a row.
    pub dim: usize,
    /// The rows, one behind the other.
    pub values: Floats,
}

impl Rows {
    /// Returns the rows in pieces of at most [`PART_BYTES`], or of one row.
    fn pieces(&self) -> impl Iterator<Item = &[f32]> {
        let rows = PART_BYTES / size_of::<f32>() / self.dim.max(1);
        self.values.chunks(rows.max(1) * self.dim.max(1))
    }
}

/// What a client gets for a request: an answer that lies in the frame it came in, or the store's error.
#[derive(Debug)]
pub struct Reply(Received);

impl Answer {
    /// Returns the bytes of rows and ids in it, about.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Self::Slot(values) => size_of_val(&values[..]),
            Self::Rows(rows) => rows.iter().map(|rows| size_of_val(&rows.values[..])).sum(),
            Self::Ids(ids) => size_of_val(&ids[..]),
            Self::Found { indices, rows } => size_of_val(&indices[..]) + size_of_val(&rows[..]),
            Self::Changed { tables, .. } => tables.iter().map(changed_bytes).sum(),
            Self::Managed(_) | Self::Done | Self::Count(_) | Self::NoSlot => 0,
        }
    }
}

/// Returns the bytes of ids and rows.
pub(crate) fn changed_bytes(changed: &ChangedRows) -> usize {
    let ChangedRows { ids, rows, deleted } = changed;
    size_of_val(&ids[..]) + size_of_val(&rows[..]) + size_of_val(&deleted[..])
}

fn changed_sections(changed: &ChangedRows) -> [Section<'_>; 3] {
    let ChangedRows { ids, rows, deleted } = changed;
    [Section::I64(ids), Section::F32(rows), Section::I64(deleted)]
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
    let sections = match outcome {
        Ok(Answer::Managed(managed)) => {
            text = serde_json::to_string(managed).map_err(malformed)?;
            vec![Section::Json(&text)]
        }
        Ok(Answer::Done | Answer::NoSlot) => vec![],
        Ok(Answer::Slot(values)) => vec![Section::F32(values)],
        Ok(Answer::Rows(rows)) => rows.iter().map(|rows| Section::F32(&rows.values)).collect(),
        Ok(Answer::Ids(ids)) => vec![Section::I64(ids)],
        Ok(Answer::Found { indices, rows }) => vec![Section::I64(indices), Section::F32(rows)],
        Ok(Answer::Changed { number, tables }) => {
            count = [*number as i64];
            [Section::I64(&count)].into_iter().chain(tables.iter().flat_map(changed_sections)).collect()
        }
        Ok(Answer::Count(number)) => {
            count = [*number as i64];
            vec![Section::I64(&count)]
        }
        Err(error) => {
            header.kind = Kind::Refused;
            text = serde_json::to_string(&WireError::from(error)).map_err(malformed)?;
            vec![Section::Json(&text)]
        }
    };
    Ok(send(&Frame { header, sections }))
}

/// Writes what a request gave, and returns how many bytes that took. Many rows go in parts before the reply, which has
/// the last of them, so that their reader can begin. Rows go as bfloat16 if the connection `is_narrow`.
///
/// # Errors
/// As [`with_reply_frame`] and as `to`.
pub(crate) fn write_reply(
    request: u64,
    outcome: &Result<Answer, Error>,
    is_narrow: bool,
    to: &mut impl Write,
) -> Result<u64, FrameError> {
    write_reply_checked(Checksum::Taken, request, outcome, is_narrow, to)
}

/// As [`write_reply`], with checksums or without.
///
/// # Errors
/// As [`write_reply`].
pub(crate) fn write_reply_checked(
    body: Checksum,
    request: u64,
    outcome: &Result<Answer, Error>,
    is_narrow: bool,
    to: &mut impl Write,
) -> Result<u64, FrameError> {
    let mut bytes = 0;
    let is_narrow = is_narrow && matches!(outcome, Ok(Answer::Rows(_)));
    let mut write = |frame: &Frame<'_>| -> Result<(), FrameError> {
        let mut write = |frame: &Frame<'_>| {
            bytes += frame.bytes() as u64;
            frame.write_checked(body, to)
        };
        let written = if is_narrow { frame.narrowed(write) } else { write(frame) };
        Ok(written?)
    };
    let mut parts = match outcome {
        Ok(Answer::Rows(rows)) => parts(rows),
        _ => Vec::new(),
    };
    let Some(sections) = parts.pop() else {
        with_reply_frame(request, outcome, write)??;
        return Ok(bytes);
    };
    for sections in parts {
        write(&Frame { header: Header::new(Kind::Part, request), sections })?;
    }
    write(&Frame { header: Header::new(Kind::Reply, request), sections })?;
    Ok(bytes)
}

/// Cuts matrices into parts of about [`PART_BYTES`].
fn parts(matrices: &[Rows]) -> Vec<Vec<Section<'_>>> {
    let (mut parts, mut room) = (Vec::new(), 0);
    for piece in matrices.iter().flat_map(Rows::pieces) {
        let bytes = size_of_val(piece);
        if bytes > room {
            parts.push(Vec::new());
            room = PART_BYTES;
        }
        room = room.saturating_sub(bytes);
        if let Some(part) = parts.last_mut() {
            part.push(Section::F32(piece));
        }
    }
    parts
}

impl Reply {
    /// Reads what came for the request numbered `request`.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] for the reply to another request, or a request. Within: the error of the store.
    pub fn of(frame: Received, request: u64) -> Result<Result<Self, Error>, FrameError> {
        check_request(&frame, request)?;
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
        matrices(&self.0)
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

    /// Returns the number of an answer of a publication, and what changed in tables of `dims`.
    ///
    /// # Errors
    /// As above, and for other numbers.
    pub fn changed(&self, dims: &[usize]) -> Result<(u64, Vec<ChangedRows>), FrameError> {
        let sections = self.0.sections()?;
        let wrong = || unexpected(&format!("the changes of {} tables", dims.len()), &sections);
        let [Section::I64(number), tables @ ..] = &sections[..] else { return Err(wrong()) };
        let table = |(sections, &dim): (&[Section<'_>], &usize)| match *sections {
            [Section::I64(ids), Section::F32(rows), Section::I64(deleted)]
                if rows.len() == ids.len() * dim =>
            {
                Ok(ChangedRows { ids: ids.to_vec(), rows: rows.to_vec(), deleted: deleted.to_vec() })
            }
            _ => Err(wrong()),
        };
        let [number] = **number else { return Err(wrong()) };
        if tables.len() != 3 * dims.len() {
            return Err(wrong());
        }
        let changed = tables.chunks(3).zip(dims).map(table).collect::<Result<_, _>>()?;
        Ok((number as u64, changed))
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

    /// Returns how many rows left the tables of a step: a count, or nothing for none.
    ///
    /// # Errors
    /// As above.
    pub fn left(&self) -> Result<u64, FrameError> {
        match &self.0.sections()?[..] {
            [] => Ok(0),
            _ => self.count(),
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

/// Calls `take` with each matrix of a part of the answer to `request`.
///
/// # Errors
/// [`FrameError::Malformed`] for a part of another answer, and for what is no matrix; as `take`.
pub(crate) fn take_part(
    frame: &Received,
    request: u64,
    mut take: impl FnMut(&[f32]) -> Result<(), FrameError>,
) -> Result<(), FrameError> {
    check_request(frame, request)?;
    matrices(frame)?.into_iter().try_for_each(&mut take)
}

fn check_request(frame: &Received, request: u64) -> Result<(), FrameError> {
    match frame.header.request {
        own if own == request => Ok(()),
        other => Err(malformed(format!("a reply to request {other}, expected {request}"))),
    }
}

fn matrices(frame: &Received) -> Result<Vec<&[f32]>, FrameError> {
    let rows = |section| match section {
        Section::F32(rows) => Ok(rows),
        other => Err(unexpected("matrices", &[other])),
    };
    frame.sections()?.into_iter().map(rows).collect()
}
