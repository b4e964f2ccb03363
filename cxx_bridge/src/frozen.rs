//! Frozen tables of the registry: opened from their files, and followed.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use recstore::{EmbeddingTable, Encoding, FrozenMemory, FrozenSpec, RowChanges, freeze};

use crate::guard::Failure;
use crate::handle_words::HandleWords;
use crate::registry::Registry;
use crate::stores::{FROZEN, Placed};

/// A frozen table that was opened.
pub struct OpenedFrozen {
    /// The words of its handle.
    pub handle: Vec<i64>,
    /// The table.
    pub table: Arc<dyn EmbeddingTable>,
    /// How its rows are kept.
    pub encoding: Encoding,
    /// A number that tells its file from others.
    pub fingerprint: u32,
}

impl Registry {
    /// Opens the file of a frozen table. Its handle is open once, and closes the table when it is released.
    ///
    /// # Errors
    /// As [`FrozenStore::open`].
    pub fn open_frozen(
        &self,
        file: &File,
        path: &Path,
        memory: FrozenMemory,
    ) -> recstore::Result<OpenedFrozen> {
        let store = self.read_state(|state| state.stores.frozen());
        let table = store.open(file, path, memory)?;
        let (encoding, fingerprint) = store.describe_file(table.id())?;
        let placed = Placed::new(FROZEN, Arc::clone(&table));
        let handle = self.change_state(|state| state.handles.open(placed)).to_words().to_vec();
        Ok(OpenedFrozen { handle, table, encoding, fingerprint })
    }

    /// Writes the rows that the table of a number has now to a file, and returns its bytes.
    ///
    /// # Errors
    /// As [`recstore::freeze`]; [`Error::UnknownHandle`].
    pub fn freeze(&self, number: i64, path: &Path, encoding: Encoding) -> recstore::Result<u64> {
        let table = self.numbered_table("freeze", number)?;
        let described = table.describe()?;
        let spec = FrozenSpec { name: &described.name, config: &described.config, encoding };
        match self.cut_rows(&[number])?.pop().flatten() {
            Some(cut) => freeze(path, spec, cut.ids(), |ids, rows| cut.read(ids, rows)),
            None => freeze(path, spec, &table.ids()?, |ids, rows| table.read(ids, rows)),
        }
    }

    /// Closes a frozen table, as the operator does that releases its handle: from a thread that traces operators too.
    ///
    /// # Errors
    /// [`Failure::Runtime`] for the words of no handle, or of one that was released.
    pub fn close_frozen(&self, handle: &[i64]) -> Result<(), Failure> {
        self.release(HandleWords::read("hashtable_release", handle)?)
    }

    /// Takes what changed in the table that a frozen one was made of.
    ///
    /// # Errors
    /// As [`FrozenStore::change`]; [`Failure::Runtime`] for the words of no handle.
    pub fn change_frozen(&self, handle: &[i64], changes: RowChanges<'_>) -> Result<(), Failure> {
        let (place, frozen) = self.read_state(|state| {
            state.find("follow", handle).map(|(_, placed)| (placed.place, state.stores.frozen()))
        })?;
        if place.store != FROZEN {
            return Err(Failure::Runtime("follow: only frozen tables follow others".to_owned()));
        }
        frozen.change(place.table, changes)?;
        self.note(place, None);
        Ok(())
    }
}
