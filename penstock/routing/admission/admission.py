"""Admission to all models of a gateway: a controller for each, with a queue per pool where a model has pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.controller import AdmissionController
from penstock.routing.admission.pool_metrics import add_pool_metrics
from penstock.routing.admission.pools import PooledAdmission
from penstock.routing.admission.queue import CLASSES
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.admission_metrics import AdmissionMetrics
from penstock.telemetry.exposition import MetricRegistry

ModelAdmission: TypeAlias = AdmissionController | PooledAdmission


class Admission:
    """The admission controllers of one gateway, by model."""

    def __init__(self, config: AdmissionConfig, models: ModelRegistry, metrics: MetricRegistry) -> None:
        self.metrics = AdmissionMetrics(
            metrics, self._depths, self._rates, self._limits, "max" if config.url else "sum"
        )
        self._config = config
        self._controllers: dict[str, ModelAdmission] = {
            model.name: _controller(model, config, self.metrics) for model in models
        }
        add_pool_metrics(metrics, self._pooled, "max" if config.url else "sum")

    def _pooled(self) -> Iterator[PooledAdmission]:
        return (found for found in self._controllers.values() if isinstance(found, PooledAdmission))

    async def start(self) -> None:
        for controller in self._controllers.values():
            await controller.start()

    async def close(self) -> None:
        for controller in self._controllers.values():
            await controller.close()

    async def add(self, model: ServedModel) -> None:
        controller = self._controllers[model.name] = _controller(model, self._config, self.metrics)
        await controller.start()

    async def renew(self, model: ServedModel) -> ModelAdmission | None:
        """The model has other pools. New requests get queues for these; the old queues are returned, and must be closed
        when nobody waits there any more."""
        old = self._controllers.get(model.name)
        await self.add(model)
        return old

    async def remove(self, model: ServedModel) -> None:
        """Removes a model; the requests waiting for it fail."""
        controller = self._controllers.pop(model.name, None)
        if controller is not None:
            await controller.close()

    def controller(self, model: ServedModel) -> ModelAdmission:
        return self._controllers[model.base_name]

    def _depths(self) -> list[tuple[tuple[str, str], float]]:
        return [
            ((model, name), count)
            for model, controller in self._controllers.items()
            for name, count in zip(CLASSES, controller.depths(), strict=True)
        ]

    def _limits(self) -> list[tuple[tuple[str], float]]:
        return [((model,), controller.most_waiting()) for model, controller in self._controllers.items()]

    def _rates(self) -> list[tuple[tuple[str], float]]:
        return [((model,), controller.rate()) for model, controller in self._controllers.items()]


def _controller(model: ServedModel, config: AdmissionConfig, metrics: AdmissionMetrics) -> ModelAdmission:
    if isinstance(model.backend, ReplicaSet) and model.backend.placer.pools:
        return PooledAdmission(model, model.backend, config, metrics)
    return AdmissionController(model, config, metrics)
