//! Pools the rows of bags of ids: sum, mean or maximum, in one pass over the rows.

use std::str::FromStr;

use crate::{Error, Result};

/// How the rows of a bag become one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingMode {
    /// Their sum, each row times its weight where weights are given.
    Sum,
    /// That sum divided by the number of rows; an empty bag gives zeros.
    Mean,
    /// The maximum of every column; an empty bag gives zeros. Takes no weights.
    Max,
}

impl FromStr for PoolingMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "sum" => Ok(Self::Sum),
            "mean" => Ok(Self::Mean),
            "max" => Ok(Self::Max),
            _ => Err(bag_error(format!("the pooling mode must be sum, mean or max, got \"{name}\""))),
        }
    }
}

/// Bags of ids: bag b holds the ids from `offsets[b]` up to `offsets[b + 1]`.
#[derive(Debug, Clone, Copy)]
pub struct BagInput<'a> {
    /// The ids of all bags, one after another.
    pub ids: &'a [i64],
    /// One more than there are bags, rising from 0 to the number of ids.
    pub offsets: &'a [i64],
    /// How rows are pooled.
    pub mode: PoolingMode,
    /// One factor an id, for sum and mean.
    pub per_sample_weights: Option<&'a [f32]>,
    /// An id that no bag counts.
    pub padding_idx: Option<i64>,
}

impl BagInput<'_> {
    /// Checks offsets and weights.
    ///
    /// # Errors
    /// [`Error::InvalidBag`] or [`Error::LengthMismatch`].
    pub(crate) fn validate(&self) -> Result<()> {
        check_offsets(self.offsets, self.ids.len())?;
        self.validate_weights()
    }

    fn validate_weights(&self) -> Result<()> {
        let Some(weights) = self.per_sample_weights else {
            return Ok(());
        };
        if self.mode == PoolingMode::Max {
            return Err(bag_error("per_sample_weights go with sum and mean, not with max".to_owned()));
        }
        if weights.len() != self.ids.len() {
            return Err(Error::LengthMismatch {
                operation: "emb_bag",
                what: "per_sample_weights, one an id".to_owned(),
                expected: self.ids.len(),
                actual: weights.len(),
            });
        }
        Ok(())
    }

    /// The number of bags.
    pub fn num_bags(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Pools bag `bag` into `pooled`; for the maximum, `max_positions` gets the position of the id whose row holds
    /// each column's maximum (the first of equals), and -1 in an empty bag. `row_of` hands out the row of an id.
    pub(crate) fn pool<'r>(
        &self,
        bag: usize,
        row_of: impl Fn(i64, &mut dyn FnMut(&[f32])) + 'r,
        pooled: &mut [f32],
        max_positions: &mut [i64],
    ) {
        let positions = self.offsets[bag] as usize..self.offsets[bag + 1] as usize;
        let counted = |position: &usize| self.padding_idx != Some(self.ids[*position]);
        pooled.fill(0.0);
        max_positions.fill(-1);
        let mut count = 0;
        for position in positions.filter(counted) {
            row_of(self.ids[position], &mut |row| match self.mode {
                PoolingMode::Max => take_maximum(pooled, max_positions, row, position),
                PoolingMode::Sum | PoolingMode::Mean => {
                    let weight = self.per_sample_weights.map(|weights| weights[position]);
                    add_row(pooled, row, weight);
                }
            });
            count += 1;
        }
        if self.mode == PoolingMode::Mean && count > 0 {
            pooled.iter_mut().for_each(|value| *value /= count as f32);
        }
    }
}

/// Checks that offsets start at 0, never fall and end at the number of ids.
///
/// # Errors
/// [`Error::InvalidBag`] names the offset, its position and what was expected.
pub fn check_offsets(offsets: &[i64], num_ids: usize) -> Result<()> {
    let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
        return Err(bag_error("offsets must hold at least the end of the last bag, got none".to_owned()));
    };
    if first != 0 {
        return Err(bag_error(format!("offsets must start at 0, got {first}")));
    }
    if let Some(bag) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
        let (before, after) = (offsets[bag], offsets[bag + 1]);
        return Err(bag_error(format!(
            "offsets must not fall, got {after} after {before} at position {}",
            bag + 1
        )));
    }
    if last as usize != num_ids {
        return Err(bag_error(format!("offsets must end at the {num_ids} ids, got {last}")));
    }
    Ok(())
}

fn add_row(pooled: &mut [f32], row: &[f32], weight: Option<f32>) {
    let weight = weight.unwrap_or(1.0);
    for (sum, value) in pooled.iter_mut().zip(row) {
        *sum += weight * value;
    }
}

fn take_maximum(pooled: &mut [f32], max_positions: &mut [i64], row: &[f32], position: usize) {
    for ((maximum, at), &value) in pooled.iter_mut().zip(max_positions).zip(row) {
        if *at < 0 || value > *maximum {
            *maximum = value;
            *at = position as i64;
        }
    }
}

fn bag_error(message: String) -> Error {
    Error::InvalidBag { message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bags<'a>(offsets: &'a [i64], mode: PoolingMode) -> BagInput<'a> {
        BagInput { ids: &[1, 2, 3], offsets, mode, per_sample_weights: None, padding_idx: Some(3) }
    }

    fn pool(input: BagInput<'_>) -> (Vec<f32>, Vec<i64>) {
        input.validate().unwrap();
        let (mut pooled, mut at) = (vec![9.0; input.num_bags()], vec![9; input.num_bags()]);
        for bag in 0..input.num_bags() {
            let row = |id: i64, visit: &mut dyn FnMut(&[f32])| visit(&[id as f32 - 10.0]);
            input.pool(bag, row, &mut pooled[bag..=bag], &mut at[bag..=bag]);
        }
        (pooled, at)
    }

    #[test]
    fn bags_are_pooled_without_padding() {
        let offsets = [0, 2, 2, 3];
        assert_eq!(pool(bags(&offsets, PoolingMode::Sum)).0, [-17.0, 0.0, 0.0]);
        assert_eq!(pool(bags(&offsets, PoolingMode::Mean)).0, [-8.5, 0.0, 0.0]);
        assert_eq!(pool(bags(&offsets, PoolingMode::Max)), (vec![-8.0, 0.0, 0.0], vec![1, -1, -1]));
    }

    #[test]
    fn weights_scale_rows() {
        let weights = [2.0, 0.5, 1.0];
        let input = BagInput { per_sample_weights: Some(&weights), ..bags(&[0, 3], PoolingMode::Sum) };
        assert_eq!(pool(input).0, [-22.0]);
    }

    #[test]
    fn bad_offsets_and_weights_are_refused() {
        let message = |input: BagInput<'_>| input.validate().unwrap_err().to_string();
        assert!(message(bags(&[], PoolingMode::Sum)).contains("got none"));
        assert!(message(bags(&[1, 3], PoolingMode::Sum)).contains("start at 0, got 1"));
        assert!(message(bags(&[0, 2, 1], PoolingMode::Sum)).contains("got 1 after 2 at position 2"));
        assert!(message(bags(&[0, 4], PoolingMode::Sum)).contains("the 3 ids, got 4"));
        let weighted = |mode| BagInput { per_sample_weights: Some(&[1.0]), ..bags(&[0, 3], mode) };
        assert!(message(weighted(PoolingMode::Max)).contains("not with max"));
        assert!(message(weighted(PoolingMode::Sum)).contains("expected 3 per_sample_weights"));
        assert!("median".parse::<PoolingMode>().unwrap_err().to_string().contains("median"));
    }
}
