"""Checks the prose of the repository: Markdown, docstrings, comments, messages and test names.

    python .ci/prose.py [--counts] [PATH...]

Prints `path:line: rule: text` for each hit and exits with 1 if there is one.
`--counts` prints totals by rule and folder instead. Code in Markdown fences, backticks and
doctests is not prose.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".md", ".py", ".cc", ".cpp", ".h", ".js", ".html", ".css", ".sh", ".yaml", ".yml"}
SKIPPED = ("tests/fixtures/", "docs/cli.md", "docs/configuration.md", ".ci/prose.py")
MAX_WORDS = 25  # per sentence
MAX_CELL_WORDS = 12  # per table cell
MIN_MESSAGE_WORDS = 4  # a string with fewer words is data

# Sentences that break a rule and are right: the end of their path and a part of them.
ALLOWED = (
    (".py", "Tell me a story"),  # prompts
    ("MODEL_CARD.md", "Tell me a story"),
    ("MODEL_CARD.md", "tell stories"),  # what the model wrote
    ("MODEL_CARD.md", '," said '),
    ("MODEL_CARD.md", '," he said.'),
    ("MODEL_CARD.md", "I do not know"),
    ("corpus/talk.py", "asks for it"),  # a user
    ("test_client_langchain.py", "Somebody."),  # read by models
    ("test_client_pydantic_ai.py", "The age of somebody."),
    ("benchmarks/structured.py", "Tell me about"),  # a prompt
    ("benchmarks/front_end.py", "requests/s"),  # a line of figures
    ("benchmarks/replay.py", "tokens per step"),
    ("models/spec.py", "beside: True"),  # the name of an argument
)


def _words(text: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{text})\b", re.IGNORECASE)


Kind = Literal["prose", "cell", "docstring", "comment", "trailing", "message", "name"]
RULES: dict[str, tuple[re.Pattern[str], str]] = {
    "subject": (
        re.compile(
            r"(?i)(?:^|[.:;] )(?:What(?:ever)?|Who(?:ever)?|Those (?:that|who|which|of)|That which"
            r"|He who)\b(?![^.]*\?)",
        ),
        "name the subject with a noun",
    ),
    "person": (
        _words(
            r"knows?|says?|said|asks|tells?|told|forgives?|likes|foresees?|foreseen|believes?|believed"
            r"|wants|forgets?|wishes|thinks|learns of|nobody|no one|somebody|whoever|whosoever"
        ),
        "use a verb for software: returns, stores, rejects; name who acts",
    ),
    "calque": (
        _words(
            r"anew|likewise|thereof|whereof|wherein|thereupon|whereupon|thereby|altogether|ere|amiss"
            r"|stands? in|lies? in|stands? beside|lay in|beside|besides|goes on|go on|went on"
            r"|found out|comes? to naught|as it were|of (?:its|their|your|our) own|in vain|for good"
            r"|, too(?=[.,:;]|$)|by way of|to and fro"
            r"|company|is no truth value|are to be|is to be|by and by|asked for|ask for"
            r"|foreign|strangers?|alike|meant for|for nothing|makes? do"
        ),
        "use the ordinary word: again, also, is in, continues, next to, separate",
    ),
    "term": (
        _words(
            r"gaps? between tokens|files? of requests|likeliest|(?:un)?likelier|share of drafts"
            r"|share of (?:the )?drafts? accepted|who decodes?|those who decode|the decoding ones"
            r"|end token|place in line|weights' types?|number of a (?:token|block)"
        ),
        "use the field's term: inter-token latency, batch file, most likely, acceptance rate",
    ),
    "because": (
        re.compile(
            r", for (?:it|they|there|nothing|this is|that is|no \w+ (?:is|has|can|may)|both|each"
            r"|one|all|\w+ (?:is|are|has|have|does|do|can|cannot|may|would)) ",
        ),
        "write because",
    ),
    "whether": (
        re.compile(r"^(?:Whether|Until|As long as|How (?:many|much|long)) "),
        "start with True if, Return, or a noun phrase",
    ),
    "start": (
        re.compile(
            r"^(?:Of|As|Where|With|Without|By|Which|From|Also|So|And|But|Or|Has|Does|Is|Are|Nothing"
            r"|That|Those) ",
        ),
        "start with the subject or an imperative",
    ),
    "noun": (re.compile(r"^(?:[\w*]+(?:, [\w*]+)*: )?of\b"), "name the noun that this belongs to"),
    "semicolons": (re.compile(r";[^.;]*;"), "one idea per sentence"),
}
# Rules for the first sentence only, with the kinds of texts that they apply to.
OPENING_RULES: dict[str, tuple[Kind, ...]] = {
    "whether": ("docstring",),
    "start": ("docstring",),
    "noun": ("docstring", "trailing"),
}
NAME_RULES = ("person", "calque", "term")
_NAME = re.compile(
    r"^test_(?:what|who|whoever|those|nobody|that_which|whose|nothing_that)_|^test_\w+_(?:is|are)_named$"
)
_WORD = re.compile(r"[A-Za-z0-9][\w'/.-]*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\")]*\s+(?=[A-Z`\"(]|[\w-]+\.md)|(?<=:)\s*$")
_MARKUP = re.compile(
    r"\n\n|\{%|[;{]\n|\S  +[^\s(]|(?:\w+_\w+ ){3}"
)  # templates, CSS, columns, names


@dataclass(frozen=True)
class Text:
    """One paragraph, table cell, comment, message or test name, without its markup."""

    path: str
    line: int
    kind: Kind
    text: str


@dataclass(frozen=True)
class Hit:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def hits_in(text: Text) -> Iterator[Hit]:
    """Return the rules that a text breaks."""
    if text.kind == "name":
        words = text.text.removeprefix("test_").replace("_", " ")
        is_test = text.text.startswith("test_")
        if _NAME.match(text.text) or (
            is_test and any(RULES[rule][0].search(words) for rule in NAME_RULES)
        ):
            yield Hit(text.path, text.line, "name", text.text)
        return
    for number, sentence in enumerate(_sentences(text.text)):
        for rule, (pattern, remedy) in RULES.items():
            kinds = OPENING_RULES.get(rule)
            if kinds is not None and (number or text.kind not in kinds):
                continue
            if (found := pattern.search(sentence)) and not _allowed(text.path, sentence):
                yield Hit(text.path, text.line, rule, f"{found[0]!r} in: {sentence} [{remedy}]")
        words = len(_WORD.findall(sentence))
        is_long = words > MAX_WORDS and text.kind != "cell"
        if is_long and not _allowed(text.path, sentence):
            yield Hit(text.path, text.line, "long", f"{words} words: {sentence}")
    if text.kind == "cell" and len(_WORD.findall(text.text)) > MAX_CELL_WORDS:
        yield Hit(text.path, text.line, "cell", text.text)


def texts_of(path: str, source: str) -> Iterator[Text]:
    """Return the texts of a file by its suffix."""
    match Path(path).suffix:
        case ".md":
            yield from _markdown(path, source)
        case ".py":
            yield from _python(path, source)
        case ".sh" | ".yaml" | ".yml":
            yield from _comments(path, source, "#")
        case _:
            yield from _comments(path, source, "//")


def _allowed(path: str, sentence: str) -> bool:
    return any(path.endswith(end) and part in sentence for end, part in ALLOWED)


def _sentences(text: str) -> list[str]:
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def _markdown(path: str, source: str) -> Iterator[Text]:
    fence, comment = False, False
    gathered: list[str] = []
    start = 1

    def paragraph() -> Iterator[Text]:
        if gathered:
            yield Text(path, start, "prose", _plain(" ".join(gathered)))
            gathered.clear()

    for number, line in enumerate(source.splitlines(), 1):
        bare = line.strip().removeprefix("> ")
        if bare.startswith(("```", "~~~")):
            fence = not fence
        if bare.startswith("<!--"):
            comment = True
        if fence or comment or bare.startswith(("```", "~~~")):
            comment = comment and "-->" not in bare
            yield from paragraph()
            continue
        if bare.startswith("|"):
            yield from paragraph()
            for cell in re.split(r"(?<!\\)\|", bare.strip("|")):
                if cell.strip(" -:"):
                    yield Text(path, number, "cell", _plain(cell.strip()))
            continue
        item = re.match(r"(?:[-*] |\d+\. |#+ )", bare)
        if not bare or item:
            yield from paragraph()
        if bare:
            if not gathered:
                start = number
            gathered.append(bare[item.end() :] if item else bare)
            if bare.startswith("#"):
                yield from paragraph()
    yield from paragraph()


def _plain(text: str) -> str:
    text = re.sub(r"``.+?``|`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(\w.*?)[*_]{1,2}", r"\1", re.sub(r"<[^>]+>", "", text))


def _python(path: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.startswith("tests/"):
            yield Text(path, node.lineno, "name", node.name)
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or not (text := ast.get_docstring(node)):
            continue
        expression = node.body[0]
        assert isinstance(expression, ast.Expr)
        docstrings.add(id(expression.value))
        yield from _docstring(path, expression.lineno, text)
    yield from _messages(path, tree, docstrings)
    comments = [
        (token.start[0], token.string.lstrip("#").strip(), not token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        and not re.match(r"#\s*(?:noqa|type:|pyright|!|fmt:)", token.string)
    ]
    yield from _joined(path, comments)


def _docstring(path: str, line: int, text: str) -> Iterator[Text]:
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |[\w*]+(?:, [\w*]+)*: |\|))", text):
        lines = part.strip("\n").splitlines()
        if lines and not re.match(r"\s*(?:>>>|\$|python |\||    )", lines[0]):
            plain = _plain(" ".join(one.strip() for one in lines))
            yield Text(
                path, line, "docstring", re.sub(r"^(?:Args|Returns|Raises|Yields):\s*", "", plain)
            )


def _messages(path: str, tree: ast.AST, docstrings: set[int]) -> Iterator[Text]:
    if path.startswith(("tests/", "training/")):  # prompts and stories
        return
    inside = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for value in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "split":
            inside.add(id(node.value))  # a list of words
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                value.value if isinstance(value, ast.Constant) else "X" for value in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) >= MIN_MESSAGE_WORDS and not _MARKUP.search(text):
            yield Text(path, getattr(node, "lineno", 0), "message", _plain(text))


def _comments(path: str, source: str, mark: str) -> Iterator[Text]:
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(rf"\s*{mark}", line) or re.search(rf"\s{mark} ", line):
            before, _, text = line.partition(mark)
            if not text.strip().startswith(("!", "NOLINT")):
                found.append((number, text.strip(), bool(before.strip())))
    yield from _joined(path, found)


def _joined(path: str, comments: Iterable[tuple[int, str, bool]]) -> Iterator[Text]:
    """Return comments on adjacent lines as one text.

    Args:
      comments: line, text, and True if code precedes the comment, which is then a separate text.
    """
    gathered: list[str] = []
    start = last = -1
    kind: Kind = "comment"
    for number, text, trailing in comments:
        if gathered and (number != last + 1 or not text or trailing):
            yield Text(path, start, kind, _plain(" ".join(gathered)))
            gathered.clear()
        if _MARKUP.search(text):  # a layout
            if gathered:
                yield Text(path, start, kind, _plain(" ".join(gathered)))
                gathered.clear()
            continue
        if text:
            if not gathered:
                start = number
                kind = "trailing" if trailing and path.endswith(".py") else "comment"
            gathered.append(text)
        last = number
    if gathered:
        yield Text(path, start, kind, _plain(" ".join(gathered)))


def _files(paths: list[str]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *paths], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [
        path
        for path in listed
        if Path(path).suffix in SUFFIXES
        and not path.startswith(SKIPPED)
        and (ROOT / path).is_file()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the repository's prose.")
    parser.add_argument("--counts", action="store_true", help="print totals per rule and folder")
    parser.add_argument("--rules", help="only these rules, separated by commas")
    parser.add_argument("paths", nargs="*", help="files or folders (default: all)")
    args = parser.parse_args()
    files = _files(args.paths)
    hits = [
        hit
        for path in files
        for text in texts_of(path, (ROOT / path).read_text(encoding="utf-8"))
        for hit in hits_in(text)
        if not args.rules or hit.rule in args.rules.split(",")
    ]
    if args.counts:
        for (folder, rule), number in sorted(
            Counter((hit.path.split("/")[0], hit.rule) for hit in hits).items()
        ):
            print(f"{folder:20} {rule:12} {number}")
        print("total", len(hits))
        return 0
    for hit in hits:
        print(hit)
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
