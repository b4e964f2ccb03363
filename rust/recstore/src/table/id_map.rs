//! From an id to the index of its row.

use hashbrown::HashMap;

use super::RowIndex;

/// The ids that have a row. Every int64 can be a key.
#[derive(Debug, Default)]
pub(super) struct IdMap {
    indices: HashMap<i64, RowIndex>,
}

impl IdMap {
    pub(super) fn get(&self, id: i64) -> Option<RowIndex> {
        self.indices.get(&id).copied()
    }

    /// Gives `id`, which has none, an index.
    pub(super) fn insert(&mut self, id: i64, index: RowIndex) {
        self.indices.insert(id, index);
    }

    /// Takes the index of `id` away and returns it.
    pub(super) fn remove(&mut self, id: i64) -> Option<RowIndex> {
        self.indices.remove(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.indices.len()
    }

    /// Returns the ids in the order of their indices.
    pub(super) fn ids(&self) -> Vec<i64> {
        let mut pairs: Vec<_> = self.indices.iter().map(|(&id, &index)| (index, id)).collect();
        pairs.sort_unstable();
        pairs.into_iter().map(|(_, id)| id).collect()
    }

    /// Returns the bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        self.indices.allocation_size()
    }
}
