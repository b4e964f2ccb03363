//! Small pieces go out together with the large one behind them: each call of the system may wake the peer.

use std::io::{self, IoSlice, Write};

/// Pieces from here on are large.
const LARGE_BYTES: usize = 4096;

/// Writes small pieces when a large one comes, or when they are many; [`Write::flush`] writes the last ones.
pub(crate) struct Gathered<W> {
    to: W,
    small: Vec<u8>,
}

impl<W: Write> Gathered<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, small: Vec::with_capacity(2 * LARGE_BYTES) }
    }

    fn write_small(&mut self) -> io::Result<()> {
        self.to.write_all(&self.small)?;
        self.small.clear();
        Ok(())
    }
}

impl<W: Write> Write for Gathered<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() < LARGE_BYTES {
            if self.small.len() >= LARGE_BYTES {
                self.write_small()?;
            }
            self.small.extend_from_slice(bytes);
            return Ok(bytes.len());
        }
        let count = self.to.write_vectored(&[IoSlice::new(&self.small), IoSlice::new(bytes)])?;
        let of_small = count.min(self.small.len());
        self.small.drain(..of_small);
        if count > of_small {
            return Ok(count - of_small);
        }
        self.write_small()?;
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_small()?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Takes at most so many bytes a call, and counts the calls.
    struct Narrow {
        most: usize,
        calls: usize,
        taken: Vec<u8>,
    }

    impl Write for Narrow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.most);
            self.taken.extend_from_slice(&bytes[..count]);
            self.calls += 1;
            Ok(count)
        }

        fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
            let all: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
            self.write(&all)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn all_that_is_written_comes_in_its_order(
            lens in prop::collection::vec(prop_oneof![0..60usize, 3_000..12_000usize], 0..12),
            most in 1..20_000usize,
        ) {
            let mut gathered = Gathered::new(Narrow { most, calls: 0, taken: Vec::new() });
            let mut expected = Vec::new();
            for (number, len) in lens.into_iter().enumerate() {
                let piece: Vec<u8> = (0..len).map(|place| (place * 7 + number) as u8).collect();
                gathered.write_all(&piece).unwrap();
                expected.extend(piece);
            }
            gathered.flush().unwrap();
            prop_assert_eq!(&gathered.to.taken, &expected);
        }
    }

    #[test]
    fn a_head_goes_out_with_its_body() {
        let mut gathered = Gathered::new(Narrow { most: usize::MAX, calls: 0, taken: Vec::new() });
        gathered.write_all(&[1; 40]).unwrap();
        gathered.write_all(&[2; LARGE_BYTES]).unwrap();
        assert_eq!((gathered.to.calls, gathered.to.taken.len()), (1, 40 + LARGE_BYTES));
    }
}
