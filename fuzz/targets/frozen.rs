//! The file of a frozen table, all of whose checksums fit.
#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use recstore::{EmbeddingTable, FrozenMemory, FrozenTable};

const BLOCK: usize = 64 << 10;

/// Gives the blocks before the last tensor, and the header, the checksums that stand in that tensor.
fn repair(bytes: &mut [u8]) -> Option<()> {
    let length = usize::try_from(u64::from_le_bytes(*bytes.first_chunk()?)).ok()?;
    let header = 8usize.checked_add(length)?;
    let blocks = bytes.len().checked_sub(4)?.div_ceil(BLOCK + 4);
    let checks = bytes.len().checked_sub(4 * (blocks + 1))?;
    let mut sums = vec![crc32fast::hash(bytes.get(..header)?)];
    sums.extend(bytes[..checks].chunks(BLOCK).map(crc32fast::hash));
    let (words, _) = bytes[checks..].as_chunks_mut::<4>();
    words.iter_mut().zip(sums).for_each(|(word, sum)| *word = sum.to_le_bytes());
    Some(())
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    _ = repair(&mut bytes);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("t");
    fs::write(&path, bytes).unwrap();
    for memory in [FrozenMemory::Mapped, FrozenMemory::Copied] {
        let Ok(table) = FrozenTable::open(&path, memory) else { continue };
        let ids = [0, 1, -2, i64::MIN];
        if let Some(floats) = table.dim().checked_mul(ids.len()).filter(|floats| *floats < 1 << 20) {
            _ = table.read(&ids, &mut vec![0.0; floats]);
        }
        _ = table.ids().map(|ids| ids.len());
    }
});
