"""The fields of custom resources that we write, as their definitions have them.

Written from the CustomResourceDefinitions of KEDA 2.20, the Prometheus operator 0.93, the Gateway API 1.6 and its
inference extension (InferencePool of 1.6, InferenceObjective of 1.5), only as far as our objects go. An object may have
no other field, as in a cluster that checks strictly.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}


def mapping(required: str = "", /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listing(items: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, **({} if most is None else {"maxItems": most})}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def resource(spec: Schema) -> Schema:
    return mapping("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=spec)


SELECTOR = mapping("matchLabels", matchLabels=LABELS)
POLICY = mapping(
    "type value periodSeconds",
    type=one_of("Pods", "Percent"),
    value={"type": "integer", "minimum": 1},
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
RULES = mapping(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=one_of("Max", "Min", "Disabled"),
    policies=listing(POLICY),
)
SCALED_OBJECT = mapping(
    "scaleTargetRef triggers",
    scaleTargetRef=mapping("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount={"type": "integer", "minimum": 1},
    pollingInterval=COUNT,
    cooldownPeriod=COUNT,
    fallback=mapping(
        "failureThreshold replicas",
        failureThreshold=COUNT,
        replicas=COUNT,
        behavior=one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
    ),
    advanced=mapping(horizontalPodAutoscalerConfig=mapping(behavior=mapping(scaleUp=RULES, scaleDown=RULES))),
    triggers=listing(
        mapping(
            "type metadata",
            type=TEXT,
            name=TEXT,
            metricType=one_of("AverageValue", "Value", "Utilization"),
            metadata={"type": "object", "additionalProperties": {"type": "string"}},
        )
    ),
)
SERVICE_MONITOR = mapping(
    "endpoints selector",
    selector=SELECTOR,
    jobLabel=TEXT,
    endpoints=listing(
        mapping(
            port=TEXT,
            path=TEXT,
            interval={"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"},
            authorization=mapping(type=TEXT, credentials=mapping("key", name=TEXT, key=TEXT)),
        )
    ),
)
INFERENCE_POOL = mapping(
    "selector targetPorts",
    selector=SELECTOR,
    targetPorts=listing(mapping("number", number=PORT), most=8),
    appProtocol=one_of("http", "kubernetes.io/h2c"),
    endpointPickerRef=mapping(
        "name port",  # the port is required for a Service
        name=NAME,
        group={"type": "string"},
        kind=TEXT,
        port=mapping("number", number=PORT),
        failureMode=one_of("FailOpen", "FailClose"),
    ),
)
INFERENCE_OBJECTIVE = mapping(
    "poolRef", priority={"type": "integer"}, poolRef=mapping("name", group={"type": "string"}, kind=TEXT, name=NAME)
)
HTTP_ROUTE = mapping(
    parentRefs=listing(mapping("name", group={"type": "string"}, kind=TEXT, namespace=NAME, name=NAME), most=32),
    hostnames=listing(
        {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
    ),
    rules=listing(
        mapping(
            matches=listing(
                mapping(
                    path=mapping(
                        type=one_of("Exact", "PathPrefix", "RegularExpression"),
                        value={"type": "string", "maxLength": 1024, "pattern": "^/"},
                    )
                )
            ),
            backendRefs=listing(mapping("name", group={"type": "string"}, kind=TEXT, name=NAME, port=PORT)),
            timeouts=mapping(request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        )
    ),
)
SCHEMAS: dict[tuple[str, str], Schema] = {
    ("keda.sh/v1alpha1", "ScaledObject"): resource(SCALED_OBJECT),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): resource(SERVICE_MONITOR),
    ("inference.networking.k8s.io/v1", "InferencePool"): resource(INFERENCE_POOL),
    ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"): resource(INFERENCE_OBJECTIVE),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): resource(HTTP_ROUTE),
}
