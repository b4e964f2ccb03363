"""The form of a token: what a handshake and a header have room for."""

from __future__ import annotations

import unicodedata

MAX_TOKEN_BYTES = 4096


def check_token(token: str | None, what: str = "the token") -> None:
    """Checks that clients can present a token.

    Args:
        token: what servers ask for; None: nothing.
        what: the name of the argument or option that gave it, for errors.

    Raises:
        ValueError: it is empty, longer than 4,096 bytes of UTF-8, or not one line of text.
    """
    if token is None:
        return
    if not isinstance(token, str):
        raise ValueError(f"{what} must be a string, got {type(token).__name__}")
    if not token:
        raise ValueError(f"{what}: the token is empty")
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in token[: MAX_TOKEN_BYTES + 1]):
        raise ValueError(f"{what}: a token must be one line of text without control characters")
    if (size := len(token.encode("utf-8", "surrogatepass"))) > MAX_TOKEN_BYTES:
        raise ValueError(f"{what}: a token must have at most {MAX_TOKEN_BYTES} bytes, got {size}")


__all__ = ["MAX_TOKEN_BYTES", "check_token"]
