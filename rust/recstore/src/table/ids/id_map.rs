//! From an id to the index of its row: ids that lie close together in pages, all others in the lines of a hash map.
//!
//! An id lies in one of both. Where it lies changes nothing but time and memory: a search that does not find it in its page
//! goes on in the lines, if any id lies there at all.
//!
//! Ids that come in order go to pages at once. For others each sixty-fourth that goes to the lines is a sample: if many of
//! its neighbours lie there too, its page is gathered, at most 1,024 ids at a time and at most once for some hundred new
//! ids, so that no call pays for all. Gathering is left undone where its memory is not to be had: a table near its limit
//! takes what it did without pages.

use super::id_lines::{IdLines, RUN};
use super::id_pages::{IDS_PER_PAGE, IdPages, MIN_RUN, id_at, offset_of, page_of};
use super::row_index::{NO_INDEX, RowIndex};
use crate::kernel::cache::Cache;
use crate::kernel::simd::{Lanes, ScalarLanes};

/// Of so many ids that go to the lines one is a sample.
const IDS_PER_SAMPLE: usize = 64;

/// So many new ids pay for gathering a page.
const IDS_PER_GATHERING: usize = 128;

/// The ids that may be saved up to pay for later gatherings, and the samples that wait for them.
const MAX_PAYING: usize = 16 * IDS_PER_GATHERING;
const MAX_SAMPLES: usize = 1_024;

/// The ids looked for all over a page before the page is counted, and how many of them make it worth that.
const IDS_LOOKED_FOR: usize = 16;
const MIN_FOUND: usize = 3;

/// The ids in the lines with which it is known how many will lie there.
const IDS_BEFORE_RESERVING: usize = 4_096;

/// The lines are made anew when they have room for so many times their ids.
const MAX_ROOM: usize = 8;

/// The ids that have a row. Every int64 can be a key.
#[derive(Debug, Default)]
pub(crate) struct IdMap {
    lines: IdLines,
    pages: IdPages,
    /// How many ids will come, while it is not known how many of them go to the lines.
    expected: usize,
    /// How many ids went to the lines since the last sample.
    since_sample: usize,
    /// Of the ids that went to the lines lately.
    samples: Vec<i64>,
    /// How many new ids have not paid for a gathering yet.
    paying: usize,
    /// Whether new ids go to the lines, wherever they lie.
    is_for_lines: bool,
}

impl IdMap {
    /// Says whether ids leave for others where there is no room: then all new ones go to the lines. What a page takes
    /// would be missing when its ids leave and others come that are far from each other.
    pub(crate) fn note_leaving(&mut self, others_leave: bool) {
        self.is_for_lines = others_leave;
    }

    /// Returns the index of `id`.
    #[inline]
    pub(crate) fn find(&self, id: i64) -> Option<RowIndex> {
        match self.pages.find(id) {
            NO_INDEX if self.lines.len() > 0 => self.lines.find(id),
            NO_INDEX => None,
            index => Some(RowIndex(index)),
        }
    }

    /// Writes the index of each id of a run to `indices`, [`NO_INDEX`] for one that has none.
    #[inline(always)]
    pub(crate) fn find_run(&self, lanes: impl Lanes, ids: &[i64], indices: &mut [u32]) {
        if self.pages.is_empty() {
            return self.lines.find_run(lanes, ids, indices);
        }
        let missing = self.pages.find_each(ids, indices);
        if missing > 0 && self.lines.len() > 0 {
            self.find_rest(lanes, ids, indices);
        }
    }

    /// Searches the lines for the ids of a run that are in no page.
    #[inline(always)]
    fn find_rest(&self, lanes: impl Lanes, ids: &[i64], indices: &mut [u32]) {
        let (mut rest, mut places, mut found) = ([0; RUN], [0u16; RUN], [NO_INDEX; RUN]);
        let mut count = 0;
        for (place, (id, index)) in ids.iter().zip(&*indices).enumerate() {
            // Written always, kept if it counts: which it is cannot be predicted.
            (rest[count], places[count]) = (*id, place as u16);
            count += usize::from(*index == NO_INDEX);
        }
        self.lines.find_run(lanes, &rest[..count], &mut found[..count]);
        for (place, index) in places.iter().zip(&found[..count]) {
            indices[usize::from(*place)] = *index;
        }
    }

