//! From an id to the index of its row: a hash map made for batches, whose memory is known before it is read.
//!
//! A *line* is one cache line of five ids and their indices. An id's bucket is the line its hash points to; where that
//! is full the id lies in one of the lines behind it, and every line passed over counts it. So a search looks at one
//! line almost always, an id that is not there is known to be missing at the first line that nothing passed over, and
//! deleting leaves nothing behind: the counts fall again, and the map is as if the id had never been there.
//!
//! Buckets keep the order of the hashes. That lets the map grow in place and a little with every id: from the last line
//! to the first, each line's ids move to where they belong among more lines, which are further behind. Ids of lines
//! that were not reached yet are found where they always were. No call pays for all of the map, no second map is
//! needed beside the first, and the whole lies in one piece, in huge pages.

mod buckets;
mod finding;
mod growing;
mod line;

use std::hash::{BuildHasher, RandomState};

use super::row_index::{NO_INDEX, RowIndex};
use crate::kernel::cache::{Cache, prefetch_one};
use crate::kernel::pages::{Pages, supplied_bytes, untouched_bytes};
use crate::kernel::simd::{Lanes, ScalarLanes};
use buckets::Buckets;
pub(crate) use finding::RUN;
use line::{IDS_PER_LINE, Line};

/// The lines of a map with its first id.
const FIRST_LINES: usize = 8;

/// The lines behind the last bucket, for the ids for which there is no room before.
const SPARE_LINES: usize = 64;

/// How many ids a line holds on average when the map begins to grow.
const IDS_PER_LINE_TO_GROW: usize = 3;

/// How many ids are inserted between two looks at whether the map has to grow.
const IDS_TOGETHER: usize = 128;

/// How far ahead the lines of new ids are loaded.
const IDS_AHEAD: usize = 64;

/// How far ahead the lines behind them are, where they are full.
const IDS_NEAR: usize = 24;

/// The ids that have a row. Every int64 can be a key.
#[derive(Debug)]
pub(crate) struct IdLines {
    /// As many as there are buckets, and some more.
    lines: Pages<Line>,
    buckets: Buckets,
    len: usize,
    /// The memory of the ids under way in [`IdLines::move_lines`], with their hashes.
    moving: Vec<(u64, i64, u32)>,
}

/// What the search of a line gives for an id that may lie in the lines behind.
pub(crate) const BEHIND: u32 = u32::MAX - 1;

/// Where the search for an id begins.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bucket(u32);

impl Default for IdLines {
    fn default() -> Self {
        let seed = RandomState::new().hash_one(0);
        let buckets = Buckets { seed, count: 0, old_count: 0, moved_from: 0 };
        Self { lines: Pages::default(), buckets, len: 0, moving: Vec::new() }
    }
}

impl IdLines {
    /// Returns where the search for `id` begins, for [`IdLines::prefetch`] and [`IdLines::search`].
    #[inline(always)]
    pub(crate) fn bucket(&self, id: i64) -> Bucket {
        Bucket(self.buckets.of(id) as u32)
    }

    /// Asks for the line where a search begins.
    #[inline(always)]
    pub(crate) fn prefetch(&self, bucket: Bucket, cache: Cache) {
        if let Some(line) = self.lines.get(bucket.0 as usize) {
            prefetch_one(line, cache);
        }
    }

    /// Searches the line where a search begins: returns an index, [`NO_INDEX`], or [`BEHIND`].
    #[inline(always)]
    pub(crate) fn search(&self, lanes: impl Lanes, bucket: Bucket, id: i64) -> u32 {
        let Some(line) = self.lines.get(bucket.0 as usize) else {
            return NO_INDEX;
        };
        match line.find(lanes, id) {
            Some(place) => line.indices[place],
            None if line.passed == 0 => NO_INDEX,
            None => BEHIND,
        }
    }

    /// Asks for the line behind the one where a search began.
    #[inline(always)]
    pub(crate) fn prefetch_behind(&self, bucket: Bucket) {
        self.prefetch(Bucket(bucket.0.saturating_add(1)), Cache::Second);
    }

