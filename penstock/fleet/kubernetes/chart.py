"""A Helm chart: the same objects, with expressions where its user may set a value."""

from __future__ import annotations

import penstock
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.objects import documents
from penstock.fleet.kubernetes.parameters import Json
from penstock.fleet.kubernetes.scaler import adapter_rules
from penstock.fleet.kubernetes.yaml_text import dump

_NOTES = """\
Penstock runs in the namespace {{ .Release.Namespace }}. Its first API key:

  kubectl -n {{ .Release.Namespace }} logs job/{{ .Release.Name }}-first-key

Then delete the job; its log holds the key:

  kubectl -n {{ .Release.Namespace }} delete job/{{ .Release.Name }}-first-key
"""
_HEAD = "# Written by `penstock deploy kubernetes --helm` from a penstock.yaml; write it again rather than edit it.\n"


def chart(deployment: Deployment) -> dict[str, str]:
    """Text by file name."""
    files = {f"templates/{document.name}.yaml": _template(deployment, document.objects, document.switch)
             for document in documents(deployment)}  # fmt: skip
    values = dict(deployment.parameters.values)
    for document in documents(deployment):
        if document.switch:
            values[document.switch] = {**values.get(document.switch, {}), "enabled": document.wanted}
    files["Chart.yaml"] = dump(
        {
            "apiVersion": "v2",
            "name": "penstock",
            "description": "Gateways and engines of a Penstock server",
            "type": "application",
            "version": penstock.__version__,
            "appVersion": penstock.__version__,
            "kubeVersion": ">=1.29.0-0",
        }
    )
    files["values.yaml"] = _HEAD + dump(values)
    files["files/penstock.yaml"] = deployment.pods.text
    files["templates/NOTES.txt"] = _NOTES
    if deployment.scaler == "hpa":
        files["prometheus-adapter-values.yaml"] = dump(adapter_rules(deployment))
    return dict(sorted(files.items()))


def _template(deployment: Deployment, objects: list[Json], switch: str) -> str:
    texts = []
    for thing in objects:
        tree, markers = deployment.parameters.templated(thing)
        text = dump(tree)
        # Longest first: the name of one marker may begin with that of another.
        for marker in sorted(markers, key=len, reverse=True):
            text = text.replace(marker, markers[marker])
        texts.append(text)
    whole = "---\n".join(texts)
    return f"{{{{- if .Values.{switch}.enabled }}}}\n{whole}{{{{- end }}}}\n" if switch else whole