    /// Asks for where a search in the lines begins.
    #[inline(always)]
    pub(crate) fn prefetch(&self, id: i64) {
        if self.lines.len() > 0 {
            self.lines.prefetch(self.lines.bucket(id), Cache::First);
        }
    }

    /// Gives `id`, which has none, an index.
    #[inline]
    pub(crate) fn insert(&mut self, id: i64, index: RowIndex) {
        if self.is_for_lines {
            return self.put_in_lines(&[id], &[index]);
        }
        self.paying += 1;
        if !self.pages.put(id, index) {
            self.put_in_lines(&[id], &[index]);
        }
    }

    /// Gives each of `ids`, which have none and are distinct, its index.
    pub(crate) fn insert_each(&mut self, ids: &[i64], indices: &[RowIndex]) {
        if self.is_for_lines {
            return self.put_in_lines(ids, indices);
        }
        self.paying += ids.len();
        let (mut others, mut their_indices) = (Vec::new(), Vec::new());
        let mut rest = (ids, indices);
        while !rest.0.is_empty() {
            let count = run_len(rest.0, rest.1);
            if !self.pages.put_run(rest.0[0], rest.1[0], count) {
                others.extend_from_slice(&rest.0[..count]);
                their_indices.extend_from_slice(&rest.1[..count]);
            }
            rest = (&rest.0[count..], &rest.1[count..]);
        }
        self.put_in_lines(&others, &their_indices);
    }

    fn put_in_lines(&mut self, ids: &[i64], indices: &[RowIndex]) {
        self.lines.insert_each(ids, indices.iter().copied());
        if !self.is_for_lines {
            self.sample(ids);
        }
        if self.expected > 0 && self.lines.len() >= IDS_BEFORE_RESERVING {
            let share = self.lines.len() as f64 / self.len() as f64;
            let expected = std::mem::take(&mut self.expected);
            self.lines.rebuild((expected as f64 * share) as usize);
        }
    }

    fn sample(&mut self, ids: &[i64]) {
        let first = IDS_PER_SAMPLE - 1 - self.since_sample;
        self.samples.extend(ids.iter().skip(first).step_by(IDS_PER_SAMPLE));
        self.since_sample = (self.since_sample + ids.len()) % IDS_PER_SAMPLE;
    }

    /// Whether [`IdMap::gather`] has something to do.
    #[inline(always)]
    pub(crate) fn is_due(&self) -> bool {
        !self.is_for_lines && self.paying >= IDS_PER_GATHERING && !self.samples.is_empty()
    }

    /// Gathers pages of ids that came lately, within `room` bytes.
    pub(crate) fn gather(&mut self, room: usize) {
        let limit = self.bytes().saturating_add(room);
        let mut has_gathered = false;
        while self.paying >= IDS_PER_GATHERING
            && let Some(id) = self.samples.pop()
        {
            if self.has_neighbours(id) {
                self.paying -= IDS_PER_GATHERING;
                has_gathered |= self.gather_page(id, limit.saturating_sub(self.bytes()));
            }
        }
        self.paying = self.paying.min(MAX_PAYING);
        let too_many = self.samples.len().saturating_sub(MAX_SAMPLES);
        self.samples.drain(..too_many);
        // What the lines held is in pages now.
        if has_gathered && self.lines.room() > MAX_ROOM * self.lines.len() {
            self.lines.rebuild(self.lines.len());
        }
    }

    /// Whether an id that lies in the lines seems to have neighbours there that are worth a page.
    fn has_neighbours(&self, id: i64) -> bool {
        // No two of them an even step apart, as the ids of a shard may be.
        const STEP: usize = 61;
        let (page, offset) = (page_of(id), offset_of(id));
        let found = |offset: usize| self.lines.find(id_at(page, offset));
        let spread = (1..=IDS_LOOKED_FOR).map(|number| (offset + number * STEP) % IDS_PER_PAGE);
        if spread.filter(|offset| found(*offset).is_some()).count() >= MIN_FOUND {
            return true;
        }
        let Some(index) = found(offset) else { return false };
        let behind = offset.min(MIN_RUN - 1);
        (1..=behind).all(|number| {
            found(offset - number).is_some_and(|before| before.0.wrapping_add(number as u32) == index.0)
        })
    }

