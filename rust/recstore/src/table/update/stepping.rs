//! The steps of rows: each thread walks those of its part, a group at a time.

#![expect(unsafe_code, reason = "threads change different rows of one table")]

use std::cell::RefCell;
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::locked::{Locked, PADDING};
use super::stepped_rows::{LocatedRow, SteppedRows};
use super::widened::Widened;
use crate::Result;
use crate::kernel::cache::{Cache, prefetch, prefetch_one, rows_of_lines};
use crate::kernel::parallel::{for_each_mut, parts_for};
use crate::kernel::simd::{Kernel, Lanes};
use crate::kernel::sorting::{CountedKeys, RankRange, SortedPart, ranges};
use crate::optimizer::{RowRule, WithRule};
use crate::rows::row_type::RowType;
use crate::table::engine::Engine;
use crate::table::ids::row_index::RowIndex;
use crate::table::rows::Rows;
use crate::table::storage::tier::Tier;

/// About how many lines of records and their gradients a group has.
const LINES_TOGETHER: usize = 400;

/// About how many lines of the next group are asked for together, with every so many lines of this one.
const LINES_ASKED_TOGETHER: usize = 112;

/// About how many of those lines are used before one that is asked for into the first cache now.
const STEP_LINES_NEAR: usize = 72;

/// How many gradients of one row are asked for before its turn: of many the last would drive out the first. The others
/// are asked for that many ahead, while the row's gradients are summed.
const GRADIENTS_TOGETHER: usize = 12;

/// Sorts positions by their row and takes the steps, every part of every table on a thread of its own.
pub(super) fn step_rows(engine: Engine<'_>, locked: &mut [Locked<'_>]) {
    let tables = locked.len().max(1);
    let work = locked.iter_mut().flat_map(|locked| {
        let floats = locked.indices.len() * locked.gradients.dim;
        // Every part goes through all positions once: several tables keep the threads busy with fewer parts each.
        let parts = parts_for(engine.executor, floats).div_ceil(tables.div_ceil(2));
        let stamp = locked.rows.stamp(locked.rows.step);
        // New rows, and roundings, are drawn from the id at a position.
        let row_type = locked.table.row_type(engine.simd);
        let is_exact = row_type.is_float32() && locked.rule.narrow().is_none();
        if locked.is_new.is_empty() && is_exact {
            locked.by_row = locked.gradients.by_row();
        }
        let (gradients, numbers) = match &locked.by_row {
            Some((by_row, numbers)) => (by_row, *numbers),
            None => (locked.gradients, Default::default()),
        };
        let Rows { storage, step, changes, row_ids, usages, sweep, tier, shared, .. } = &mut *locked.rows;
        let rows = Arc::new(SteppedRows {
            table: locked.table,
            gradients,
            row_type,
            weight_words: storage.weight_words(),
            stride: storage.stride(),
            records: storage.shared(),
            changes,
            row_ids,
            usages: usages.as_ref().map(|usages| (usages, sweep.as_deref())),
            stamp,
            tier: tier.as_deref(),
            indices: [CountedKeys { keys: &locked.indices, padding: Some(PADDING), numbers }],
            is_new: &locked.is_new,
            shared: shared.as_deref(),
            rule: &locked.rule,
            simd: engine.simd,
            max_grad_norm: locked.table.config.max_grad_norm.map(|most| most as f32),
            noise: locked.table.noise(*step),
            stepped: &locked.stepped,
        });
        ranges(&rows.indices, parts).into_iter().map(move |range| (Arc::clone(&rows), range))
    });
    walk_ranges(engine, work);
}

/// Takes the steps of the rows in some ranges, each on a thread of its own.
pub(super) fn walk_ranges<'a, 'r: 'a>(
    engine: Engine<'_>,
    work: impl Iterator<Item = (Arc<SteppedRows<'r>>, RankRange<u32>)> + Send + 'a,
) {
    thread_local! {
        // Kept for the next step: it takes as much memory again each time.
        static SORTED: RefCell<SortedPart<u32>> = RefCell::default();
    }
    for_each_mut(engine.executor, work, |(rows, range)| {
        SORTED.with_borrow_mut(|sorted| {
            sorted.fill(&rows.indices, range);
            rows.stepped.fetch_add(sorted.len() as u64, Ordering::Relaxed);
            rows.rule.run(StepRows { rows: &rows, sorted });
        });
    });
}

/// One part's steps, before the type of its rule is known.
struct StepRows<'a> {
    rows: &'a SteppedRows<'a>,
    sorted: &'a SortedPart<u32>,
}

