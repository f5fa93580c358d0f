"""Kubernetes manifests: what each setting becomes, what is kept out of a ConfigMap, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import ConfigError
from penstock.fleet.kubernetes import ClusterOptions, Deployment, chart, manifests
from penstock.fleet.kubernetes.instructions import instructions, secret_keys
from penstock.fleet.kubernetes.manifests import objects
from penstock.fleet.kubernetes.network import server_ports
from tests.cli.command import penstock
from tests.fleet.kubernetes.cases import EXAMPLES, RICH, deployment, found

PLAIN = ClusterOptions()


@pytest.fixture
def rich(tmp_path: Path) -> Deployment:
    return deployment(RICH, tmp_path)


def containers(things: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for thing in things:
        pod = thing.get("spec", {}).get("template", {}).get("spec", {})
        yield from [*pod.get("initContainers", []), *pod.get("containers", [])]


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") or entry["valueFrom"] for entry in container["env"]}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.stem))
def test_every_example_can_be_deployed(file: Path) -> None:
    deployed = Deployment.of(file, replace(PLAIN, name="llm", namespace="prod", image="reg.example.com/p:7"))
    things = objects(deployed)
    assert {"Deployment", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy"} <= {one["kind"] for one in things}
    names = [(one["kind"], one["metadata"]["name"]) for one in things]
    assert len(set(names)) == len(names)
    assert {one["metadata"]["namespace"] for one in things} == {"prod"}
    assert {container["image"] for container in containers(things)} == {"reg.example.com/p:7"}


def test_a_grid_of_eight_gpus_asks_for_eight() -> None:
    (file,) = [file for file in EXAMPLES if file.stem.startswith("70b")]
    deployed = Deployment.of(file, PLAIN)
    pod = found(deployed, "StatefulSet", "penstock-llama-70b")["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert engine["image"].endswith("-cuda") and "PENSTOCK_CORES" not in environment(engine)
    assert [one["args"] for one in pod["initContainers"]] == [
        ["pull", "hf:meta-llama/Llama-3.3-70B-Instruct"],
        ["pull", "hf:meta-llama/Llama-3.1-8B-Instruct"],
    ]
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > 900, "140 GB from a slow disk"
    assert {"AWS_ACCESS_KEY_ID", "HF_TOKEN"} <= environment(engine).keys()
    gateway = found(deployed, "Deployment", "penstock-gateway")["spec"]["template"]["spec"]["containers"][0]
    engines = [word for word in gateway["args"] if word.startswith("llama-70b=")]
    assert engines == ["llama-70b=tcp://penstock-llama-70b-0.penstock-llama-70b.penstock.svc:5555"]


def test_no_pod_may_do_more_than_it_needs(rich: Deployment) -> None:
    things = objects(rich)
    for container in containers(things):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
    for thing in things:
        pod = thing.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not found(rich, "ServiceAccount", "penstock")["automountServiceAccountToken"]


def test_secrets_of_the_configuration_are_in_no_file(rich: Deployment) -> None:
    written = "".join([*manifests(rich).values(), *chart(rich).values(), *instructions(rich, None, helm=False)])
    for secret in ("hunter2", "swordfish", "opensesame"):
        assert secret not in written
    kept = yaml.safe_load(rich.pods.text)
    assert kept["counters"]["url"] == "redis://redis.example.com:6380"
    assert "otlp_headers" not in kept["telemetry"]
    gateway = found(rich, "Deployment", "penstock-gateway")["spec"]["template"]["spec"]["containers"][0]
    variables = environment(gateway)
    for variable, key in (
        ("PENSTOCK_STORE__URL", "store-url"),
        ("PENSTOCK_COUNTERS__URL", "counters-url"),
        ("PENSTOCK_TELEMETRY__OTLP_HEADERS", "telemetry-otlp-headers"),
        ("UPSTREAM_KEY", "UPSTREAM_KEY"),
    ):
        assert variables[variable] == {"secretKeyRef": {"name": "penstock", "key": key}}
        assert key in secret_keys(rich)
    engine = found(rich, "StatefulSet", "penstock-spot")["spec"]["template"]["spec"]["containers"][0]
    assert "PENSTOCK_STORE__URL" not in environment(engine), "engines need no database"


def test_the_same_configuration_gives_the_same_text() -> None:
    assert manifests(Deployment.of(EXAMPLES[0], PLAIN)) == manifests(Deployment.of(EXAMPLES[0], PLAIN))


def test_the_pods_change_with_the_configuration(tmp_path: Path) -> None:
    def checksum(text: str) -> str:
        pod = found(deployment(text, tmp_path, PLAIN), "Deployment", "penstock-gateway")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["penstock/configuration"])

    assert checksum("generation: {max_choices: 2}") != checksum("generation: {max_choices: 3}")


def test_replicas_that_differ_are_stateful_sets_of_their_own(rich: Deployment) -> None:
    for role in ("prefill", "decode"):
        group = found(rich, "StatefulSet", f"penstock-llama-8b-{role}")["spec"]
        (engine,) = group["template"]["spec"]["containers"]
        assert group["replicas"] == 2 and engine["args"][-2:] == ["--role", role]
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"name": "scratch", "mountPath": "/var/cache/blocks"} in engine["volumeMounts"]
    assert "replica_devices" not in yaml.safe_load(rich.pods.text)["models"][0]


def test_blocks_that_outlive_their_engine_have_a_volume_that_does(rich: Deployment, tmp_path: Path) -> None:
    kept = RICH.replace("    disk_memory: 10GiB\n", "    disk_memory: 10GiB\n    disk_persistent: true\n")
    for deployed, claimed in ((rich, False), (deployment(kept, tmp_path, PLAIN), True)):
        group = found(deployed, "StatefulSet", "penstock-llama-8b-decode")["spec"]
        claims = {claim["metadata"]["name"]: claim["spec"] for claim in group["volumeClaimTemplates"]}
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert ("scratch" in claims) == claimed and ("scratch" in volumes) == (not claimed)
        if claimed:
            assert claims["scratch"]["resources"]["requests"]["storage"] == "11Gi"


def test_pools_are_stateful_sets_of_their_own(rich: Deployment, tmp_path: Path) -> None:
    for pool, label, replicas in (("chat", "chat", 2), ("Batch", "batch", 1)):
        group = found(rich, "StatefulSet", f"penstock-small-{label}")["spec"]
        (engine,) = group["template"]["spec"]["containers"]
        assert group["replicas"] == replicas and engine["args"][-2:] == ["--pool", pool]
        asked = {"cpu": "2.5", "memory": str(3 * 2**30), "example.com/nvme": "1"}
        assert engine["resources"]["requests"] == asked, "models[N].resources"
        threads = {"resourceFieldRef": {"resource": "requests.cpu"}}
        assert environment(engine)["PENSTOCK_CORES"] == threads, "no more threads than were asked for"
    fixed = replace(PLAIN, registry="dns", scaler="none")
    gateway = found(deployment(RICH, tmp_path, fixed), "Deployment", "penstock-gateway")
    arguments = gateway["spec"]["template"]["spec"]["containers"][0]["args"]
    address = "tcp://penstock-small-batch-0.penstock-small-batch.penstock.svc:5555"
    assert f"small={address}?pool=Batch" in arguments


def test_a_grid_over_machines_has_a_stateful_set_for_each(rich: Deployment) -> None:
    head = found(rich, "StatefulSet", "penstock-large")["spec"]["template"]["spec"]["containers"][0]
    assert head["args"][-2:] == ["--join-endpoint", "tcp://0.0.0.0:7001"]
    assert head["resources"]["limits"]["nvidia.com/gpu"] == "4"
    for machine in ("host-b", "host-c"):
        (rank,) = found(rich, "StatefulSet", f"penstock-large-{machine}")["spec"]["template"]["spec"]["containers"]
        address = "tcp://penstock-large-$(POD_INDEX).penstock-large.penstock.svc:7001"
        assert rank["args"][:4] == ["join", address, "--as", machine]
        assert rank["resources"]["limits"]["nvidia.com/gpu"] == "4"
    placement = yaml.safe_load(rich.pods.text)["models"][2]["placement"]
    assert placement["curve_key"] == "/etc/penstock/ranks/head.key"


def test_probes_wait_for_slow_starts_and_drains_have_time(rich: Deployment) -> None:
    gateway = found(rich, "Deployment", "penstock-gateway")["spec"]["template"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] == 10 + 45 + 15, "delay, drain, margin"
    (container,) = gateway["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health", "one model's restart is not everybody's"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    engine = found(rich, "StatefulSet", "penstock-spot")["spec"]["template"]["spec"]
    assert engine["terminationGracePeriodSeconds"] == 45 + 15
    (container,) = engine["containers"]
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 3600
    assert container["livenessProbe"]["exec"]["command"][:3] == ["penstock", "engine", "--check"]


def test_a_share_of_the_replicas_runs_on_spot_machines(rich: Deployment) -> None:
    sure, spot = found(rich, "ScaledObject", "penstock-spot"), found(rich, "ScaledObject", "penstock-spot-spot")
    assert [(one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]) for one in (sure, spot)] == [
        (2, 6),
        (0, 4),
    ]
    thresholds = [float(one["spec"]["triggers"][0]["metadata"]["threshold"]) for one in (sure, spot)]
    assert thresholds == pytest.approx([10 / 0.6, 10 / 0.4], rel=1e-4), "each takes its share of the queue"
    pod = found(rich, "StatefulSet", "penstock-spot-spot")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    assert "karpenter.sh/capacity-type" in {one["key"] for one in pod["tolerations"]}
    assert pod["terminationGracePeriodSeconds"] <= 120, "the machine is gone then"


def test_keda_scales_on_the_whole_queue_and_keeps_schedules(rich: Deployment) -> None:
    triggers = found(rich, "ScaledObject", "penstock-spot")["spec"]["triggers"]
    waiting = triggers[0]["metadata"]["query"]
    for metric in ("penstock_queue_depth", "penstock_engine_requests_waiting", "penstock_held_requests"):
        assert metric in waiting
    assert "max by (class)" in waiting, "gateways with one queue in Redis all report the same"
    assert triggers[1]["metadata"]["threshold"] == f"{40 * 0.7 / 0.6:.6g}"
    assert triggers[2]["metadata"] == {
        "timezone": "Europe/Berlin",
        "start": "55 23 * * 0,4",  # ten minutes early: Sunday and Thursday
        "end": "0 0 * * 2,6",
        "desiredReplicas": "4",
    }
    behavior = found(rich, "ScaledObject", "penstock-spot")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    assert behavior["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_scale_to_zero_needs_keda(tmp_path: Path) -> None:
    text = "models: [{source: smollm2-135m, autoscale: {min: 0, max: 2, idle_s: 40}}]"
    spec = found(deployment(text, tmp_path, PLAIN), "ScaledObject", "penstock-smollm2-135m")["spec"]
    assert (spec["minReplicaCount"], spec["cooldownPeriod"]) == (0, 40)
    assert "replicas" not in found(deployment(text, tmp_path, PLAIN), "StatefulSet", "penstock-smollm2-135m")["spec"]
    with pytest.raises(ConfigError, match=r"cannot scale to zero; use --scaler keda"):
        deployment(text, tmp_path, replace(PLAIN, scaler="hpa"))


def test_an_hpa_uses_the_metrics_that_the_adapter_makes(tmp_path: Path) -> None:
    text = "models: [{source: smollm2-135m, autoscale: {min: 1, max: 5}}]"
    deployed = deployment(text, tmp_path, replace(PLAIN, scaler="hpa", queue_target=7))
    spec = found(deployed, "HorizontalPodAutoscaler", "penstock-smollm2-135m")["spec"]
    names = [metric["external"]["metric"]["name"] for metric in spec["metrics"]]
    assert spec["metrics"][0]["external"]["target"]["averageValue"] == "7000m"
    rules = yaml.safe_load(manifests(deployed)["once/prometheus-adapter-values.yaml"])["rules"]["external"]
    assert [rule["name"]["as"] for rule in rules] == names


def test_only_gateways_reach_engines(rich: Deployment) -> None:
    policy = found(rich, "NetworkPolicy", "penstock-large")["spec"]
    gateways, own = policy["ingress"]
    assert gateways["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert [port["port"] for port in gateways["ports"]] == [5555]
    assert [port["port"] for port in own["ports"]] == [5555, 7001]
    egress = found(rich, "NetworkPolicy", "penstock-gateway")["spec"]["egress"]
    assert {port["port"] for rule in egress for port in rule["ports"]} >= {6432, 6380, 6379, 4318, 443, 5555, 53}


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("input_files: {url_hosts: ['*', 'files.example.net:8443']}", {8443}),
        ("input_files: {url_hosts: ['*'], url_plain_http: true}", {80}),
        ("webhooks: {enabled: true, plain_http: true}", {80}),
        ("webhooks: {enabled: true}", set()),
    ],
)
def test_gateways_reach_the_servers_of_files_and_webhooks(text: str, opened: set[int], tmp_path: Path) -> None:
    plain = "store: {url: 'postgresql://db/x'}\nmodels: [{name: m, source: 'hf:org/m'}]\n"
    before, after = (set(server_ports(deployment(given, tmp_path, PLAIN))) for given in (plain, plain + text))
    assert after - before == opened


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("store: {url: 'sqlite:////var/db'}", r"store.url: .* is a file of one pod"),
        ("counters: {url: 'redis://localhost:6379'}", r"counters.url: localhost is the pod itself there"),
        (
            "remotes: [{name: r, model: m, urls: ['http://127.0.0.1:9001/v1']}]",
            r"remotes\[0\].urls: 127.0.0.1 is the pod itself",
        ),
        ("models: [{source: /data/model}]", r"a file of this machine; copy it to a claim"),
        ("models: [{source: smollm2-135m, time_slice: gpu0}]", r"pods have GPUs of their own"),
        ("models: [{source: smollm2-135m, memory_share: 0.5}]", r"a pod has its GPUs to itself"),
        ("models: [{source: smollm2-135m, replicas: 2, replica_devices: [cpu, cuda]}]", r"one entry of `models`"),
        ("models: [{resources: {gpus: 0.5}}]", r"resources.gpus: a pod has whole GPUs"),
        ("models: [{resources: {labels: [h200]}}]", r"extended resources are DOMAIN/NAME=AMOUNT"),
        ("cache: {exact: asked}", r"several gateways need a shared cache"),
        ("models: [{source: hf:a/b, name: a.b}, {source: hf:c/d, name: a-b}]", r"names of those of a.b; rename it"),
        ("models: [{source: hf:a/b, name: m}, {source: hf:c/d, name: gateway}]", r"those of the gateways"),
        ("server: {loaded_models: /var/lib/m.json}", r"server.loaded_models: a file of one pod"),
        (f"models: [{{source: smollm2-135m, name: {'long' * 20}}}]", r"is too long for a StatefulSet"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        deployment(text, tmp_path, PLAIN)


def test_autoscaling_without_a_registry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateways learn of new replicas through the fleet's Redis"):
        deployment("models: [{autoscale: {max: 2}}]", tmp_path, replace(PLAIN, registry="dns"))


def test_the_command_prints_a_stream_and_what_is_left_to_do(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("models: [{source: smollm2-135m, replicas: 2}]\n")
    printed = penstock("deploy", "kubernetes", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    kinds = [thing["kind"] for thing in yaml.safe_load_all(printed.stdout)]
    assert kinds.count("StatefulSet") == 1 and "Job" not in kinds
    assert "create secret generic penstock --from-file=fleet-secret" in printed.stderr


@pytest.mark.slow
def test_the_command_writes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("models: [{source: smollm2-135m, replicas: 2}]\n")
    chosen = penstock("deploy", "kubernetes", "--helm", "--output", "chart", "--name", "llm", cwd=tmp_path)
    assert chosen.returncode == 0 and (tmp_path / "chart/values.yaml").exists()
    assert "helm upgrade --install llm chart" in chosen.stderr
    refused = penstock("deploy", "kubernetes", "--helm", cwd=tmp_path)
    assert refused.returncode == 2 and "--output FOLDER" in refused.stderr
