//! Merges gradients before the step, so that those of many backward passes take no more memory than their sums.
//!
//! The step sums the gradients of an id pass by pass, and then these sums in their order. What the first passes give is
//! one sum, with which the step goes on to the same bits. It never is a negative zero, because every sum starts at zero.

use super::collector::{CollectedGradients, GradientCollector, KeptGradients};
use super::embedding_table::EmbeddingTable;
use crate::config::{NanPolicy, TableConfig};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::Simd;
use crate::rows::gradient::{Coalesced, NotFinite};
use crate::rows::gradient::{GradientPart, Gradients, MergedGradients};

/// Fewer bytes are not worth a merge.
const MIN_BYTES: usize = 1 << 20;

/// Sums of the gradients of several backward passes.
struct Sums {
    merged: MergedGradients,
    firsts: Vec<u32>,
    count: usize,
    not_finite: Option<NotFinite>,
    dim: usize,
}

impl KeptGradients for Sums {
    fn part(&self) -> GradientPart<'_> {
        let Self { firsts, count, not_finite, .. } = self;
        let merged_from = Some(Coalesced { firsts, count: *count, not_finite: *not_finite });
        GradientPart { merged_from, ..GradientPart::new(&self.merged.ids, &self.merged.sums, self.dim) }
    }

    fn were_changed(&self) -> bool {
        false
    }
}

/// The bytes that a collector keeps of a table.
#[derive(Default)]
struct Bytes {
    merged: usize,
    since: usize,
}

impl<K: Clone + PartialEq> GradientCollector<K> {
    /// Merges what collectors have of tables that were looked up together: once the gradients that came since the last
    /// time take more than a MiB, and more than half of the memory of those merged then. All merging so takes a time in
    /// proportion to the gradients that come, and what is kept between passes is at most one and a half times their sums,
    /// a MiB, and one pass.
    ///
    /// A step gives the same bits as without, if no other collector that it is taken with has the table; else those of
    /// the second one count as one pass. It also gives the same errors: what is not finite is named as it came, and
    /// gradients with ids out of range, or that were changed, stay as they are. Those that may be kept without a copy
    /// are let go; changing them is no error from then on.
    pub fn merge_early(executor: &dyn Executor, lookups: &[(&Self, K, &dyn EmbeddingTable)]) {
        if !lookups.iter().any(|(collector, key, _)| collector.has_several(key)) {
            return;
        }
        let bytes: Vec<_> = lookups.iter().map(|(collector, key, _)| collector.bytes_of(key)).collect();
        let merged = bytes.iter().map(|bytes| bytes.merged).sum::<usize>();
        let since = bytes.iter().map(|bytes| bytes.since).sum::<usize>();
        if since <= MIN_BYTES.max(merged / 2) {
            return;
        }
        for (collector, key, table) in lookups {
            // A dropped table has none: the step says so.
            if let Ok(description) = table.describe() {
                collector.merge_table(executor, key, &description.config);
            }
        }
    }

    /// Returns the bytes that gradients keep in use; of matrices that several tables share, a part each.
    pub fn bytes(&self) -> usize {
        self.with_chunks(|chunks| chunks.iter().map(|chunk| chunk.bytes).sum())
    }

    fn has_several(&self, table: &K) -> bool {
        self.with_chunks(|chunks| chunks.iter().filter(|chunk| chunk.table == *table).count() > 1)
    }

    /// Returns the bytes of a table that can be merged.
    fn bytes_of(&self, table: &K) -> Bytes {
        self.with_chunks(|chunks| {
            let mut bytes = Bytes::default();
            for chunk in chunks.iter().filter(|chunk| chunk.table == *table) {
                if chunk.will_be_refused {
                    return Bytes::default();
                }
                *(if chunk.passes > 1 { &mut bytes.merged } else { &mut bytes.since }) += chunk.bytes;
            }
            bytes
        })
    }

