//! The hash of text whose values are ids.

use super::hash::mix;

const WORD: usize = 8;

/// Hashes a text: its length is mixed, then each of its words of 8 bytes, little-endian, the last filled with zeros.
#[must_use]
pub fn hash_text(text: &[u8]) -> u64 {
    let words = text.chunks(WORD).map(|bytes| {
        let mut word = [0; WORD];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    words.fold(mix(text.len() as i64), |hash, word| mix((hash ^ word) as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed by the definition, in Python's integers.
    #[test]
    fn texts_have_the_hashes_of_their_definition() {
        let expected = [
            ("", 0xE220_A839_7B1D_CDAF),
            ("a", 0x5E02_5F9A_DE9E_AF3E),
            ("12345678", 0x83DB_EC76_B33F_9CA3),
            ("123456789", 0x7CF4_6F00_F45F_A22A),
            ("Zürich, Bern and Zug", 0xF635_44BB_8940_3FAF),
        ];
        for (text, hash) in expected {
            assert_eq!(hash_text(text.as_bytes()), hash, "{text}");
        }
    }

    #[test]
    fn zeros_at_the_end_count() {
        assert_ne!(hash_text(b"a"), hash_text(b"a\0"));
    }
}
