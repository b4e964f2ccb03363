//! Pieces of one size in one array, those given back first.

use bytemuck::Pod;

use crate::kernel::pages::{Pages, supplied_bytes};

/// Pieces that are numbered; none ever moves to another number.
#[derive(Debug)]
pub(super) struct Slots<T: Pod> {
    items: Pages<T>,
    /// How many numbers were ever given out.
    high_water: usize,
    free: Vec<u32>,
}

impl<T: Pod> Default for Slots<T> {
    fn default() -> Self {
        Self { items: Pages::default(), high_water: 0, free: Vec::new() }
    }
}

impl<T: Pod> Slots<T> {
    /// Returns the number of a piece that holds `item` now.
    pub(super) fn put(&mut self, item: &T) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.high_water += 1;
            self.high_water as u32 - 1
        });
        if self.high_water > self.items.len() {
            self.items.grow(Self::room(self.high_water));
        }
        self.items[number as usize] = *item;
        number
    }

    /// Takes a piece back.
    pub(super) fn free(&mut self, number: u32) {
        self.free.push(number);
    }

    #[inline(always)]
    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.items.get(number as usize)
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, number: u32) -> &mut T {
        &mut self.items[number as usize]
    }

    /// Returns the bytes in use.
    pub(super) fn bytes(&self) -> usize {
        self.bytes_after(0)
    }

    /// Returns the most bytes in use when there are `more` pieces.
    pub(super) fn bytes_after(&self, more: usize) -> usize {
        let count = self.high_water + more.saturating_sub(self.free.len());
        let size = size_of::<T>();
        // Each number can be among the free ones.
        supplied_bytes(count * size, 0, Self::room(count) * size) + count * size_of::<u32>()
    }

    /// For how many pieces there is room when `count` are in use; behind them the system has supplied nothing.
    fn room(count: usize) -> usize {
        const MIN: usize = 8;
        if count == 0 { 0 } else { count.next_power_of_two().max(MIN) }
    }
}
