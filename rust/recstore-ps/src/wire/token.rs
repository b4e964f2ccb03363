//! The form of a token, the same for all who ask for it and all who say it.

use recstore::{Error, Result};

/// The longest token: a handshake has no room for more.
pub(crate) const MAX_TOKEN_BYTES: usize = 4096;

/// Checks that a token can be said, on the bulk port and in a header.
///
/// # Errors
/// [`Error::InvalidConfig`] says what it must be, and never the token.
pub(crate) fn check_token(token: Option<&str>) -> Result<()> {
    let Some(token) = token else { return Ok(()) };
    let message = match token.len() {
        0 => "the token must not be empty".to_owned(),
        bytes if bytes > MAX_TOKEN_BYTES => {
            format!("the token must have at most {MAX_TOKEN_BYTES} bytes, got {bytes}")
        }
        _ if token.contains(char::is_control) => {
            "the token must be one line without control characters".to_owned()
        }
        _ => return Ok(()),
    };
    Err(Error::InvalidConfig { message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_line_that_a_handshake_has_room_for() {
        for token in [None, Some("a"), Some("open sesame, Zürich"), Some(&"x".repeat(MAX_TOKEN_BYTES))] {
            assert_eq!(check_token(token), Ok(()));
        }
        for token in ["", "a\nb", "a\0", &"x".repeat(5_000)] {
            let refused = check_token(Some(token)).unwrap_err().to_string();
            assert!(refused.contains("the token must") && !refused.contains("xx"), "{refused}");
        }
    }
}
