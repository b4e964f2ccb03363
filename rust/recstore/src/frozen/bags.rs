//! Pools bags of several frozen tables, in pieces of bags that threads share.

use std::sync::{Arc, OnceLock};

use super::changed::{Both, Changed};
use super::followed::{FollowedTable, with_rows};
use super::walk::PoolRows;
use crate::kernel::parallel::Executor;
use crate::rows::pooling::{BagInput, Piece, Pooling, for_each_piece};
use crate::{Error, Result};

/// Pools bags that were checked before.
///
/// # Errors
/// [`Error::Frozen`]: a byte that was read was changed.
pub(super) fn pool(
    executor: &dyn Executor,
    tables: &[&FollowedTable],
    input: BagInput<'_>,
    pooled: &mut [f32],
    max_positions: &mut [i64],
) -> Result<()> {
    let dims: Vec<usize> = tables.iter().map(|table| table.frozen().dim()).collect();
    let changed: Vec<Arc<Changed>> = tables.iter().map(|table| table.changed()).collect();
    let failure = OnceLock::new();
    for_each_piece(executor, &dims, &input, pooled, max_positions, |piece| {
        pool_piece(tables, &changed, input, piece, &failure);
    });
    failure.into_inner().map_or(Ok(()), Err)
}

fn pool_piece(
    tables: &[&FollowedTable],
    changed: &[Arc<Changed>],
    input: BagInput<'_>,
    mut piece: Piece<'_>,
    failure: &OnceLock<Error>,
) {
    let mut first = 0;
    for (number, (table, changed)) in tables.iter().zip(changed).enumerate() {
        let dim = table.frozen().dim();
        let (range, columns) = piece.of_table(number, first, dim);
        let (ids, first_position) = (input.ids_of(range.clone()), input.offsets[range.start] as usize);
        let (pooling, row) = (Pooling::new(input, range, columns), vec![0.0; dim]);
        with_rows!(table, &**changed, source => {
            table.frozen().simd().run(PoolRows { source, ids, first_position, pooling, row, failure });
        });
        first += dim;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TableConfig;
    use crate::frozen::{Encoding, FrozenMemory, FrozenSpec, FrozenTable, freeze};
    use crate::kernel::parallel::Serial;
    use crate::kernel::simd::SimdLevel;
    use crate::rows::pooling::PoolingMode;
    use proptest::prelude::*;
    use std::path::Path;

    const ROWS: i64 = 100;

    /// The id of a row: far from others, near, or side by side.
    fn id_of(number: i64, kind: i64) -> i64 {
        [number * number * 7, number * 3, number][kind as usize]
    }

    fn opened(directory: &Path, dim: usize, encoding: Encoding, kind: i64, level: SimdLevel) -> FrozenTable {
        let path = directory.join(format!("{dim}{encoding}"));
        let config =
            TableConfig::from_json(dim, r#"{"initializer": {"kind": "normal", "std": 1.0}}"#).unwrap();
        let spec = FrozenSpec { name: "t", config: &config, encoding };
        let ids: Vec<i64> = (0..ROWS).map(|number| id_of(number, kind)).collect();
        let value = |id: i64, column: usize| ((id * 31 + column as i64 * 17) % 101) as f32 / 37.0 - 1.0;
        let read = |ids: &[i64], rows: &mut [f32]| {
            for (id, row) in ids.iter().zip(rows.chunks_mut(dim)) {
                row.iter_mut().enumerate().for_each(|(column, own)| *own = value(*id, column));
            }
            Ok(())
        };
        freeze(&path, spec, &ids, read).unwrap();
        // Half of them have their bytes copied: these are read the same.
        let memory = if dim.is_multiple_of(2) { FrozenMemory::Copied } else { FrozenMemory::Mapped };
        FrozenTable::open(&path, memory).unwrap().with_simd(level).unwrap()
    }

    /// The sums of rows that were read, one after the other.
    fn expected(table: &FrozenTable, input: &BagInput<'_>) -> Vec<f32> {
        let dim = table.dim();
        let mut rows = vec![0.0; input.ids.len() * dim];
        table.read(&Serial, input.ids, &mut rows).unwrap();
        let mut pooled = vec![0.0; (input.offsets.len() - 1) * dim];
        for (bag, pooled) in pooled.chunks_mut(dim).enumerate() {
            for position in input.offsets[bag] as usize..input.offsets[bag + 1] as usize {
                let weight = input.per_sample_weights.map_or(1.0, |weights| weights[position]);
                let row = &rows[position * dim..][..dim];
                pooled.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
            }
            let count = input.offsets[bag + 1] - input.offsets[bag];
            if input.mode == PoolingMode::Mean && count > 0 {
                pooled.iter_mut().for_each(|sum| *sum /= count as f32);
            }
        }
        pooled
    }

    proptest! {
        #[test]
        fn every_level_adds_up_what_was_read(
            lengths in prop::collection::vec(0usize..40, 1..9), seed in any::<u64>(), is_weighted in any::<bool>(),
            is_mean in any::<bool>(), dim in prop::sample::select(vec![1, 5, 8, 16, 64]),
            encoding in prop::sample::select(Encoding::ALL.to_vec()), kind in 0i64..3,
        ) {
            let directory = tempfile::tempdir().unwrap();
            let count: usize = lengths.iter().sum();
            // Some of these have no row.
            let id = |place: usize| {
                id_of((seed >> (place % 48)) as i64 % (ROWS + 9), kind)
            };
            let ids: Vec<i64> = (0..count).map(id).collect();
            let weights: Vec<f32> = (0..count).map(|place| place as f32 / 8.0 - 1.0).collect();
            let mut offsets = vec![0i64];
            lengths.iter().for_each(|&length| offsets.push(offsets[offsets.len() - 1] + length as i64));
            let input = BagInput {
                ids: &ids,
                offsets: &offsets,
                mode: if is_mean { PoolingMode::Mean } else { PoolingMode::Sum },
                per_sample_weights: is_weighted.then_some(&weights[..]),
                padding_idx: None,
            };
            let expected = expected(&opened(directory.path(), dim, encoding, kind, SimdLevel::Baseline), &input);
            for level in SimdLevel::available() {
                let table = opened(directory.path(), dim, encoding, kind, level);
                let mut pooled = vec![f32::NAN; expected.len()];
                pool(&Serial, &[&FollowedTable::new(table)], input, &mut pooled, &mut []).unwrap();
                prop_assert_eq!(&pooled, &expected, "{} at {}", encoding, level);
            }
        }
    }
}
