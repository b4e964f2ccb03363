//! Names of files in a directory.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::DirEntry;

/// Checks that a name stays in its directory: it is relative, and no part of it is empty, `.` or `..`.
///
/// `whose` is told in the error: the directory, or the file that has the name.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] names `whose` and the name.
pub fn check_name(name: impl AsRef<Path>, whose: &dyn Display) -> io::Result<()> {
    let bytes = name.as_ref().as_os_str().as_bytes();
    let stays = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !part.contains(&0);
    match bytes.split(|&byte| byte == b'/').all(stays) {
        true => Ok(()),
        false => Err(io::Error::new(
            ErrorKind::InvalidInput,
            format!("{whose}: {:?} is no name of a file inside a directory", name.as_ref()),
        )),
    }
}

/// The name of the file that is written to replace another.
pub(super) fn beside(name: &OsStr) -> OsString {
    let path = Path::new(name);
    match path.extension() {
        Some(extension) if extension != "new" => path.with_extension("new").into_os_string(),
        _ => {
            let mut longer = name.to_owned();
            longer.push(".new");
            longer
        }
    }
}

pub(super) fn of_entry(entry: &DirEntry) -> OsString {
    OsString::from_vec(entry.file_name().to_bytes().to_vec())
}
