"""Lists the workloads and the model shapes that can be chosen."""

from __future__ import annotations

from rich.console import Console

from penstock.bench import report, shapes, workloads


def show_choices(console: Console) -> None:
    names = report.table("Workloads", "name", "what")
    for workload in workloads.WORKLOADS.values():
        names.add_row(workload.name, workload.summary)
    forms = report.table("Shapes", "name", "hidden", "ffn", "layers", "heads", "vocabulary")
    for name, config in shapes.SHAPES.items():
        heads = f"{config['num_attention_heads']}/{config['num_key_value_heads']} of {config['head_dim']}"
        sizes = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        forms.add_row(name, *(f"{size:,}" for size in sizes), heads, f"{config['vocab_size']:,}")
    console.print(names)
    console.print(forms)
