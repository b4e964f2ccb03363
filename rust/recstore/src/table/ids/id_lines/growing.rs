//! How the map grows: line by line, from the last to the first.

use super::buckets::{Buckets, scale};
use super::line::{IDS_PER_LINE, Line};
use super::{Bucket, FIRST_LINES, IDS_PER_LINE_TO_GROW, IDS_TOGETHER, IdLines, SPARE_LINES};
use crate::kernel::cache::Cache;

/// How many lines are moved for so many new ids while the map grows. It is done before a line's ids are 3.7 on average:
/// with fewer, more ids lie behind their buckets; with more, the batches of that time take long beside the others.
pub(super) const LINES_MOVED_TOGETHER: usize = 192;

/// How far ahead the lines of a move are loaded.
const LINES_AHEAD: usize = 12;

impl IdLines {
    /// Grows as far as `more` ids ask for, at most [`IDS_TOGETHER`].
    #[inline]
    pub(super) fn expect(&mut self, more: usize) {
        if self.buckets.is_growing() {
            if self.len / IDS_TOGETHER != (self.len + more) / IDS_TOGETHER {
                self.move_lines(LINES_MOVED_TOGETHER);
            }
            return;
        }
        while self.len + more > self.buckets.count * IDS_PER_LINE_TO_GROW && !self.buckets.is_growing() {
            self.begin_to_grow();
            // The lines of a small map would be overfull before their turn came.
            if self.buckets.old_count <= LINES_MOVED_TOGETHER {
                self.move_lines(LINES_MOVED_TOGETHER);
            }
        }
    }

    /// Grows at once, twice if the map is growing already: more ids than can be expected met at its end.
    #[cold]
    pub(super) fn make_room(&mut self) {
        // A growth under way ends first: buckets know of one old number of lines.
        self.move_lines(usize::MAX);
        self.begin_to_grow();
        self.move_lines(usize::MAX);
    }

    /// Adds half as many lines more; [`IdLines::move_lines`] moves ids to them.
    #[cold]
    pub(super) fn begin_to_grow(&mut self) {
        let old_count = self.buckets.count;
        // By half. A map that doubles moves each id once and not twice (30 against 38 ns at 10 M ids), but
        // takes 28.5 bytes a key instead of 25.4; with more ids a line before it grows the gain is gone.
        let count = (old_count + old_count / 2).max(FIRST_LINES);
        self.lines.grow(count + SPARE_LINES);
        self.buckets = Buckets { count, old_count, moved_from: old_count, ..self.buckets };
    }

    /// Moves the ids of the next `count` old buckets, from the last to the first.
    pub(super) fn move_lines(&mut self, count: usize) {
        let end = self.buckets.moved_from;
        let start = end.saturating_sub(count);
        let mut moving = std::mem::take(&mut self.moving);
        // Ids of these buckets that lie behind `end` go first: they are found by the counts of the lines
        // before them, which `move_line` clears.
        self.take_behind(start, end, &mut moving);
        let own = self.first_line_of_its_own(start, end);
        // From the last line: a line's ids go further behind, to lines that were moved before.
        for line in (own..end).rev() {
            self.prefetch_move(line.saturating_sub(LINES_AHEAD));
            self.move_line(line, &mut moving);
        }
        // Their new lines may be among these, so all ids are taken out before the first is put back.
        for line in start..own {
            self.take_from(line, start, &mut moving);
        }
        // Before the ids are put: `put_hashed` asks `moved_from` which of two buckets counts.
        self.buckets.moved_from = start;
        for (hash, id, index) in moving.drain(..) {
            self.put_hashed(hash, id, index);
        }
        self.moving = moving;
    }

    /// Returns from which of the old buckets from `start` to `end` on lines can be moved one by one: no id of a bucket before
    /// lies there or behind, and where their ids go is behind `end`.
    fn first_line_of_its_own(&self, start: usize, end: usize) -> usize {
        if start + start / 2 <= end {
            return end;
        }
        (start..end).find(|&line| self.lines[line - 1].passed == 0).unwrap_or(end)
    }

    /// Asks for a line and those that most of its ids will move to.
    #[inline(always)]
    fn prefetch_move(&self, line: usize) {
        let to = line + line / 2;
        for line in [line, to, to + 1] {
            self.prefetch(Bucket(line as u32), Cache::First);
        }
    }

    /// Moves all ids of a line; adds those for which there is no room to `left_over`.
    #[inline(always)]
    fn move_line(&mut self, line: usize, left_over: &mut Vec<(u64, i64, u32)>) {
        let Line { ids, indices, mut used, .. } = self.lines[line];
        self.lines[line].used = 0;
        // Those that passed move too.
        self.lines[line].passed = 0;
        while used != 0 {
            let place = used.trailing_zeros() as usize;
            used &= used - 1;
            let hash = self.buckets.hash(ids[place]);
            if !self.put_from(scale(hash, self.buckets.count), ids[place], indices[place]) {
                left_over.push((hash, ids[place], indices[place]));
            }
        }
    }

    /// Takes the ids out of a line whose old buckets are `start` or behind.
    #[inline(always)]
    fn take_from(&mut self, line: usize, start: usize, taken: &mut Vec<(u64, i64, u32)>) {
        let Line { ids, indices, mut used, .. } = self.lines[line];
        let mut kept = used;
        while used != 0 {
            let place = used.trailing_zeros() as usize;
            used &= used - 1;
            let hash = self.buckets.hash(ids[place]);
            let bucket = scale(hash, self.buckets.old_count);
            // Its own bucket is not moved yet, so a search still comes here from there.
            if bucket < start {
                continue;
            }
            taken.push((hash, ids[place], indices[place]));
            kept &= !(1 << place);
            if bucket < line {
                self.lines[bucket..line].iter_mut().for_each(Line::unpass);
            }
        }
        self.lines[line].used = kept;
    }

    /// Takes the ids of old buckets from `start` to `end` out of the lines behind.
    #[inline(always)]
    fn take_behind(&mut self, start: usize, end: usize, taken: &mut Vec<(u64, i64, u32)>) {
        let mut line = end;
        while line > 0 && line < self.lines.len() && self.lines[line - 1].passed > 0 {
            for place in 0..IDS_PER_LINE {
                let (id, index) = (self.lines[line].ids[place], self.lines[line].indices[place]);
                let hash = self.buckets.hash(id);
                let bucket = scale(hash, self.buckets.old_count);
                if self.lines[line].used >> place & 1 == 1 && (start..end).contains(&bucket) {
                    taken.push((hash, id, index));
                    self.take(bucket, line, place);
                }
            }
            line += 1;
        }
    }
}
