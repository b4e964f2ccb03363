//! What kernels read rows from: a frozen table, or one and what changed in it.

use super::encoding::Encoding;
use crate::Result;
use crate::kernel::simd::{Lanes, ScalarLanes};

/// The number of a row that is not there.
pub(super) const NO_ROW: usize = usize::MAX;

/// Rows by the ids that they have, in three steps, so that the memory of one is asked for before the next.
pub(super) trait RowSource: Copy + Sync {
    /// Returns the elements of a row.
    fn dim(self) -> usize;

    /// Returns how rows are kept.
    fn encoding(self) -> Encoding;

    /// Writes the values that an id without a row has.
    fn fill_initial(self, id: i64, row: &mut [f32]);

    /// Asks for what says where the rows of ids are. `hashes` are for [`RowSource::find`].
    fn seek(self, ids: &[i64], hashes: &mut [u64]);

    /// Writes the number of the row that each id has if it has one, [`NO_ROW`] where it is known that it has none.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte that was read was changed.
    fn find(self, lanes: impl Lanes, ids: &[i64], hashes: &[u64], numbers: &mut [usize]) -> Result<()>;

    /// Asks for a row.
    fn prefetch_row(self, number: usize);

    /// Returns the bytes of the row of a number, if it is that of an id.
    ///
    /// # Errors
    /// As [`RowSource::find`].
    fn row<'a>(self, number: usize, id: i64) -> Result<Option<&'a [u8]>>
    where
        Self: 'a;
}

/// Returns the bytes of the row of one id, and its number, if it has one.
///
/// # Errors
/// As [`RowSource::find`].
pub(super) fn row_of<'a>(source: impl RowSource + 'a, id: i64) -> Result<Option<(usize, &'a [u8])>> {
    let (mut hashes, mut numbers) = ([0], [NO_ROW]);
    source.seek(&[id], &mut hashes);
    source.find(ScalarLanes, &[id], &hashes, &mut numbers)?;
    match numbers[0] {
        NO_ROW => Ok(None),
        number => Ok(source.row(number, id)?.map(|row| (number, row))),
    }
}