impl WithRule for StepRows<'_> {
    fn run(self, rule: &impl RowRule) {
        let Self { rows, sorted } = self;
        match rows.tier {
            Some(tier) if !tier.has_step() => rows.walk_tiered(tier, sorted, rule),
            _ => {
                let step = |group: Group<'_>, widened: &mut Widened| {
                    rows.simd.run(StepGroup { rows, rule, group, widened });
                };
                rows.simd.run(Walk { rows, sorted, step: &step });
            }
        }
    }
}

/// The way through the rows of a part. The steps of its groups are compiled for each rule, and it is not.
struct Walk<'a> {
    rows: &'a SteppedRows<'a>,
    sorted: &'a SortedPart<u32>,
    /// Takes the steps of a group.
    step: &'a dyn Fn(Group<'_>, &mut Widened),
}

impl Kernel for Walk<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { rows, sorted, step } = self;
        let dim = rows.gradients.dim;
        let rounds = rows.are_widened();
        let has_lists = rounds || rows.gradients.has_row_of();
        let group_len = rows_of_lines(LINES_TOGETHER, rows.stride + dim);
        let together = rows_of_lines(LINES_ASKED_TOGETHER, rows.stride + dim);
        let near = rows_of_lines(STEP_LINES_NEAR, rows.stride + dim);
        let (mut summed, mut starting) = (SummedRows::default(), StartingRows::default());
        let mut widened = Widened::default();
        // The rows of a group, and behind them those of the next one.
        let (mut located, mut to_sum) = (Vec::new(), Vec::new());
        // The lists are read at random, for the id of a rounded row or the gradient row of a bag: not asked
        // for a group earlier, they took a quarter of a step of bfloat16 rows.
        if has_lists {
            rows.prefetch_lists(rounds, sorted, 0..2 * group_len);
        }
        rows.locate(sorted, 0..group_len, &mut located, &mut to_sum);
        // Small batches end within the first group: without this each of their rows was waited for, 72
        // against 40 ns (64 ids, dim 16).
        rows.ask_together(&located);
        for group in (0..sorted.len()).step_by(group_len) {
            let behind = sorted.len().min(group + group_len);
            if has_lists {
                rows.prefetch_lists(rounds, sorted, behind + group_len..behind + 2 * group_len);
            }
            rows.locate(sorted, behind..behind + group_len, &mut located, &mut to_sum);
            if !rows.is_new.is_empty() {
                // By a kernel of its own, a group together: begun one by one within each rule's step, new
                // rows made a third of the library and took 226 against 175 ns (dim 16).
                rows.simd.run(StartRows { rows, sorted, numbers: group..behind, starting: &mut starting });
            }
            let own = to_sum.partition_point(|&number| number < behind);
            summed.sum(rows, sorted, to_sum.drain(..own), group, &mut located);
            // Before the steps: a save under way copies rows as they were. New ones have no bit in it.
            rows.note(&located[..behind - group]);
            let lens = [behind - group, group_len, together, near];
            step(Group { located: &located, sums: &summed.sums, lens }, &mut widened);
            located.drain(..behind - group);
        }
    }
}

/// The gradients of those rows of a group that have several, or one with a weight, or one that may be too long.
#[derive(Default)]
struct SummedRows {
    sums: Vec<f32>,
    chunk_sum: Vec<f32>,
}

impl SummedRows {
    /// Sums the gradients of the rows of some numbers; `located` begins with that of number `first`.
    #[inline(always)]
    fn sum(
        &mut self,
        rows: &SteppedRows<'_>,
        sorted: &SortedPart<u32>,
        numbers: impl Iterator<Item = usize>,
        first: usize,
        located: &mut [LocatedRow<'_>],
    ) {
        let dim = rows.gradients.dim;
        self.chunk_sum.resize(dim, 0.0);
        let mut len = 0;
        for number in numbers {
            if self.sums.len() < len + dim {
                self.sums.resize(len + dim, 0.0);
            }
            // Asked for while earlier ones are summed: 43 against 50 ns a row if one id is a tenth of all.
            let later = sorted.positions(number).skip(GRADIENTS_TOGETHER);
            let sum = &mut self.sums[len..len + dim];
            rows.gradients.sum(sorted.positions(number), later, sum, &mut self.chunk_sum);
            rows.clip(sum);
            located[number - first].sum = Some(len as u32);
            len += dim;
        }
    }
}

/// Rows that are stepped together, and behind them those that are asked for meanwhile.
struct Group<'a> {
    located: &'a [LocatedRow<'a>],
    sums: &'a [f32],
    /// How many rows are stepped, how many before some are asked for into the second cache, and how many those are, and
    /// how many before one is asked for into the first.
    lens: [usize; 4],
}

