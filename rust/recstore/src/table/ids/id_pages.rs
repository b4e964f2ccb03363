//! Ids that lie close together: pages of 1,024 consecutive ids, found by the number of the page alone.
//!
//! Where all indices of a page are its ids plus a constant the page is *linear*: the constant, and a bit for each id that
//! is there. Any other page is an *array* of indices. Both are read without a hash and without comparing ids; a linear page
//! whose ids are all there is no memory to read at all but its entry in the directory.
//!
//! The directory is one array from the first page to the last one. A page that lies too far from the others has no place in
//! it: [`IdPages`] refuses its ids, and they lie elsewhere.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::row_index::{NO_INDEX, RowIndex};
use super::slots::Slots;
use crate::kernel::cache::{Cache, prefetch_one};
use crate::kernel::pages::{Pages, supplied_bytes};

/// The ids of a page.
pub(super) const IDS_PER_PAGE: usize = 1 << PAGE_BITS;
const PAGE_BITS: u32 = 10;

/// The consecutive ids, with consecutive indices, that are worth a linear page.
pub(super) const MIN_RUN: usize = 16;

/// The ids with which an array costs less than the lines of a hash map, and those with which it costs more.
pub(super) const MIN_IDS_OF_NEW_ARRAY: usize = 205;
const MIN_IDS_OF_ARRAY: usize = 128;

/// The ids with which a linear page costs more than the lines of a hash map.
const MIN_IDS_OF_LINEAR: usize = 6;

/// The entries of the directory for each page that there is, and for none.
const ENTRIES_PER_PAGE: usize = 8;
const SPARE_ENTRIES: usize = 64;

/// The ids that are looked at together, and how far ahead the indices of arrays are loaded.
const IDS_TOGETHER: usize = 16;
const IDS_AHEAD: usize = 48;

type Bitmap = [u64; IDS_PER_PAGE / u64::BITS as usize];
type Indices = [u32; IDS_PER_PAGE];

/// What the directory knows of a page.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    /// The index of a linear page's first id, whether it is there or not; of an array how many of its ids are there.
    value: u32,
    /// The kind, and above it where the bits or indices lie.
    kind_and_slot: u32,
}

/// No page: what zeroed memory says.
const NONE: u32 = 0;
/// A linear page all ids of which are there.
const FULL: u32 = 1;
const LINEAR: u32 = 2;
const ARRAY: u32 = 3;
const KIND_BITS: u32 = 2;

impl Entry {
    #[inline(always)]
    fn kind(self) -> u32 {
        self.kind_and_slot & ((1 << KIND_BITS) - 1)
    }

    #[inline(always)]
    fn slot(self) -> u32 {
        self.kind_and_slot >> KIND_BITS
    }

    fn new(kind: u32, slot: u32, value: u32) -> Self {
        Self { value, kind_and_slot: slot << KIND_BITS | kind }
    }
}

/// Returns the number of an id's page.
#[inline(always)]
pub(super) fn page_of(id: i64) -> i64 {
    id >> PAGE_BITS
}

/// Returns the place of an id in its page.
#[inline(always)]
pub(super) fn offset_of(id: i64) -> usize {
    id as usize % IDS_PER_PAGE
}

/// Returns the id at a place of a page.
#[inline(always)]
pub(super) fn id_at(page: i64, offset: usize) -> i64 {
    page << PAGE_BITS | offset as i64
}

/// Consecutive ids, all of which are there, whose indices are consecutive too: full pages side by side.
#[derive(Debug, Clone, Copy, Default)]
struct Segment {
    start: i64,
    len: u64,
    /// The index of the first id.
    base: u32,
}

impl Segment {
    #[inline(always)]
    fn find(self, id: i64) -> u32 {
        let place = (id as u64).wrapping_sub(self.start as u64);
        if place < self.len { self.base.wrapping_add(place as u32) } else { NO_INDEX }
    }

    /// Whether another one follows.
    fn ends_where(&self, other: &Self) -> bool {
        self.len > 0
            && other.len > 0
            && (self.start as u64).wrapping_add(self.len) == other.start as u64
            && self.base.wrapping_add(self.len as u32) == other.base
    }

