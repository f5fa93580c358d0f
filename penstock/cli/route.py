"""`penstock route`: explains the decision of a route, evaluates it on labelled prompts, trains score and classifier.

`experiments.py` has the commands for experiments.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.admin import DEFAULT_URL, Url

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.routing.selection.classifier import Classifier
    from penstock.routing.selection.prompts import Prompt
    from penstock.routing.selection.selector import RouteRules

route = typer.Typer(
    help="Which model answers: selection by content (`model: auto`), and experiments.", no_args_is_help=True
)


class LeaveOut(enum.StrEnum):
    """What is kept from the weights that judge a prompt."""

    STYLE = "style"
    LANGUAGE = "language"
    NOTHING = "nothing"


Threshold = Annotated[float, typer.Option(min=0, max=1, help="Score above which the large model answers.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="Labelled prompts: small or large, TAB, kind, TAB, prompt. Default: built in."),
]
ClassifierFile = Annotated[
    Path | None, typer.Option("--classifier", exists=True, dir_okay=False, help="Trained with `penstock route train`.")
]
ScoreFile = Annotated[
    Path | None, typer.Option("--score", exists=True, dir_okay=False, help="Made with `penstock route train-score`.")
]
Key = Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key with the scope `inference`.")]


@route.command()
def explain(
    text: Annotated[str, typer.Argument(help="A question.")],
    threshold: Threshold = 0.6,
    score: ScoreFile = None,
) -> None:
    """
    Show which model would answer a question, and what speaks for and against the large one.

    Examples:

        penstock route explain "Prove that the square root of 2 is irrational."
    """
    from rich.console import Console

    from penstock.routing.selection.complexity import Complexity, shipped
    from penstock.routing.selection.selector import select

    rules = _rules(threshold)
    model = shipped() if score is None else Complexity.load(score)
    found, selection = model.assess(text), select(rules, text, complexity=model)
    console = Console(highlight=False)
    console.print(f"[bold]{selection.size}[/bold] (rule: {selection.rule})")
    for name, weight in found.parts[:10]:
        if abs(weight) >= 0.05:
            bar = ("+" if weight > 0 else "-") * min(round(abs(weight) * 10), 40)
            console.print(f"  {name:16} {weight:+.2f} {bar}")
    console.print(
        f"  {'score':16} {found.value:.2f} (large above {threshold:g}, small below {threshold - rules.unsure:g})"
    )


@route.command()
def evaluate(
    prompts: Prompts = None,
    threshold: Threshold = 0.6,
    classifier: ClassifierFile = None,
    score: ScoreFile = None,
    leave_out: Annotated[
        LeaveOut, typer.Option(help="Built-in prompts: judge each by weights that never saw its style or its language.")
    ] = LeaveOut.STYLE,
    price_ratio: Annotated[
        float, typer.Option(min=1, help="Price of the large model divided by the small one's.")
    ] = 10.0,
    show_wrong: Annotated[bool, typer.Option("--show-wrong", help="List the wrong decisions.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Measure accuracy and savings on labelled prompts.

    The built-in prompts are those that the score was trained on, so each is judged by weights trained without its style
    (or language); that takes about a minute. Prompts of your own are judged by the score as it is.

    Examples:

        penstock route evaluate --leave-out language

        penstock route evaluate --prompts ours.tsv --show-wrong

        penstock route evaluate --prompts ours.tsv --classifier auto.json --price-ratio 20
    """
    from rich.console import Console
    from rich.table import Table

    from penstock.routing.selection.classifier import Classifier
    from penstock.routing.selection.complexity import Complexity, shipped
    from penstock.routing.selection.evaluation import evaluate as measure
    from penstock.routing.selection.selector import select

    rules, found = _rules(threshold), _load(prompts)
    opinions: dict[str, float] = {}
    if classifier is not None:
        trained = Classifier.load(classifier)
        vectors = _embed([prompt.text for prompt in found], trained.encoder, url, key)
        opinions = {p.text: trained.probability(p.text, row) for p, row in zip(found, vectors, strict=True)}
    console = Console()
    unseen = prompts is None and score is None and leave_out is not LeaveOut.NOTHING
    by_language = leave_out is LeaveOut.LANGUAGE
    models: dict[str, Complexity] = {}
    if unseen:
        from penstock.routing.selection.trainer import Trainer

        with console.status("training without each group in turn"):
            trainer = Trainer(found)
            for name in sorted({_group(prompt, by_language=by_language) for prompt in found}):
                others = [i for i, p in enumerate(found) if _group(p, by_language=by_language) != name]
                models[name] = Complexity.of(trainer.fit(others), shipped().temperature)
    model = shipped() if score is None else Complexity.load(score)
    table = Table(
        "prompts", "number", "correct", "too small", "too large", "unknown", "sent to large", "saved", box=None
    )
    groups = sorted({_group(prompt, by_language=by_language) for prompt in found})
    for name in [*groups, "all"]:
        part = [prompt for prompt in found if name in (_group(prompt, by_language=by_language), "all")]
        result = measure(
            part,
            lambda prompt: select(
                rules,
                prompt.text,
                opinion=opinions.get(prompt.text),
                complexity=models.get(_group(prompt, by_language=by_language), model),
            ),
        )
        table.add_row(
            name, str(result.prompts), f"{result.accuracy:.1%}", str(result.too_small), str(result.too_large),
            str(result.unknown), f"{result.sent_to_large / result.prompts:.0%}", f"{result.saved(price_ratio):.0%}",
        )  # fmt: skip
        for prompt, selection in result.wrong if show_wrong and name != "all" else ():
            shown = f"{selection.size} instead of {prompt.size} ({selection.score or 0:.2f}): {prompt.text}"
            console.print(f"  {name}: {shown}", highlight=False, markup=False)
    console.print(table)
    if unseen:
        console.print(f"Each line was decided by weights trained without that {leave_out.value}.")
    console.print(f"Saved: compared with sending everything to the large model at {price_ratio:g} times the price.")


