//! Ids of which nothing is to stay in a table.

use super::table::Table;
use crate::Result;

impl Table {
    /// Deletes the rows of `ids` and forgets what was counted of them, also where others were counted with them. Returns
    /// the ids that had a row.
    ///
    /// # Errors
    /// As [`Table::delete`].
    pub(crate) fn erase(&self, ids: &[i64]) -> Result<Vec<i64>> {
        self.check_writable("forget", 0)?;
        let rows = &mut *self.exclusive();
        let found = ids.iter().copied().filter(|id| rows.ids.find(*id).is_some()).collect();
        rows.delete(ids)?;
        if let Some(admission) = &mut rows.admission {
            ids.iter().for_each(|id| admission.erase(*id));
        }
        Ok(found)
    }
}
