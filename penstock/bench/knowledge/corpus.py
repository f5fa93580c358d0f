"""The documentation of the Python standard library as Markdown, one document per module, one section per entry.

It is on every machine that runs Python, large enough to get lost in, and was not written for this test.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from types import ModuleType

_NAMES = """
    argparse array ast asyncio atexit base64 binascii bisect bz2 cProfile calendar cmath cmd code codecs
    collections colorsys concurrent.futures configparser contextlib contextvars copy copyreg csv dataclasses
    datetime dbm decimal difflib dis doctest email.message email.utils enum errno faulthandler fcntl filecmp
    fileinput fnmatch fractions functools gc getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac
    html html.parser http.client http.cookies http.server importlib importlib.metadata importlib.resources
    inspect io ipaddress itertools json keyword linecache locale logging logging.config logging.handlers lzma
    marshal math mimetypes mmap multiprocessing multiprocessing.shared_memory numbers operator os os.path
    pathlib pdb pickle pkgutil platform plistlib pprint profile pstats pty pwd py_compile queue random re
    readline reprlib resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site
    smtplib socket socketserver sqlite3 ssl stat statistics string struct subprocess sys sysconfig syslog
    tabnanny tarfile tempfile termios textwrap threading time timeit token tokenize tomllib trace traceback
    tracemalloc tty types typing unicodedata unittest unittest.mock urllib.parse urllib.request
    urllib.robotparser uuid warnings weakref webbrowser wsgiref.simple_server xml.etree.ElementTree
    xmlrpc.client zipapp zipfile zipimport zlib
"""
MODULES = _NAMES.split()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of default values: different in every run."""
LEAST = 24
"""Characters of a documentation string worth an entry."""


def corpus() -> Iterator[tuple[str, str]]:
    """Names of documents and their Markdown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue  # not on this platform
            sections = [
                f"# {name}",
                _doc(module) or "",
                *(f"## {title}\n\n{text}" for title, text in _entries(module, name)),
            ]
            yield f"{name}.md", "\n\n".join(section for section in sections if section) + "\n"


def _entries(module: ModuleType, title: str) -> Iterator[tuple[str, str]]:
    public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in sorted(public):
        value = getattr(module, name, None)
        if inspect.ismodule(value) or not callable(value):
            continue
        if _home(value) not in (module.__name__, "") and getattr(module, "__all__", None) is None:
            continue
        full = f"{title}.{name}"
        if text := _text(name, value):
            yield full, text
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for method, raw in sorted(vars(value).items()):
                function = raw.fget if isinstance(raw, property) else raw
                if not method.startswith("_") and (text := _text(method, function)):
                    yield f"{full}.{method}", text


def _home(value: object) -> str:
    home = getattr(value, "__module__", None) or ""
    return home.removeprefix("_")


def _text(name: str, value: object) -> str:
    doc = _doc(value)
    if doc is None or len(doc) < LEAST:
        return ""
    try:
        signature = f"`{name}{_ADDRESS.sub('', str(inspect.signature(value)))}`"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        signature = f"`{name}`"
    return f"{signature if len(signature) < 300 else f'`{name}`'}\n\n{doc}"


def _doc(value: object) -> str | None:
    return inspect.getdoc(value)
