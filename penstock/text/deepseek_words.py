"""How the tokenizers of DeepSeek and Kimi cut text into words before they merge bytes, by the names of GGUF files.

The patterns are those of the published tokenizers. DeepSeek's are applied one after the other: each cuts what the ones
before left whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
"""Letters of scripts with two cases, as the first tokenizer lists them; it leaves some out."""
_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
_EAST_ASIAN = "4E00-9FA5 800-4E00 AC00-D7FF"
_HAN_AND_KANA = "4E00-9FA5 3040-309F 30A0-30FF"


def _ranges(codes: str) -> str:
    """A class of characters from code points in hexadecimal."""
    parts = (code.split("-") for code in codes.split())
    return "[" + "".join("-".join(_escaped(int(end, 16)) for end in ends) for ends in parts) + "]"


def _escaped(code: int) -> str:
    return f"\\{chr(code)}" if code < 128 and not chr(code).isalnum() else chr(code)


def _one_by_one(*patterns: str) -> Callable[[], Any]:
    def build() -> Any:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))

DEEPSEEK_LLM = _one_by_one(
    r"[\r\n]",
    rf"\s?{_ranges(_CASED)}+",
    rf"\s?{_ranges(_PUNCTUATION)}+",
    r"\s+$",
    rf"{_ranges(_EAST_ASIAN)}+",
    r"\p{N}+",
)
DEEPSEEK_CODER = _one_by_one(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_ranges(_EAST_ASIAN)}+", r"\p{N}")
DEEPSEEK_V3 = _one_by_one(
    r"\p{N}{1,3}",
    rf"{_ranges(_HAN_AND_KANA)}+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KIMI_K2 = _one_by_one(
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": KIMI_K2,
}
