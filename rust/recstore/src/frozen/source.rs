//! What kernels read rows from: a frozen table, or one and what changed in it.

use super::encoding::Encoding;
use crate::Result;
use crate::kernel::simd::Lanes;

/// The number of a row that is not there.
pub(super) const NO_ROW: usize = usize::MAX;

/// Rows by the ids that they have, in three steps, so that the memory of one is asked for before the next.
pub(super) trait RowSource: Copy + Sync {
    /// Where the search for an id begins.
    type Bucket: Copy + Default;

    /// Returns the elements of a row.
    fn dim(self) -> usize;

    /// Returns how rows are kept.
    fn encoding(self) -> Encoding;

    /// Writes the values that an id without a row has.
    fn fill_initial(self, id: i64, row: &mut [f32]);

    /// Returns where an id is looked for first, and asks for it.
    fn seek(self, id: i64) -> Self::Bucket;

    /// Returns the number of the row of an id, [`NO_ROW`] if it has none.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte that was read was changed.
    fn number(self, lanes: impl Lanes, bucket: Self::Bucket, id: i64) -> Result<usize>;

    /// Asks for a row.
    fn prefetch_row(self, number: usize);

    /// Returns the bytes of a row.
    ///
    /// # Errors
    /// As [`RowSource::number`].
    fn row<'a>(self, number: usize) -> Result<&'a [u8]>
    where
        Self: 'a;
}
