//! What the tensor of a table's handle holds: a number that no other handle has, of whatever process, and the table's name.
//!
//! A handle leaves its process in exported programs, traces and pickles. Where its number is unknown, the name still
//! tells which table is meant. All handles have one length, so that one compiled graph serves every table. Files hold
//! them: what the words mean must not change under the same mark.

use crate::guard::Failure;

/// The words of a handle. An odd number: no batch should have as many ids, or a graph for any shape would take both
/// sizes for one.
pub(crate) const HANDLE_WORDS: usize = 19;

const NAME_WORDS: usize = HANDLE_WORDS - 1;

/// The bytes for the name; of a longer one those of its beginning and of a hash of all.
const NAME_BYTES: usize = (NAME_WORDS - 1) * size_of::<i64>();
const HASH_BYTES: usize = size_of::<u128>();

/// Stands in the upper half of the word that holds the name's length.
const MARK: i64 = 0x7273_6831 << 32;

/// The words of a handle that stand for the table's name: its length and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NameWords([i64; NAME_WORDS]);

impl NameWords {
    pub(crate) fn new(name: &str) -> Self {
        let mut bytes = [0; NAME_BYTES];
        match bytes.get_mut(..name.len()) {
            Some(start) => start.copy_from_slice(name.as_bytes()),
            None => {
                let (start, hash) = bytes.split_at_mut(NAME_BYTES - HASH_BYTES);
                start.copy_from_slice(&name.as_bytes()[..start.len()]);
                hash.copy_from_slice(&hash_of(name).to_le_bytes());
            }
        }
        let mut words = [MARK | name.len() as i64; NAME_WORDS];
        for (word, bytes) in words[1..].iter_mut().zip(bytes.as_chunks().0) {
            *word = i64::from_le_bytes(*bytes);
        }
        Self(words)
    }

    /// Returns how messages call the table; of a long name only the beginning is known.
    pub(crate) fn text(&self) -> String {
        let bytes: Vec<u8> = self.0[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
        let length = (self.0[0] ^ MARK) as usize;
        match bytes.get(..length) {
            Some(name) => String::from_utf8_lossy(name).into_owned(),
            None => format!("{}...", String::from_utf8_lossy(&bytes[..NAME_BYTES - HASH_BYTES])),
        }
    }
}

/// What a handle's tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandleWords {
    pub(crate) number: i64,
    pub(crate) name: NameWords,
}

impl HandleWords {
    /// Reads the words of a tensor, of whatever numbers, for a call of the name `operation`.
    pub(crate) fn read(operation: &str, words: &[i64]) -> Result<Self, Failure> {
        let handle = words.split_first().and_then(|(&number, name)| {
            let name = NameWords(name.try_into().ok()?);
            let is_marked = (name.0[0] ^ MARK) >> 32 == 0;
            is_marked.then_some(Self { number, name })
        });
        let none = || {
            format!(
                "{operation}: table must be a handle as make_hashtable gives it, got other numbers of its shape"
            )
        };
        handle.ok_or_else(|| Failure::of(operation, none()))
    }

    pub(crate) fn to_words(self) -> [i64; HANDLE_WORDS] {
        let mut words = [self.number; HANDLE_WORDS];
        words[1..].copy_from_slice(&self.name.0);
        words
    }
}

/// FNV-1a: the same in every process and version.
fn hash_of(name: &str) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    name.bytes().fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str) -> String {
        NameWords::new(name).text()
    }

    #[test]
    fn a_name_is_read_back_and_of_a_long_one_the_beginning() {
        let longest = "n".repeat(NAME_BYTES);
        for name in ["", "user", "Nutzer \u{fc}", &longest] {
            assert_eq!(text(name), name);
        }
        assert_eq!(text(&format!("{longest}n")), format!("{}...", "n".repeat(NAME_BYTES - HASH_BYTES)));
        assert!(text(&"\u{fc}".repeat(NAME_BYTES)).starts_with("\u{fc}\u{fc}"));
    }

    #[test]
    fn names_differ_in_their_words() {
        let start = "n".repeat(NAME_BYTES);
        let names =
            ["", "\0", "a", "a\0", &start, &format!("{start}a"), &format!("{start}b"), &format!("{start}ab")];
        let words = names.map(NameWords::new);
        for (number, one) in words.iter().enumerate() {
            assert!(words[..number].iter().all(|other| other != one), "{number}");
        }
    }

    #[test]
    fn the_words_of_a_format_in_files_stay_as_they_are() {
        let words = HandleWords { number: 7, name: NameWords::new("user") }.to_words();
        assert_eq!(words[..4], [7, 0x7273_6831_0000_0004, 0x7265_7375, 0]);
        assert_eq!(hash_of("foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn other_numbers_are_no_handle() {
        let handle = HandleWords { number: 7, name: NameWords::new("user") };
        let words = handle.to_words();
        assert_eq!(HandleWords::read("emb_read", &words).unwrap(), handle);
        let unmarked = [7; HANDLE_WORDS];
        for words in [&words[..4], &unmarked, &[]] {
            let refused = HandleWords::read("emb_read", words).unwrap_err().to_string();
            assert!(
                refused.starts_with("emb_read: table must be a handle as make_hashtable gives it"),
                "{refused}"
            );
        }
    }
}
