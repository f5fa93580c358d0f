"""From a method and a path to the endpoint that answers: a dictionary for fixed paths, patterns for those with
parameters. HEAD is answered by the endpoint for GET; the listener leaves out the body."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.gateway.app.endpoint import BoundEndpoint

_MOST_PARTS = 8
_PARAMETER = re.compile(r"{(\w+)(:path)?}")
_SEGMENTS = "[^/](?:.*[^/])?"


def pattern(path: str) -> re.Pattern[str]:
    """`{name}` is one segment, `{name:path}` one or more of them, without a slash at either end."""
    parts, end = [], 0
    for match in _PARAMETER.finditer(path):
        parts += [re.escape(path[end : match.start()]), f"(?P<{match[1]}>{_SEGMENTS if match[2] else '[^/]+'})"]
        end = match.end()
    return re.compile("".join(parts) + re.escape(path[end:]))


def _methods(method: str) -> tuple[str, ...]:
    return ("GET", "HEAD") if method == "GET" else (method,)


class Router:
    """Finds endpoints; where several patterns match, the first one in the table answers."""

    def __init__(self, endpoints: Sequence[BoundEndpoint]) -> None:
        self.endpoints = endpoints
        self.fixed = {
            (method, bound.endpoint.path): bound for bound in endpoints for method in _methods(bound.endpoint.method)
        }
        self._patterns = [
            (method, pattern(bound.endpoint.path), bound)
            for bound in endpoints
            for method in _methods(bound.endpoint.method)
            if "{" in bound.endpoint.path
        ]

    def match(self, method: str, path: str) -> tuple[BoundEndpoint, dict[str, str]] | None:
        """The endpoint behind a path with parameters, and the parameters."""
        for wanted, regex, bound in self._patterns:
            if wanted == method and (found := regex.fullmatch(path)) is not None:
                return bound, found.groupdict()
        return None

    def methods_of(self, path: str) -> list[str]:
        """The methods of the endpoints that have this path; none when there is no such path."""
        found = [method for method, known in self.fixed if known == path]
        found += [method for method, regex, _ in self._patterns if regex.fullmatch(path)]
        return sorted(set(found))

    def meant(self, method: str, path: str) -> str | None:
        """The fixed path that a client with a wrong base URL meant: the end of `path`, at the top or under `/v1`."""
        parts = path.strip("/").split("/")[-_MOST_PARTS:]
        for start in range(len(parts)):
            rest = "/" + "/".join(parts[start:])
            for candidate in (rest, f"/v1{rest}"):
                if (method, candidate) in self.fixed:
                    return candidate
        return None
