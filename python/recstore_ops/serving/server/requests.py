"""Requests as the ports of a model server give them, and answers as they take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recstore_ops.serving.server.refusals import Kind, Refusal


@dataclass(frozen=True)
class Request:
    """A request that has come, or could not.

    Attributes:
        port: the name of the port.
        method: of HTTP, or of the service of gRPC.
        path: of HTTP.
        headers: those of HTTP that mean something, by their names in lower case.
        body: of HTTP, or the message of gRPC.
        failure: the kind of refusal and the reason, if the body did not come.
    """

    port: str
    method: str
    path: str = ""
    headers: Mapping[str, bytes] = field(default_factory=dict)
    body: bytes = b""
    failure: tuple[str, str] | None = None

    def content(self) -> bytes:
        """Returns the body.

        Raises:
            Refusal: it did not come.
        """
        if self.failure is None:
            return self.body
        label, reason = self.failure
        raise Refusal(next(kind for kind in Kind if kind.label == label), reason)


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: the status of HTTP, or the code of gRPC.
        body: the body of HTTP; the message of gRPC, or the text of its error.
        headers: of HTTP.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
