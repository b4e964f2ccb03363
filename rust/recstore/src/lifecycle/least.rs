//! The least of many items, of which only those are kept.

use std::collections::BinaryHeap;

/// The `limit` least items of those that came.
#[derive(Debug)]
pub(crate) struct Least<T> {
    limit: usize,
    greatest_first: BinaryHeap<T>,
}

impl<T: Ord> Least<T> {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, greatest_first: BinaryHeap::new() }
    }

    pub(crate) fn push(&mut self, item: T) {
        if self.greatest_first.len() < self.limit {
            self.greatest_first.push(item);
        } else if let Some(mut greatest) = self.greatest_first.peek_mut().filter(|greatest| item < **greatest)
        {
            *greatest = item;
        }
    }

    /// Returns the least items, in no order.
    pub(crate) fn into_items(self) -> Vec<T> {
        self.greatest_first.into_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_least_are_those_that_sorting_puts_first(items in prop::collection::vec(0..50u64, 0..100), limit in 0..60usize) {
            let mut least = Least::new(limit);
            items.iter().for_each(|item| least.push(*item));
            let (mut kept, mut sorted) = (least.into_items(), items);
            kept.sort_unstable();
            sorted.sort_unstable();
            sorted.truncate(limit);
            prop_assert_eq!(kept, sorted);
        }
    }
}