    /// Moves those ids of a page from the lines to the page that belong there.
    fn gather_page(&mut self, id: i64, room: usize) -> bool {
        let page = page_of(id);
        let ids: [i64; IDS_PER_PAGE] = std::array::from_fn(|offset| id_at(page, offset));
        let mut found = [NO_INDEX; IDS_PER_PAGE];
        self.lines.find_run(ScalarLanes, &ids, &mut found);
        let base = found[offset_of(id)].wrapping_sub(offset_of(id) as u32);
        let taken = self.pages.gather(page, base, &found, room);
        for offset in &taken {
            self.lines.remove(ids[*offset]);
        }
        !taken.is_empty()
    }

    /// Takes the index of `id` away and returns it.
    pub(crate) fn remove(&mut self, id: i64) -> Option<RowIndex> {
        let index = self.pages.remove(id);
        if index == NO_INDEX {
            return self.lines.remove(id);
        }
        // Where the lines would have to grow, the page stays: deleting takes no memory.
        if let Some(count) = self.pages.too_few(page_of(id))
            && (count == 0 || count <= self.lines.room().saturating_sub(self.lines.len()))
        {
            for (id, index) in self.pages.take_page(page_of(id)) {
                self.lines.insert(id, index);
            }
        }
        Some(RowIndex(index))
    }

    /// Makes room for `len` ids in a map that has none.
    pub(crate) fn reserve(&mut self, len: usize) {
        if self.len() == 0 {
            self.expected = len;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len() + self.lines.len()
    }

    /// Returns the ids in linear pages, in arrays and in the lines.
    pub(crate) fn ids_by_kind(&self) -> [usize; 3] {
        let [linear, array] = self.pages.ids_by_kind();
        [linear, array, self.lines.len()]
    }

    /// Returns the bytes in use.
    pub(crate) fn bytes(&self) -> usize {
        self.lines.bytes() + self.pages.bytes()
    }

    /// Returns the most bytes in use when there are `more` ids. What is gathered then must find room of its own.
    pub(crate) fn bytes_after(&self, more: usize) -> usize {
        let reserved = IdLines::bytes_reserved(self.expected);
        if self.is_for_lines {
            return self.lines.bytes_after(self.pages.len() + more).max(reserved) + self.pages.bytes();
        }
        self.lines.bytes_after(more).max(reserved) + self.pages.bytes_after(more)
    }
}

/// Returns how many ids of a page follow each other, as their indices do.
fn run_len(ids: &[i64], indices: &[RowIndex]) -> usize {
    let most = ids.len().min(IDS_PER_PAGE - offset_of(ids[0]));
    let follows = |place: &usize| {
        ids[*place] == ids[place - 1].wrapping_add(1)
            && indices[*place].0 == indices[place - 1].0.wrapping_add(1)
    };
    1 + (1..most).take_while(follows).count()
}

#[cfg(test)]
mod tests {
    use super::super::finding::FindRows;
    use super::*;
    use crate::kernel::simd::{Simd, SimdLevel};
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// What happens to a map.
    #[derive(Debug, Clone)]
    enum Change {
        /// Ids from the first on, so many, each so far behind the one before.
        Insert(i64, usize, i64),
        /// The same one by one, with indices that do not follow each other.
        InsertEach(i64, usize, i64),
        Remove(i64, usize, i64),
        Gather(usize),
        NoteLeaving(bool),
    }

    fn start() -> impl Strategy<Value = i64> {
        let page = IDS_PER_PAGE as i64;
        prop_oneof![
            4 => -2 * page..6 * page,
            1 => (0..5i64).prop_map(move |number| number * page - 3),
            1 => i64::MAX - 2 * page..=i64::MAX,
            1 => i64::MIN..i64::MIN + 2 * page,
            1 => any::<i64>(),
        ]
    }

    fn change() -> impl Strategy<Value = Change> {
        let count = prop_oneof![1..20usize, 1..2_500usize];
        let step = prop_oneof![3 => Just(1i64), 1 => 2..9i64, 1 => any::<i64>()];
        let some = (start(), count, step).boxed();
        prop_oneof![
            3 => some.clone().prop_map(|(start, count, step)| Change::Insert(start, count, step)),
            2 => some.clone().prop_map(|(start, count, step)| Change::InsertEach(start, count, step)),
            3 => some.prop_map(|(start, count, step)| Change::Remove(start, count, step)),
            1 => prop_oneof![Just(0), 0..20_000usize, Just(usize::MAX)].prop_map(Change::Gather),
            1 => any::<bool>().prop_map(Change::NoteLeaving),
        ]
    }

