//! A minimal perfect hash: it sends each id of a table to a number of its own, and any other id to the number of some id.
//!
//! Hashes fall into parts by their upper bits, and within a part into buckets. A bucket has a pilot, which sends its ids to slots
//! that no other id has:
//!
//! ```text
//! slot   = (hash ^ pilot * A) * B, scaled to the slots of the part
//! number = where the part's numbers begin, and its slot
//! ```
//!
//! A part of n ids has a few slots more than n: an id whose slot is n or beyond was moved to one below n that was left free.
//! Large buckets get their pilots first. With 4 ids a bucket and a 64th of the slots to spare one takes 120 tries on average, and
//! the chance that 2^16 do not do for a bucket is e^-70. An id takes 4.3 bits.
//!
//! Source: Pibiri and Trani 2021, "PTHash: Revisiting FCH Minimal Perfect Hashing", section 4; parts, and products in place of
//! remainders, as in Groot Koerkamp 2025, "PtrHash: Minimal Perfect Hashing at RAM Throughput", section 3.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::kernel::hash::mix;

/// The ids of a part, on average. Their slots lie in the first cache while pilots are sought, and have numbers of 16 bits.
const IDS_PER_PART: usize = 1 << 15;
const MAX_SLOTS: usize = 1 << 16;
const IDS_PER_BUCKET: usize = 4;
const IDS_PER_SPARE: usize = 64;

/// How often another seed is tried. One fails where ids were chosen so that their hashes lie together.
const SEEDS: u32 = 64;

const PER_SEED: u64 = 0x9E37_79B9_7F4A_7C15;
const PER_PILOT: u64 = 0xD6E8_FEB8_6659_FD93;
const SPREAD: u64 = 0xA076_1D64_78BD_642F | 1;

/// What a hash is computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct HashShape {
    seed: u32,
    parts: u32,
    /// The buckets of a part.
    buckets: u32,
    /// The slots of a part beyond its ids.
    spare: u32,
}

/// A hash, its bytes, and the ids by their numbers.
pub(super) struct BuiltHash {
    pub(super) shape: HashShape,
    pub(super) bytes: Vec<u8>,
    pub(super) ids: Vec<i64>,
}

/// Returns the hash of some ids.
///
/// # Errors
/// Says why there is none.
pub(super) fn build(mut ids: Vec<i64>) -> Result<BuiltHash, String> {
    for seed in 0..SEEDS {
        let shape = HashShape::new(ids.len(), seed);
        ids.sort_unstable_by_key(|&id| shape.hash(id));
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("id {} is there twice", pair[0]));
        }
        if let Some((bytes, numbered)) = shape.fill(&ids) {
            return Ok(BuiltHash { shape, bytes, ids: numbered });
        }
    }
    Err(format!("none of {SEEDS} seeds gives a hash of its ids"))
}

impl HashShape {
    fn new(ids: usize, seed: u32) -> Self {
        let parts = ids.div_ceil(IDS_PER_PART).max(1);
        let of_part = |size: usize| (ids / parts / size + 1) as u32;
        Self { seed, parts: parts as u32, buckets: of_part(IDS_PER_BUCKET), spare: of_part(IDS_PER_SPARE) }
    }

    #[inline(always)]
    pub(super) fn hash(self, id: i64) -> u64 {
        mix(id ^ u64::from(self.seed).wrapping_mul(PER_SEED) as i64)
    }

    /// Returns a hash's part, and its bucket there.
    #[inline(always)]
    fn bucket(self, hash: u64) -> (usize, usize) {
        let (part, rest) = scaled(hash, u64::from(self.parts));
        (part, scaled(rest, u64::from(self.buckets)).0)
    }

    /// Returns the bytes of its starts, moved slots and pilots, which lie one behind the other, and then of all.
    pub(super) fn places(self) -> Option<[Range<usize>; 3]> {
        let [parts, buckets, spare] = [self.parts, self.buckets, self.spare].map(|count| count as usize);
        let starts = parts.checked_add(1)?.checked_mul(size_of::<u32>())?;
        let moved = starts.checked_add(parts.checked_mul(spare)?.checked_mul(size_of::<u16>())?)?;
        let pilots = moved.checked_add(parts.checked_mul(buckets)?.checked_mul(size_of::<u16>())?)?;
        Some([0..starts, starts..moved, moved..pilots])
    }

    /// Finds the pilots of ids in the order of their hashes. None: this seed has none.
    fn fill(self, ids: &[i64]) -> Option<(Vec<u8>, Vec<i64>)> {
        let (mut starts, mut moved, mut pilots) = (vec![0u32], Vec::new(), Vec::new());
        let mut numbered = Vec::with_capacity(ids.len());
        let mut rest = ids;
        for part in 0..self.parts as usize {
            let count = rest.partition_point(|&id| self.bucket(self.hash(id)).0 <= part);
            let (own, others) = rest.split_at(count);
            rest = others;
            let slots = Some(count + self.spare as usize).filter(|&slots| slots <= MAX_SLOTS)?;
            let found = self.find_pilots(own, slots)?;
            moved.extend(self.number(own, &found, slots, &mut numbered)?);
            pilots.extend(found);
            starts.push(numbered.len() as u32);
        }
        let words = [moved, pilots].concat();
        let starts = starts.iter().flat_map(|start| start.to_le_bytes());
        Some((starts.chain(words.iter().flat_map(|word| word.to_le_bytes())).collect(), numbered))
    }

