//! How often some ids are found among many.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};

const ID_BYTES: usize = size_of::<i64>();

/// The most bytes that are read at a time: whole lines of ids.
const BYTES_PER_CHUNK: usize = 1 << 20;

/// Ids that are looked for, and how often each was found.
#[derive(Debug)]
pub struct IdTally {
    ids: Vec<i64>,
    /// Whether an id has these lower bits: most numbers are no id, and here that costs one look.
    ends: Vec<bool>,
    found: BTreeMap<i64, u64>,
}

impl IdTally {
    /// Looks for these ids.
    pub fn new(ids: &[i64]) -> Self {
        let (mut ids, mut ends) = (ids.to_vec(), vec![false; 1 << u16::BITS]);
        ids.sort_unstable();
        ids.iter().for_each(|id| ends[usize::from(*id as u16)] = true);
        Self { ids, ends, found: BTreeMap::new() }
    }

    /// Returns what is looked for, ascending.
    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// Counts a number, if it is an id.
    #[inline]
    pub fn add(&mut self, number: i64) {
        if self.ends[usize::from(number as u16)] && self.ids.binary_search(&number).is_ok() {
            *self.found.entry(number).or_default() += 1;
        }
    }

    /// Counts the numbers that bytes are, eight each, little-endian.
    pub fn add_all(&mut self, bytes: &[u8]) {
        bytes.as_chunks().0.iter().for_each(|number| self.add(i64::from_le_bytes(*number)));
    }

    /// Counts each eight bytes that are an id, wherever they begin.
    ///
    /// # Errors
    /// As `from`.
    pub fn add_within(&mut self, from: &mut impl Read) -> io::Result<()> {
        let (mut buffer, mut kept) = (vec![0; BYTES_PER_CHUNK], 0);
        loop {
            let filled = kept
                + match from.read(&mut buffer[kept..]) {
                    Ok(0) => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    read => read?,
                };
            for window in buffer[..filled].windows(ID_BYTES) {
                self.add_all(window);
            }
            kept = filled.min(ID_BYTES - 1);
            buffer.copy_within(filled - kept..filled, 0);
        }
    }

    /// Returns how often each id was found, ascending, and begins anew.
    pub fn take(&mut self) -> Vec<(i64, u64)> {
        std::mem::take(&mut self.found).into_iter().collect()
    }
}

/// Calls `take` with the next bytes, in parts of whole lines.
///
/// # Errors
/// As `from`; [`ErrorKind::UnexpectedEof`] where it ends before.
pub(crate) fn read_parts(
    from: &mut (impl Read + ?Sized),
    mut bytes: usize,
    mut take: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut buffer = vec![0; bytes.min(BYTES_PER_CHUNK)];
    while bytes > 0 {
        let part = &mut buffer[..bytes.min(BYTES_PER_CHUNK)];
        from.read_exact(part)?;
        take(part);
        bytes -= part.len();
    }
    Ok(())
}
