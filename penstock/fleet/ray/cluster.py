"""The Ray API that Penstock uses, in one place; Ray is imported when it is first needed."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.fleet.ray.bundle import Bundle, Node

NAMESPACE = "penstock"
HEAD = "node:__internal_head__"
"""The resource that only the head node has."""
ATTEMPTS = 3
NOT_STARTED = "Starting Ray client server failed"
"""Ray starts a process of its own for every client: by forking one that has many threads, which now and then fails."""

log = logging.getLogger("penstock.fleet")


def library() -> Any:
    """The module `ray`."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        needed = '--cluster ray needs Ray: pip install "penstock[ray]" here and on every node'
        raise ConfigError(needed) from error


def connect(address: str) -> None:
    """Joins a running cluster as its client."""
    ray = library()
    # Through Ray Client these are settings of the server, which has its own.
    quiet: dict[str, Any] = {} if address.startswith("ray://") else {"logging_level": logging.ERROR}
    try:
        _init(ray, address=address, namespace=NAMESPACE, log_to_driver=False, **quiet)
    except Exception as error:  # Ray raises many kinds: no cluster, other versions, a malformed address
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
        raise ConfigError(
            f"cannot join the Ray cluster at {address!r}: {why} (`ray start --head` starts one on this machine; "
            "--ray-address names another)"
        ) from error


def _init(ray: Any, **settings: Any) -> None:
    for left in reversed(range(ATTEMPTS)):
        try:
            ray.init(**settings)
            return
        except Exception as error:
            if NOT_STARTED not in str(error) or not left:
                raise
            log.warning("Ray has not started its side of the connection; connecting again: %s", error)


def disconnect() -> None:
    library().shutdown()


def nodes() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(found["NodeID"], found["NodeManagerHostname"], found["NodeManagerAddress"], found["Resources"])
        for found in library().nodes()
        if found["Alive"]
    ]


def controller_name(fleet: str) -> str:
    return f"{fleet}-controller"


def find_controller(fleet: str) -> Any | None:
    """The controller of a server that runs on the cluster."""
    try:
        return library().get_actor(controller_name(fleet), namespace=NAMESPACE)
    except ValueError:
        return None


def make_controller(fleet: str, kind: type, *, detached: bool) -> Any:
    """An actor beside Ray's own controller: without the head node there is no cluster either."""
    options: dict[str, Any] = {
        "name": controller_name(fleet), "namespace": NAMESPACE, "num_cpus": 0, "resources": {HEAD: 0.001},
        "max_restarts": 0, "max_concurrency": 4096,
    }  # fmt: skip
    if detached:
        options["lifetime"] = "detached"
    return library().remote(kind).options(**options).remote()


def reserve(
    bundles: list[Bundle], *, strategy: Literal["STRICT_PACK", "STRICT_SPREAD"], name: str, node: str = ""
) -> Any:
    """A placement group. `node`: where it should be if there is room (STRICT_PACK only)."""
    group = importlib.import_module("ray.util.placement_group")
    target = {"_soft_target_node_id": node} if node else {}
    return group.placement_group([bundle.resources for bundle in bundles], strategy=strategy, name=name, **target)


def placed_nodes(group: Any) -> dict[int, str]:
    """The nodes of the bundles that have room; empty while the group waits."""
    table = importlib.import_module("ray.util.placement_group").placement_group_table(group)
    if table.get("state") not in ("CREATED", "RESCHEDULING"):
        return {}
    return {int(bundle): node for bundle, node in table.get("bundles_to_node_id", {}).items() if node}


def release(group: Any) -> None:
    importlib.import_module("ray.util.placement_group").remove_placement_group(group)


def make_host(kind: type, group: Any, index: int, bundle: Bundle, name: str) -> Any:
    """An actor in a bundle of a placement group. It ends with the actor that makes it."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return (
        library()
        .remote(kind)
        .options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            memory=bundle.memory or None,
            resources=dict(bundle.custom) or None,
            max_restarts=0,
            max_concurrency=64,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        )
        .remote()
    )


def here() -> tuple[str, str]:
    """The id and the address of this actor's node."""
    ray = library()
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def itself() -> Any:
    """The handle of the actor that calls this."""
    return library().get_runtime_context().current_actor


def kill(actor: Any) -> None:
    library().kill(actor, no_restart=True)


def is_lost(error: BaseException) -> bool:
    """Whether an actor call failed because the actor or its node is gone, and not because of what it did."""
    exceptions = library().exceptions
    if isinstance(error, exceptions.RayTaskError) or "creation task" in str(error):
        return False
    return isinstance(error, exceptions.RayError)


def is_unavailable(error: BaseException) -> bool:
    """Whether an actor could not be reached; it may still be there."""
    return isinstance(error, library().exceptions.ActorUnavailableError)


def reason(error: BaseException) -> str:
    """Why an actor call failed, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return str(cause) or type(cause).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
