//! Which rows lie in memory, in which *frame*, and which of them have to go when others come.
//!
//! Rows go by the clock (second chance): a hand goes round the frames, takes the mark of use of those that have one, and
//! stops at one that has none.
//!
//! Source: Corbato 1968, "A paging experiment with the Multics system".

use crate::kernel::bits::Bits;
use crate::kernel::pages::Pages;

/// A row in memory: its index and its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Resident {
    pub(crate) index: u32,
    pub(crate) frame: u32,
}

/// The frames of a table and whose rows they hold.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    /// By index: the frame plus one, 0 for a row on disk.
    frames: Pages<u32>,
    /// By frame: the index plus one, 0 for a free frame.
    indices: Pages<u32>,
    free: Vec<u32>,
    num_frames: usize,
    /// Frames whose record differs from the file's.
    dirty: Bits,
    /// Frames used since the hand passed them.
    used: Bits,
    /// Frames that the hand must not stop at.
    pinned: Bits,
    /// Frames of rows that were read ahead for a step to come: the hand stops there only if there are no others.
    expected: Bits,
    hand: usize,
}

/// Makes an array at least `len` long, by an eighth more than asked for so that it seldom moves.
fn grow(array: &mut Pages<u32>, len: usize) {
    if len > array.len() {
        array.grow(len + len / 8);
    }
}

impl BufferPool {
    /// Returns the bytes of arrays for so many indices and frames.
    pub(crate) fn bytes_for(num_indices: usize, num_frames: usize) -> usize {
        // Two words of a pair and the free list; four bits a frame.
        num_indices * size_of::<u32>() + num_frames * (2 * size_of::<u32>() + 1)
    }

    /// Makes room for the indices below `len`.
    pub(crate) fn grow_indices(&mut self, len: usize) {
        grow(&mut self.frames, len);
    }

