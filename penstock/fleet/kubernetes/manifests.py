"""Plain manifests, for `kubectl apply`."""

from __future__ import annotations

from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.objects import documents
from penstock.fleet.kubernetes.parameters import Json
from penstock.fleet.kubernetes.scaler import adapter_rules
from penstock.fleet.kubernetes.yaml_text import dump


def objects(deployment: Deployment) -> list[Json]:
    """What is wanted, with every parameter at its default."""
    return [
        deployment.parameters.plain(thing)
        for document in documents(deployment)
        if document.wanted
        for thing in document.objects
    ]


def stream(deployment: Deployment) -> str:
    """All objects as one YAML stream, without those that are for one time only."""
    files = manifests(deployment)
    return "---\n".join(text for name, text in files.items() if not name.startswith("once/"))


def manifests(deployment: Deployment) -> dict[str, str]:
    """Text by file name. Files in `once/` are not for `kubectl apply -f FOLDER`."""
    files = {}
    for document in documents(deployment):
        if document.wanted:
            folder = "once/" if document.once else ""
            files[f"{folder}{document.name}.yaml"] = "---\n".join(
                dump(deployment.parameters.plain(thing)) for thing in document.objects
            )
    if deployment.scaler == "hpa":
        files["once/prometheus-adapter-values.yaml"] = dump(adapter_rules(deployment))
    return files
