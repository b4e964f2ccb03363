//! Where in the files of a table the record of a row lies.

/// The files of a table: a write locks its file, so that as many can go on at a time.
pub(super) const STRIPES: usize = 4;

/// Rows of neighbouring indices that lie in one file, before those of the next.
const BLOCK: usize = 1024;

/// The place of a record. Places are in the order of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slot {
    /// Which of the files it is.
    pub(crate) stripe: u32,
    /// How many records lie before it there.
    pub(super) position: u32,
}

impl Slot {
    /// Returns the place of the record of a row.
    #[inline(always)]
    pub(crate) fn of(index: u32) -> Self {
        let (block, within) = (index / BLOCK as u32, index % BLOCK as u32);
        let (stripes, records) = (STRIPES as u32, BLOCK as u32);
        Self { stripe: block % stripes, position: block / stripes * records + within }
    }

    /// Whether `next` lies right behind it.
    pub(crate) fn is_before(self, next: Self) -> bool {
        self.stripe == next.stripe && self.position + 1 == next.position
    }
}

/// Returns how many records of the indices below `count` a file has room for.
pub(super) fn records_of(stripe: usize, count: usize) -> usize {
    let (whole, rest) = (count / BLOCK, count % BLOCK);
    let blocks = (whole + STRIPES - 1 - stripe) / STRIPES;
    blocks * BLOCK + if whole % STRIPES == stripe { rest } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_index_has_a_place_of_its_own_and_files_have_no_gaps() {
        for count in [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 4 * BLOCK, 9 * BLOCK + 1023] {
            let slots: BTreeSet<Slot> = (0..count as u32).map(Slot::of).collect();
            assert_eq!(slots.len(), count);
            for stripe in 0..STRIPES {
                let positions = slots.iter().filter(|slot| slot.stripe as usize == stripe);
                assert!(
                    positions.clone().map(|slot| slot.position as usize).eq(0..records_of(stripe, count))
                );
            }
        }
    }

    #[test]
    fn neighbours_are_of_one_file() {
        assert!(Slot::of(7).is_before(Slot::of(8)) && !Slot::of(7).is_before(Slot::of(9)));
        assert!(!Slot::of(BLOCK as u32 - 1).is_before(Slot::of(BLOCK as u32)));
        assert!(Slot::of(BLOCK as u32 - 1).is_before(Slot::of((STRIPES * BLOCK) as u32)));
    }
}
