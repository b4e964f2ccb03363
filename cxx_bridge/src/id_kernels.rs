//! What the operators that make ids do, on slices.

use recstore::NgramTables;

use crate::executor::TorchThreads;
use crate::ffi::IdColumns;
use crate::guard::guard;
use crate::kernels::Outcome;

pub(crate) fn hash_strings_32(characters: &[u8], offsets: &[i32], seed: i64, ids: &mut [i64]) -> Outcome {
    guard(|| Ok(recstore::hash_strings(&TorchThreads, characters, offsets, seed, ids)?))
}

pub(crate) fn hash_strings_64(characters: &[u8], offsets: &[i64], seed: i64, ids: &mut [i64]) -> Outcome {
    guard(|| Ok(recstore::hash_strings(&TorchThreads, characters, offsets, seed, ids)?))
}

pub(crate) fn cross_ids(columns: &IdColumns, seed: i64, crossed: &mut [i64]) -> Outcome {
    guard(|| {
        let ids: Vec<&[i64]> = (0..columns.count()).map(|number| columns.column(number)).collect();
        recstore::cross_ids(&TorchThreads, &ids, seed, crossed);
        Ok(())
    })
}

/// Checks what [`ngram_ids`] takes, before there is memory for its result.
pub(crate) fn check_ngrams(n: i64, tables: i64, vocab: i64) -> Outcome {
    guard(|| Ok(NgramTables::new(n, tables, vocab, 0).map(drop)?))
}

pub(crate) fn ngram_ids(
    tokens: &[i64],
    length: usize,
    n: i64,
    tables: i64,
    vocab: i64,
    seed: i64,
    ids: &mut [i64],
) -> Outcome {
    guard(|| {
        NgramTables::new(n, tables, vocab, seed)?.ids(&TorchThreads, tokens, length, ids);
        Ok(())
    })
}

/// Checks the sizes of levels, also where there are no codes.
pub(crate) fn check_prefix_sizes(sizes: &[i64]) -> Outcome {
    guard(|| Ok(recstore::check_prefix_sizes(sizes)?))
}

pub(crate) fn prefix_ids(codes: &[i64], sizes: &[i64], ids: &mut [i64]) -> Outcome {
    guard(|| Ok(recstore::prefix_ids(&TorchThreads, codes, sizes, ids)?))
}

pub(crate) fn bucket_ids(ids: &[i64], buckets: i64, seed: i64, bucketed: &mut [i64]) -> Outcome {
    guard(|| Ok(recstore::bucket_ids(&TorchThreads, ids, buckets, seed, bucketed)?))
}