    /// Searches the lines behind the one where a search began.
    #[inline(always)]
    pub(crate) fn search_behind(&self, lanes: impl Lanes, bucket: Bucket, id: i64) -> Option<RowIndex> {
        let (line, place) = self.place_of(lanes, bucket.0 as usize + 1, id)?;
        Some(RowIndex(self.lines[line].indices[place]))
    }

    /// Returns the index of `id`.
    pub(crate) fn find(&self, id: i64) -> Option<RowIndex> {
        let (line, place) = self.place_of(ScalarLanes, self.buckets.of(id), id)?;
        Some(RowIndex(self.lines[line].indices[place]))
    }

    /// Returns the line and the place where `id` lies, which is not before line `start`.
    #[inline(always)]
    fn place_of(&self, lanes: impl Lanes, start: usize, id: i64) -> Option<(usize, usize)> {
        for (behind, line) in self.lines.get(start..)?.iter().enumerate() {
            if let Some(place) = line.find(lanes, id) {
                return Some((start + behind, place));
            }
            if line.passed == 0 {
                return None;
            }
        }
        None
    }

    /// Gives `id`, which has none, an index.
    #[inline]
    pub(crate) fn insert(&mut self, id: i64, index: RowIndex) {
        self.expect(1);
        self.put(id, index.0);
    }

    /// Puts an id at bucket or behind, and counts it.
    #[inline]
    fn put(&mut self, id: i64, index: u32) {
        self.put_hashed(self.buckets.hash(id), id, index);
        self.len += 1;
    }

    #[inline(always)]
    fn put_hashed(&mut self, hash: u64, id: i64, index: u32) {
        // The bucket is computed again after each growth, the hash is not: growth changes only the number of
        // lines.
        while !self.put_from(self.buckets.of_hash(hash), id, index) {
            self.make_room();
        }
    }

    /// Puts an id at `bucket` or behind; fails if all lines behind are full.
    #[inline(always)]
    fn put_from(&mut self, bucket: usize, id: i64, index: u32) -> bool {
        for line in bucket..self.lines.len() {
            if let Some(place) = self.lines[line].free_place() {
                self.lines[line].put(place, id, index);
                // Counts rise only when a place is found: an attempt that fails leaves no line changed.
                if line > bucket {
                    self.lines[bucket..line].iter_mut().for_each(Line::pass);
                }
                return true;
            }
        }
        false
    }

    /// Frees a place in `line` of an id whose bucket is `bucket`.
    fn take(&mut self, bucket: usize, line: usize, place: usize) {
        self.lines[bucket..line].iter_mut().for_each(Line::unpass);
        self.lines[line].used &= !(1 << place);
    }

    /// Gives each of `ids`, which have none and are distinct, the next of `indices`.
    pub(crate) fn insert_each(&mut self, ids: &[i64], indices: impl IntoIterator<Item = RowIndex>) {
        let mut indices = indices.into_iter();
        // Those of a block, and behind them those of the next one.
        let mut hashes = [0; 2 * IDS_TOGETHER];
        let mut blocks = ids.chunks(IDS_TOGETHER).peekable();
        self.hash_each(blocks.peek(), &mut hashes);
        // In blocks, each id hashed once and its line asked for ahead, an insert took 17 ns instead of 24.
        while let Some(block) = blocks.next() {
            self.expect(block.len());
            self.hash_each(blocks.peek(), &mut hashes[IDS_TOGETHER..]);
            self.insert_block(block, &hashes, &mut indices);
            hashes.copy_within(IDS_TOGETHER.., 0);
        }
    }

    #[inline(always)]
    fn hash_each(&self, ids: Option<&&[i64]>, hashes: &mut [u64]) {
        for (hash, id) in hashes.iter_mut().zip(ids.copied().unwrap_or_default()) {
            *hash = self.buckets.hash(*id);
        }
    }

