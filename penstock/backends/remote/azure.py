"""Azure OpenAI: deployments instead of models, a version in every address, filters around prompts and answers.

An address that ends in `/openai/v1` is Azure's newer API, which names the model in the body as OpenAI does. A key that
begins with `Bearer ` is an Entra ID token; any other is sent as `api-key`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from penstock.backends.remote.dialect import Call, encode
from penstock.backends.remote.features import STANDARD, Feature, Operation
from penstock.backends.remote.openai import PATHS, OpenAI

VERSION = "2024-10-21"


class Azure(OpenAI):
    """A deployment of Azure OpenAI."""

    name = "azure"
    features: ClassVar[frozenset[Feature]] = OpenAI.features - {"continue_final_message", "rerank"}
    parameters: ClassVar[frozenset[str] | None] = STANDARD

    @property
    def _v1(self) -> bool:
        return self.base.endswith("/v1")

    def sign(self, call: Call) -> dict[str, str]:
        key = self.key.value()
        headers = {"content-type": "application/json", **call.headers}
        if key:
            headers["authorization" if key.startswith("Bearer ") else "api-key"] = key
        return headers

    def call(self, operation: Operation, body: Mapping[str, Any]) -> Call:
        sent = {name: value for name, value in body.items() if name != "model"}
        if self._v1:
            sent["model"] = self.upstream.model
        return Call(self._url(PATHS[operation]), encode(sent), {"accept": "text/event-stream"})

    def embed_call(self, texts: Sequence[str], dimensions: int | None = None) -> Call:
        call = super().embed_call(texts, dimensions)
        return Call(self._url("/embeddings"), call.content)

    def health_call(self) -> Call:
        if self._v1:
            return Call(f"{self.base}/models")
        return Call(f"{self._root}/openai/models?{self._version}")

    @property
    def _root(self) -> str:
        return self.base.removesuffix("/openai")

    @property
    def _version(self) -> str:
        return f"api-version={quote(self.upstream.api_version or VERSION)}"

    def _url(self, path: str) -> str:
        if self._v1:
            query = f"?{self._version}" if self.upstream.api_version else ""
            return f"{self.base}{path}{query}"
        return f"{self._root}/openai/deployments/{quote(self.upstream.model, safe='')}{path}?{self._version}"
