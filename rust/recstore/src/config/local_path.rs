//! Paths of this machine, which others may give.

use std::path::Path;

/// Checks that a path is no URL, which would be taken for the name of a folder.
///
/// # Errors
/// Says so.
pub fn check_local_path(path: &Path) -> std::result::Result<(), String> {
    let text = path.to_string_lossy();
    let is_of_scheme = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    match text.split_once("://") {
        Some((scheme, _)) if !scheme.is_empty() && scheme.bytes().all(is_of_scheme) => {
            Err(format!("expected the path of a local directory, got a URL of the scheme \"{scheme}\""))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_no_paths() {
        for url in ["s3://bucket/x", "file:///tmp", "gs://b", "a+b.c-1://x"] {
            let refused = check_local_path(Path::new(url)).unwrap_err();
            assert!(refused.contains("expected the path of a local directory, got a URL"), "{refused}");
        }
        for path in ["/tmp/s3://x", "a:b", "://", "x/y://z"] {
            assert_eq!(check_local_path(Path::new(path)), Ok(()));
        }
    }
}