    #[inline(always)]
    fn insert_block(
        &mut self,
        ids: &[i64],
        hashes: &[u64; 2 * IDS_TOGETHER],
        indices: &mut impl Iterator<Item = RowIndex>,
    ) {
        for (place, (id, index)) in ids.iter().zip(indices).enumerate() {
            // Behind the last block stand old hashes: asking for their lines is harmless. Lines asked for in
            // turn, not a block of them at once, took inserts into 10 M ids from 57 ns to about 40.
            self.prefetch(Bucket(self.buckets.of_hash(hashes[place + IDS_AHEAD]) as u32), Cache::First);
            self.prefetch_behind_full(self.buckets.of_hash(hashes[place + IDS_NEAR]));
            self.put_hashed(hashes[place], *id, index.0);
        }
        self.len += ids.len();
    }

    /// Asks for the line behind one that is there already, if that is full.
    #[inline(always)]
    fn prefetch_behind_full(&self, line: usize) {
        // With three ids a line every sixth is full, and waiting for the line behind was half of an insert.
        let is_full = self.lines.get(line).is_some_and(|line| line.free_place().is_none());
        // Else for the line itself, which costs nothing: whether it is full cannot be predicted.
        self.prefetch(Bucket((line + usize::from(is_full)) as u32), Cache::First);
    }

    /// Takes the index of `id` away and returns it.
    pub(crate) fn remove(&mut self, id: i64) -> Option<RowIndex> {
        let bucket = self.buckets.of(id);
        let (line, place) = self.place_of(ScalarLanes, bucket, id)?;
        self.take(bucket, line, place);
        self.len -= 1;
        Some(RowIndex(self.lines[line].indices[place]))
    }

    /// Counts an id: its index is how many times that was done.
    pub(crate) fn count(&mut self, id: i64) -> u32 {
        let Some((line, place)) = self.place_of(ScalarLanes, self.buckets.of(id), id) else {
            self.insert(id, RowIndex(1));
            return 1;
        };
        let count = &mut self.lines[line].indices[place];
        *count = count.saturating_add(1);
        *count
    }

    /// Returns all ids and their indices, in no order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (i64, u32)> {
        self.lines.iter().flat_map(|line| {
            let used = (0..IDS_PER_LINE).filter(|place| line.used >> place & 1 == 1);
            used.map(|place| (line.ids[place], line.indices[place]))
        })
    }

    /// Returns a map of some ids and their indices, with room for `len`.
    pub(crate) fn of(len: usize, entries: impl Iterator<Item = (i64, u32)>) -> Self {
        let mut map = Self::default();
        map.reserve(len);
        entries.for_each(|(id, index)| map.insert(id, RowIndex(index)));
        map
    }

    /// Makes room for `len` ids in a map that has none.
    pub(crate) fn reserve(&mut self, len: usize) {
        if self.len > 0 || len == 0 {
            return;
        }
        let count = Self::buckets_for(len);
        self.lines = Pages::zeroed(count + SPARE_LINES, 0);
        self.buckets = Buckets { count, old_count: count, moved_from: 0, ..self.buckets };
    }

    /// Returns the bytes in use of a map that has room for `len` ids.
    pub(crate) fn bytes_reserved(len: usize) -> usize {
        if len == 0 {
            return 0;
        }
        let lines = (Self::buckets_for(len) + SPARE_LINES) * size_of::<Line>();
        supplied_bytes(lines, 0, lines)
    }

    fn buckets_for(len: usize) -> usize {
        len.div_ceil(IDS_PER_LINE_TO_GROW).max(FIRST_LINES) + 1
    }

    /// Makes the map anew, with room for `len` ids or for those that it has.
    pub(crate) fn rebuild(&mut self, len: usize) {
        *self = Self::of(len.max(self.len), self.entries());
    }

    /// Returns how many ids may lie here before the map grows.
    pub(crate) fn room(&self) -> usize {
        self.buckets.count * IDS_PER_LINE_TO_GROW
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes in use: of the lines that a growing map is to move ids to, those that it has reached.
    pub(crate) fn bytes(&self) -> usize {
        let reached = self.buckets.moved_from + self.buckets.moved_from / 2;
        let old = self.buckets.old_count + SPARE_LINES;
        let lines = size_of_val(&*self.lines);
        supplied_bytes(lines, 0, lines)
            - untouched_bytes(old * size_of::<Line>(), reached * size_of::<Line>(), lines)
    }

    /// Returns the most bytes in use when there are `more` ids.
    pub(crate) fn bytes_after(&self, more: usize) -> usize {
        let len = self.len + more;
        let mut count = self.buckets.count;
        // The map begins to grow with the next id; it has grown long before it grows again.
        while more > 0 && len > count * IDS_PER_LINE_TO_GROW {
            count = (count + count / 2).max(FIRST_LINES);
        }
        let lines = if count == 0 { 0 } else { count + SPARE_LINES };
        let lines = lines * size_of::<Line>();
        supplied_bytes(lines, 0, lines)
    }
}

