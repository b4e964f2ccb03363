//! Places: where a lookup found its rows, kept for the step that follows, which then need not search again.
//!
//! A row never moves, so a place is good until rows are deleted. Places come with a tag of table, deletions and ids;
//! where it does not fit, the rows are searched for as if there were no places. Even a forged place harms no memory:
//! it is used only below the number of rows, and gradients are grouped by it, so that no row is changed by two threads.

use super::id_map::mix;

/// The words that a tag takes behind the places.
pub const TAG_WORDS: usize = 2;

/// Returns the tag of the places of `ids`; `epoch` tells a table and its deletions apart from all others.
fn tag(epoch: u64, ids: &[i64], places: &[u32]) -> u64 {
    // Odd factors: exchanging two ids or places, or changing one, changes the sum.
    let mut factor = 1u64;
    let mut sum = 0u64;
    for (&id, &place) in ids.iter().zip(places) {
        let both = id as u64 ^ u64::from(place).rotate_left(32);
        sum = sum.wrapping_add(both.wrapping_mul(factor));
        factor = factor.wrapping_add(0x9E37_79B9_7F4A_7C16);
    }
    mix((sum ^ mix(epoch as i64)) as i64) ^ ids.len() as u64
}

/// Writes the tag behind the places of `ids`.
pub(super) fn seal(places: &mut [u32], epoch: u64, ids: &[i64]) {
    if let Some((places, words)) = places.split_at_mut_checked(ids.len()) {
        let tag = tag(epoch, ids, places);
        for (word, value) in words.iter_mut().zip([tag as u32, (tag >> 32) as u32]) {
            *word = value;
        }
    }
}

/// Returns the places of `ids`, if they are of this epoch.
pub(super) fn unseal<'a>(places: &'a [u32], epoch: u64, ids: &[i64]) -> Option<&'a [u32]> {
    let (places, words) = places.split_at_checked(ids.len())?;
    let tag = tag(epoch, ids, places);
    (words == [tag as u32, (tag >> 32) as u32]).then_some(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_open_for_the_same_ids_and_epoch_only() {
        let ids = [5, -3, 5, i64::MIN];
        let mut places = [1, 2, 1, 9, 0, 0];
        seal(&mut places, 7, &ids);
        assert_eq!(unseal(&places, 7, &ids), Some(&[1, 2, 1, 9][..]));
        assert_eq!(unseal(&places, 8, &ids), None);
        assert_eq!(unseal(&places, 7, &[-3, 5, 5, i64::MIN]), None);
        assert_eq!(unseal(&places, 7, &ids[..3]), None);
        assert_eq!(unseal(&places[..5], 7, &ids), None);
        assert_eq!(unseal(&[1, 2, 2, 9, places[4], places[5]], 7, &ids), None);
        assert_eq!(unseal(&[], 7, &ids), None);
        seal(&mut [], 7, &ids);
    }
}
