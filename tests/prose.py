"""Find phrases that plain English avoids, in markdown pages and in the docstrings, comments and messages of Python files.

    python -m tests.prose README.md docs

Folders are searched for `.md` and `.py` files. Code is skipped: inline code, fenced code other than its comments, and
Python strings without a space. Prints one line for each phrase, and exits with 1 if there are any.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

# Each phrase as a regular expression, in which a space is any white space, and the words to write in its place.
PHRASES = {
    r"behind": "after, at the end of, through",
    r"in front of": "before",
    r"(?:lies|lay|lain|lying)|where \w+ lie": "is, is stored at",
    r"of another state": "stale",
    r"who|whom|whoever|whatever (?:they|it) (?:is|are)": "the actor's name: the writer, DALI, the caller",
    r"somebody|someone|nobody|no one|anybody|anyone": "the actor's name: the writer, DALI, the caller",
    r"others": "a noun: other members, other options",
    r"(?:go|goes|gone|going|went) on": "resume, continue",
    r"(?:take|takes|taken|taking|took) up(?! to\b)": "resume",
    r"for none": "ignore",
    r"(?:is|are) called so|no \w+ is called": "unknown",
    r"beside (?:it|them|this)": "sidecar, next to",
    r"(?:is|are|was|were) to be": "must be, should be",
    r"of (?:its|their|your|our|my) own": "its own, their own, your own",
    r"of (?:yours|ours|theirs)": "your, our, their",
    r"broken off|breaks off": "interrupted",
    r"otherwise than": "differently from, unlike",
    r"that (?:is|are|was|were) left(?! out)": "abandoned, remaining",
    r"begins? at(?! once)": "starts at",
    r"by way of": "through",
    r"to be had": "available",
    r"one another": "each other",
    r"at which there": "where there",
}
# Patterns that do not begin and end with a word.
_OTHER_PATTERNS = {
    r"(?i:(?<!there) (?:is|are) no (?!longer|more|less|fewer|shorter|larger|smaller|faster|slower))": "is not a",
    r"(?i:, say(?!\w)| say(?=[).]))": "for example",
    r"(?:\A|\0\s*|[.!:;] |\n\n(?:[-#] )?)(?:What|Whether|Who)\b(?=[^.?!]*[.!])": "a noun or a verb first, not a clause",
}
_PATTERNS = [
    *((rf"(?i:(?<!\w)(?:{phrase})(?!\w))", instead) for phrase, instead in PHRASES.items()),
    *_OTHER_PATTERNS.items(),
]
_REGEXES = [(re.compile(pattern.replace(" ", r"\s+")), instead) for pattern, instead in _PATTERNS]
# From Python 3.12 on, the text of an f-string is a separate token.
_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_CODE = "\0"  # stands for a character that is not prose, so that no phrase reaches across it


def find_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, phrase and what to write in its place, for text in which code is blanked out."""
    for regex, instead in _REGEXES:
        for match in regex.finditer(text):
            phrase = match[0].strip(" .,:;!#-\0\n")
            yield text.count("\n", 0, match.end()) + 1, " ".join(phrase.split()), instead


def prose_of_markdown(text: str) -> str:
    """Return a page with its code blanked out, line by line the same."""
    lines, language = [], None
    for line in text.split("\n"):
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            language = fence[1] if language is None else None
            lines.append("")
        elif language:
            _, mark, comment = line.rpartition("# ")
            lines.append(comment if mark else "")
        else:
            lines.append(re.sub(r"\]\([^)]*\)", "]", line))
    return re.sub(r"`[^`]*`", lambda match: _blank(match[0]), "\n".join(lines))


def prose_of_python(text: str) -> str:
    """Return a module with all but its comments and strings blanked out, line by line the same."""
    rows = [list(_blank(line)) for line in text.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _PROSE or (token.type != tokenize.COMMENT and " " not in token.string):
            continue
        content = re.sub(r"`[^`\n]*`|\{[^{}]*\}", lambda match: _blank(match[0]), token.string)
        if token.type == tokenize.COMMENT:
            content = content.replace("#", " ", 1)
        elif token.type == tokenize.STRING:
            content = re.sub(r"\A\w*['\"]+|['\"]+\Z", lambda match: _blank(match[0]), content)
        row, column = token.start
        for at, line in enumerate(content.split("\n")):
            begin = 0 if at else column
            rows[row - 1 + at][begin : begin + len(line)] = line
    return "\n".join(map("".join, rows))


def _blank(text: str) -> str:
    return re.sub(r"\S", _CODE, text)


def check(paths: Sequence[str | Path]) -> list[str]:
    """Return one line for each phrase in the files.

    Raises:
        FileNotFoundError: A path does not exist, or a folder has no pages and no modules.
    """
    found = []
    for root in map(Path, paths):
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in (".md", ".py"))
        if not files:
            raise FileNotFoundError(f"{root}: no .md or .py files")
        for path in files:
            read = prose_of_python if path.suffix == ".py" else prose_of_markdown
            for number, phrase, instead in sorted(find_phrases(read(path.read_text(encoding="utf-8")))):
                found.append(f"{path}:{number}: {phrase!r}; write: {instead}")
    return found


if __name__ == "__main__":
    lines = check(sys.argv[1:])
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