    /// Returns the longer part of what is left without a page.
    fn without(self, page: i64) -> Self {
        let (before, page_ids) =
            ((id_at(page, 0) as u64).wrapping_sub(self.start as u64), IDS_PER_PAGE as u64);
        if before >= self.len {
            return self;
        }
        let behind = self.len - before - page_ids;
        if before >= behind {
            return Self { len: before, ..self };
        }
        let skipped = before + page_ids;
        Self {
            start: (self.start as u64).wrapping_add(skipped) as i64,
            len: behind,
            base: self.base.wrapping_add(skipped as u32),
        }
    }
}

/// The segments that are known; any other is found page by page.
#[derive(Debug, Default)]
struct Segments {
    longest: Segment,
    /// That of the page that was filled last.
    latest: Segment,
}

impl Segments {
    fn cut(&mut self, page: i64) {
        self.longest = self.longest.without(page);
        self.latest = self.latest.without(page);
    }
}

/// Ids in pages.
#[derive(Debug, Default)]
pub(super) struct IdPages {
    /// The number of the page that the directory begins with.
    first: i64,
    directory: Pages<Entry>,
    bitmaps: Slots<Bitmap>,
    arrays: Slots<Indices>,
    segments: Segments,
    pages: usize,
    full: usize,
    linear_ids: usize,
    array_ids: usize,
    #[cfg(test)]
    switch: super::without_pages::Switch,
}

impl IdPages {
    #[inline(always)]
    fn entry(&self, page: i64) -> Entry {
        // One comparison: what lies before the directory lies far behind it as an unsigned number.
        let place = (page as u64).wrapping_sub(self.first as u64);
        self.directory.get(place as usize).copied().unwrap_or(Entry::new(NONE, 0, 0))
    }

    fn set(&mut self, page: i64, entry: Entry) {
        self.directory[(page - self.first) as usize] = entry;
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.pages == 0
    }

    pub(super) fn len(&self) -> usize {
        self.linear_ids + self.array_ids
    }

    /// Returns the ids in linear pages and in arrays.
    pub(super) fn ids_by_kind(&self) -> [usize; 2] {
        [self.linear_ids, self.array_ids]
    }

    /// Returns an id's index, or [`NO_INDEX`].
    #[inline(always)]
    pub(super) fn find(&self, id: i64) -> u32 {
        let (entry, offset) = (self.entry(page_of(id)), offset_of(id));
        match entry.kind() {
            FULL => entry.value.wrapping_add(offset as u32),
            LINEAR if self.is_set(entry, offset) => entry.value.wrapping_add(offset as u32),
            ARRAY => self.arrays.get(entry.slot()).map_or(NO_INDEX, |indices| indices[offset]),
            _ => NO_INDEX,
        }
    }

    #[inline(always)]
    fn is_set(&self, entry: Entry, offset: usize) -> bool {
        let (word, bit) = bit_of(offset);
        self.bitmaps.get(entry.slot()).is_some_and(|bits| bits[word] & bit != 0)
    }

    /// Writes the index of each id to `indices`, and returns how many are not here.
    #[inline(always)]
    pub(super) fn find_each(&self, ids: &[i64], indices: &mut [u32]) -> usize {
        let segment = self.segments.longest;
        let mut others = 0u32;
        // Branches on nothing: the compiler takes eight ids at a time.
        for (id, index) in ids.iter().zip(&mut *indices) {
            *index = segment.find(*id);
            others += u32::from(*index == NO_INDEX);
        }
        if others == 0 { 0 } else { self.find_others(ids, indices) }
    }