/// Takes the steps of a group's first rows, and asks for those behind them. A kernel of its own: within the larger one
/// its loop has too few registers.
struct StepGroup<'a, R> {
    rows: &'a SteppedRows<'a>,
    rule: &'a R,
    group: Group<'a>,
    widened: &'a mut Widened,
}

impl<R: RowRule> Kernel for StepGroup<'_, R> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { rows, rule, group, widened } = self;
        let Group { located, sums, lens: [len, later, together, near] } = group;
        for first in (0..len).step_by(together) {
            let own = first..len.min(first + together);
            let behind = located.len().min(own.start + later)..located.len().min(own.end + later);
            // Several rows at once, so that walks through page tables overlap: 75 ns a row for 8 to 12 rows
            // together, 87 for one with each row or 16 together, 101 for all 33 of a group.
            rows.ask_together(&located[behind]);
            if rows.are_widened() {
                let near = located.len().min(own.start + near)..located.len().min(own.end + near);
                rows.step_widened(rule, &located[own], sums, &located[near], widened);
                continue;
            }
            for place in own {
                if let Some(near) = located.get(place + near) {
                    rows.ask(near, Cache::First);
                }
                let row = &located[place];
                // SAFETY:
                // 1. `SteppedRows::locate` located it.
                // 2. An index is a key of one part, once, no two have one place, and every part is walked by one thread.
                let record = unsafe { rows.records.record_mut(row.record) };
                rows.step(rule, record, row.gradient(sums), &mut []);
            }
        }
    }
}

/// Writes the values that the new ones of some rows start with.
struct StartRows<'a> {
    rows: &'a SteppedRows<'a>,
    sorted: &'a SortedPart<u32>,
    numbers: Range<usize>,
    starting: &'a mut StartingRows,
}

/// The memory of the new ones of a group.
#[derive(Default)]
struct StartingRows {
    indices: Vec<RowIndex>,
    ids: Vec<i64>,
    values: Vec<f32>,
}

impl Kernel for StartRows<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { rows, sorted, numbers, starting } = self;
        let StartingRows { indices, ids, values } = starting;
        indices.clear();
        ids.clear();
        for number in numbers.start..numbers.end.min(sorted.len()) {
            if rows.is_new[sorted.first(number)] {
                indices.push(RowIndex(sorted.rank(number)));
                ids.push(rows.gradients.id(sorted.first(number)));
            }
        }
        let dim = rows.gradients.dim;
        values.resize(ids.len() * dim, 0.0);
        rows.fill_new(ids, values);
        for (index, weights) in indices.iter().zip(values.chunks_exact_mut(dim)) {
            // SAFETY: 1. located here; 2. as for steps: the rows are those of one part.
            let record = unsafe { rows.records.record_mut(rows.records.locate(rows.place(*index))) };
            rows.start_record(weights, record);
        }
    }
}