    fn ids(start: i64, count: usize, step: i64) -> impl Iterator<Item = i64> {
        (0..count as i64).map(move |number| start.wrapping_add(number.wrapping_mul(step)))
    }

    /// A map, and beside it a plain one.
    #[derive(Default)]
    struct Both {
        map: IdMap,
        model: HashMap<i64, u32>,
        next: u32,
    }

    impl Both {
        fn new_ids(&self, ids: impl Iterator<Item = i64>) -> Vec<i64> {
            let mut seen = std::collections::HashSet::new();
            ids.filter(|id| !self.model.contains_key(id) && seen.insert(*id)).collect()
        }

        fn make(&mut self, change: &Change) {
            match *change {
                Change::Insert(start, count, step) => {
                    let ids = self.new_ids(ids(start, count, step));
                    let indices: Vec<RowIndex> = (self.next..).map(RowIndex).take(ids.len()).collect();
                    self.next += ids.len() as u32;
                    let foretold = self.map.bytes_after(ids.len());
                    self.map.insert_each(&ids, &indices);
                    assert!(self.map.bytes() <= foretold, "{} bytes, {foretold} foretold", self.map.bytes());
                    self.model.extend(ids.into_iter().zip(indices.iter().map(|index| index.0)));
                }
                Change::InsertEach(start, count, step) => {
                    for id in self.new_ids(ids(start, count, step)) {
                        self.next += 1 + self.next % 2;
                        let foretold = self.map.bytes_after(1);
                        self.map.insert(id, RowIndex(self.next));
                        assert!(self.map.bytes() <= foretold);
                        self.model.insert(id, self.next);
                    }
                }
                Change::Remove(start, count, step) => {
                    for id in ids(start, count, step) {
                        assert_eq!(self.map.remove(id).map(|index| index.0), self.model.remove(&id), "{id}");
                    }
                }
                Change::NoteLeaving(others_leave) => self.map.note_leaving(others_leave),
                Change::Gather(room) => {
                    let before = self.map.bytes();
                    self.map.gather(room);
                    assert!(self.map.bytes() <= before.saturating_add(room));
                }
            }
        }

        /// Compares all ids, and some that are not there, one by one and in runs.
        fn check(&self) {
            let mut ids: Vec<i64> = self.model.keys().flat_map(|id| [*id, id.wrapping_add(1)]).collect();
            ids.sort_unstable();
            let expected: Vec<u32> =
                ids.iter().map(|id| self.model.get(id).copied().unwrap_or(NO_INDEX)).collect();
            for (id, index) in ids.iter().zip(&expected) {
                assert_eq!(self.map.find(*id).map_or(NO_INDEX, |index| index.0), *index, "{id}");
            }
            for level in SimdLevel::available() {
                let mut indices = vec![0; ids.len()];
                let find = FindRows { ids: &self.map, of: &ids, indices: &mut indices };
                Simd::new(level).unwrap().run(find);
                assert_eq!(indices, expected);
            }
            assert_eq!(self.map.len(), self.model.len());
            assert_eq!(self.map.ids_by_kind().iter().sum::<usize>(), self.model.len());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn a_map_with_pages_agrees_with_a_plain_one(changes in prop::collection::vec(change(), 1..30)) {
            let mut both = Both::default();
            for change in &changes {
                both.make(change);
            }
            both.check();
        }
    }

    /// Inserts ids in batches, as steps do, and gathers after each.
    fn insert_in_batches(both: &mut Both, ids: &[i64]) {
        for batch in ids.chunks(4_096) {
            let mut batch = batch.to_vec();
            batch.sort_unstable();
            let indices: Vec<RowIndex> = (both.next..).map(RowIndex).take(batch.len()).collect();
            both.next += batch.len() as u32;
            both.map.insert_each(&batch, &indices);
            both.map.gather(usize::MAX);
            both.model.extend(batch.iter().copied().zip(indices.iter().map(|index| index.0)));
        }
    }

