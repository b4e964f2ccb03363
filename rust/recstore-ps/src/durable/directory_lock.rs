//! One server a directory: two that write one log would spoil it.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use recstore::{Directory, Result};

use super::{in_file, unusable};

pub(crate) const NAME: &str = "lock";

/// How long to wait for one that is just ending.
const TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// A directory that no other server uses. The system takes the lock away from a process that ends, however it does.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    directory: Directory,
    file: File,
}

impl Drop for DirectoryLock {
    /// Closing the file would not do: a child forked meanwhile has it open too.
    fn drop(&mut self) {
        _ = self.file.unlock();
    }
}

impl DirectoryLock {
    /// Keeps other servers from a directory, which is made if it is not there.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the lock: another server has it, or the directory cannot be used.
    pub(crate) fn take(directory: &Path) -> Result<Self> {
        Self::take_within(directory, TIMEOUT)
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Whether a server uses a directory. No lock is made where there is none.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the lock: it is no file, or cannot be opened.
    pub(crate) fn is_taken(directory: &Directory) -> Result<bool> {
        let path = directory.path();
        if directory.kind(NAME).map_err(in_file(path))?.is_none() {
            return Ok(false);
        }
        let file = directory.lock_file(NAME).map_err(in_file(path))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(true),
            locked => locked
                .and_then(|()| file.unlock().map_err(TryLockError::Error))
                .map(|()| false)
                .map_err(|error| unusable(&path.join(NAME), error)),
        }
    }

    fn take_within(path: &Path, patience: Duration) -> Result<Self> {
        let until = Instant::now() + patience;
        let directory = Directory::create(path).map_err(in_file(path))?;
        let file = directory.lock_file(NAME).map_err(in_file(path))?;
        let unusable = |message: &str| unusable(&path.join(NAME), message);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { directory, file }),
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => {
                    return Err(unusable("another server uses the directory"));
                }
                Err(TryLockError::Error(error)) => return Err(unusable(&error.to_string())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_one_servers_until_it_ends() {
        let directory = tempfile::tempdir().unwrap();
        let first = DirectoryLock::take_within(directory.path(), Duration::ZERO).unwrap();
        assert_eq!(first.directory().path(), directory.path());
        let refused = DirectoryLock::take_within(directory.path(), PAUSE).unwrap_err().to_string();
        let path = directory.path().join("lock").display().to_string();
        assert!(
            refused.contains(&path) && refused.ends_with("another server uses the directory"),
            "{refused}"
        );
        let ending = thread::spawn(move || {
            thread::sleep(PAUSE);
            drop(first);
        });
        DirectoryLock::take(directory.path()).unwrap();
        ending.join().unwrap();
    }

    #[test]
    fn a_directory_that_is_a_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        File::create(&file).unwrap();
        let refused = DirectoryLock::take(&file).unwrap_err().to_string();
        assert!(refused.contains(&file.display().to_string()), "{refused}");
    }
}
