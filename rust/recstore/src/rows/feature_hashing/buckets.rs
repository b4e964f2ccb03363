//! Ids made few.

use super::{IdInputError, count, first_hash, in_pieces, salt};
use crate::kernel::parallel::Executor;

/// Writes to `bucketed` the bucket of each id, below `buckets`: its hash modulo their number.
///
/// # Errors
/// [`IdInputError::Count`]: there is no bucket.
///
/// # Panics
/// If `bucketed` is not as long as `ids`.
pub fn bucket_ids(
    executor: &dyn Executor,
    ids: &[i64],
    buckets: i64,
    seed: i64,
    bucketed: &mut [i64],
) -> Result<(), IdInputError> {
    assert_eq!(ids.len(), bucketed.len(), "bucket_ids: a bucket for each id");
    let buckets = count("bucket_ids", "buckets", buckets, i64::MAX)? as u64;
    let salt = salt(seed);
    in_pieces(executor, bucketed, 1, |first, bucketed| {
        for (bucket, &id) in bucketed.iter_mut().zip(&ids[first..]) {
            *bucket = (first_hash(id, salt) % buckets) as i64;
        }
    });
    Ok(())
}