    /// The numbers below `count` in an order that looks like none.
    fn shuffled(count: i64) -> Vec<i64> {
        let mut ids: Vec<i64> = (0..count).collect();
        ids.sort_unstable_by_key(|id| crate::kernel::hash::mix(*id));
        ids
    }

    #[test]
    fn ids_in_order_lie_in_linear_pages_and_take_next_to_nothing() {
        for one_by_one in [false, true] {
            let mut both = Both::default();
            let ids: Vec<i64> = (-3_000..1_000_000).collect();
            if one_by_one {
                for (index, id) in ids.iter().enumerate() {
                    both.map.insert(*id, RowIndex(index as u32));
                    both.map.gather(usize::MAX);
                    both.model.insert(*id, index as u32);
                }
            } else {
                insert_in_batches(&mut both, &ids);
            }
            both.check();
            assert_eq!(both.map.ids_by_kind(), [ids.len(), 0, 0]);
            assert!(both.map.bytes() * 5 < ids.len(), "{} bytes", both.map.bytes());
        }
    }

    #[test]
    fn close_ids_in_any_order_lie_in_arrays() {
        let mut both = Both::default();
        let ids = shuffled(500_000);
        insert_in_batches(&mut both, &ids);
        both.check();
        let [_, array, lines] = both.map.ids_by_kind();
        assert!(array * 100 > ids.len() * 99 && lines * 100 < ids.len(), "{array} {lines}");
        assert!(both.map.bytes() < 6 * ids.len(), "{} bytes", both.map.bytes());
    }

    #[test]
    fn ids_far_from_each_other_take_what_lines_take() {
        let mut both = Both::default();
        let ids: Vec<i64> = (0..300_000).map(|number| crate::kernel::hash::mix(number) as i64).collect();
        insert_in_batches(&mut both, &ids);
        both.check();
        assert_eq!(both.map.ids_by_kind(), [0, 0, ids.len()]);
        let mut lines = IdLines::default();
        lines.insert_each(&ids, (0..).map(RowIndex));
        assert_eq!(both.map.bytes(), lines.bytes());
    }

    #[test]
    fn a_page_whose_ids_go_takes_their_memory_along() {
        let mut both = Both::default();
        insert_in_batches(&mut both, &shuffled(100_000));
        let far: Vec<i64> = (1..60_000).map(|number| number << 40).collect();
        insert_in_batches(&mut both, &far);
        both.make(&Change::Remove(0, 100_000, 1));
        both.check();
        assert_eq!(both.map.ids_by_kind()[1], 0);
        // What went is used again: the map does not grow by it.
        insert_in_batches(&mut both, &shuffled(100_000));
        let bytes = both.map.bytes();
        both.make(&Change::Remove(0, 100_000, 1));
        insert_in_batches(&mut both, &shuffled(100_000));
        assert!(both.map.bytes() <= bytes, "{} after {bytes}", both.map.bytes());
        both.check();
    }

    #[test]
    fn a_window_of_ids_that_moves_on_for_ever_takes_the_same_memory() {
        let (mut both, count) = (Both::default(), 50_000i64);
        insert_in_batches(&mut both, &(0..count).collect::<Vec<_>>());
        let bytes = both.map.bytes();
        for start in (0..2_000_000).step_by(10_000) {
            both.make(&Change::Remove(start, 10_000, 1));
            insert_in_batches(&mut both, &(start + count..start + count + 10_000).collect::<Vec<_>>());
        }
        both.check();
        assert_eq!(both.map.ids_by_kind()[0], count as usize);
        assert!(both.map.bytes() <= 3 * bytes, "{} after {bytes}", both.map.bytes());
    }

    #[test]
    fn what_is_expected_counts_before_it_comes() {
        for spread in [1, 1 << 33] {
            let mut both = Both::default();
            both.map.reserve(100_000);
            let foretold = both.map.bytes_after(0);
            let indices: Vec<RowIndex> = (0..100_000).map(RowIndex).collect();
            let ids: Vec<i64> = (0..100_000).map(|number| number * spread).collect();
            for (ids, indices) in ids.chunks(1_000).zip(indices.chunks(1_000)) {
                both.map.insert_each(ids, indices);
            }
            assert!(both.map.bytes() <= foretold.max(IdLines::bytes_reserved(100_000)));
        }
    }
}
