//! Rows that leave at once because a memory limit leaves no room for new ones.

use super::growth::Growth;
use super::ids::row_index::RowIndex;
use super::rows::Rows;
use super::sweep::rank;
use crate::Result;
use crate::config::EvictionConfig;
use crate::kernel::bits::Bits;
use crate::lifecycle::Least;

/// Of so many rows one leaves, though fewer would do: going through all of them should be worth it.
const SHARE: usize = 16;

impl Rows {
    /// Takes the least rows by the policy of `config` away, but for those at the indices `needed`, so that new ones find
    /// room where they were. Returns whether they do; if not, all rows are still there.
    ///
    /// # Errors
    /// [`crate::Error::Disk`], likewise.
    pub(super) fn displace(&mut self, config: &EvictionConfig, new: Growth, needed: &[u32]) -> Result<bool> {
        // As many rows as leave come: what else is needed must fit beside those that are there.
        let (count, besides) = (new.rows, Growth { rows: 0, ..new });
        let spared = self.spared(config, needed);
        let available = self.ids.len() - spared.count();
        if available < count || !self.fits(besides) {
            return Ok(false);
        }
        let leaving = (self.ids.len() / SHARE).clamp(count, available);
        let leaving = self.least(config, leaving, &spared);
        self.evictions += self.delete(&leaving)? as u64;
        Ok(true)
    }

    /// Returns the indices of rows that must stay.
    fn spared(&self, config: &EvictionConfig, needed: &[u32]) -> Bits {
        let (mut spared, len) = (Bits::default(), self.allocator.high_water());
        spared.grow(len);
        // An id without a row has an index that no row has.
        needed.iter().filter(|index| (**index as usize) < len).for_each(|index| spared.set(*index as usize));
        for index in config.keep.iter().filter_map(|id| self.ids.find(*id)) {
            spared.set(index.0 as usize);
        }
        spared
    }

    /// Returns the ids of the least rows that are not spared, in ascending order.
    fn least(&self, config: &EvictionConfig, count: usize, spared: &Bits) -> Vec<i64> {
        let mut least = Least::new(count);
        let Some(usages) = &self.usages else { return Vec::new() };
        for index in self.row_ids.used().ones_from(0).filter(|index| !spared.is_set(*index)) {
            let index = RowIndex(index as u32);
            least.push(rank(config.policy, self.row_ids.of(index), usages.of(index)));
        }
        let mut ids: Vec<i64> = least.into_items().into_iter().map(|(.., id)| id).collect();
        ids.sort_unstable();
        ids
    }
}
