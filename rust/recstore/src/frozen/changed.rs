//! The rows of a frozen table that changed since it was frozen, beside those that did not.

use super::encoding::Encoding;
use super::source::{NO_ROW, RowSource};
use super::table::{FrozenRows, FrozenTable};
use crate::Result;
use crate::calls::MemoryUse;
use crate::kernel::cache::{Cache, prefetch};
use crate::kernel::simd::Lanes;
use crate::table::{BEHIND, IdLines, NO_INDEX, RowIndex};

/// The place of an id whose row went. Others are less than it.
const GONE: RowIndex = RowIndex(BEHIND - 1);

/// Rows that take the place of those of a frozen table.
#[derive(Debug, Default)]
pub(super) struct Changed {
    /// The place of each id's row among `rows`.
    places: IdLines,
    rows: Vec<u8>,
    /// Places of rows that went.
    free: Vec<RowIndex>,
    /// The ids without a row in the frozen table that have one here, and those of its rows that went.
    added: usize,
    gone: usize,
}

/// What changes in a table.
#[derive(Debug, Clone, Copy)]
pub struct RowChanges<'a> {
    /// The ids whose rows change or are new.
    pub ids: &'a [i64],
    /// Their rows in the table's encoding, one behind the other.
    pub rows: &'a [u8],
    /// The ids whose rows go, before those above come.
    pub deleted: &'a [i64],
}

impl Changed {
    /// Whether all rows are as they were frozen.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.places.len() == 0
    }

    /// Returns how many rows there are beside a frozen table of so many.
    pub(super) fn num_rows(&self, frozen: usize) -> usize {
        frozen + self.added - self.gone
    }

    /// Returns the memory in use.
    pub(super) fn memory(&self) -> MemoryUse {
        let free = self.free.capacity() * size_of::<RowIndex>();
        MemoryUse {
            row_bytes: self.rows.capacity() as u64,
            index_bytes: (self.places.bytes() + free) as u64,
            ..MemoryUse::default()
        }
    }

    /// Whether an id has a row, if that is known here.
    pub(super) fn knows(&self, id: i64) -> Option<bool> {
        self.places.find(id).map(|place| place != GONE)
    }

    /// Returns the ids that have a row here.
    pub(super) fn ids(&self) -> impl Iterator<Item = i64> {
        self.places.entries().filter(|(_, place)| RowIndex(*place) != GONE).map(|(id, _)| id)
    }

    /// Takes changes, whose lengths fit each other.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte of the frozen table was changed; then nothing was taken.
    pub(super) fn take(&mut self, frozen: &FrozenTable, changes: RowChanges<'_>) -> Result<()> {
        let has_row = |&id: &i64| frozen.row_of(id).map(|row| row.is_some());
        let were_frozen = |ids: &[i64]| ids.iter().map(has_row).collect::<Result<Vec<_>>>();
        // All looks into the frozen table come first: they may fail, and the changes below cannot.
        let (deleted, changed) = (were_frozen(changes.deleted)?, were_frozen(changes.ids)?);
        for (&id, was_frozen) in changes.deleted.iter().zip(deleted) {
            self.delete(id, was_frozen);
        }
        let row_bytes = frozen.encoding().row_bytes(frozen.dim());
        for ((&id, was_frozen), row) in changes.ids.iter().zip(changed).zip(changes.rows.chunks(row_bytes)) {
            self.put(id, was_frozen, row);
        }
        Ok(())
    }

    fn delete(&mut self, id: i64, was_frozen: bool) {
        match self.places.remove(id) {
            Some(GONE) => self.gone -= 1,
            Some(place) => {
                self.free.push(place);
                self.added -= usize::from(!was_frozen);
            }
            None => {}
        }
        if was_frozen {
            // Its row lies in the file still, and would be found there.
            self.places.insert(id, GONE);
            self.gone += 1;
        }
    }

    fn put(&mut self, id: i64, was_frozen: bool, row: &[u8]) {
        let place = match self.places.find(id) {
            Some(GONE) => {
                self.places.remove(id);
                self.gone -= 1;
                self.place_new(id, row.len())
            }
            Some(place) => place,
            None => {
                self.added += usize::from(!was_frozen);
                self.place_new(id, row.len())
            }
        };
        self.rows[place.0 as usize * row.len()..][..row.len()].copy_from_slice(row);
    }

    fn place_new(&mut self, id: i64, row_bytes: usize) -> RowIndex {
        let place = self.free.pop().unwrap_or_else(|| {
            let place = RowIndex((self.rows.len() / row_bytes) as u32);
            self.rows.resize(self.rows.len() + row_bytes, 0);
            place
        });
        self.places.insert(id, place);
        place
    }
}

impl Clone for Changed {
    fn clone(&self) -> Self {
        let places = IdLines::of(self.places.len(), self.places.entries());
        Self { places, rows: self.rows.clone(), free: self.free.clone(), ..*self }
    }
}

/// A frozen table and what changed in it. The rows here have the numbers behind the frozen ones.
#[derive(Clone, Copy)]
pub(super) struct Both<'a> {
    pub(super) frozen: FrozenRows<'a>,
    pub(super) changed: &'a Changed,
}

impl Both<'_> {
    #[inline(always)]
    fn own_row<'a>(self, number: usize) -> Option<&'a [u8]>
    where
        Self: 'a,
    {
        let row_bytes = self.frozen.row_bytes();
        let place = number.checked_sub(self.frozen.num_rows())?;
        Some(&self.changed.rows[place * row_bytes..][..row_bytes])
    }
}

impl RowSource for Both<'_> {
    #[inline(always)]
    fn dim(self) -> usize {
        self.frozen.dim()
    }

    #[inline(always)]
    fn encoding(self) -> Encoding {
        self.frozen.encoding()
    }

    #[inline(always)]
    fn fill_initial(self, id: i64, row: &mut [f32]) {
        self.frozen.fill_initial(id, row);
    }

    #[inline(always)]
    fn seek(self, ids: &[i64], hashes: &mut [u64]) {
        for &id in ids {
            self.changed.places.prefetch(self.changed.places.bucket(id), Cache::First);
        }
        self.frozen.seek(ids, hashes);
    }

    #[inline(always)]
    fn find(self, lanes: impl Lanes, ids: &[i64], hashes: &[u64], numbers: &mut [usize]) -> Result<()> {
        self.frozen.find(lanes, ids, hashes, numbers)?;
        let places = &self.changed.places;
        for (number, &id) in numbers.iter_mut().zip(ids) {
            let place = match places.search(lanes, places.bucket(id), id) {
                BEHIND => {
                    places.search_behind(lanes, places.bucket(id), id).map_or(NO_INDEX, |place| place.0)
                }
                place => place,
            };
            // What changed hides the frozen row of the same id.
            match RowIndex(place) {
                RowIndex(NO_INDEX) => {}
                GONE => *number = NO_ROW,
                RowIndex(place) => *number = self.frozen.num_rows() + place as usize,
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn prefetch_row(self, number: usize) {
        match self.own_row(number) {
            Some(row) => prefetch(row, Cache::First),
            None => self.frozen.prefetch_row(number),
        }
    }

    #[inline(always)]
    fn row<'a>(self, number: usize, id: i64) -> Result<Option<&'a [u8]>>
    where
        Self: 'a,
    {
        match self.own_row(number) {
            Some(row) => Ok(Some(row)),
            None => self.frozen.row(number, id),
        }
    }
}
