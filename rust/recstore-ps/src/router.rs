//! Which shard an id's row lies on: a function of the id alone, the same on every machine, for every int64.

use std::fmt;
use std::str::FromStr;

use recstore::Error;
use serde::{Deserialize, Serialize};

/// How ids are spread over shards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HashMethod {
    /// The remainder of `CityHash64` (version 1.0.3) of the id's eight little-endian bytes.
    #[default]
    CityHash,
    /// The Euclidean remainder of the id, which is never negative.
    SimpleMod,
}

impl FromStr for HashMethod {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "city_hash" => Ok(Self::CityHash),
            "simple_mod" => Ok(Self::SimpleMod),
            _ => Err(Error::InvalidConfig {
                message: format!("hash_method must be city_hash or simple_mod, got \"{name}\""),
            }),
        }
    }
}

impl fmt::Display for HashMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CityHash => "city_hash",
            Self::SimpleMod => "simple_mod",
        })
    }
}

/// Where the rows of ids lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Router {
    method: HashMethod,
    shards: usize,
}

/// The ids of a call, one list a shard, and where each came from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Split {
    /// For each shard its ids, in input order.
    pub ids: Vec<Vec<i64>>,
    /// For each shard the positions of these among the ids of the call.
    pub positions: Vec<Vec<usize>>,
}

impl Router {
    /// Spreads ids over `shards` shards; 0 counts as 1.
    pub fn new(method: HashMethod, shards: usize) -> Self {
        Self { method, shards: shards.max(1) }
    }

    /// Returns the number of shards.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Returns how ids are spread.
    pub fn method(&self) -> HashMethod {
        self.method
    }

    /// Returns the shard of an id.
    pub fn shard_of(&self, id: i64) -> usize {
        let shard = match self.method {
            HashMethod::CityHash => city_hash(id) % self.shards as u64,
            // Euclidean, as the remainder of a negative id would be negative.
            HashMethod::SimpleMod => i128::from(id).rem_euclid(self.shards as i128) as u64,
        };
        shard as usize
    }

    /// Splits ids by shard.
    pub fn split(&self, ids: &[i64]) -> Split {
        if self.shards == 1 {
            return Split { ids: vec![ids.to_vec()], positions: vec![(0..ids.len()).collect()] };
        }
        let mut split =
            Split { ids: vec![Vec::new(); self.shards], positions: vec![Vec::new(); self.shards] };
        for (position, &id) in ids.iter().enumerate() {
            let shard = self.shard_of(id);
            split.ids[shard].push(id);
            split.positions[shard].push(position);
        }
        split
    }
}

impl Split {
    /// Copies for each shard the rows of its ids out of those of the call.
    pub fn gather(&self, rows: &[f32], dim: usize) -> Vec<Vec<f32>> {
        let gather = |positions: &Vec<usize>| {
            let mut gathered = Vec::with_capacity(positions.len() * dim);
            positions.iter().for_each(|&position| gathered.extend_from_slice(&rows[position * dim..][..dim]));
            gathered
        };
        self.positions.iter().map(gather).collect()
    }

    /// Copies the values of one shard's ids, `width` each, to their positions among those of the call.
    pub fn scatter<T: Copy>(&self, shard: usize, width: usize, from: &[T], to: &mut [T]) {
        // A width of 0 gives no values, and no chunks can be that wide.
        for (&position, values) in self.positions[shard].iter().zip(from.chunks_exact(width.max(1))) {
            to[position * width..][..width].copy_from_slice(values);
        }
    }
}

/// `CityHash64` of the eight little-endian bytes of an id.
///
/// Source: `CityHash` 1.0.3, `HashLen0to16` for a length of 8, and `Hash128to64`.
fn city_hash(id: i64) -> u64 {
    const LEN: u64 = 8;
    let bits = id as u64;
    let (low, high) = (bits & 0xFFFF_FFFF, bits >> 32);
    hash_128_to_64(LEN.wrapping_add(low << 3), high)
}