    /// Finds those ids of which `indices` has no index yet, and returns how many are not here.
    #[inline(always)]
    fn find_others(&self, ids: &[i64], indices: &mut [u32]) -> usize {
        let mut missing = 0;
        for (number, (block, indices)) in
            ids.chunks(IDS_TOGETHER).zip(indices.chunks_mut(IDS_TOGETHER)).enumerate()
        {
            let others = indices.iter().fold(false, |any, index| any | (*index == NO_INDEX));
            if !others {
                continue;
            }
            if self.array_ids > 0 {
                let ahead = ids.get(number * IDS_TOGETHER + IDS_AHEAD..).unwrap_or_default();
                ahead.iter().take(IDS_TOGETHER).for_each(|id| self.prefetch(*id));
            }
            for (id, index) in block.iter().zip(indices) {
                if *index == NO_INDEX {
                    *index = self.find(*id);
                    missing += usize::from(*index == NO_INDEX);
                }
            }
        }
        missing
    }

    /// Asks for an id's index.
    #[inline(always)]
    fn prefetch(&self, id: i64) {
        let entry = self.entry(page_of(id));
        if entry.kind() == ARRAY
            && let Some(indices) = self.arrays.get(entry.slot())
        {
            prefetch_one(&indices[offset_of(id)], Cache::First);
        }
    }

    /// Puts an id that is nowhere to its page, if it fits there.
    #[inline]
    pub(super) fn put(&mut self, id: i64, index: RowIndex) -> bool {
        self.put_run(id, index, 1)
    }

    /// Puts `count` consecutive ids of a page that are nowhere to it, if they fit there; their indices are consecutive too.
    pub(super) fn put_run(&mut self, id: i64, index: RowIndex, count: usize) -> bool {
        let (page, offset) = (page_of(id), offset_of(id));
        let (entry, base) = (self.entry(page), index.0.wrapping_sub(offset as u32));
        match entry.kind() {
            LINEAR if entry.value == base => self.set_bits(page, offset..offset + count),
            ARRAY => {
                let indices = self.arrays.get_mut(entry.slot());
                for (place, number) in (offset..offset + count).zip(index.0..) {
                    indices[place] = number;
                }
                self.set(page, Entry { value: entry.value + count as u32, ..entry });
                self.array_ids += count;
            }
            NONE if (count >= MIN_RUN || self.continues(page, offset, base)) && self.cover(page) => {
                self.add_linear(page, base);
                self.set_bits(page, offset..offset + count);
            }
            _ => return false,
        }
        true
    }

    /// Whether an id begins its page where a full linear one ends.
    fn continues(&self, page: i64, offset: usize, base: u32) -> bool {
        let before = self.entry(page - 1);
        offset == 0 && before.kind() == FULL && before.value.wrapping_add(IDS_PER_PAGE as u32) == base
    }

    /// Makes a linear page without ids, where the directory has room for it.
    fn add_linear(&mut self, page: i64, base: u32) {
        let slot = self.bitmaps.put(&Bitmap::default());
        self.set(page, Entry::new(LINEAR, slot, base));
        self.pages += 1;
    }

    /// Notes ids of a linear page that were not there.
    fn set_bits(&mut self, page: i64, offsets: Range<usize>) {
        let entry = self.entry(page);
        self.linear_ids += offsets.len();
        let bits = self.bitmaps.get_mut(entry.slot());
        let (last_word, _) = bit_of(offsets.end - 1);
        for (word, bit) in offsets.map(bit_of) {
            bits[word] |= bit;
        }
        if bits[last_word] == u64::MAX && bits.iter().all(|word| *word == u64::MAX) {
            self.full += 1;
            self.set(page, Entry::new(FULL, entry.slot(), entry.value));
            self.join(page, entry.value);
        }
    }

    /// Notes a page all ids of which are there now.
    fn join(&mut self, page: i64, base: u32) {
        let mut segment = Segment { start: id_at(page, 0), len: IDS_PER_PAGE as u64, base };
        let known = [self.segments.latest, self.segments.longest];
        if let Some(known) = known.iter().find(|known| known.ends_where(&segment)) {
            segment = Segment { len: known.len + segment.len, ..*known };
        }
        if let Some(known) = known.iter().find(|known| segment.ends_where(known)) {
            segment.len += known.len;
        }
        self.segments.latest = segment;
        if segment.len >= self.segments.longest.len {
            self.segments.longest = segment;
        }
    }

