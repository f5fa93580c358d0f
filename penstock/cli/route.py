"""`penstock route`: explains the decision of a route, evaluates it on labelled prompts, trains its classifier.

`experiments.py` has the commands for experiments.
"""

from __future__ import annotations

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

Threshold = Annotated[float, typer.Option(min=0, max=1, help="Score above which the large model answers.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="Labelled prompts: small or large, TAB, kind, TAB, prompt. Default: built in."),
]
ClassifierFile = Annotated[
    Path | None, typer.Option("--classifier", exists=True, dir_okay=False, help="Trained with `penstock route train`.")
]
Key = Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key with the scope `inference`.")]


@route.command()
def explain(
    text: Annotated[str, typer.Argument(help="A question.")],
    threshold: Threshold = 0.6,
) -> None:
    """
    Show which model would answer a question, and why.

    Examples:

        penstock route explain "Prove that the square root of 2 is irrational."
    """
    from rich.console import Console

    from penstock.routing.selection.features import read
    from penstock.routing.selection.score import score
    from penstock.routing.selection.selector import select

    rules = _rules(threshold)
    selection = select(rules, text)
    console = Console()
    console.print(f"[bold]{selection.size}[/bold] (rule: {selection.rule})")
    found = score(read(text), rules.long_words)
    for name, certainty in found.parts:
        if certainty >= 0.005:
            console.print(f"  {name:12} {certainty:.2f} {'█' * round(certainty * 40)}")
    console.print(f"  {'score':12} {found.value:.2f} (threshold {threshold:g})")


@route.command()
def evaluate(
    prompts: Prompts = None,
    threshold: Threshold = 0.6,
    classifier: ClassifierFile = None,
    price_ratio: Annotated[
        float, typer.Option(min=1, help="Price of the large model divided by the small one's.")
    ] = 10.0,
    show_wrong: Annotated[bool, typer.Option("--show-wrong", help="List the wrong decisions.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Measure accuracy and savings on labelled prompts, separately for training and test prompts.

    Examples:

        penstock route evaluate --show-wrong

        penstock route evaluate --classifier auto.json --price-ratio 20
    """
    from rich.console import Console
    from rich.table import Table

    from penstock.routing.selection.classifier import Classifier
    from penstock.routing.selection.evaluation import evaluate as measure
    from penstock.routing.selection.selector import select

    rules, found = _rules(threshold), _load(prompts)
    opinions: dict[str, float] = {}
    if classifier is not None:
        trained = Classifier.load(classifier)
        vectors = _embed([prompt.text for prompt in found], trained.encoder, url, key)
        opinions = {p.text: trained.probability(p.text, row) for p, row in zip(found, vectors, strict=True)}
    console = Console()
    table = Table("set", "prompts", "correct", "too small", "too large", "sent to large", "saved", box=None)
    for name, kept in (("training", False), ("test", True)):
        part = [prompt for prompt in found if prompt.for_testing == kept]
        if not part:
            continue
        result = measure(part, lambda text: select(rules, text, opinion=opinions.get(text)))
        table.add_row(
            name, str(result.prompts), f"{result.accuracy:.1%}", str(result.too_small), str(result.too_large),
            f"{result.sent_to_large / result.prompts:.0%}", f"{result.saved(price_ratio):.0%}",
        )  # fmt: skip
        for prompt, selection in result.wrong if show_wrong else ():
            console.print(f"  {name}: {selection.size} instead of {prompt.size}: {prompt.text}", highlight=False)
    console.print(table)
    console.print(f"Saved: compared with sending everything to the large model at {price_ratio:g} times the price.")


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
