"""The search for phrases sees prose and nothing else, and the pages have none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.prose import PHRASES, check

ROOT = Path(__file__).parent.parent


def _found(tmp_path: Path, name: str, text: str) -> list[str]:
    (tmp_path / name).write_text(text)
    return [line.split(":", 1)[1].split(";")[0] for line in check([tmp_path / name])]


def test_the_pages_are_plain() -> None:
    assert check([ROOT / "README.md", ROOT / "docs"]) == []


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("The index is behind the shard.", "behind"),
        ("It is the caller, whoever\nthat is.", "whoever"),
        ("The bytes lie where the index lies.", "lies"),
        ("A model on a GPU, say.", "say"),
        ("Called again, it goes\non after the last shard.", "goes on"),
        ("The file is no tar.", "is no"),
        ("It ends. What a break costs is the shard.", "What"),
        ("A lease is taken up.", "taken up"),
    ],
)
def test_phrases_in_a_page(tmp_path: Path, sentence: str, phrase: str) -> None:
    line = 3 + sentence.count("\n", 0, sentence.find(phrase.split()[-1]))
    assert _found(tmp_path, "page.md", f"# Title\n\n{sentence}\n") == [f"{line}: '{phrase}'"]


@pytest.mark.parametrize(
    "text",
    [
        "There is no such file. It is no longer there. Both begin at once.",
        "What is a shard? A tar.",
        "`behind` is a name, and so is `x.others`.",
        "[the page](behind.md) takes up to three.",
        "```python\nbehind = others  # a comment\n```",
        "```bash\ngo on\n```",
    ],
)
def test_plain_text_and_code_pass(tmp_path: Path, text: str) -> None:
    assert _found(tmp_path, "page.md", text) == []


def test_comments_of_fenced_code_are_prose(tmp_path: Path) -> None:
    text = "Text.\n\n```python\nx = 1\ny = 2  # behind x\n```\n"
    assert _found(tmp_path, "page.md", text) == ["5: 'behind'"]


def test_docstrings_comments_and_messages_are_prose(tmp_path: Path) -> None:
    text = '''"""What it does is nothing.

The index is in
front of the shard.
"""
others = {"behind": 1, "who": others}
# Hazard: it is broken
# off here.
raise ValueError(f"{who}: nobody has it")
'''
    assert _found(tmp_path, "module.py", text) == ["1: 'What'", "4: 'in front of'", "8: 'broken off'", "9: 'nobody'"]


def test_every_phrase_is_found(tmp_path: Path) -> None:
    """None of the patterns is spelled so that it never matches."""
    examples = [
        "behind", "in front of", "lies", "of another state", "who", "nobody", "others", "went on", "took up", "for none",
        "is called so", "beside it", "is to be", "of its own", "of yours", "broken off", "otherwise than", "that was left",
        "begins at", "by way of", "to be had", "one another", "at which there",
    ]  # fmt: skip
    assert len(examples) == len(PHRASES)
    for example in examples:
        assert len(_found(tmp_path, "page.md", f"text {example} text")) == 1, example


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("plain\n")
    command = [sys.executable, "-m", "tests.prose", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    (tmp_path / "b.py").write_text("# behind\n")
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout.startswith(f"{tmp_path / 'b.py'}:1: 'behind'; write: after")
    with pytest.raises(FileNotFoundError, match="no .md or .py files"):
        check([tmp_path / "nothing"])
