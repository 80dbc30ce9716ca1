"""Read the final answer of a response: the number after ``####``, or the contents of ``\\boxed{}``.

Every function takes linear time, because responses are long and graders run in the main process.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_LETTER = r"[^\W\d_]"
_SPACE = " \N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}"
_GROUPED = "|".join(rf"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+" for mark in (",", f"[{_SPACE}]"))
NUMBER = rf"(?:{_GROUPED}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
"""Pattern of digits without a sign: thousands may be separated by commas or by single spaces."""


def _split(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# ----------------------------------------------------------------------------------------- keywords
_NUMBER_WORDS = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "hundred hundreds thousand thousands million millions billion billions trillion trillions "
    "dozen dozens lakh crore"
)
CHANGES_VALUE = _NUMBER_WORDS | _split(
    # magnitudes and fractions
    "k mn mln mio bn half halves third thirds quarter fourths fifth fifths sixths sevenths eighth"
    " eighths ninths tenth tenths hundredth hundredths thousandth thousandths thrice twice double"
    " triple "
    # operators
    "plus minus negative squared cubed multiplied divided root sqrt factorial modulo mod pi"
    " infinity inf nan "
    # alternatives, ranges and approximations
    "or either neither nor not never maybe perhaps possibly versus vs than least most between "
    "approximately approx roughly about around nearly almost"
)
"""Words that change the value of an adjacent number."""
_CHANGES_NEXT = _split("over under above below beyond exceeding square cube log power")
_ATTACHED_UNITS = _split(
    "mm cm km in ft yd mi mg g kg lb lbs oz ml mL cl L s sec min h hr hrs mph kph"
)
_UNIT_LETTERS = _split("a m g l L s h")
"""Words of one letter after a number that are not factors: the article and units."""

# --------------------------------------------------------------------------------------- one number
_MARKER = re.compile("#{4,}")
_WORD = re.compile(f"{_LETTER}+")
_NOT = re.compile(r"n['’]t\b")
_PUNCTUATION = r"""\s.,:;'"’‘“”—()\[\]%"""
_INSIDE_WORDS = rf"(?<={_LETTER})[-/_](?={_LETTER})|(?<={_LETTER})[!?]"
_LABEL = re.compile(rf"(?:{_LETTER}|[{_PUNCTUATION}]|{_INSIDE_WORDS})*+(?:=\s*)?")
_UNIT = re.compile(rf"(?:[-/](?={_LETTER}{{2}}))?(?:{_LETTER}|[{_PUNCTUATION}°]|{_INSIDE_WORDS})*+")
_DIGIT_RUN = re.compile(rf"\.?[0-9](?:[0-9.,]|[{_SPACE}](?=[0-9]))*")
_SIGNS = "-+\N{MINUS SIGN}"
_MARKUP = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Separators of thousands in LaTeX: 1{,}234, 1,\!234 and 1\,234.
        (r"(?<=[0-9])\{,\}(?=[0-9])|(?<=[0-9]),\\!(?=[0-9])", ","),
        (r"(?<=[0-9])\\[,;: ](?=[0-9])", " "),
        (r"\\([$%])", r"\1"),
        (rf"(?<=[{_SIGNS}])[$€£¥₹](?=[.0-9])", ""),
        # Other markup becomes a line break, which separates the digits on its two sides.
        (r"<[|/]?[A-Za-z_]{1,32}\|?>", "\n"),  # <answer>, </answer>, <|im_end|>
        (r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|quad)(?![A-Za-z])", "\n"),
        (r"\\[()\[\],;:! ]|[{}$€£¥₹]", "\n"),
        # Emphasis: **72**, __72__, `72`. Its first half may precede the marker ####.
        (
            r"\A\s*[*`_]{1,3}(?=\s)|(?<![\w)*`])[*`_]{1,3}(?=[^\s*`_])|(?<=[^\s*`_])[*`_]{1,3}(?![\w*`])",
            "\n",
        ),
    )
]