    /// Takes an id away and returns its index, or [`NO_INDEX`].
    pub(super) fn remove(&mut self, id: i64) -> u32 {
        let (page, offset) = (page_of(id), offset_of(id));
        let (entry, index) = (self.entry(page), self.find(id));
        if index == NO_INDEX {
            return NO_INDEX;
        }
        if entry.kind() == ARRAY {
            self.arrays.get_mut(entry.slot())[offset] = NO_INDEX;
            self.set(page, Entry { value: entry.value - 1, ..entry });
            self.array_ids -= 1;
        } else {
            let (word, bit) = bit_of(offset);
            self.bitmaps.get_mut(entry.slot())[word] &= !bit;
            self.set(page, Entry::new(LINEAR, entry.slot(), entry.value));
            if entry.kind() == FULL {
                self.full -= 1;
                self.segments.cut(page);
            }
            self.linear_ids -= 1;
        }
        index
    }

    /// Returns how many ids of a page are here, if they would take less memory elsewhere; 0 also of no page.
    pub(super) fn too_few(&self, page: i64) -> Option<usize> {
        let entry = self.entry(page);
        let (count, least) = match entry.kind() {
            LINEAR => (self.bitmaps.get(entry.slot()).map_or(0, count_bits), MIN_IDS_OF_LINEAR),
            ARRAY => (entry.value as usize, MIN_IDS_OF_ARRAY),
            _ => return None,
        };
        (count < least).then_some(count)
    }

    /// Takes all of a page away and returns its ids with their indices.
    pub(super) fn take_page(&mut self, page: i64) -> Vec<(i64, RowIndex)> {
        let taken = self.entries_of(page);
        self.free(self.entry(page), taken.len());
        self.set(page, Entry::new(NONE, 0, 0));
        self.pages -= 1;
        taken
    }

    /// Gives back what a page of so many ids has besides its entry.
    fn free(&mut self, entry: Entry, count: usize) {
        if entry.kind() == ARRAY {
            self.arrays.free(entry.slot());
            self.array_ids -= count;
        } else {
            self.bitmaps.free(entry.slot());
            self.linear_ids -= count;
        }
    }

    /// Takes those of a page's ids that belong here, within `room` bytes, and returns their places. `found` has the
    /// indices of those that lie elsewhere, [`NO_INDEX`] for ids that do not.
    pub(super) fn gather(&mut self, page: i64, base: u32, found: &Indices, room: usize) -> Vec<usize> {
        let entry = self.entry(page);
        let all: Vec<usize> = (0..IDS_PER_PAGE).filter(|offset| found[*offset] != NO_INDEX).collect();
        let in_line = |offset: &usize| found[*offset] == base.wrapping_add(*offset as u32);
        let linear: Vec<usize> = all.iter().copied().filter(in_line).collect();
        if entry.kind() == NONE && linear.len() >= MIN_RUN && all.len() - linear.len() < MIN_IDS_OF_NEW_ARRAY
        {
            if self.bytes_with(1, 0) - self.bytes() > room || !self.cover(page) {
                return Vec::new();
            }
            self.add_linear(page, base);
            linear.iter().for_each(|&offset| self.set_bits(page, offset..offset + 1));
            return linear;
        }
        if all.len() < MIN_IDS_OF_NEW_ARRAY
            || self.bytes_with(0, 1) - self.bytes() > room
            || !self.cover(page)
        {
            return Vec::new();
        }
        self.make_array(page, found);
        all
    }

    /// Makes an array of a page, of the ids that are here and those that were found elsewhere.
    fn make_array(&mut self, page: i64, found: &Indices) {
        let (entry, mut indices) = (self.entry(page), *found);
        let elsewhere = indices.iter().filter(|index| **index != NO_INDEX).count();
        let mut here = 0;
        if entry.kind() == NONE {
            self.pages += 1;
        } else {
            for (_, RowIndex(index)) in self.entries_of(page) {
                indices[index.wrapping_sub(entry.value) as usize] = index;
                here += 1;
            }
            self.free(entry, here);
        }
        let slot = self.arrays.put(&indices);
        self.set(page, Entry::new(ARRAY, slot, (here + elsewhere) as u32));
        self.array_ids += here + elsewhere;
    }