    pub(crate) fn num_frames(&self) -> usize {
        self.num_frames
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Returns how many rows lie in memory.
    pub(crate) fn num_resident(&self) -> usize {
        self.num_frames - self.free.len()
    }

    /// Adds free frames up to `len`.
    pub(crate) fn grow_frames(&mut self, len: usize) {
        grow(&mut self.indices, len);
        self.dirty.grow(len);
        self.used.grow(len);
        self.pinned.grow(len);
        self.expected.grow(len);
        // Below the others on the stack, the highest lowest: the last slab, the one that can go back, fills
        // last.
        self.free.splice(0..0, (self.num_frames as u32..len as u32).rev());
        self.num_frames = self.num_frames.max(len);
    }

    /// Returns the rows in the frames from `len` on, which [`BufferPool::shrink_frames`] would take away.
    pub(crate) fn residents_from(&self, len: usize) -> Vec<Resident> {
        (len..self.num_frames).filter_map(|frame| self.resident(frame as u32)).collect()
    }

    /// Takes the frames from `len` on away, which hold no row.
    pub(crate) fn shrink_frames(&mut self, len: usize) {
        self.free.retain(|&frame| (frame as usize) < len);
        self.num_frames = len;
        self.hand = 0;
    }

    /// Returns the frame of a row in memory.
    #[inline(always)]
    pub(crate) fn frame(&self, index: u32) -> Option<u32> {
        self.frames[index as usize].checked_sub(1)
    }

    fn resident(&self, frame: u32) -> Option<Resident> {
        let index = self.indices[frame as usize].checked_sub(1)?;
        Some(Resident { index, frame })
    }

    /// Notes that the record in a frame differs from the file's.
    #[inline(always)]
    pub(crate) fn set_dirty(&self, frame: u32) {
        self.dirty.set(frame as usize);
    }

    pub(crate) fn is_dirty(&self, frame: u32) -> bool {
        self.dirty.is_set(frame as usize)
    }

    /// Notes that a row was used.
    #[inline(always)]
    pub(crate) fn set_used(&self, frame: u32) {
        self.used.set(frame as usize);
    }

    /// Keeps a row in memory until [`BufferPool::unpin_all`].
    pub(crate) fn pin(&self, frame: u32) {
        self.pinned.set(frame as usize);
        self.used.set(frame as usize);
    }

    pub(crate) fn unpin_all(&mut self) {
        self.pinned.clear();
    }

    /// Notes that a step is to come that needs the rows that are pinned now.
    pub(crate) fn expect_pinned(&mut self) {
        self.expected.join(&self.pinned);
        // Steps that never came leave theirs: others must not be kept from their turn by those for ever.
        if self.expected.count() > self.num_frames / 2 {
            self.expected.clear();
            self.expected.join(&self.pinned);
        }
    }

    /// Notes that the step is under way that needs the rows that are pinned now.
    pub(crate) fn meet_pinned(&mut self) {
        self.expected.remove(&self.pinned);
    }

    /// Takes a free frame.
    pub(crate) fn take_free(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives a frame that was taken back.
    pub(crate) fn give_back(&mut self, frame: u32) {
        self.free.push(frame);
    }

    /// Notes that a frame that was taken holds a row, which is as in the file unless `is_dirty`.
    pub(crate) fn put(&mut self, Resident { index, frame }: Resident, is_dirty: bool) {
        self.frames[index as usize] = frame + 1;
        self.indices[frame as usize] = index + 1;
        self.used.set(frame as usize);
        if is_dirty {
            self.dirty.set(frame as usize);
        }
    }

    /// Frees the frame of a row, if it has one.
    pub(crate) fn release(&mut self, index: u32) {
        if let Some(frame) = self.frame(index) {
            self.frames[index as usize] = 0;
            self.indices[frame as usize] = 0;
            self.dirty.take(frame as usize);
            self.used.take(frame as usize);
            self.expected.take(frame as usize);
            self.pinned.take(frame as usize);
            self.free.push(frame);
        }
    }

    /// Chooses up to `count` rows that have to go, none of them pinned, and those that are expected last. They stay until
    /// they are released.
    pub(crate) fn victims(&mut self, count: usize) -> Vec<Resident> {
        let mut victims = Vec::with_capacity(count.min(self.num_frames));
        self.choose(count, &mut victims);
        if victims.len() < count && self.expected.count() > 0 {
            // Expected rows are a wish: they go before a call is refused.
            self.expected.clear();
            self.choose(count, &mut victims);
        }
        victims
    }

    /// Adds rows that have to go, and that are not expected, up to `count`.
    fn choose(&mut self, count: usize, victims: &mut Vec<Resident>) {
        // In the first round marks of use are taken, so two rounds find all there are; a third is never needed.
        for _ in 0..2 * self.num_frames {
            if victims.len() == count {
                break;
            }
            let frame = self.hand;
            self.hand = (self.hand + 1) % self.num_frames;
            let Some(resident) = self.resident(frame as u32) else { continue };
            let stays = self.pinned.is_set(frame) || self.expected.is_set(frame);
            if stays || self.used.take(frame) {
                continue;
            }
            // Chosen once: the hand passes over it in the next round.
            self.pinned.set(frame);
            victims.push(resident);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(count: u32) -> BufferPool {
        let mut residence = BufferPool::default();
        residence.grow_indices(100);
        residence.grow_frames(count as usize);
        for index in 0..count {
            let frame = residence.take_free().unwrap();
            residence.put(Resident { index: index + 10, frame }, index % 2 == 0);
        }
        residence
    }

    #[test]
    fn frames_are_handed_out_in_order_and_found_by_index() {
        let mut residence = filled(3);
        assert_eq!([9, 10, 11, 12].map(|index| residence.frame(index)), [None, Some(0), Some(1), Some(2)]);
        assert_eq!(
            (residence.take_free(), residence.is_dirty(0), residence.is_dirty(1)),
            (None, true, false)
        );
        residence.release(11);
        residence.release(11);
        assert_eq!((residence.frame(11), residence.num_free(), residence.num_resident()), (None, 1, 2));
    }

    #[test]
    fn a_row_used_since_the_hand_passed_has_a_second_chance() {
        let mut residence = filled(4);
        let first = residence.victims(1);
        assert_eq!(first, [Resident { index: 10, frame: 0 }]);
        residence.release(10);
        residence.unpin_all();
        residence.set_used(1);
        let indices: Vec<u32> = residence.victims(2).iter().map(|victim| victim.index).collect();
        assert_eq!(indices, [12, 13]);
    }

    #[test]
    fn pinned_rows_are_no_victims_and_none_is_chosen_twice() {
        let mut residence = filled(4);
        residence.pin(2);
        let mut frames: Vec<u32> = residence.victims(9).iter().map(|victim| victim.frame).collect();
        frames.sort_unstable();
        assert_eq!(frames, [0, 1, 3]);
    }

    #[test]
    fn expected_rows_go_last_and_not_once_their_step_came() {
        let indices = |victims: Vec<Resident>| victims.iter().map(|one| one.index).collect::<Vec<_>>();
        let mut residence = filled(6);
        residence.pin(0);
        residence.pin(1);
        residence.expect_pinned();
        residence.unpin_all();
        assert_eq!(indices(residence.victims(3)), [12, 13, 14]);
        residence.unpin_all();
        residence.pin(0);
        residence.meet_pinned();
        residence.unpin_all();
        assert_eq!(indices(residence.victims(5)), [15, 12, 13, 14, 10]);
        // There is nothing else: it goes all the same.
        assert_eq!(indices(residence.victims(9)), [11]);
    }

    #[test]
    fn rows_whose_step_never_comes_are_no_longer_expected_when_they_are_many() {
        let mut residence = filled(4);
        for frame in 0..3 {
            residence.unpin_all();
            residence.pin(frame);
            residence.expect_pinned();
        }
        residence.unpin_all();
        let frames: Vec<u32> = residence.victims(3).iter().map(|one| one.frame).collect();
        assert_eq!(frames, [0, 1, 3]);
    }

    #[test]
    fn frames_that_are_taken_away_are_never_handed_out() {
        let mut residence = filled(4);
        assert_eq!(residence.residents_from(3), [Resident { index: 13, frame: 3 }]);
        residence.release(13);
        residence.release(12);
        residence.shrink_frames(3);
        assert_eq!(
            (residence.take_free(), residence.take_free(), residence.num_frames()),
            (Some(2), None, 3)
        );
    }
}