#[cfg(test)]
mod tests {
    use super::growing::LINES_MOVED_TOGETHER;
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[derive(Debug, Clone)]
    enum Change {
        Insert(i64),
        Remove(i64),
    }

    fn id() -> impl Strategy<Value = i64> {
        prop_oneof![Just(0), Just(i64::MIN), Just(i64::MAX), -20..20i64, any::<i64>()]
    }

    #[test]
    fn a_map_takes_no_more_than_was_foretold() {
        let mut map = IdLines::default();
        assert_eq!((map.bytes(), map.bytes_after(0)), (0, 0));
        for id in 0..5_000 {
            let foretold = map.bytes_after(1);
            let far = map.bytes_after(1_000);
            map.insert(id, RowIndex(0));
            assert!(map.bytes() <= foretold && foretold <= far, "{id}");
            assert!(far - map.bytes() < 70_000 + map.bytes() / 2, "{id}");
        }
    }

    proptest! {
        #[test]
        fn a_map_agrees_with_a_plain_one(
            changes in prop::collection::vec(prop_oneof![3 => id().prop_map(Change::Insert), 2 => id().prop_map(Change::Remove)], 0..400)
        ) {
            let (mut map, mut model) = (IdLines::default(), HashMap::new());
            for (number, change) in changes.into_iter().enumerate() {
                match change {
                    Change::Insert(id) if !model.contains_key(&id) => {
                        map.insert(id, RowIndex(number as u32));
                        model.insert(id, RowIndex(number as u32));
                    }
                    Change::Insert(id) => prop_assert_eq!(map.find(id), model.get(&id).copied()),
                    Change::Remove(id) => prop_assert_eq!(map.remove(id), model.remove(&id)),
                }
                prop_assert_eq!(map.len(), model.len());
            }
            for (&id, &index) in &model {
                prop_assert_eq!(map.find(id), Some(index));
            }
        }
    }

    #[test]
    fn counting_and_listing_agree_with_a_plain_map() {
        let (mut map, mut model) = (IdLines::default(), HashMap::new());
        for number in 0..20_000i64 {
            let id = number * number % 7_001;
            *model.entry(id).or_insert(0) += 1;
            assert_eq!(map.count(id), model[&id]);
        }
        assert_eq!(map.entries().collect::<HashMap<_, _>>(), model);
    }

    /// How many ids all lines say passed them.
    fn lines_passed(map: &IdLines) -> usize {
        map.lines.iter().map(|line| usize::from(line.passed)).sum()
    }

    #[test]
    fn deleting_everything_leaves_an_empty_map() {
        let mut map = IdLines::default();
        let ids: Vec<i64> = (0..50_000).map(|id| id * 1_000_003).collect();
        map.insert_each(&ids, (0..50_000).map(RowIndex));
        assert!(lines_passed(&map) > 0);
        for (index, &id) in ids.iter().enumerate() {
            assert_eq!(map.remove(id), Some(RowIndex(index as u32)));
        }
        assert_eq!((map.len(), lines_passed(&map)), (0, 0));
    }

    #[test]
    fn few_ids_lie_behind_their_buckets_in_a_map_of_any_size() {
        let mut map = IdLines::default();
        for id in 0..5_000 {
            map.insert(id, RowIndex(id as u32));
            let passed = lines_passed(&map);
            assert!(map.len() < 100 || passed < 2 * map.len(), "{passed} lines passed by {} ids", map.len());
        }
    }

