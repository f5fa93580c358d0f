"""Kubernetes objects of a server, from its configuration: plain manifests or a Helm chart.

Both are written from the same objects. What a chart's user may set is a parameter in them (`parameters.py`): a manifest
holds its default, the chart's template an expression and its `values.yaml` the default.
"""

from penstock.fleet.kubernetes.chart import chart
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.manifests import manifests, stream
from penstock.fleet.kubernetes.options import ClusterOptions

__all__ = ["ClusterOptions", "Deployment", "chart", "manifests", "stream"]
