"""The commands on the pages for people: an indented block, or one fenced as `sh`, is to be typed; all else is fenced.

A block that no test runs says so, and why, in the line above: `<!-- not run here: needs a container engine -->`.
"""

import re
import shlex
from dataclasses import dataclass

from helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
TYPED = {"sh", "bash", "console"}
MARK = re.compile(r"<!-- not run here: (.+) -->")
ENDS = {"&&", "||", "|", ";"}
LEADING = {"do", "done", "then", "fi"}


@dataclass(frozen=True)
class Line:
    """A line that is to be typed.

    Attributes:
        where: page and number of the line.
        text: what it is, with its comment.
        why_not: why no test runs it; empty for one that is run.
    """

    where: str
    text: str
    why_not: str

    def commands(self, stands_for=None):
        """Return the words of each command in it, without loops and assignments; what a shell puts in comes last.

        Where the line has a name for something, `stands_for` may say what is to be there instead.
        """
        text = self.text
        for name, what in (stands_for or {}).items():
            text = text.replace(name, what)
        return _commands(text)


def _commands(text):
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    found = [[]]
    for word in lexer:
        if word in ENDS:
            found.append([])
        elif found[-1] or not (word in LEADING or re.match(r"[A-Z_]+=", word)):
            found[-1].append(word)
    inner = [words for part in re.findall(r"\$\((.+?)\)", text) for words in _commands(part)]
    return [words for words in found if words and words[0] != "for"] + inner


def prose(page):
    """Return the page without what its fenced blocks hold; its lines keep their numbers."""
    return FENCED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def typed(page):
    """Return the lines of a page that are to be typed, in order."""
    name, found, why_not, inside = page.relative_to(ROOT), [], "", False
    lines = FENCED.sub(_indented, page.read_text()).splitlines()
    for number, text in enumerate(lines, start=1):
        above = lines[number - 2] if number > 1 else ""
        inside = text.startswith("    ") and (inside or not above or bool(MARK.fullmatch(above)))
        if inside:
            found.append(Line(f"{name}:{number}", text.strip(), why_not))
        elif text:
            mark = MARK.fullmatch(text)
            why_not = mark[1] if mark else ""
    return found


def _indented(block):
    """Show a block of what is to be typed as an indented one, and none of any other."""
    if block[2] not in TYPED:
        return "\n" * block[0].count("\n")
    return "\n" + re.sub(r"^", "    ", block[3], flags=re.MULTILINE).rstrip(" ")
