"""What all pods have in common: who they run as, where they may write, what they mount."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.fleet.kubernetes.configuration import FILE, SECRET_FOLDER, SecretFile, SecretSetting
from penstock.fleet.kubernetes.deployment import HOME, MODELS, Deployment
from penstock.fleet.kubernetes.parameters import Json
from penstock.fleet.surroundings import source_variables

USER = 10001
"""Of the image."""
FLEET_SECRET = "fleet-secret"
"""Key of the Secret."""


def pod_security() -> Json:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Json:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def variable(name: str, value: str) -> Json:
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def from_request(name: str, resource: str) -> Json:
    """What the container that has the variable asks for; of cores the next whole number."""
    return {"name": name, "valueFrom": {"resourceFieldRef": {"resource": f"requests.{resource}"}}}


def from_secret(deployment: Deployment, name: str, key: str, *, optional: bool = False) -> Json:
    reference: Json = {"name": deployment.secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def settings_from_secret(deployment: Deployment, settings: Iterable[SecretSetting]) -> list[Json]:
    return [from_secret(deployment, setting.variable, setting.key) for setting in settings]


def common_env(deployment: Deployment) -> list[Json]:
    """The pod's name and address first: later values refer to them."""
    return [
        from_field("POD_NAME", "metadata.name"),
        from_field("POD_IP", "status.podIP"),
        *folder_env(),
        variable("PENSTOCK_FLEET__MACHINE", "$(POD_NAME)"),
        variable("PENSTOCK_FLEET__ADVERTISE", "$(POD_IP)"),
        variable("PENSTOCK_FLEET__SECRET_FILE", f"{SECRET_FOLDER}/{FLEET_SECRET}"),
        # Kubernetes copies these labels from the machine to the pod since 1.35; before, they are empty.
        from_field("PENSTOCK_FLEET__REGION", "metadata.labels['topology.kubernetes.io/region']"),
        from_field("PENSTOCK_FLEET__ZONE", "metadata.labels['topology.kubernetes.io/zone']"),
    ]


def folder_env() -> list[Json]:
    """Where the pod writes."""
    return [
        variable("PENSTOCK_CACHE", f"{HOME}/cache"),
        variable("PENSTOCK_STATE", HOME),
        variable("XDG_CACHE_HOME", f"{HOME}/cache"),
    ]


def folder_mounts() -> list[Json]:
    return [{"name": "home", "mountPath": HOME}, {"name": "tmp", "mountPath": "/tmp"}]


def source_env(deployment: Deployment, sources: Iterable[str]) -> list[Json]:
    """Credentials for where models come from, if the Secret has them."""
    return [
        from_secret(deployment, name, name.lower().replace("_", "-"), optional=True)
        for name in source_variables(sources)
    ]


def mounts(deployment: Deployment) -> list[Json]:
    found: list[Json] = [
        {"name": "configuration", "mountPath": FILE, "subPath": "penstock.yaml", "readOnly": True},
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        *folder_mounts(),
    ]
    if deployment.options.models_claim:
        found.append({"name": "models", "mountPath": MODELS, "readOnly": True})
    return found


def volumes(deployment: Deployment, files: Iterable[SecretFile] = ()) -> list[Json]:
    """All but `home`, which is a claim for engines. `files`: keys of the Secret that are files of these pods."""
    keys = [FLEET_SECRET, *(file.key for file in files)]
    found: list[Json] = [
        {"name": "configuration", "configMap": {"name": deployment.name}},
        {
            "name": "secret",
            "secret": {
                "secretName": deployment.secret,
                "defaultMode": 0o440,
                "items": [{"key": key, "path": key} for key in keys],
            },
        },
        {"name": "tmp", "emptyDir": {}},
    ]
    if deployment.options.models_claim:
        claim = {"claimName": deployment.options.models_claim, "readOnly": True}
        found.append({"name": "models", "persistentVolumeClaim": claim})
    return found


def spread(labels: dict[str, str]) -> list[Json]:
    """Over zones and machines, as evenly as there is room; a pod that cannot be spread runs all the same."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


def disruption_budget(deployment: Deployment, name: str, labels: dict[str, str]) -> Json:
    """Voluntary disruptions, such as a drained machine, take one pod at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": deployment.metadata(name, labels),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }


def service_account(deployment: Deployment) -> Json:
    """No pod talks to the API server, so none gets a token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": deployment.metadata(deployment.name, deployment.labels("server")),
        "automountServiceAccountToken": False,
    }