    /// Returns the pilot of each bucket of a part.
    fn find_pilots(self, ids: &[i64], slots: usize) -> Option<Vec<u16>> {
        let hashes: Vec<u64> = ids.iter().map(|&id| self.hash(id)).collect();
        let mut buckets: Vec<&[u64]> =
            hashes.chunk_by(|&one, &other| self.bucket(one) == self.bucket(other)).collect();
        buckets.sort_by_key(|own| Reverse(own.len()));
        let mut pilots = vec![0; self.buckets as usize];
        let mut used = UsedSlots { slots, bits: vec![0; slots.div_ceil(64)] };
        for own in buckets {
            pilots[self.bucket(own[0]).1] = (0..=u16::MAX).find(|&pilot| used.take(own, pilot))?;
        }
        Some(pilots)
    }

    /// Appends the ids of a part by their numbers: those whose slot is one of as many as there are, and in the slots that are
    /// left free those whose slot is beyond. Returns the number of each slot beyond.
    fn number(self, ids: &[i64], pilots: &[u16], slots: usize, numbered: &mut Vec<i64>) -> Option<Vec<u16>> {
        let (mut placed, mut beyond) = (vec![None; ids.len()], vec![None; slots - ids.len()]);
        for &id in ids {
            let hash = self.hash(id);
            let slot = slot(hash, pilots[self.bucket(hash).1], slots);
            match placed.get_mut(slot) {
                Some(place) => *place = Some(id),
                None => beyond[slot - ids.len()] = Some(id),
            }
        }
        let mut moved = vec![0; beyond.len()];
        let mut free = 0;
        for (to, id) in moved.iter_mut().zip(beyond).filter(|(_, id)| id.is_some()) {
            free += placed[free..].iter().position(Option::is_none)?;
            placed[free] = id;
            *to = free as u16;
        }
        numbered.extend(placed.into_iter().flatten());
        Some(moved)
    }
}

/// Returns the two words of a product: a hash in the range of `count`, and what is left to choose by.
#[inline(always)]
fn scaled(hash: u64, count: u64) -> (usize, u64) {
    let product = u128::from(hash) * u128::from(count);
    ((product >> u64::BITS) as usize, product as u64)
}

#[inline(always)]
fn slot(hash: u64, pilot: u16, slots: usize) -> usize {
    let mixed = hash ^ u64::from(pilot).wrapping_mul(PER_PILOT);
    scaled(mixed.wrapping_mul(SPREAD), slots as u64).0
}

/// Which slots of a part are in use.
struct UsedSlots {
    slots: usize,
    bits: Vec<u64>,
}

impl UsedSlots {
    /// Takes the slots that a pilot sends the hashes of a bucket to, if all are free.
    fn take(&mut self, hashes: &[u64], pilot: u16) -> bool {
        for (number, &hash) in hashes.iter().enumerate() {
            let slot = slot(hash, pilot, self.slots);
            if self.bits[slot / 64] >> (slot % 64) & 1 == 1 {
                for &hash in &hashes[..number] {
                    let before = self::slot(hash, pilot, self.slots);
                    self.bits[before / 64] &= !(1 << (before % 64));
                }
                return false;
            }
            self.bits[slot / 64] |= 1 << (slot % 64);
        }
        true
    }
}

/// A hash that is read from its bytes.
#[derive(Debug)]
pub(in super::super) struct PerfectHash {
    shape: HashShape,
    /// The number at which each part begins, and their count.
    starts: Vec<u32>,
    moved: usize,
    pilots: usize,
}

/// Reads 16 bits at a place of a hash's bytes.
pub(super) trait ReadWord {
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte there was changed.
    fn word(self, place: usize) -> crate::Result<u16>;
}

impl PerfectHash {
    /// Takes the hash of so many ids, of whose bytes these say where parts start.
    ///
    /// # Errors
    /// Says that it is none.
    pub(super) fn open(shape: HashShape, starts: &[u8], ids: usize) -> Result<Self, String> {
        let refused = || format!("the hash of its {ids} ids does not add up");
        let [expected, moved, pilots] = shape.places().ok_or_else(refused)?;
        let is_whole = starts.len() == expected.len()
            && [shape.parts, shape.buckets, shape.spare].iter().all(|&count| count > 0);
        let starts: Vec<u32> = starts.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let fits = |pair: &[u32]| {
            let own = pair[1].checked_sub(pair[0]).map(|own| own as usize + shape.spare as usize);
            own.is_some_and(|slots| slots <= MAX_SLOTS)
        };
        let ends = starts.first().zip(starts.last()).map(|(&first, &last)| (first, last as usize));
        match is_whole && ends == Some((0, ids)) && starts.windows(2).all(fits) {
            true => Ok(Self { shape, starts, moved: moved.start, pilots: pilots.start }),
            false => Err(refused()),
        }
    }

