//! The checksum CRC-64/NVME with the names of the crate `crc-fast`, whose place it takes (`[patch]` in `Cargo.toml`).
//!
//! `object_store` computes this one checksum, for stores that are asked to compare it. The crate `crc-fast` has tables for
//! a hundred others, 0.8 MB of each program that it is linked into.

use crc::{CRC_64_NVME, Crc, Table};

static CRC64_NVME: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_NVME);

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrcAlgorithm {
    /// CRC-64/NVME: that of the NVM Express command set, revision 1.0d, section 5.2.1.3.4.
    Crc64Nvme,
}

/// A checksum of bytes that come in pieces.
pub struct Digest(crc::Digest<'static, u64, Table<16>>);

impl Digest {
    /// Begins a checksum.
    pub fn new(algorithm: CrcAlgorithm) -> Self {
        match algorithm {
            CrcAlgorithm::Crc64Nvme => Self(CRC64_NVME.digest()),
        }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes.
    pub fn finalize(self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(pieces: &[&[u8]]) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        pieces.iter().for_each(|piece| digest.update(piece));
        digest.finalize()
    }

    #[test]
    fn the_checksum_is_the_published_one() {
        // "Catalogue of parametrised CRC algorithms", CRC-64/NVME: its check value, that of the text of nine digits.
        assert_eq!(checksum(&[b"123456789"]), 0xAE8B_1486_0A79_9888);
        assert_eq!(checksum(&[]), 0);
    }

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..1000u32).map(|place| (place * 7 % 251) as u8).collect();
        for cut in [0, 1, 15, 16, 17, 500, 1000] {
            let (one, other) = bytes.split_at(cut);
            assert_eq!(checksum(&[one, other]), checksum(&[&bytes]), "{cut}");
        }
    }
}
