//! One id of several.

use super::{first_hash, in_pieces, next_hash, salt};
use crate::kernel::parallel::Executor;

/// Writes to `crossed` an id for what stands at each place in all of `ids`, in their order.
///
/// The first id is mixed with the seed, then each further one is added and the sum is mixed.
///
/// # Panics
/// If there are no ids, or some are not as many as `crossed`.
pub fn cross_ids(executor: &dyn Executor, ids: &[&[i64]], seed: i64, crossed: &mut [i64]) {
    let (firsts, others) = ids.split_first().expect("cross_ids: at least one id for each place");
    assert!(ids.iter().all(|ids| ids.len() == crossed.len()), "cross_ids: as many ids for each place");
    let salt = salt(seed);
    in_pieces(executor, crossed, 1, |start, crossed| {
        let places = start..start + crossed.len();
        for (hash, &id) in crossed.iter_mut().zip(&firsts[places.clone()]) {
            *hash = first_hash(id, salt) as i64;
        }
        for ids in others {
            for (hash, &id) in crossed.iter_mut().zip(&ids[places.clone()]) {
                *hash = next_hash(*hash as u64, id) as i64;
            }
        }
    });
}
