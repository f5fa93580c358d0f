"""Lists the workloads and the model shapes that can be chosen."""

from __future__ import annotations

from rich.console import Console

from penstock.bench import report, shapes, workloads


def show_choices(console: Console) -> None:
    names = report.table("Workloads", "name", "what")
    for workload in workloads.WORKLOADS.values():
        names.add_row(workload.name, workload.summary)
    forms = report.table(
        "Shapes; NAME:N has N layers", "name", "layers", "hidden", "parameters", "read for a token", "vocabulary"
    )
    for name, config in shapes.SHAPES.items():
        cost = shapes.cost(config, weight_bytes=1, kv_bytes=1)
        forms.add_row(
            name,
            f"{config['num_hidden_layers']}",
            f"{config['hidden_size']:,}",
            f"{shapes.all_parameters(config) / 1e9:.2f} B",
            f"{cost.weights(1) / 1e9:.2f} B",
            f"{config['vocab_size']:,}",
        )
    console.print(names)
    console.print(forms)
