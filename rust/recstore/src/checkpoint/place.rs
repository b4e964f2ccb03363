//! Where a checkpoint may be written: a local directory in which no server keeps its tables.

use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::files::{at, refused};
use super::options::SaveOptions;
use crate::Result;
use crate::config::check_local_path;

/// The file by which a server's directory is known.
pub const SERVER_STATE: &str = "recstore-shard.json";

/// The file in which a server keeps which snapshots its store has saved and loaded.
pub const SERVER_SAVES: &str = "recstore-saves.json";

/// What the directory of a server has beside a checkpoint.
pub(super) const SERVER_FILES: [&str; 6] =
    [SERVER_STATE, SERVER_SAVES, "lock", "incarnation", "checkpoint", "log"];

/// Checks that a server expects nothing of its own in a directory, whatever links lead there: the directory lies in none
/// of a server, and no server's lies in it.
pub(super) fn check_free(directory: &Path, options: &SaveOptions<'_>) -> Result<()> {
    check_local_path(directory).map_err(|message| refused(directory, message))?;
    if options.by_its_server {
        return Ok(());
    }
    let real = real_path(directory).map_err(at(directory))?;
    if let Some(server) = real.ancestors().find(|above| is_of_server(above)) {
        let message = format!(
            "a server keeps its tables in {}, and would go on without what was saved: choose another directory, or load it into the server",
            server.display()
        );
        return Err(refused(directory, message));
    }
    match server_within(&real).map_err(at(directory))? {
        Some(server) => {
            let message = format!(
                "a server keeps its tables in {}, and would not start beside a checkpoint: choose another directory",
                server.display()
            );
            Err(refused(directory, message))
        }
        None => Ok(()),
    }
}

fn is_of_server(directory: &Path) -> bool {
    directory.join(SERVER_STATE).exists()
}

/// Returns the path without links and `..`, of a directory that need not be there.
fn real_path(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    match fs::canonicalize(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => Ok(real_path(parent)?.join(name)),
            _ => Err(error),
        },
        real => real,
    }
}

/// Returns the directory of a server that lies in `directory`.
fn server_within(directory: &Path) -> io::Result<Option<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    let server = |entry: DirEntry| {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        Some(entry.path()).filter(|path| !is_file && is_of_server(path))
    };
    for entry in entries {
        if let Some(server) = server(entry?) {
            return Ok(Some(server));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(directory: &Path) -> Option<String> {
        check_free(directory, &SaveOptions::default()).err().map(|error| error.to_string())
    }

    #[test]
    fn nothing_is_saved_in_around_or_through_a_link_to_a_server() {
        let root = tempfile::tempdir().unwrap();
        let (data, elsewhere) = (root.path().join("data"), root.path().join("elsewhere"));
        let shard = data.join("shard-0-of-1");
        fs::create_dir_all(shard.join("log")).unwrap();
        fs::create_dir_all(&elsewhere).unwrap();
        fs::write(shard.join(SERVER_STATE), "{}").unwrap();
        let link = |name: &str, to: &Path| {
            let link = root.path().join(name);
            std::os::unix::fs::symlink(to, &link).unwrap();
            link
        };
        let (to_data, to_shard) = (link("to data", &data), link("to shard", &shard));
        let places = [
            shard.clone(),
            data.clone(),
            shard.join("log"),
            shard.join("new/deep"),
            elsewhere.join("../data"),
            to_data,
            to_shard.join("checkpoint"),
        ];
        for place in places {
            let refused = refusal(&place).unwrap();
            assert!(refused.contains("a server keeps its tables in") && refused.contains("shard-0-of-1"));
        }
        // A server's directory may be a link, too.
        assert!(refusal(root.path()).unwrap().contains("to shard"));
        for place in [elsewhere.clone(), data.join("new"), elsewhere.join("a/b")] {
            assert_eq!(refusal(&place), None);
        }
        assert!(refusal(Path::new("s3://bucket/x")).unwrap().contains("got a URL of the scheme \"s3\""));
        let own = SaveOptions { by_its_server: true, ..SaveOptions::default() };
        assert!(check_free(&shard, &own).is_ok());
    }
}
