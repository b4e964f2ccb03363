//! The hash of ids, from which the noise of a step is drawn too.

/// Mixes the bits of an id; the finalizer of `SplitMix64` (Steele, Lea and Flood 2014).
#[inline(always)]
pub(crate) fn mix(id: i64) -> u64 {
    let mut hash = (id as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}
