//! The ids of n-grams of tokens, for models that look up what was said last in tables of memory.
//!
//! Several tables hash an n-gram by different seeds: two n-grams that share a row of one table seldom share those of the
//! others. Source: multi-head hashing in "Conditional Memory via Scalable Lookup" (Engram), `DeepSeek` 2026.

use std::ops::Range;

use super::{IdInputError, count, first_hash, in_pieces, next_hash, salt};
use crate::kernel::parallel::Executor;

/// The token that stands before the first of a row.
pub const PADDING_TOKEN: i64 = -1;

const MAX_TOKENS: i64 = 256;
const MAX_TABLES: i64 = 1_024;

/// Tables of as many rows each, and the n-grams that they keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramTables {
    tokens: usize,
    rows: u64,
    salts: Vec<u64>,
}

impl NgramTables {
    /// `tables` tables of `vocab` rows for n-grams of `n` tokens. Table k has the seed `seed + k`.
    ///
    /// # Errors
    /// [`IdInputError::Count`]: `n` is not from 1 to 256, `tables` not from 1 to 1,024, or there are no rows.
    pub fn new(n: i64, tables: i64, vocab: i64, seed: i64) -> Result<Self, IdInputError> {
        const OPERATION: &str = "ngram_ids";
        let tokens = count(OPERATION, "n", n, MAX_TOKENS)?;
        count(OPERATION, "tables", tables, MAX_TABLES)?;
        let rows = count(OPERATION, "vocab", vocab, i64::MAX)? as u64;
        let salts = (0..tables).map(|table| salt(seed.wrapping_add(table))).collect();
        Ok(Self { tokens, rows, salts })
    }

    /// Writes to `ids` for each token, and for each table, the row of the n-gram that ends with the token.
    ///
    /// `tokens` are rows of `length`. Before the first token of a row stand [`PADDING_TOKEN`]s. The hash is that of
    /// [`super::cross_ids`] over the tokens, the oldest first; the row is the upper half of its product with the number
    /// of rows.
    ///
    /// # Panics
    /// If `tokens` are no whole rows, or there is not an id for each token and table.
    pub fn ids(&self, executor: &dyn Executor, tokens: &[i64], length: usize, ids: &mut [i64]) {
        let tables = self.salts.len();
        assert_eq!(ids.len(), tokens.len() * tables, "ngram_ids: an id for each token and table");
        assert!(tokens.len().is_multiple_of(length), "ngram_ids: whole rows of tokens");
        in_pieces(executor, ids, tables, |first, ids| {
            let mut scratch = Scratch::default();
            let (mut first, mut left) = (first, ids);
            while !left.is_empty() {
                let in_row = length - first % length;
                let places = in_row.min(Scratch::PLACES).min(left.len() / tables);
                let (ids, behind) = left.split_at_mut(places * tables);
                scratch.take(tokens, first - first % length, first..first + places, self.tokens - 1);
                self.write(&mut scratch, ids);
                (first, left) = (first + places, behind);
            }
        });
    }

    /// Writes the ids of the places whose tokens lie in `scratch`.
    fn write(&self, scratch: &mut Scratch, ids: &mut [i64]) {
        let tables = self.salts.len();
        for (table, &salt) in self.salts.iter().enumerate() {
            scratch.hash(salt, self.tokens);
            for (ids, &hash) in ids.chunks_exact_mut(tables).zip(&scratch.hashes) {
                ids[table] = reduced(hash, self.rows) as i64;
            }
        }
    }
}

/// A number below `rows`, of which each comes of as many hashes, but for one: the upper half of the product.
#[inline(always)]
fn reduced(hash: u64, rows: u64) -> u64 {
    ((u128::from(hash) * u128::from(rows)) >> 64) as u64
}

/// Some places of a row that are hashed together, few enough for the first cache.
#[derive(Default)]
struct Scratch {
    /// Those before the first place that belong to its n-gram, then those of the places.
    tokens: Vec<i64>,
    hashes: Vec<u64>,
}

impl Scratch {
    const PLACES: usize = 512;

    /// Takes the tokens of places of the row that begins at `row`, and as many `before` them.
    fn take(&mut self, tokens: &[i64], row: usize, places: Range<usize>, before: usize) {
        let start = places.start.saturating_sub(before).max(row);
        let padding = before - (places.start - start);
        self.tokens.clear();
        self.tokens.resize(padding, PADDING_TOKEN);
        self.tokens.extend_from_slice(&tokens[start..places.end]);
    }

    /// Hashes the n-gram of `n` tokens of each place.
    fn hash(&mut self, salt: u64, n: usize) {
        let places = self.tokens.len() - (n - 1);
        self.hashes.clear();
        self.hashes.extend(self.tokens[..places].iter().map(|&token| first_hash(token, salt)));
        // Ages outside, places inside: the hashes of different places do not wait for each other.
        for age in 1..n {
            for (hash, &token) in self.hashes.iter_mut().zip(&self.tokens[age..]) {
                *hash = next_hash(*hash, token);
            }
        }
    }
}
