"""`penstock plan`: from a model, hardware and a workload to GPUs, latency and money, before anything is bought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from penstock.cli.lists import Format, show

if TYPE_CHECKING:
    from penstock.planning.calibration import Calibration
    from penstock.planning.catalogue import ApiPrice, Catalogue, Device
    from penstock.planning.numbers import KVDType, WeightDType
    from penstock.planning.shape import ModelShape
    from penstock.planning.workload import Workload

_Number = TypeVar("_Number", int, float)
DEFAULT_MODEL = "smollm2-135m"
LIST, ALL, NONE = "list", "all", "none"
_HARDWARE, _LOAD, _OBJECTIVES, _MONEY, _OUTPUT = "Hardware", "Workload", "Objectives", "Money", "Output"


def plan(
    model: Annotated[
        str | None, typer.Argument(help="Known name, folder, config.json, .gguf file or hub name.", show_default=False)
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            "--hardware",
            metavar="NAME",
            rich_help_panel=_HARDWARE,
            help="Device of the catalogue; may be repeated. list: show them; all: every GPU that Penstock runs on; "
            "this-machine: its CPU.",
        ),
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_HARDWARE, help="Your own devices and prices, over the built-in."),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="list", rich_help_panel=_HARDWARE, help="list: show the known models.")
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option("--tp", min=1, rich_help_panel=_HARDWARE, help="Tensor parallel sizes to try; may be repeated."),
    ] = None,
    pp: Annotated[
        list[int] | None,
        typer.Option("--pp", min=1, rich_help_panel=_HARDWARE, help="Pipeline stages to try; may be repeated."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_HARDWARE,
            help="Weight formats to try: auto (as stored), bf16, fp8, int8, int4; by default auto and 8 bits.",
        ),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_HARDWARE, help="KV cache formats to try: auto, fp8, int8; by default both."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, rich_help_panel=_HARDWARE, help="Context window; by default four times the average request."
        ),
    ] = None,
    host_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", rich_help_panel=_HARDWARE, help="Host memory per device for KV blocks that leave the cache."
        ),
    ] = "0",
    acceptance: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_HARDWARE, help="Speculation: chance that a draft token is accepted; off by default."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", rich_help_panel=_HARDWARE, help="Draft model for --acceptance, instead of n-grams."
        ),
    ] = None,
    adapters: Annotated[
        int, typer.Option(min=0, rich_help_panel=_HARDWARE, help="LoRA adapters in device memory at the same time.")
    ] = 0,
    adapter_rank: Annotated[
        int, typer.Option(min=1, max=512, rich_help_panel=_HARDWARE, help="Largest rank of these adapters.")
    ] = 16,
    adapter_rows: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=_HARDWARE, help="Rows of embedding and head that each may replace."),
    ] = 64,
    adapter_vectors: Annotated[
        bool,
        typer.Option("--adapter-vectors", rich_help_panel=_HARDWARE, help="Some have DoRA, biases, IA3 or norms."),
    ] = False,
    adapter_blocks: Annotated[
        int, typer.Option(min=0, rich_help_panel=_HARDWARE, help="Size of OFT blocks, if all of them are OFT.")
    ] = 0,
    adapter_tokens: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=_HARDWARE, help="Virtual tokens that each puts before prompts."),
    ] = 0,
    adapter_prefixes: Annotated[
        bool,
        typer.Option(
            "--adapter-prefixes", rich_help_panel=_HARDWARE, help="These are keys and values (prefix tuning)."
        ),
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=_HARDWARE, help="Efficiency from `penstock bench engine --calibrate`."
        ),
    ] = None,
    users: Annotated[
        float | None,
        typer.Option(rich_help_panel=_LOAD, help="Users a day; by default 1000, or 100 on this machine."),
    ] = None,
    requests: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="Requests per user and day.")] = 10,
    input_tokens: Annotated[
        float, typer.Option("--input", rich_help_panel=_LOAD, help="Prompt tokens that a request adds.")
    ] = 500,
    output_tokens: Annotated[float, typer.Option("--output", rich_help_panel=_LOAD, help="Tokens of an answer.")] = 250,
    turns: Annotated[
        float, typer.Option(rich_help_panel=_LOAD, help="Requests of a conversation; each sends the history again.")
    ] = 1,
    cache_hit_rate: Annotated[
        float | None,
        typer.Option(rich_help_panel=_LOAD, help="Share of prompt tokens in the prefix cache; by default histories."),
    ] = None,
    shared_prefix: Annotated[
        float, typer.Option(rich_help_panel=_LOAD, help="Tokens with which all prompts begin, such as a system prompt.")
    ] = 0,
    peak: Annotated[
        float, typer.Option(rich_help_panel=_LOAD, help="The peak to serve in time, over the day's average.")
    ] = 3,
    curve: Annotated[
        str, typer.Option(rich_help_panel=_LOAD, help="The day: consumer, office, flat, or 24 loads with commas.")
    ] = "consumer",
    slo_ttft: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_OBJECTIVES,
            help="Milliseconds to the first token (p95); by default 500, on CPUs 5000; 0: any.",
        ),
    ] = None,
    slo_itl: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_OBJECTIVES, help="Milliseconds between tokens (mean); by default 50, on CPUs 200; 0: any."
        ),
    ] = None,
    utilisation: Annotated[
        float, typer.Option(rich_help_panel=_OBJECTIVES, help="Share of a replica's capacity to plan for at peak.")
    ] = 0.8,
    spares: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_OBJECTIVES,
            help="Replicas beyond those that the load needs; by default 1, or 0 on this machine.",
        ),
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", rich_help_panel=_MONEY, help="Choose by the bill of a fleet that follows the day."),
    ] = False,
    reserved: Annotated[float, typer.Option(rich_help_panel=_MONEY, help="Share of the GPUs reserved for a year.")] = 0,
    spot: Annotated[float, typer.Option(rich_help_panel=_MONEY, help="Share of the GPUs on spot.")] = 0,
    operations: Annotated[
        float | None,
        typer.Option(rich_help_panel=_MONEY, help="Hours of people a month; by default 40, or 0 on this machine."),
    ] = None,
    wage: Annotated[float, typer.Option(rich_help_panel=_MONEY, help="Dollars per hour of theirs.")] = 100,
    egress: Annotated[float, typer.Option(rich_help_panel=_MONEY, help="Dollars per GB sent to clients.")] = 0.09,
    storage: Annotated[float, typer.Option(rich_help_panel=_MONEY, help="Dollars per GB kept for a month.")] = 0.08,
    api_price: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_MONEY,
            help="API to compare with; by default the cheapest that serves the model. list: show them; none: do not.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", rich_help_panel=_OUTPUT, help="Show every deployment, also those that are out.")
    ] = False,
    form: Annotated[
        Format, typer.Option("--format", "-o", rich_help_panel=_OUTPUT, help="table or json; a list also csv.")
    ] = "table",
    json_output: Annotated[
        bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="Print the plan as JSON.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_OUTPUT, help="Write it as a page with charts.")
    ] = None,
    charts: Annotated[
        Path | None, typer.Option(metavar="DIR", rich_help_panel=_OUTPUT, help="Write its charts as plan-*.svg.")
    ] = None,
) -> None:
    """
    Plan a deployment: memory, latency, GPUs and money for a workload, and the cheapest that keeps the objectives.

    Without a model, it plans the default one on this machine's CPU. With a model and without --gpu, it tries every GPU
    of the catalogue that Penstock runs on. Every assumption is printed with its source.

    Examples:

        penstock plan

        penstock plan llama-3-70b --gpu h100 --users 100000 --requests 10 --input 2000 --output 500

        penstock plan llama-3-70b --gpu all --users 100000 --input 2000 --output 500 --autoscale --html plan.html

        penstock plan ./my-model --gpu l40s --tp 2 --weights int4 --slo-ttft 1000 --slo-itl 0

        penstock plan llama-3-8b --gpu l4 --turns 6 --input 100 --output 200 --api-price groq/llama-3.1-8b

        penstock plan llama-3-70b --gpu h100 --tp 8 --adapters 20 --adapter-rank 64 --draft llama-3-8b --acceptance 0.7

        penstock plan --hardware list -o csv
    """
    from penstock.cli.terminal import stdout
    from penstock.errors import ConfigError
    from penstock.planning.candidate import Options
    from penstock.planning.capacity import Slo
    from penstock.planning.catalogue import THIS_MACHINE, load_catalogue
    from penstock.planning.deployment import Speculation
    from penstock.planning.money import Overheads, PriceMix
    from penstock.planning.plan import make_plan, require
    from penstock.planning.provision import Headroom
    from penstock.planning.workload import Workload
    from penstock.planning.workload import curve as curve_of

    known = load_catalogue(catalogue)
    asked = [name.strip() for given in gpu or [] for name in given.split(",")]
    if _listed(known, asked, models, api_price, "json" if json_output else form):
        return
    if form == "csv":
        raise typer.BadParameter("csv is for the lists; a plan is a table or --json")
    hardware = _hardware(known, asked or [ALL if model else THIS_MACHINE])
    own = all(device.name == THIS_MACHINE for device in hardware)
    slow = all(device.kind == "cpu" for device in hardware)
    if draft is not None and acceptance is None:
        raise ConfigError("--draft needs --acceptance, the chance that one of its tokens is accepted")
    speculation = None if acceptance is None else Speculation("ngram", acceptance)
    if draft is not None and acceptance is not None:
        speculation = Speculation("draft", acceptance, draft=_shape(draft))
    options = Options(
        tensor_parallel=tuple(tp or ()),
        pipeline_parallel=tuple(pp or ()),
        weight_dtypes=_weight_formats(weights),
        kv_dtypes=_kv_formats(kv),
        context=context,
        host_memory=_size(host_memory),
        speculation=speculation,
        adapter_slots=adapters,
        adapter_rank=adapter_rank,
        adapter_rows=adapter_rows,
        adapter_vectors=adapter_vectors,
        adapter_blocks=adapter_blocks,
        adapter_tokens=adapter_tokens,
        adapter_prefixes=adapter_prefixes,
        headroom=Headroom(utilisation, _or(spares, 0 if own else 1)),
        mix=PriceMix(1 - reserved - spot, reserved, spot),
        overheads=Overheads(
            operations_hours=_or(operations, 0 if own else 40),
            hourly_wage=wage,
            egress_per_gb=egress,
            storage_per_gb=storage,
        ),
        autoscaled=autoscale,
        calibrations=_calibrations(calibration),
    )
    people = _or(users, 100 if own else 1_000)
    workload = Workload(
        people, requests, input_tokens, output_tokens, peak, curve_of(curve), turns, cache_hit_rate, shared_prefix
    )
    slo = Slo(
        _seconds("--slo-ttft", _or(slo_ttft, 5_000 if slow else 500)),
        _seconds("--slo-itl", _or(slo_itl, 200 if slow else 50)),
    )
    shape = _shape(model or DEFAULT_MODEL)
    made = make_plan(shape, hardware, workload, slo, options, _api(known, api_price, shape, workload), known)
    require(made)
    if html is not None:
        from penstock.cli.plan_page import render

        _write(html, render(made))
    if charts is not None:
        from penstock.cli.plan_charts import draw

        for name, drawing in draw(made).items():
            _write(charts / f"plan-{name}.svg", drawing)
    if json_output or form == "json":
        import msgspec

        from penstock.planning.plan_tree import as_tree

        typer.echo(msgspec.json.format(msgspec.json.encode(as_tree(made)), indent=2).decode())
    elif html is None and charts is None:
        from penstock.cli.plan_table import tables

        console = stdout()
        for part in tables(made, every=every):
            console.print(part)
            console.print()


def _write(path: Path, text: str) -> None:
    from penstock.errors import ConfigError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)


def _or(given: _Number | None, default: _Number) -> _Number:
    return default if given is None else given


def _shape(model: str) -> ModelShape:
    """A model that is in the cache is planned as it is stored there; others as their published configuration."""
    from dataclasses import replace

    from penstock.planning.model_shape import model_shape
    from penstock.sources.resolve import ALIASES, cached

    path = cached(model) if model in ALIASES else None
    return model_shape(model) if path is None else replace(model_shape(path), name=model)


def _listed(known: Catalogue, asked: Sequence[str], models: str | None, api: str | None, output: Format) -> bool:
    """Prints the lists that were asked for, and whether there were any."""
    from penstock.cli import plan_lists
    from penstock.errors import ConfigError
    from penstock.planning.model_shape import known_models, model_shape

    if models not in (None, LIST):
        raise ConfigError(f"--models {models}: the only value is list; a model is given as `penstock plan MODEL`")
    if LIST in asked:
        show(plan_lists.hardware(), known.devices.values(), output)
    if models == LIST:
        show(plan_lists.models(), map(model_shape, known_models()), output)
    if api == LIST:
        show(plan_lists.apis(), known.apis.values(), output)
    return LIST in (*asked, models, api)


def _hardware(known: Catalogue, names: Sequence[str]) -> list[Device]:
    from penstock.planning.candidate import runs_on

    found: dict[str, Device] = {}
    for name in names:
        if name == ALL:
            gpus = [device for device in known.devices.values() if device.kind == "gpu" and runs_on(device)]
            found |= {device.name: device for device in gpus}
        else:
            device = known.device(name)
            found[device.name] = device
    return list(found.values())


def _api(known: Catalogue, name: str | None, shape: ModelShape, workload: Workload) -> ApiPrice | None:
    """The one that was named, or else the cheapest for this workload that serves a model of the same size."""
    from penstock.planning.model_shape import model_shape
    from penstock.planning.money import api_request

    if name == NONE:
        return None
    if name is not None:
        return known.api(name)
    alike = [
        price
        for price in known.apis.values()
        if price.serves is not None and model_shape(price.serves).parameters == shape.parameters
    ]
    return min(alike, key=lambda price: api_request(price, workload), default=None)


def _weight_formats(given: Sequence[str] | None) -> tuple[WeightDType, ...]:
    from penstock.planning.numbers import WEIGHT_DTYPES

    return cast("tuple[WeightDType, ...]", _formats("--weights", given, WEIGHT_DTYPES))


def _kv_formats(given: Sequence[str] | None) -> tuple[KVDType, ...]:
    from penstock.planning.numbers import KV_DTYPES

    return cast("tuple[KVDType, ...]", _formats("--kv", given, KV_DTYPES))


def _formats(option: str, given: Sequence[str] | None, allowed: Sequence[str]) -> tuple[str, ...]:
    from penstock.errors import ConfigError

    names = [name.strip() for text in given or () for name in text.split(",")]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{option} {name}: must be one of {', '.join(allowed)}")
    return tuple(dict.fromkeys(names))


def _calibrations(path: Path | None) -> tuple[Calibration, ...] | None:
    """The file's before the packaged ones."""
    if path is None:
        return None
    from penstock.planning.calibration import packaged, read_calibration

    return (read_calibration(path), *packaged())


def _size(text: str) -> int:
    from penstock.config.units import SIZE_HELP, parse_size
    from penstock.errors import ConfigError

    try:
        return parse_size(text)
    except ValueError:
        raise ConfigError(f"--host-memory {text}: give {SIZE_HELP}") from None


def _seconds(option: str, milliseconds: float) -> float | None:
    import math

    from penstock.errors import ConfigError

    if not math.isfinite(milliseconds) or milliseconds < 0:
        raise ConfigError(f"{option} must be 0 (any) or more milliseconds, not {milliseconds:g}")
    return milliseconds / 1e3 or None