def spell_number(digits: str, sign: str = "") -> str:
    """Return the normalised spelling of a number.

    It has no separators, plus sign or redundant zeros. Two spellings are equal exactly if the
    numbers are equal.
    """
    text = format(Decimal(re.sub(rf"[,{_SPACE}]", "", digits)), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if text == "0" or sign in ("", "+") else f"-{text}"


def read_number(text: str) -> str | None:
    """Return the number that ``text`` states, None if it does not state exactly one number.

    A label before the number (``Answer:``, ``x =``, words), a currency, and a percent sign or unit
    after it are ignored. Several numbers, operators, ranges, alternatives, fractions,
    approximations and magnitudes give None.
    """
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    runs = list(_DIGIT_RUN.finditer(text))
    other_numerals = (unicodedata.numeric(c, None) for c in text if not c.isascii())
    if len(runs) != 1 or any(x is not None for x in other_numerals):
        return None
    digits = runs[0][0].rstrip(".,")
    label, unit = text[: runs[0].start()], text[runs[0].end() :]
    sign = label[-1] if label and label[-1] in _SIGNS else ""
    label = label.removesuffix(sign)
    is_separate = not label or label[-1].isspace() or label[-1] in ":=\"'“‘"
    if not is_separate or not re.fullmatch(NUMBER, digits):
        return None
    return spell_number(digits, sign) if _is_plain(label, unit) else None


def _is_plain(label: str, unit: str) -> bool:
    """Return whether the texts before and after a number leave its value unchanged."""
    words = {word.lower() for word in _WORD.findall(label) + _WORD.findall(unit)}
    if words & CHANGES_VALUE or _NOT.search(label) or _NOT.search(unit):
        return False
    before = re.search(rf"(?<!{_LETTER})(?:({_LETTER}+)\s)?({_LETTER}+)\s*\Z", label)
    if before and (len(before[2]) == 1 or _CHANGES_NEXT & set(before[0].lower().split())):
        return False
    attached = _WORD.match(unit)
    if attached and attached[0] not in _ATTACHED_UNITS:
        return False
    first = re.match(rf"\s+({_LETTER})(?!{_LETTER})", unit)
    if unit[:1] in ("(", "[") or (first and first[1] not in _UNIT_LETTERS):
        return False
    return bool(_LABEL.fullmatch(label) and _UNIT.fullmatch(unit))


def final_statement(response: str) -> str | None:
    """Return the text from the last ``####`` before a number to the end of the number's paragraph.

    None if there is no such text. Paragraphs without a number are included, so that the number may
    be below a heading.
    """
    sections = _MARKER.split(response)[1:]
    section = next((text for text in reversed(sections) if _has_number(text)), None)
    if section is None:
        return None
    lines: list[str] = []
    complete = False
    for line in section.splitlines():
        if complete and not line.strip():
            break
        complete = complete or _has_number(line)
        lines.append(line)
    return "\n".join(lines)


def _has_number(text: str) -> bool:
    """Return whether ``text`` has a digit of any script or an English number word."""
    return any(map(str.isnumeric, text)) or any(
        word.lower() in _NUMBER_WORDS for word in _WORD.findall(text)
    )


# -------------------------------------------------------------------------------------------- boxes
_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\[A-Za-z]+|\\.|[{}]", re.DOTALL)
LONGEST_BOX = 1000
"""Largest length of a box in characters. math-verify takes too long for longer ones."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_PERCENT = re.compile(r"\\?%|\\(?:text|mathrm|mbox)\s*\{\s*per ?cent\s*\}|\bper ?cent\b")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ])(?=[0-9]{3}(?![0-9]))")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|hbox)\s*\{([^{}]*)\}")
_RELATION = re.compile(
    r"\\(?:approx|sim|simeq|cong|equiv|neq?|not|n?mid|lor|vee|land|wedge|to|gets|(?:long)?(?:left|right)+arrow"
    r"|implies|impliedby|iff|mapsto|propto|[hv]?phantom|hspace)(?![A-Za-z])|\\[&\\]|[|≈≠≡→⇒∨∧]",
    re.IGNORECASE,
)


def boxed_answers(text: str) -> list[str]:
    """Return the contents of each outermost ``\\boxed{}`` or ``\\fbox{}``.

    ``\\boxed 7`` is a box as well. A box inside another one is part of the content of the other. A
    box without its end, or with more than ``LONGEST_BOX`` characters, has the content "", which
    equals no answer.
    """
    contents: list[str] = []
    start: int | None = None
    depth = position = 0
    while match := _TOKEN.search(text, position):
        position = match.end()
        if start is None and _BOX.match(match[0]):
            opening = re.compile(r"\s*+(\{?)").match(text, position)
            assert opening is not None
            position = opening.end()
            if opening[1]:
                start, depth = position, 1
            else:  # LaTeX boxes the next token
                contents.append(text[position : position + 1])
        elif start is not None and match[0] in ("{", "}"):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                content = _BOX.sub("", text[start : match.start()])
                # math-verify would read {7} as a set.
                group = re.fullmatch(r"\s*\{([^{}]*)\}\s*", content)
                contents.append(group[1] if group else content)
                start = None
    contents += [] if start is None else [""]
    return [content if len(content) <= LONGEST_BOX else "" for content in contents]


def plain_latex(text: str) -> str:
    """Remove percent signs, which count as units, and separators that math-verify misreads."""
    return _THOUSANDS.sub("", _PERCENT.sub(" ", text)).replace("~", " ")


def adds_meaning(answer: str, truth: str) -> bool:
    """Return whether a LaTeX answer has words or relations that the correct answer lacks.

    math-verify ignores them: it reads ``7 \\text{ million}``, ``7 \\approx 12`` and ``7 \\text{
    (12)}`` as 7.
    """
    texts = " ".join(_TEXT.findall(answer))
    digits_in_text = re.search("[0-9]", texts) and re.search("[0-9]", _TEXT.sub("", answer))
    return bool(digits_in_text) or not _marks(answer) <= _marks(truth)


def _marks(latex: str) -> set[str]:
    """Return the words and relations of an answer that change its value."""
    # A word of one letter, such as k, may be a variable.
    words = {word.lower() for word in _WORD.findall(_COMMAND.sub(" ", latex)) if len(word) > 1}
    return words & CHANGES_VALUE | {match[0] for match in _RELATION.finditer(latex)}


def constant_sides(answer: str, truth: str) -> list[str]:
    """Return the sides of an equation without variables, which must all equal the correct answer.

    Empty if the answer is not an equation, or if the correct answer is one.
    """
    sides = re.split(r"(?<![<>!\\])=", answer)
    if len(sides) < 2 or "=" in truth or "," in answer or ";" in answer:
        return []
    return [side for side in sides if not _WORD.search(_COMMAND.sub(" ", side))]
