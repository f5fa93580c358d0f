"""Markdown in a real browser: what a model writes becomes elements, and never markup of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route

STATIC = Path(__file__).resolve().parents[2] / "penstock" / "console" / "static"
ROOT = "http://console.example/"
LOAD = "const { markdown, Rendered } = await import('/markdown/render.js');"

BLOCKS = {
    "# One\n\n###### Six ##": "<h3>One</h3><h6>Six</h6>",
    "Title\n=====\ntext": "<h3>Title</h3><p>text</p>",
    "a\n\n---\n\n* * *\n\nb": "<p>a</p><hr><hr><p>b</p>",
    "- a\n  - b\n    - c\n- d": "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    "1. a\n   - b\n   - c\n2. d": "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>",
    "1. a\n  * b\n\n   more": "<ol><li>a<ul><li>b</li></ul>more</li></ol>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "1. a\n\n   second\n2. b": "<ol><li><p>a</p><p>second</p></li><li><p>b</p></li></ol>",
    "The year\n1984. was": "<p>The year<br>1984. was</p>",
    "> a\n> > b\n> - c": "<blockquote><p>a</p><blockquote><p>b</p></blockquote><ul><li>c</li></ul></blockquote>",
    "- [x] done\n- [ ] open": '<ul><li class="task"><input type="checkbox" disabled="" aria-label="done" checked=""> '
    'done</li><li class="task"><input type="checkbox" disabled="" aria-label="to do"> open</li></ul>',
    "| a | b |\n|:-:|--:|\n| `x|y` | 2 \\| 3 |\n| only |": '<div class="grid" tabindex="0"><table><thead><tr>'
    '<th style="text-align: center">a</th><th style="text-align: right">b</th></tr></thead><tbody><tr>'
    '<td style="text-align: center"><code>x|y</code></td><td style="text-align: right">2 | 3</td></tr><tr>'
    '<td style="text-align: center">only</td><td style="text-align: right"></td></tr></tbody></table></div>',
    "one | two": "<p>one | two</p>",
    "line one\nline two\\\nthree": "<p>line one<br>line two<br>three</p>",
}
INLINE = {
    "**bold** *it* ***both*** _it_ ~~gone~~": "<strong>bold</strong> <em>it</em> <em><strong>both</strong></em> "
    "<em>it</em> <del>gone</del>",
    "**Note:**text **a *b* c**": "<strong>Note:</strong>text <strong>a <em>b</em> c</strong>",
    "2 * 3 * 4, snake_case_name, ~5 or ~6, **open": "2 * 3 * 4, snake_case_name, ~5 or ~6, **open",
    "`a*b*` and ``x`y``": "<code>a*b*</code> and <code>x`y</code>",
    r"\*no\* \_no\_ &amp; &lt;b&gt; &#65;": "*no* _no_ &amp; &lt;b&gt; A",
    "[a **b**](https://x.example/y_(z)) <https://q.example>": '<a href="https://x.example/y_(z)" target="_blank" '
    'rel="noreferrer noopener">a <strong>b</strong></a> <a href="https://q.example/" target="_blank" '
    'rel="noreferrer noopener">https://q.example</a>',
    "see (https://a.example/b).": 'see (<a href="https://a.example/b" target="_blank" rel="noreferrer noopener">'
    "https://a.example/b</a>).",
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](/v1/x)": "[x](javascript:alert(1)) [y](data:text/html,z) "
    "[z](/v1/x)",
    "![alt](https://a.example/i.png)": '<a href="https://a.example/i.png" target="_blank" rel="noreferrer noopener">'
    "🖼 alt</a>",
    '<img src=x onerror="document.title=1"><script>1</script>a<br>b': '&lt;img src=x onerror="document.title=1"&gt;'
    "&lt;script&gt;1&lt;/script&gt;a<br>b",
    "It costs $5 and $10, or $5-$10.": "It costs $5 and $10, or $5-$10.",
}
FORMULAS = {
    "$x^2$": "<msup><mi>x</mi><mn>2</mn></msup>",
    r"\(\frac{a}{b+1}\)": "<mfrac><mi>a</mi><mrow><mi>b</mi><mo>+</mo><mn>1</mn></mrow></mfrac>",
    r"$\sqrt[3]{x}$": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"$\alpha_i' \leq 3.14$": '<mrow><msubsup><mi>α</mi><mi>i</mi><mo lspace="0">′</mo></msubsup><mo>≤</mo>'
    "<mn>3.14</mn></mrow>",
    r"$\mathbb{R}^n$": "<msup><mi>ℝ</mi><mi>n</mi></msup>",
    r"$f(x)=\text{if } x$": '<mrow><mi>f</mi><mo stretchy="false">(</mo><mi>x</mi><mo stretchy="false">)</mo>'
    "<mo>=</mo><mtext>if&nbsp;</mtext><mi>x</mi></mrow>",
}
SOURCES_SHOWN = [r"\undefinedcommand{x}", r"\frac{a}", r"\begin{tikzpicture}", "{" * 100 + "x" + "}" * 100, r"\left( x"]


async def blank(page: Page) -> None:
    """A page on which the console's modules can be imported; no server."""

    async def answer(route: Route) -> None:
        name = route.request.url.removeprefix(ROOT)
        if name:
            await route.fulfill(path=STATIC / name, content_type="text/javascript")
        else:
            await route.fulfill(body="<!doctype html><title>blank</title>", content_type="text/html")

    await page.route(f"{ROOT}**", answer)
    await page.goto(ROOT)


