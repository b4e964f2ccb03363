//! Memory of large frames that is used again: fresh memory costs a machine more than filling it.

use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

/// Smaller buffers are as cheap to make.
const MIN_WORDS: usize = (128 << 10) / size_of::<u64>();

/// Larger buffers are not kept.
const MAX_WORDS: usize = (64 << 20) / size_of::<u64>();

/// The buffers kept: half a gigabyte, at most.
const MAX_BUFFERS: usize = 8;

static KEPT: Mutex<Vec<Vec<u64>>> = Mutex::new(Vec::new());

/// Returns at most `count` words, of any content.
pub(super) fn take(count: usize) -> Vec<u64> {
    if count < MIN_WORDS {
        return Vec::new();
    }
    // Who finds others at it does without: a child forked in that moment must not wait.
    let kept = KEPT.try_lock().ok().and_then(|mut kept| {
        // The smallest that is large enough, or the largest.
        let fit = |&place: &usize| match kept[place].len() {
            len if len < count => (1, usize::MAX - len),
            len => (0, len),
        };
        let best = (0..kept.len()).min_by_key(fit)?;
        Some(kept.swap_remove(best))
    });
    let mut words = kept.unwrap_or_default();
    words.truncate(count);
    words
}

/// Keeps a buffer for another frame, if it is worth it.
pub(super) fn put_back(words: &mut Vec<u64>) {
    if !(MIN_WORDS..=MAX_WORDS).contains(&words.capacity()) {
        return;
    }
    if let Ok(mut kept) = KEPT.try_lock()
        && kept.len() < MAX_BUFFERS
    {
        kept.push(mem::take(words));
    }
}

/// Floats in such memory, at first of any value.
#[derive(Debug, Clone)]
pub struct Floats {
    words: Vec<u64>,
    count: usize,
}

impl Floats {
    /// Returns room for `count` floats.
    pub(crate) fn new(count: usize) -> Self {
        let len = count.div_ceil(size_of::<u64>() / size_of::<f32>());
        let mut words = take(len);
        words.resize(len, 0);
        Self { words, count }
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.words)[..self.count]
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.count]
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        put_back(&mut self.words);
    }
}

impl PartialEq for Floats {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_come_again_and_never_longer_than_wanted() {
        put_back(&mut vec![7; MIN_WORDS]);
        assert!(take(MIN_WORDS + 1).len() <= MIN_WORDS + 1);
        put_back(&mut vec![7; MIN_WORDS]);
        assert!(take(MIN_WORDS - 1).is_empty());
        for _ in 0..2 * MAX_BUFFERS {
            put_back(&mut vec![7; MIN_WORDS]);
            put_back(&mut vec![7; 3]);
            put_back(&mut Vec::with_capacity(MAX_WORDS + 1));
        }
        let kept = KEPT.lock().unwrap();
        assert!(kept.len() <= MAX_BUFFERS && kept.iter().all(|words| words.capacity() <= MAX_WORDS));
    }
}