    /// Merges all that there is of a table, if it is of several passes and a step would take it.
    fn merge_table(&self, executor: &dyn Executor, table: &K, config: &TableConfig) {
        let replaced = self.with_chunks(|chunks| {
            // All of it under the collector's lock: a pass that comes meanwhile goes behind the merged ones,
            // in its order.
            let of_table: Vec<_> = chunks.iter().filter(|chunk| chunk.table == *table).collect();
            if of_table.len() < 2 || of_table.iter().any(|chunk| chunk.will_be_refused) {
                return Vec::new();
            }
            let merged = merged(executor, &of_table, config);
            let mut own = chunks.iter_mut().filter(|chunk| chunk.table == *table);
            match (merged, own.next()) {
                (Some(merged), Some(first)) => {
                    let first = std::mem::replace(first, merged);
                    let mut is_first = true;
                    let is_replaced = |chunk: &mut CollectedGradients<K>| {
                        chunk.table == *table && !std::mem::take(&mut is_first)
                    };
                    std::iter::once(first).chain(chunks.extract_if(.., is_replaced)).collect()
                }
                (_, first) => {
                    // Noted, so that later passes do not try again what the step is to refuse.
                    first.into_iter().for_each(|first| first.will_be_refused = true);
                    Vec::new()
                }
            }
        });
        // Outside the lock: what kept them may have a destructor of its own.
        drop(replaced);
    }
}