    #[test]
    fn replacing_ids_for_ever_neither_grows_the_map_nor_lengthens_its_searches() {
        let mut map = IdLines::default();
        let ids: Vec<i64> = (0..20_000).collect();
        map.insert_each(&ids, (0..20_000).map(RowIndex));
        let bytes = map.bytes();
        let mut replace = |ids: std::ops::Range<i64>| {
            for id in ids {
                let index = map.remove(id - 20_000).unwrap();
                map.insert(id, index);
            }
            (map.bytes(), lines_passed(&map))
        };
        // Once the ids that came first are gone, it is in a balance that it keeps.
        let (_, balance) = replace(20_000..200_000);
        let (after, passed) = replace(200_000..800_000);
        assert!(after <= bytes * 3 / 2, "{after} bytes after {bytes}");
        assert!(passed * 4 <= balance * 5, "{passed} passed after {balance}");
    }

    /// A map without ids that has some buckets.
    fn map_of(buckets: usize) -> IdLines {
        let mut map = IdLines::default();
        map.buckets = Buckets { count: buckets, old_count: buckets, ..map.buckets };
        map.lines.grow(buckets + SPARE_LINES);
        map
    }

    /// Ids of one bucket among many.
    fn ids_of_bucket(map: &IdLines, bucket: usize, count: usize) -> Vec<i64> {
        (0..).filter(|&id| map.buckets.of(id) == bucket).take(count).collect()
    }

    #[test]
    fn a_count_that_reached_its_limit_keeps_its_ids() {
        let mut map = map_of(4);
        let ids = ids_of_bucket(&map, 1, 7);
        for &id in &ids[..6] {
            map.put(id, id as u32);
        }
        map.lines[1].passed = u16::MAX;
        assert_eq!(map.remove(ids[5]), Some(RowIndex(ids[5] as u32)));
        assert_eq!(map.lines[1].passed, u16::MAX);
        assert_eq!((map.find(ids[5]), map.find(ids[4])), (None, Some(RowIndex(ids[4] as u32))));
        assert_eq!(map.remove(ids[6]), None);
    }

    #[test]
    fn more_ids_of_the_last_bucket_than_there_is_room_for_make_the_map_grow() {
        let mut map = map_of(64);
        let ids = ids_of_bucket(&map, 63, 5 * (SPARE_LINES + 1) + 1);
        for (index, &id) in ids.iter().enumerate() {
            map.put(id, index as u32);
        }
        assert!(map.buckets.count > 64);
        assert!(ids.iter().enumerate().all(|(index, &id)| map.find(id) == Some(RowIndex(index as u32))));
    }

    #[test]
    fn ids_that_lie_behind_the_lines_moved_together_move_with_them() {
        let mut map = map_of(4 * LINES_MOVED_TOGETHER);
        // Far more than a line holds, at the first and the last of the lines that move together, and beside them.
        let borders =
            (1..4).flat_map(|part| [-2, -1, 0, 1].map(|by| part * LINES_MOVED_TOGETHER as i64 + by));
        let ids: Vec<i64> = borders.flat_map(|bucket| ids_of_bucket(&map, bucket as usize, 23)).collect();
        for (index, &id) in ids.iter().enumerate() {
            map.put(id, index as u32);
        }
        map.begin_to_grow();
        while map.buckets.is_growing() {
            map.move_lines(LINES_MOVED_TOGETHER);
            assert!(ids.iter().enumerate().all(|(index, &id)| map.find(id) == Some(RowIndex(index as u32))));
        }
        ids.iter().for_each(|&id| assert!(map.remove(id).is_some()));
        assert_eq!((map.len(), lines_passed(&map), map.entries().count()), (0, 0, 0));
    }

    #[test]
    fn every_id_is_found_at_every_stage_of_growing() {
        let mut map = IdLines::default();
        for id in 0..3_000 {
            map.insert(id, RowIndex(id as u32));
            if id % 7 == 3 {
                assert_eq!(map.remove(id), Some(RowIndex(id as u32)));
            }
            let found = (0..=id).all(|id| map.find(id) == (id % 7 != 3).then_some(RowIndex(id as u32)));
            assert!(found, "after {id}");
        }
    }
}