fn hash_128_to_64(low: u64, high: u64) -> u64 {
    const FACTOR: u64 = 0x9DDF_EA08_EB38_2D69;
    let mix = |value: u64| value ^ (value >> 47);
    let first = mix((low ^ high).wrapping_mul(FACTOR));
    mix((high ^ first).wrapping_mul(FACTOR)).wrapping_mul(FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hashes_are_those_of_city_hash() {
        // From the Python package clickhouse-cityhash, which wraps the C++ code of this version.
        for (id, hash) in [
            (0, 0xD7C0_6285_B9DE_677A),
            (1, 0x8CC4_2B24_AE99_097E),
            (-1, 0xA4FD_B41C_311C_655E),
            (42, 0x91BE_5BCB_E54C_34EB),
            (1 << 32, 0xAD8F_2694_FCD7_54C8),
            (i64::MAX, 0x2C4C_01C6_58B2_F639),
            (i64::MIN, 0xC9BA_7E38_61BF_B302),
            (10_000_000_019, 0xF8E4_ED80_ED36_F44F),
        ] {
            assert_eq!(city_hash(id), hash, "{id}");
        }
    }

    #[test]
    fn a_remainder_is_never_negative() {
        let router = Router::new(HashMethod::SimpleMod, 3);
        let shards = [i64::MIN, -4, -3, -1, 0, 1, 2, 3, i64::MAX].map(|id| router.shard_of(id));
        assert_eq!(shards, [1, 2, 0, 2, 0, 1, 2, 0, 1]);
    }

    #[test]
    fn a_thousand_shards_are_balanced_under_zipf_ids() {
        // Every id that a table with Zipf lookups has is one row: spread over shards they must be even.
        const SHARDS: usize = 1_000;
        let router = Router::new(HashMethod::CityHash, SHARDS);
        let mut rows = vec![0u32; SHARDS];
        let mut lookups = vec![0.0; SHARDS];
        for rank in 0..1_000_000u32 {
            let shard = router.shard_of(i64::from(rank));
            rows[shard] += 1;
            lookups[shard] += 1.0 / f64::from(rank + 1000);
        }
        // Binomial: a mean of 1,000 and a deviation of 32; five of those either way.
        assert!(rows.iter().all(|&rows| (840..1160).contains(&rows)), "{:?}", rows.iter().max());
        let mean = lookups.iter().sum::<f64>() / SHARDS as f64;
        assert!(lookups.iter().all(|&share| share < 2.0 * mean));
    }

    #[test]
    fn an_unknown_method_is_refused_by_name() {
        assert_eq!("city_hash".parse::<HashMethod>(), Ok(HashMethod::CityHash));
        assert_eq!("simple_mod".parse::<HashMethod>(), Ok(HashMethod::SimpleMod));
        let message = "md5".parse::<HashMethod>().unwrap_err().to_string();
        assert!(message.contains("city_hash or simple_mod, got \"md5\""), "{message}");
        assert_eq!(HashMethod::CityHash.to_string(), "city_hash");
        assert_eq!(HashMethod::SimpleMod.to_string(), "simple_mod");
    }

    proptest! {
        #[test]
        fn what_is_split_and_gathered_is_scattered_to_where_it_was(
            ids in prop::collection::vec(any::<i64>(), 0..40),
            shards in 1..9usize,
            is_mod in any::<bool>(),
        ) {
            let method = if is_mod { HashMethod::SimpleMod } else { HashMethod::CityHash };
            let router = Router::new(method, shards);
            let rows: Vec<f32> = (0..2 * ids.len()).map(|value| value as f32).collect();
            let split = router.split(&ids);
            let (mut rows_back, mut ids_back) = (vec![f32::NAN; rows.len()], vec![0; ids.len()]);
            for (shard, part) in split.gather(&rows, 2).iter().enumerate() {
                split.scatter(shard, 2, part, &mut rows_back);
                split.scatter(shard, 1, &split.ids[shard], &mut ids_back);
                prop_assert!(split.ids[shard].iter().all(|&id| router.shard_of(id) == shard));
                prop_assert!(split.positions[shard].is_sorted());
            }
            prop_assert_eq!((rows_back, ids_back), (rows, ids));
        }
    }
}
