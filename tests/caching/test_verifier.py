"""R-CACHE-2: the verifier distinguishes similar questions, including the adversarial set in the repository."""

from __future__ import annotations

import time

import pytest

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.bench.semantic_cache import Decider, Prepared, load_pairs
from penstock.caching.question import parse_question
from penstock.caching.verifier import Leftover, compare, match_leftover


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ("Is it safe?", "Is it not safe?", "negation"),
        ("Can I pay with cash?", "Can I pay without cash?", "negation"),
        ("Don't you ship?", "Do you ship?", "negation"),
        ("error 404", "error 403", "number"),
        ("version 2.1 of it", "version 2.10 of it", "number"),
        ("two eggs", "three eggs", "number"),
        ("the 1st law", "the 2nd law", "number"),
        ("Who is Ada?", "Who is Bob?", "name"),
        ("what is the capital of france", "what is the capital of germany", "name"),
        ("How do I lock it?", "How do I unlock it?", "opposite"),
        ("How do I turn on dark mode?", "How do I turn off dark mode?", "opposite"),
        ("trains from Paris to Lyon", "trains from Lyon to Paris", "order"),
        ("When was it invented?", "Where was it invented?", "question"),
        ("What is my name?", "What is your name?", "person"),
        ("Who leads the United team?", "Who leads the Unit team?", "name"),
        ("run `ls -l`", "run `ls -a`", "literal"),
        ("pizza dough recipe", "vegan pizza dough recipe", "name"),
        ("delete a file", "delete all files", "wording"),
        ("5 kg of rice", "5 lb of rice", "name"),
        ("Convert 10 miles to kilometres", "Convert 10 kilometers to miles", "order"),
    ],
)
def test_what_differs_is_named(a: str, b: str, why: str) -> None:
    assert compare(parse_question(a), parse_question(b)) == why
    assert compare(parse_question(b), parse_question(a)) == why


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("How do I reset my password?", "what's the best way to reset my password"),
        ("What is 15% of 240?", "What is 15 percent of 240?"),
        ("Give me five ideas", "Suggest 5 ideas"),
        ("How tall is Mount Everest?", "What is the height of Mount Everest?"),
        ("Who wrote Hamlet?", "Who is the author of Hamlet?"),
        ("How do I turn on dark mode?", "How can I enable dark mode?"),
        ("Translate colours", "translate color"),
        ("Is it organised?", "Is it organized?"),
        ("10 kilometres", "10 km"),
        ("Is it open on Mondays?", "Is it open on Monday?"),
        ("How much does it cost to ship to Norway?", "What is the cost of shipping to Norway?"),
    ],
)
def test_what_means_the_same_passes(a: str, b: str) -> None:
    assert compare(parse_question(a), parse_question(b)) is None


def test_words_without_an_entry_are_judged_by_their_vectors() -> None:
    left = compare(parse_question("How do I clean a rug?"), parse_question("How do I clean a carpet?"))
    assert left == Leftover(("rug",), ("carpet",))
    assert match_leftover(left, [[0.8]]) is None
    assert match_leftover(left, [[0.6]]) == "wording"
    assert match_leftover(Leftover(("ethanol",), ("methanol",)), [[0.99]]) == "wording"


@pytest.mark.parametrize("text", ["", "???", "`", "'s 's n't", "数字は 42 ですか", "a" * 1000, "% $ #"])
def test_any_text_can_be_read(text: str) -> None:
    assert compare(parse_question(text), parse_question(text)) is None


@pytest.mark.parametrize("text", ["a" * 100_000, "a.b+c-" * 20_000, "@" * 100_000, "how many " * 1000, "'" * 100_000])
def test_long_texts_are_read_in_linear_time(text: str) -> None:
    begin = time.process_time()
    parse_question(text)
    assert time.process_time() - begin < 5  # minutes, if anything were quadratic


@pytest.mark.slow
async def test_the_adversarial_set_on_its_held_out_part(encoder_endpoint: str) -> None:
    pairs = [pair for pair in load_pairs() if pair.held_out]
    adversarial = [pair for pair in pairs if pair.kind != "paraphrase"]
    paraphrases = [pair for pair in pairs if pair.kind == "paraphrase"]
    assert len(load_pairs()) > 350 and len(adversarial) > 100 and len(paraphrases) > 60
    embedder = Embedder("minilm", "minilm", EncoderBackend(encoder_endpoint))
    decider = Decider(await Prepared.of(embedder, pairs), 0.8)
    false_hits = [pair for pair in adversarial if await decider.same(pair.first, pair.second)]
    hits = [pair for pair in paraphrases if await decider.same(pair.first, pair.second)]
    await embedder.close()
    assert len(false_hits) <= 0.01 * len(adversarial), false_hits
    assert len(hits) > 0.6 * len(paraphrases)