/// Returns the gradients of one table merged, unless a step would refuse them for something else than their values.
fn merged<K: Clone>(
    executor: &dyn Executor,
    collected: &[&CollectedGradients<K>],
    config: &TableConfig,
) -> Option<CollectedGradients<K>> {
    let first = collected.first()?;
    // A merge lets the tensors go, and their counts of changes with them: the step could not refuse any more.
    if collected.iter().any(|chunk| chunk.were_changed()) {
        return None;
    }
    let chunks: Vec<_> = collected.iter().map(|chunk| chunk.as_chunk()).collect();
    let is_beyond = |id: i64| config.num_embeddings.is_some_and(|end| id < 0 || id as u64 >= end);
    if chunks.iter().any(|chunk| chunk.ids().any(is_beyond)) {
        return None;
    }
    let gradients = Gradients::new(first.dim, &chunks);
    let (merged, firsts) = gradients.merged_with_firsts(executor, Simd::detect());
    // A sum is finite only if all its gradients are. The step will refuse the first one that is not.
    let is_searched = config.nan_policy == NanPolicy::Error && !merged.sums.iter().all(|sum| sum.is_finite());
    let not_finite = if is_searched { gradients.not_finite() } else { None };
    let count = gradients.original_len();
    let sums: Box<dyn KeptGradients> = Box::new(Sums { merged, firsts, count, not_finite, dim: first.dim });
    let passes = collected.iter().map(|chunk| chunk.passes).sum();
    let one = CollectedGradients::new(first.table.clone(), first.name.clone(), first.dim, vec![sums]);
    Some(CollectedGradients { passes, ..one })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::calls::TableId;
    use crate::kernel::parallel::Serial;
    use crate::store::embedding_store::EmbeddingStore;
    use crate::store::local_store::LocalStore;

    /// Runs bodies on threads of its own.
    struct Threads(usize);

    impl Executor for Threads {
        fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
            thread::scope(|scope| {
                for thread in 0..self.0 {
                    scope.spawn(move || (thread..count).step_by(self.0).for_each(body));
                }
            });
        }

        fn num_threads(&self) -> usize {
            self.0
        }
    }

    const DIM: usize = 3;

    /// One lookup's gradients, in columns of a matrix.
    #[derive(Debug, Clone, Default)]
    struct Part {
        ids: Vec<i64>,
        matrix: Vec<f32>,
        stride: usize,
        row_of: Vec<u32>,
        weights: Vec<f32>,
        padding_idx: Option<i64>,
        was_changed: bool,
    }

    impl Part {
        fn of(ids: Vec<i64>, matrix: Vec<f32>) -> Self {
            Self { ids, matrix, stride: DIM, ..Self::default() }
        }
    }

    impl KeptGradients for Part {
        fn part(&self) -> GradientPart<'_> {
            GradientPart {
                stride: self.stride,
                first_column: self.stride - DIM,
                row_of: &self.row_of,
                weights: &self.weights,
                padding_idx: self.padding_idx,
                ..GradientPart::new(&self.ids, &self.matrix, DIM)
            }
        }

        fn were_changed(&self) -> bool {
            self.was_changed
        }
    }

    /// Numbers whose sums depend on their order, both zeros, and a few that are not finite.
    fn any_value() -> impl Strategy<Value = f32> {
        let rare = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38];
        prop_oneof![
            40 => -4.0..4.0f32,
            40 => prop::sample::select(vec![1e8, -1e8, 1.0, 0.0, -0.0, -0.0, 1e-40, -1e-40]),
            1 => prop::sample::select(rare.to_vec()),
        ]
    }

    fn any_part(padding_idx: Option<i64>) -> impl Strategy<Value = Part> {
        let shape = (prop::collection::vec(-3..6i64, 0..7), 0..3usize, any::<bool>(), any::<bool>());
        shape.prop_flat_map(move |(ids, more, has_row_of, is_weighted)| {
            let (count, stride) = (ids.len(), DIM + more);
            let rows = if has_row_of { 3 } else { count };
            let row_of = prop::collection::vec(0..3u32, if has_row_of { count } else { 0 });
            let weights = prop::collection::vec(any_value(), if is_weighted { count } else { 0 });
            let matrix = prop::collection::vec(any_value(), rows * stride);
            (row_of, weights, matrix).prop_map(move |(row_of, weights, matrix)| Part {
                ids: ids.clone(),
                matrix,
                stride,
                row_of,
                weights,
                padding_idx,
                was_changed: false,
            })
        })
    }

    /// Backward passes, each with whether everything is merged behind it.
    fn any_passes() -> impl Strategy<Value = Vec<(Vec<Part>, bool)>> {
        prop::option::of(-1..2i64).prop_flat_map(|padding_idx| {
            let pass = (prop::collection::vec(any_part(padding_idx), 0..3), any::<bool>());
            prop::collection::vec(pass, 1..7)
        })
    }

    fn open(config: &str) -> (LocalStore, TableId) {
        let store = LocalStore::new(Box::new(Serial));
        let config = TableConfig::from_json(DIM, config).unwrap();
        let table = store.open_table("t", &config).unwrap().id();
        (store, table)
    }

    /// Collects passes, merging behind those that say so, takes a step and returns all that can be seen of it.
    fn seen(executor: &dyn Executor, config: &str, passes: &[(Vec<Part>, bool)], merges: bool) -> String {
        let (store, id) = open(config);
        let table = store.table("t", id).unwrap();
        let collector = GradientCollector::default();
        for (parts, is_end) in passes {
            let parts = parts.iter().map(|part| Box::new(part.clone()) as Box<dyn KeptGradients>);
            collector.accept(id, &*table, parts.collect()).unwrap();
            if merges && *is_end {
                collector.merge_table(executor, &id, &table.describe().unwrap().config);
            }
        }
        let bits = |values: &[f32]| {
            let bits = |value: &f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
            values.iter().map(bits).collect::<Vec<_>>()
        };
        let sums = collector.merged(executor, &id).map(|merged| (merged.ids.clone(), bits(&merged.sums)));
        let stepped = GradientCollector::apply_to(&store, &[&collector]);
        let mut ids = table.ids().unwrap();
        ids.sort_unstable();
        let mut rows = vec![0.0; ids.len() * DIM];
        table.read(&ids, &mut rows).unwrap();
        let slots = table.describe().unwrap().slots;
        let slots: Vec<_> =
            slots.iter().map(|(name, _)| bits(&table.read_slot(name, &ids).unwrap().unwrap())).collect();
        let statistics = table.statistics().unwrap();
        let counts = (statistics.updates, statistics.refusals, statistics.step, collector.tables().len());
        format!("{sums:?} {stepped:?} {ids:?} {:?} {slots:?} {counts:?}", bits(&rows))
    }

    proptest! {
        #[test]
        fn a_step_shows_nothing_of_merges_before_it(
            passes in any_passes(),
            policy in prop::sample::select(vec!["error", "skip", "allow"]),
            optimizer in prop::sample::select(vec!["sgd", "adagrad"]),
            // Some ids are out of range, or none.
            bound in prop::sample::select(vec!["", r#""num_embeddings": 5, "#]),
            threads in prop::sample::select(vec![1, 2, 8]),
        ) {
            let config = format!(r#"{{{bound}"nan_policy": "{policy}", "optimizer": {{"kind": "{optimizer}"}}}}"#);
            let expected = seen(&Serial, &config, &passes, false);
            prop_assert_eq!(seen(&Threads(threads), &config, &passes, true), expected);
        }
    }

    #[test]
    fn many_gradients_give_the_same_bits_on_any_number_of_threads() {
        let pass = |pass: i64| {
            let ids = (0..30_000).map(|place: i64| (place * 7919 + pass * 31) % 9_973).collect();
            let values =
                (0..30_000 * DIM).map(|at| ((at * 31 + 17 * pass as usize) % 1009) as f32 / 301.0 - 1.7);
            (vec![Part::of(ids, values.collect())], pass != 1)
        };
        let passes: Vec<_> = (0..5).map(pass).collect();
        let expected = seen(&Serial, "{}", &passes, false);
        for threads in [1, 2, 8] {
            assert!(seen(&Threads(threads), "{}", &passes, true) == expected, "{threads} threads");
        }
    }

    /// Collects a pass as the bridge does.
    fn collect(collector: &GradientCollector<TableId>, table: &dyn EmbeddingTable, part: Part) {
        collector.accept(table.id(), table, vec![Box::new(part)]).unwrap();
        GradientCollector::merge_early(&Serial, &[(collector, table.id(), table)]);
    }

    #[test]
    fn many_passes_take_no_more_than_one_and_a_half_times_their_sums_and_a_pass() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        let (span, pass) = (200_000, 30_000);
        let part = |number: i64| {
            let ids: Vec<i64> = (0..pass).map(|place| (place + number * 997) % span).collect();
            let rows = vec![0.5; ids.len() * DIM];
            Part::of(ids, rows)
        };
        let a_row = size_of::<i64>() + DIM * size_of::<f32>();
        for number in 0..300 {
            collect(&collector, &*table, part(number));
            let merged = span.min(pass + number * 997) as usize * (a_row + size_of::<u32>());
            let most = merged + merged / 2 + MIN_BYTES + pass as usize * a_row + (1 << 12);
            assert!(collector.bytes() <= most, "pass {number}: {} bytes, at most {most}", collector.bytes());
        }
        assert!(collector.bytes() >= span as usize * a_row);
    }

    #[test]
    fn merging_takes_a_time_in_proportion_to_the_passes() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        let (pass, mut merged, mut merges) = (5_000, 0, 0);
        for number in 0..400 {
            let ids: Vec<i64> = (number * pass..(number + 1) * pass).collect();
            let rows = vec![0.5; ids.len() * DIM];
            collect(&collector, &*table, Part::of(ids, rows));
            let chunks = collector.with_chunks(|chunks| chunks.len());
            if chunks == 1 {
                merges += 1;
                merged += (number + 1) * pass;
            }
        }
        assert!(merges > 5, "{merges} merges");
        assert!(merged < 4 * 400 * pass, "{merged} rows merged of {}", 400 * pass);
    }

    #[test]
    fn small_passes_are_merged_too() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        for _ in 0..10_000 {
            collect(&collector, &*table, Part::of(vec![1], vec![0.5; DIM]));
        }
        assert!(collector.with_chunks(|chunks| chunks.len()) < 1100);
        assert_eq!(collector.merged(&Serial, &id).unwrap().sums, [5000.0; DIM]);
    }

    #[test]
    fn tables_looked_up_together_are_merged_together() {
        let (store, first) = open("{}");
        let other = store.open_table("other", &TableConfig::from_json(DIM, "{}").unwrap()).unwrap();
        let (table, collectors) =
            (store.table("t", first).unwrap(), [(); 2].map(|()| GradientCollector::default()));
        for _ in 0..300 {
            for (collector, table, count) in [(&collectors[0], &table, 4_096), (&collectors[1], &other, 7)] {
                let part = Part::of((0..count).collect(), vec![0.5; count as usize * DIM]);
                collector.accept(table.id(), &**table, vec![Box::new(part)]).unwrap();
            }
            let lookups = [(&collectors[0], first, &*table), (&collectors[1], other.id(), &*other)];
            GradientCollector::merge_early(&Serial, &lookups);
            let chunks = collectors.each_ref().map(|collector| collector.with_chunks(|chunks| chunks.len()));
            assert_eq!(chunks[0], chunks[1]);
            assert!(chunks[0] < 20, "{chunks:?}");
        }
    }

    #[test]
    fn changed_gradients_stay_for_the_step_to_refuse() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        for number in 0..100 {
            let part = Part::of((0..4_096).collect(), vec![0.5; 4_096 * DIM]);
            collect(&collector, &*table, Part { was_changed: number == 3, ..part });
        }
        assert!(
            GradientCollector::apply_to(&store, &[&collector]).unwrap_err().to_string().contains("in place")
        );
        collector.clear();
        let part = || Part::of(vec![1], vec![0.5; DIM]);
        (0..3).for_each(|_| collect(&collector, &*table, part()));
        GradientCollector::apply_to(&store, &[&collector]).unwrap();
    }

    #[test]
    fn one_pass_stays_as_it_came() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        collect(&collector, &*table, Part::of((0..100_000).collect(), vec![-0.0; 100_000 * DIM]));
        assert_eq!(collector.with_chunks(|chunks| chunks[0].passes), 1);
    }

    #[test]
    fn a_collector_that_nobody_empties_is_told_of_once() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        let accumulate = |passes| {
            let told = (0..passes).filter_map(|_| {
                collect(&collector, &*table, Part::of(vec![1, 2], vec![0.5; 2 * DIM]));
                collector.overdue(&id)
            });
            told.map(|overdue| overdue.to_string()).collect::<Vec<_>>()
        };
        for _ in 0..3 {
            assert!(accumulate(1023).is_empty());
            GradientCollector::apply_to(&store, &[&collector]).unwrap();
        }
        let told = accumulate(3000);
        assert_eq!(told.len(), 1);
        assert!(
            told[0].starts_with(
                "the module over table \"t\" has collected the gradients of 1024 backward passes"
            )
        );
    }

    #[test]
    fn many_bytes_are_told_of_sooner() {
        let (store, id) = open("{}");
        let (table, collector) = (store.table("t", id).unwrap(), GradientCollector::default());
        let pass = |rows: usize| {
            // Zeros that nobody reads take no memory.
            let part = Part::of(vec![0; rows], vec![0.0; rows * DIM]);
            collector.accept(id, &*table, vec![Box::new(part)]).unwrap();
        };
        pass(55_000_000);
        assert!(collector.bytes() > 1 << 30);
        (0..62).for_each(|_| pass(1));
        assert_eq!(collector.overdue(&id), None);
        pass(1);
        assert_eq!(collector.overdue(&id).map(|overdue| overdue.passes), Some(64));
    }
}