    /// Returns the ids of a page with their indices.
    fn entries_of(&self, page: i64) -> Vec<(i64, RowIndex)> {
        let each = (0..IDS_PER_PAGE).map(|offset| id_at(page, offset));
        each.map(|id| (id, RowIndex(self.find(id)))).filter(|(_, index)| index.0 != NO_INDEX).collect()
    }

    /// Sees that the directory has a place for a page; fails if that lies too far from the others.
    fn cover(&mut self, page: i64) -> bool {
        #[cfg(test)]
        if self.switch.is_off() {
            return false;
        }
        if (page as u64).wrapping_sub(self.first as u64) < self.directory.len() as u64 {
            return true;
        }
        if !self.extend(page) {
            // Pages that went may have left it longer than it need be.
            self.trim();
            return self.extend(page);
        }
        true
    }

    fn extend(&mut self, page: i64) -> bool {
        let (first, len) = (self.first, self.directory.len());
        if len == 0 {
            (self.first, self.directory) = (page, Pages::zeroed(1, 0));
            return true;
        }
        let end = first + len as i64;
        let needed = (end.max(page + 1) - first.min(page)) as usize;
        let most = (self.pages + 1) * ENTRIES_PER_PAGE + SPARE_ENTRIES;
        if needed > most {
            return false;
        }
        // Half as long again, towards where it grows.
        let target = (needed + needed / 2).min(most);
        let new_first = if page < first { (end - target as i64).max(i64::MIN >> PAGE_BITS) } else { first };
        let mut longer = Pages::zeroed(target, 0);
        let moved = (first - new_first) as usize;
        longer[moved..moved + len].copy_from_slice(&self.directory);
        (self.first, self.directory) = (new_first, longer);
        true
    }

    /// Shortens the directory to the pages that there are.
    fn trim(&mut self) {
        let is_page = |entry: &Entry| entry.kind() != NONE;
        let start = self.directory.iter().position(is_page).unwrap_or(self.directory.len());
        let end = self.directory.iter().rposition(is_page).map_or(start, |last| last + 1);
        let mut shorter = Pages::zeroed(end - start, 0);
        shorter.copy_from_slice(&self.directory[start..end]);
        self.first += start as i64;
        self.directory = shorter;
    }

    fn directory_bytes(&self) -> usize {
        Self::bytes_of_entries(self.directory.len())
    }

    fn bytes_of_entries(count: usize) -> usize {
        let bytes = count * size_of::<Entry>();
        supplied_bytes(bytes, 0, bytes)
    }

    fn directory_bytes_after(&self, more: usize) -> usize {
        let entries = (self.pages + more) * ENTRIES_PER_PAGE + SPARE_ENTRIES;
        self.directory_bytes().max(Self::bytes_of_entries(entries))
    }

    /// Returns the bytes in use.
    pub(super) fn bytes(&self) -> usize {
        self.directory_bytes() + self.bitmaps.bytes() + self.arrays.bytes()
    }

    /// Returns the most bytes in use with so many more linear pages and arrays.
    fn bytes_with(&self, linear: usize, arrays: usize) -> usize {
        self.directory_bytes_after(linear + arrays)
            + self.bitmaps.bytes_after(linear)
            + self.arrays.bytes_after(arrays)
    }

    /// Returns the most bytes in use when there are `more` ids.
    pub(super) fn bytes_after(&self, more: usize) -> usize {
        if more == 0 {
            return self.bytes();
        }
        // A run makes one, or an id that continues a full page.
        let continued = more.min(self.full + more / IDS_PER_PAGE + 1);
        self.bytes_with(more / MIN_RUN + continued, 0)
    }
}

/// Returns the word and the bit of a place in a page.
#[inline(always)]
fn bit_of(offset: usize) -> (usize, u64) {
    (offset / u64::BITS as usize, 1 << (offset % u64::BITS as usize))
}

fn count_bits(bits: &Bitmap) -> usize {
    bits.iter().map(|word| word.count_ones() as usize).sum()
}
