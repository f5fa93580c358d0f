"""What the operator does besides applying the objects: the Secret, the first key, and keys of ranks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from penstock.config.models import ModelConfig
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.extras import METRICS_SECRET
from penstock.fleet.kubernetes.pods import FLEET_SECRET
from penstock.fleet.surroundings import credentials

_EXAMPLES = {"store-url": "postgresql://USER:PASSWORD@HOST/NAME", "fleet-url": "redis://:PASSWORD@HOST:6379"}


def secret_keys(deployment: Deployment) -> dict[str, str]:
    """The keys that the Secret must have, with what belongs there."""
    found = {FLEET_SECRET: "file"}
    for setting in deployment.pods.secrets:
        found[setting.key] = _EXAMPLES.get(setting.key, f"the value of {'.'.join(setting.path)}")
    for file in deployment.pods.files:
        found[file.key] = "file"
    for name in credentials(deployment.config):
        found[name] = f"the value of ${name}"
    if deployment.options.service_monitor:
        found[METRICS_SECRET] = "an API key with the scope metrics"
    return found


def instructions(deployment: Deployment, output: Path | None, *, helm: bool) -> Iterator[str]:
    options = deployment.options
    kubectl = f"kubectl -n {options.namespace}"
    yield f"\nBefore the first time, in the namespace {options.namespace}:\n"
    yield f"  penstock fleet secret {FLEET_SECRET}"
    words = [f"--from-file={FLEET_SECRET}"]
    words += [f"--from-file={file.key}={shlex.quote(file.path)}" for file in deployment.pods.files]
    words += [f"--from-literal={key}='{text}'" for key, text in secret_keys(deployment).items() if text != "file"]
    yield f"  {kubectl} create secret generic {options.secret_name} " + " ".join(words)
    for model in deployment.config.models:
        if model.placement is not None:
            yield from _rank_keys(deployment, model, kubectl)
    folder = output or "FOLDER"
    if helm:
        yield f"\nThen: helm upgrade --install {options.name} {folder} -n {options.namespace}"
        return
    job = f"{options.name}-first-key"
    yield f"  {kubectl} apply -f {folder}/once/first-key.yaml    # then: {kubectl} logs job/{job}"
    yield f"\nThen: {kubectl} apply -f {folder}"


def _rank_keys(deployment: Deployment, model: ModelConfig, kubectl: str) -> Iterator[str]:
    name = deployment.parameters.plain(f"{deployment.head_name(model)}-ranks")
    yield "  penstock engine --make-curve-key head.key > head.pub"
    yield "  penstock engine --make-curve-key rank.key > machines.txt"
    files = " ".join(f"--from-file={file}" for file in ("head.key", "head.pub", "rank.key", "machines.txt"))
    yield f"  {kubectl} create secret generic {name} {files}"