@route.command("train-score")
def train_score(
    output: Annotated[Path, typer.Argument(help="File to write the weights to (.npz).")],
    prompts: Prompts = None,
    only: Annotated[
        bool, typer.Option("--only", help="Train on --prompts alone, not on the built-in prompts too.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0.1, help="Divides logits; measured by leaving out each style when not given.")
    ] = None,
) -> None:
    """
    Train the weights of the complexity score. Needs no server; takes less than a minute.

    Examples:

        penstock route train-score ours.npz --prompts ours.tsv
    """
    from rich.console import Console

    from penstock.errors import ConfigError
    from penstock.routing.selection.prompts import own_prompts, read_prompts
    from penstock.routing.selection.trainer import Trainer, calibrate

    console = Console()
    found = [] if prompts is None else read_prompts(prompts)
    if only and prompts is None:
        raise ConfigError("--only needs --prompts")
    found = found if only else [*own_prompts(), *found]
    if len({prompt.size for prompt in found}) < 2:
        raise ConfigError("there must be prompts of both sizes")
    trainer = Trainer(found)
    if temperature is None:
        with console.status("measuring the temperature"):
            temperature = calibrate(trainer.left_out(lambda prompt: prompt.style), trainer.labels)
    trainer.model(temperature).save(output)
    console.print(f"{output}: trained on {len(found)} prompts, temperature {temperature:g}.")
    console.print(f"To use it, set routes[0].score: {output}")


@route.command()
def train(
    output: Annotated[Path, typer.Argument(help="File to write the classifier to (JSON).")],
    prompts: Prompts = None,
    feedback: Annotated[
        Path | None,
        typer.Option(help='More examples, a JSON object per line: {"prompt": …, "size": "small", "rating": "down"}.'),
    ] = None,
    encoder: Annotated[str, typer.Option(help="Embedding model that the server serves.")] = "minilm",
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Train a classifier on labelled prompts, with embeddings from a running server.

    With --feedback, a bad rating of the small model labels the prompt as large; a good rating confirms the model.

    Examples:

        penstock route train auto.json

        penstock route train auto.json --prompts ours.tsv --feedback rated.jsonl
    """
    import numpy as np
    from rich.console import Console

    from penstock.routing.selection.classifier import Classifier, fit, rows

    found = _load(prompts) + ([] if feedback is None else _rated(feedback))
    console = Console()
    with console.status(f"embedding {len(found)} prompts"):
        vectors = _embed([prompt.text for prompt in found], encoder, url, key)
    features = rows([prompt.text for prompt in found], vectors)
    labels = np.array([prompt.size == "large" for prompt in found])
    kept = np.array([prompt.for_testing for prompt in found])
    weights, bias = fit(features[~kept], labels[~kept])
    right = ((features[kept] @ np.array(weights) + bias > 0) == labels[kept]).mean() if kept.any() else float("nan")
    made: Classifier = Classifier(encoder, weights, bias, int((~kept).sum()), float(right))
    made.save(output)
    console.print(
        f"{output}: trained on {made.trained_on} prompts, {right:.1%} correct on {int(kept.sum())} test prompts."
    )
    console.print(f"To use it, set routes[0].classifier: {output}")


def _rules(threshold: float) -> RouteRules:
    from penstock.routing.selection.selector import RouteRules

    return RouteRules("auto", "small", "large", threshold=threshold)


def _group(prompt: Prompt, *, by_language: bool) -> str:
    return prompt.language if by_language else prompt.style


def _load(path: Path | None) -> list[Prompt]:
    from penstock.routing.selection.prompts import own_prompts, read_prompts

    return own_prompts() if path is None else read_prompts(path)


def _rated(path: Path) -> list[Prompt]:
    from penstock.routing.selection.prompts import rated_prompts

    return rated_prompts(path)


def _embed(texts: list[str], encoder: str, url: str, key: str | None) -> NDArray[np.float32]:
    import httpx
    import numpy as np

    from penstock.cli.admin import fetch

    found: list[list[float]] = []
    for begin in range(0, len(texts), 64):
        body = {"model": encoder, "input": texts[begin : begin + 64]}
        answer: httpx.Response = fetch("POST", url, key, "/v1/embeddings", body, under="", timeout=httpx.Timeout(120.0))
        found += [one["embedding"] for one in answer.json()["data"]]
    return np.array(found, np.float32)