async def rendered(page: Page, sources: list[str]) -> list[str]:
    code = f"async (sources) => {{ {LOAD} return sources.map((one) => markdown(one).innerHTML); }}"
    return list(await page.evaluate(code, sources))


async def test_markdown_becomes_elements_and_never_markup(page: Page) -> None:
    await blank(page)
    for source, html in zip(BLOCKS, await rendered(page, list(BLOCKS)), strict=True):
        assert html == BLOCKS[source], source
    for source, html in zip(INLINE, await rendered(page, list(INLINE)), strict=True):
        assert html == f"<p>{INLINE[source]}</p>", source
    for source, html in zip(FORMULAS, await rendered(page, list(FORMULAS)), strict=True):
        assert html.endswith(f">{FORMULAS[source]}</math></p>"), html
    unknown = await rendered(page, [f"a ${one}$ b" for one in SOURCES_SHOWN])
    assert [html.split("</code>")[0] for html in unknown] == [
        f'<p>a <code class="latex">{one}' for one in SOURCES_SHOWN
    ]
    [code] = await rendered(page, ["```python\ndef f(x):  # why\n    return 'a' + 1\n```"])
    for part in (
        '<span class="hl-keyword">def</span> <span class="hl-call">f</span>(x):',
        '<span class="hl-comment"># why</span>',
        '<span class="hl-string">\'a\'</span> + <span class="hl-number">1</span>',
        '<span>python</span><button type="button" data-copy="" aria-label="Copy this block">',
    ):
        assert part in code, code
    [display] = await rendered(page, ["\\[\n\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}\n\\]"])
    assert display.count("<mtd>") == 4 and 'display="block"' in display
    assert await page.title() == "blank"


CITED = """async () => { %s
  const sources = { cite: (n) => n < 3 };
  const shown = markdown("One [1], two [1, 2], none [7], link [1](https://a.example).", sources);
  return [...shown.querySelectorAll("[data-cite]")].map((one) => one.dataset.cite).join() + " " + shown.textContent;
}"""


async def test_numbers_of_sources_are_buttons_and_other_numbers_are_not(page: Page) -> None:
    await blank(page)
    assert await page.evaluate(CITED % LOAD) == "1,1,2 One 1, two 12, none [7], link 1."


GROWING = """async (source) => { %s
  const element = document.createElement("div");
  document.body.append(element);
  const live = new Rendered(element);
  let made = 0;
  new MutationObserver((seen) => { for (const one of seen) made += one.addedNodes.length; }).observe(element, { childList: true });
  const began = performance.now();
  let steps = 0;
  for (let end = 0; end <= source.length; end += 97) { live.show(source.slice(0, end)); steps++; }
  live.show(source);
  const seconds = (performance.now() - began) / 1000;
  await new Promise((done) => setTimeout(done));
  return { same: element.innerHTML === markdown(source).innerHTML, seconds, steps, made, children: element.childNodes.length };
}"""  # noqa: E501


async def grown(page: Page, source: str) -> dict[str, Any]:
    return dict(await page.evaluate(GROWING % LOAD, source))


def long_answer(size: int) -> str:
    part = "\n\n".join([*BLOCKS, "```python\nx = 1\n\n\n# y\n```", *INLINE, *FORMULAS])
    return (part + "\n\n") * (size // len(part) + 1)


@pytest.mark.slow
async def test_a_growing_text_is_what_it_would_be_at_once_and_only_its_end_is_made_anew(page: Page) -> None:
    await blank(page)
    result = await grown(page, long_answer(20_000))
    assert result["same"]
    assert result["made"] < 4 * result["steps"] + result["children"], result


@pytest.mark.slow
async def test_100_kb_stay_fast_and_hostile_text_costs_no_more_than_its_length(page: Page) -> None:
    await blank(page)
    result = await grown(page, long_answer(100_000))
    assert result["same"] and result["made"] < 4 * result["steps"] + result["children"], result
    assert result["seconds"] < 60, "1,000 redraws: one second on an idle core"
    hostile = ["*a ", "[", "`a``", "$a ", "> ", "- ", "_*~~", "\\[", "(", "![](", "<", "https://a("]
    hostile = [part * (90_000 // len(part)) for part in hostile]
    hostile += ["|a" * 40_000 + "\n" + "|-" * 40_000, "```js\n" + "`" * 90_000, "```python\n" + '"""' * 30_000]
    hostile += ["```bash\n" + "a " * 40_000, "```yaml\n" + "a b " * 20_000]
    for source in hostile:
        began = await page.evaluate("performance.now()")
        await rendered(page, [source])
        taken = (await page.evaluate("performance.now()") - began) / 1000
        assert taken < 30, f"{source[:20]!r} took {taken:.1f} s"