impl SteppedRows<'_> {
    /// Takes the steps of rows of which some lie on disk; the first error of the disk ends them. Compiled for the baseline
    /// and for any rule: it waits for the disk.
    fn walk_tiered(&self, tier: &Tier, sorted: &SortedPart<u32>, rule: &dyn RowRule) {
        let dim = self.gradients.dim;
        let (mut sum, mut chunk_sum, mut weights) = (vec![0.0; dim], vec![0.0; dim], vec![0.0; dim]);
        let (mut scratch, mut widened) = (vec![0.0; self.stride], Widened::default());
        for number in 0..sorted.len() {
            let (index, first) = (RowIndex(sorted.rank(number)), sorted.first(number));
            // Nothing is asked for ahead: reads of the disk take longer than any line of memory.
            self.gradients.sum(sorted.positions(number), iter::empty(), &mut sum, &mut chunk_sum);
            self.clip(&mut sum);
            let is_new = self.is_new.get(first).copied().unwrap_or(false);
            let mut step = |record: &mut [f32]| {
                if is_new {
                    self.fill_new(&[self.gradients.id(first)], &mut weights);
                    self.start_record(&mut weights, record);
                }
                widened.fill(self, &[&mut *record], &[]);
                self.step(rule, record, &sum, widened.of(0));
                widened.round(self, &mut [record], std::iter::once(first));
            };
            let Some(place) = tier.place_to_change(index) else {
                if let Err(error) = self.step_on_disk(tier, (index, is_new), &mut scratch, &mut step) {
                    return tier.fail(error);
                }
                continue;
            };
            // SAFETY: 1. located here; 2. as above: rows of different indices lie in different places.
            let record = unsafe { self.records.record_mut(self.records.locate(place)) };
            self.changes.before_change(index, || self.key(index), record);
            self.use_row(index);
            step(record);
        }
    }

    /// Notes rows before their steps: for saves, and for what makes rows leave.
    #[inline(always)]
    fn note(&self, located: &[LocatedRow<'_>]) {
        if !self.changes.are_noted() && self.usages.is_none() {
            return;
        }
        for row in located {
            // SAFETY: 1. and 2. as for steps.
            let record = unsafe { self.records.record_mut(row.record) };
            self.changes.before_change(row.index, || self.key(row.index), record);
            self.use_row(row.index);
        }
    }

    /// Takes the step of a row for which there is no room in memory.
    fn step_on_disk(
        &self,
        tier: &Tier,
        (index, is_new): (RowIndex, bool),
        record: &mut [f32],
        step: &mut dyn FnMut(&mut [f32]),
    ) -> Result<()> {
        // A new row has nothing on disk; its index may have belonged to another row, whose record still lies
        // there.
        if !is_new {
            tier.read(index, record)?;
        }
        self.changes.before_change(index, || self.key(index), record);
        self.use_row(index);
        step(record);
        tier.write(index, record)
    }

    /// Asks for what the gradients of some numbers are found by, and for the ids that rounding is drawn from.
    #[inline(always)]
    fn prefetch_lists(&self, rounds: bool, sorted: &SortedPart<u32>, numbers: Range<usize>) {
        for place in sorted.places(numbers.start.min(sorted.len())..numbers.end.min(sorted.len())) {
            self.gradients.prefetch_lists(place.position as usize, rounds);
        }
    }

    /// Adds where some numbers' rows and gradients lie to `located`, and those numbers whose gradients have to be summed
    /// to `to_sum`; asks for the gradients of these but the first.
    #[inline(always)]
    fn locate<'b>(
        &'b self,
        sorted: &SortedPart<u32>,
        numbers: Range<usize>,
        located: &mut Vec<LocatedRow<'b>>,
        to_sum: &mut Vec<usize>,
    ) {
        let numbers = numbers.start.min(sorted.len())..numbers.end.min(sorted.len());
        located.extend(numbers.clone().map(|number| {
            let index = RowIndex(sorted.rank(number));
            let gradient = self.gradients.row(sorted.first(number));
            let (first, record) = (sorted.first(number) as u32, self.records.locate(self.place(index)));
            LocatedRow { index, first, sum: None, record, gradient }
        }));
        let is_plain = self.gradients.is_plain() && self.max_grad_norm.is_none();
        let before = to_sum.len();
        let mut count = before;
        to_sum.resize(before + numbers.len(), 0);
        for number in numbers {
            // Written always, kept if it counts: which it is cannot be predicted.
            to_sum[count] = number;
            count += usize::from(!is_plain | !sorted.is_single(number));
        }
        to_sum.truncate(count);
        for &number in &to_sum[before..] {
            for position in sorted.positions(number).take(GRADIENTS_TOGETHER).skip(1) {
                prefetch(self.gradients.row(position), Cache::Second);
            }
        }
    }

    /// Asks for records and the first of their gradients, each one's first line before the others of any: where a row
    /// lies is looked for in page tables, which goes on for several at a time if no step stands between.
    #[inline(always)]
    fn ask_together(&self, rows: &[LocatedRow<'_>]) {
        for row in rows {
            self.records.prefetch_first(row.record);
            prefetch_one(&row.gradient[0], Cache::Second);
        }
        for row in rows {
            self.ask(row, Cache::Second);
        }
    }

    /// Takes the steps of some rows whose records are not in single precision; `upcoming` are asked for meanwhile.
    #[inline(always)]
    fn step_widened(
        &self,
        rule: &impl RowRule,
        located: &[LocatedRow<'_>],
        sums: &[f32],
        upcoming: &[LocatedRow<'_>],
        widened: &mut Widened,
    ) {
        // SAFETY: 1. and 2. as for steps: the rows of a group are different ones.
        let records = located.iter().map(|row| unsafe { self.records.record_mut(row.record) });
        let mut records: Vec<&mut [f32]> = records.collect();
        widened.fill(self, &records, upcoming);
        for (place, (row, record)) in located.iter().zip(&mut records).enumerate() {
            self.step(rule, record, row.gradient(sums), widened.of(place));
        }
        widened.round(self, &mut records, located.iter().map(|row| row.first as usize));
    }
}