    #[inline(always)]
    pub(super) fn hash(&self, id: i64) -> u64 {
        self.shape.hash(id)
    }

    /// Returns where the pilot of a hash lies.
    #[inline(always)]
    pub(super) fn pilot_place(&self, hash: u64) -> usize {
        let (part, bucket) = self.shape.bucket(hash);
        self.pilots + (part * self.shape.buckets as usize + bucket) * size_of::<u16>()
    }

    /// Returns the number of the only id that may have a hash. It may be that of no id, where bytes were changed or a part is empty.
    #[inline(always)]
    pub(super) fn number(&self, from: impl ReadWord + Copy, hash: u64) -> crate::Result<usize> {
        let (part, _) = self.shape.bucket(hash);
        let (start, end) = (self.starts[part], self.starts[part + 1]);
        let (count, spare) = ((end - start) as usize, self.shape.spare as usize);
        let mut slot = slot(hash, from.word(self.pilot_place(hash))?, count + spare);
        if slot >= count {
            let beyond = part * spare + slot - count;
            slot = from.word(self.moved + beyond * size_of::<u16>())?.into();
        }
        Ok(start as usize + slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy)]
    struct Bytes<'a>(&'a [u8]);

    impl ReadWord for Bytes<'_> {
        fn word(self, place: usize) -> crate::Result<u16> {
            Ok(u16::from_le_bytes([self.0[place], self.0[place + 1]]))
        }
    }

    fn opened(built: &BuiltHash) -> Result<PerfectHash, String> {
        let [starts, ..] = built.shape.places().unwrap();
        PerfectHash::open(built.shape, &built.bytes[starts], built.ids.len())
    }

    fn numbers(built: &BuiltHash, ids: &[i64]) -> Vec<usize> {
        let hash = opened(built).unwrap();
        ids.iter().map(|&id| hash.number(Bytes(&built.bytes), hash.hash(id)).unwrap()).collect()
    }

    proptest! {
        #[test]
        fn each_id_has_its_number_and_others_one_of_them(
            ids in prop::collection::hash_set(any::<i64>(), 1..400), others in prop::collection::vec(any::<i64>(), 0..40)
        ) {
            let ids: Vec<i64> = ids.into_iter().collect();
            let built = build(ids.clone()).unwrap();
            prop_assert_eq!(numbers(&built, &built.ids), (0..ids.len()).collect::<Vec<_>>());
            prop_assert!(numbers(&built, &others).iter().all(|number| *number < ids.len()));
            let mut reversed = ids;
            reversed.reverse();
            prop_assert_eq!(build(reversed).unwrap().bytes, built.bytes, "the order in which they came is nothing");
        }
    }

    #[test]
    fn many_ids_take_half_a_byte_each() {
        let ids: Vec<i64> = (0..200_000i64).map(|id| id * id * 31).collect();
        let built = build(ids).unwrap();
        assert_eq!(built.shape.parts, 7);
        assert!(built.bytes.len() < 200_000 * 54 / 100, "{}", built.bytes.len());
        assert_eq!(numbers(&built, &built.ids), (0..200_000).collect::<Vec<_>>());
    }

    #[test]
    fn ids_chosen_against_a_seed_get_another() {
        let shape = HashShape::new(200_000, 0);
        let ids: Vec<i64> = (0..).filter(|&id| shape.bucket(shape.hash(id)).0 == 3).take(200_000).collect();
        let built = build(ids).unwrap();
        assert_eq!(built.shape.seed, 1);
        assert_eq!(numbers(&built, &built.ids), (0..200_000).collect::<Vec<_>>());
    }

    #[test]
    fn an_id_that_is_there_twice_is_told() {
        assert_eq!(build(vec![5, -7, 5]).err(), Some("id 5 is there twice".to_owned()));
    }

    #[test]
    fn starts_that_do_not_add_up_are_refused() {
        let built = build((0..70_000).map(|id| id * 999_983).collect()).unwrap();
        let [starts, ..] = built.shape.places().unwrap();
        let starts = &built.bytes[starts];
        let refused = |shape, starts: &[u8]| PerfectHash::open(shape, starts, 70_000).err();
        assert_eq!(refused(built.shape, starts), None);
        let expected = Some("the hash of its 70000 ids does not add up".to_owned());
        for (place, value) in [(0, 1), (4, u32::MAX), (4, 70_000), (12, 69_999)] {
            let mut starts = starts.to_vec();
            starts[place..place + 4].copy_from_slice(&value.to_le_bytes());
            assert_eq!(refused(built.shape, &starts), expected, "{value} at {place}");
        }
        assert_eq!(refused(built.shape, &starts[4..]), expected);
        assert_eq!(refused(built.shape, &[]), expected);
        for shape in [HashShape { parts: u32::MAX, ..built.shape }, HashShape { buckets: 0, ..built.shape }] {
            assert_eq!(refused(shape, starts), expected);
        }
    }
}
