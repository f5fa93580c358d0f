"""The complexity score: right on prompts it was not trained on, fast, and made by the script that is shipped."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.routing.selection.complexity import Complexity, shipped
from penstock.routing.selection.concepts import Lexicon, lexicon, plain
from penstock.routing.selection.prompts import own_prompts
from penstock.routing.selection.selector import RouteRules, select
from penstock.routing.selection.trainer import Trainer, calibrate

RULES = RouteRules("auto", "mini", "maxi")

HARD = [
    "Our gateway answers with 502 as soon as more than 300 users are on it, but each service is fine alone. Why?",
    "Under load 2% of requests come back as 502 from nginx while the upstream logs show nothing. How do I find it?",
    "My landlord kept my deposit for scratches that were there when I moved in, and he has photos. What can I do?",
    "A bat and a ball cost $1.10 in total. The bat costs $1.00 more than the ball. How much does the ball cost?",
    "用动态规划求两个字符串的最长公共子序列，并说明时间复杂度",
    "给定一个背包容量和若干物品，如何用动态规划求最大价值？请给出状态转移方程",
    "Warum verliert mein Redux-Store seinen Zustand, wenn ich zwischen zwei Tabs wechsle?",
    "Un fermier a 17 moutons, tous meurent sauf 9. Combien en reste-t-il ?",
    "サーバーが毎朝九時だけ遅くなる原因をどう切り分ければよいですか",
    "이 재귀 함수를 반복문으로 바꾸고 시간 복잡도를 설명해줘",
    "Докажи, что сумма углов треугольника равна 180 градусам",
    "صمم قاعدة بيانات لمكتبة تعير الكتب واشرح العلاقات بين الجداول",
    "मेरी कंपनी ने बिना नोटिस नौकरी से निकाल दिया, मेरे क्या अधिकार हैं और पहला कदम क्या हो?",
    "Il conduttore non paga da tre mesi ma il contratto è verbale: come lo sfratto e con quali tempi?",
    "Ontwerp een algoritme dat dubbele klanten vindt ondanks spelfouten.",
]
EASY = [
    "Thanks, the script worked!",
    "Great, the deadlock is gone. Thank you so much!",
    "ok merci, la fonction marche",
    "Danke, der Beweis ist jetzt klar!",
    "谢谢，代码可以运行了！",
    "Who wrote Faust?",
    "¿Cuál es la capital de Noruega?",
    "Translate to French: the algorithm proves the theorem step by step.",
    "Fix the typos: we shuold analyse teh root cause of teh crash",
    "Was heißt Deadlock auf Deutsch?",
    "天气怎么样",
    "今日は何曜日ですか",
    "고마워, 잘 됐어!",
    "شكراً، الكود يعمل الآن",
    "Set an alarm for half past six.",
    "What does idempotency mean?",
]


def test_prompts_that_were_not_trained_on() -> None:
    known = {prompt.text for prompt in own_prompts()}
    assert not known.intersection([*HARD, *EASY])
    wrong = [text for text in HARD if select(RULES, text).size != "large"]
    wrong += [text for text in EASY if select(RULES, text).size != "small"]
    assert not wrong


def test_the_prompts_are_many_and_balanced_in_every_language_and_style() -> None:
    prompts = own_prompts()
    assert len(prompts) >= 3000 and len({prompt.text for prompt in prompts}) == len(prompts)
    languages = Counter(prompt.language for prompt in prompts)
    assert sum(count >= 90 for count in languages.values()) >= 14
    for name, prompt_name in (("language", languages), ("style", Counter(prompt.style for prompt in prompts))):
        for group in prompt_name:
            sizes = Counter(prompt.size for prompt in prompts if getattr(prompt, name) == group)
            assert min(sizes.values()) >= 0.04 * sum(sizes.values()) and len(sizes) == 2, (group, sizes)


def test_the_shipped_weights_are_where_training_ends() -> None:
    trainer, weights = Trainer(own_prompts()), shipped().weights()
    assert trainer.steepness(weights) < 0.02 * trainer.steepness(np.zeros(len(weights)))


@pytest.mark.slow
def test_the_shipped_weights_are_those_of_the_script() -> None:
    prompts = own_prompts()
    made = Trainer(prompts).model(shipped().temperature)
    values = [(made.assess(prompt.text).value, shipped().assess(prompt.text).value) for prompt in prompts[::40]]
    assert max(abs(one - other) for one, other in values) < 0.03


@pytest.mark.slow
def test_prompts_of_a_style_or_language_that_was_left_out() -> None:
    trainer = Trainer(own_prompts())
    styles = trainer.left_out(lambda prompt: prompt.style)
    languages = trainer.left_out(lambda prompt: prompt.language)
    assert ((styles > 0) == (trainer.labels > 0)).mean() >= 0.88
    assert ((languages > 0) == (trainer.labels > 0)).mean() >= 0.89
    assert 0.8 < calibrate(styles, trainer.labels) / shipped().temperature < 1.25


def test_a_question_takes_little_however_long_it_is() -> None:
    texts = [prompt.text for prompt in own_prompts()[::20]]
    model = shipped()
    best = min(_seconds(model, texts) for _ in range(5))
    assert best / len(texts) < 0.02  # 0.2 ms on a fast machine
    long = "Why does the server fail under load? " * 50_000
    assert min(_seconds(model, [long]) for _ in range(5)) < 0.4  # seconds, if all of it were read


def _seconds(model: Complexity, texts: list[str]) -> float:
    begin = time.process_time()
    for text in texts:
        model.assess(text)
    return time.process_time() - begin


def test_weights_are_small_and_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "score.npz"
    shipped().save(path)
    assert path.stat().st_size < 300_000
    assert Complexity.load(path).assess(HARD[0]) == shipped().assess(HARD[0])


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    other.write_bytes(b"PK nothing")
    with pytest.raises(ConfigError, match="train-score"):
        Complexity.load(other)
    np.savez(other, version=np.array(99), concepts=np.array(["why"]))
    with pytest.raises(ConfigError, match="another version"):
        Complexity.load(other)
    with pytest.raises(ConfigError, match="train-score"):
        Complexity.load(tmp_path / "missing.npz")
    other.write_text("large\tours\tWhy?\n")
    with pytest.raises(ConfigError, match="train-score"):
        Complexity.load(other)


def test_diacritics_and_quotation_marks_do_not_matter() -> None:
    assert plain("  ¿Por QUÉ\n falla? ") == "¿por que falla?"
    assert plain("İstanbul’da") == "istanbul'da"
    one, other = (shipped().assess(text).value for text in ("Démontre que c’est vrai", "demontre que c'est vrai"))
    assert abs(one - other) < 0.1


def test_stems_match_at_the_beginning_of_words() -> None:
    words = Lexicon(["# comment", "[en]", "why: why_, reason", "zh: 为什么"])
    assert words.find("why reasons unreason whys") == [(0, 0), (0, 4)]
    assert [concept for concept, _ in words.find("请问为什么会这样")] == [1]
    with pytest.raises(ConfigError, match="line 1"):
        Lexicon(["nothing"])
    assert len(lexicon().names) >= 30


def test_quoted_text_does_not_say_what_is_asked() -> None:
    quoted = "We must analyse the root cause of the failure, compare both designs step by step and prove the theorem."
    assert select(RULES, f'Correct the spelling of this: "{quoted}"').size == "small"
    assert select(RULES, quoted).size == "large"
