//! Many reads under way at a time, by io_uring.
//!
//! A ring is a short cut: a read that it does not do whole, for whatever reason, is done again by a plain call, which
//! says what is wrong.

use std::fs::File;
use std::io::IoSliceMut;

/// A read of neighbouring bytes of a file, each part of them into memory of its own.
pub(super) struct RingRead<'a, 'b> {
    pub(super) file: &'a File,
    pub(super) offset: u64,
    pub(super) places: &'a mut [IoSliceMut<'b>],
    /// Whether all was read.
    pub(super) is_done: bool,
}

/// The way through the kernel.
#[cfg(target_os = "linux")]
mod kernel {
    #![expect(unsafe_code, reason = "the kernel fills memory of which it gets addresses")]

    use std::io::{self, ErrorKind};
    use std::os::fd::AsRawFd;
    use std::thread;
    use std::time::Duration;

    use io_uring::squeue::Entry;
    use io_uring::{IoUring, Probe, opcode, types};

    use super::RingRead;

    /// The most reads that are under way at a time.
    const DEPTH: usize = 256;

    /// How long to wait for reads when the system refuses to wait.
    const PAUSE: Duration = Duration::from_micros(50);

    /// Submissions to the kernel, and its completions.
    pub(in crate::disk) struct Ring(IoUring);

    impl Ring {
        /// Asks the kernel for a ring.
        ///
        /// # Errors
        /// The kernel has none, or refuses it to this process.
        pub(in crate::disk) fn new() -> io::Result<Self> {
            let ring = IoUring::new(DEPTH as u32)?;
            let mut probe = Probe::new();
            ring.submitter().register_probe(&mut probe)?;
            let reads = probe.is_supported(opcode::Readv::CODE);
            if reads { Ok(Self(ring)) } else { Err(ErrorKind::Unsupported.into()) }
        }

        /// Does the reads and notes which were done whole. When it returns none is under way, whatever happened.
        ///
        /// # Errors
        /// That of the kernel; the ring must not be used again.
        pub(in crate::disk) fn read(&mut self, reads: &mut [RingRead<'_, '_>]) -> io::Result<()> {
            reads.chunks_mut(DEPTH).try_for_each(|batch| self.read_batch(batch))
        }

        fn read_batch(&mut self, batch: &mut [RingRead<'_, '_>]) -> io::Result<()> {
            for (number, read) in batch.iter_mut().enumerate() {
                let entry = entry(read, number as u64);
                // SAFETY:
                // 1. The file, the places and their memory are borrowed by `batch`, mutably where the kernel writes.
                // 2. From the first submission below until the kernel has answered all that it took, this function
                //    neither returns nor unwinds. What it did not take goes with the ring, which is not used again.
                unsafe { self.0.submission().push(&entry) }.map_err(io::Error::other)?;
            }
            let mut pending = batch.len();
            let mut refusal = None;
            while pending > 0 {
                if let Err(error) = self.0.submit_and_wait(pending)
                    && error.kind() != ErrorKind::Interrupted
                {
                    refusal = Some(error);
                }
                for completion in self.0.completion() {
                    pending -= 1;
                    if let Some(read) = batch.get_mut(completion.user_data() as usize) {
                        // A short read is not done: `pread` repeats it, and gives the error if there is one.
                        read.is_done = usize::try_from(completion.result()) == Ok(bytes(read));
                    }
                }
                let unsubmitted = self.0.submission().len();
                if refusal.is_some() && pending > unsubmitted {
                    // The kernel does not wait for those under way: they must end all the same.
                    thread::sleep(PAUSE);
                } else if refusal.is_some() {
                    break;
                }
            }
            refusal.map_or(Ok(()), Err)
        }
    }

    fn bytes(read: &RingRead<'_, '_>) -> usize {
        read.places.iter().map(|place| place.len()).sum()
    }

    fn entry(read: &mut RingRead<'_, '_>, number: u64) -> Entry {
        let file = types::Fd(read.file.as_raw_fd());
        // `IoSliceMut` has the layout of `iovec` by its documentation.
        let places = read.places.as_mut_ptr().cast_const().cast::<libc::iovec>();
        let readv = opcode::Readv::new(file, places, read.places.len() as u32);
        readv.offset(read.offset).build().user_data(number)
    }
}

/// Other systems have no rings.
#[cfg(not(target_os = "linux"))]
mod kernel {
    use std::io::{self, ErrorKind};

    use super::RingRead;

    /// There is none.
    pub(in crate::disk) enum Ring {}

    impl Ring {
        pub(in crate::disk) fn new() -> io::Result<Self> {
            Err(ErrorKind::Unsupported.into())
        }

        pub(in crate::disk) fn read(&mut self, _: &mut [RingRead<'_, '_>]) -> io::Result<()> {
            match *self {}
        }
    }
}

pub(super) use kernel::Ring;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Returns a ring, unless this system has none.
    fn ring() -> Option<Ring> {
        Ring::new().inspect_err(|error| eprintln!("not run: no io_uring: {error}")).ok()
    }

    #[test]
    fn reads_are_done_whole_or_not_and_leave_the_ring_usable() {
        let Some(mut ring) = ring() else { return };
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..6_000u32).map(|i| (i * 7 % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        for _ in 0..2 {
            let mut memory = vec![0; 10 * 601];
            let mut places: Vec<IoSliceMut<'_>> = memory.chunks_mut(5).map(IoSliceMut::new).collect();
            let mut reads: Vec<RingRead<'_, '_>> = places
                .chunks_mut(2)
                .enumerate()
                .map(|(number, places)| RingRead {
                    file: &file,
                    offset: number as u64 * 10,
                    places,
                    is_done: false,
                })
                .collect();
            ring.read(&mut reads).unwrap();
            let done: Vec<bool> = reads.iter().map(|read| read.is_done).collect();
            assert!(done[..600].iter().all(|done| *done) && !done[600]);
            assert_eq!(memory[..6_000], bytes);
        }
    }
}
