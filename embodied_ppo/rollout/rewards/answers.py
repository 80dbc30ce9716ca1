"""Read the final answer of a response: the number after ``####``, or the contents of ``\\boxed{}``.

Every function takes linear time, because responses are long and graders run in the main process.
"""

from __future__ import annotations

import re
from decimal import Decimal

_LETTER = r"[^\W\d_]"
_SPACE = " \N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}"
SIGNS = "-+\N{MINUS SIGN}"
_GROUPED = "|".join(rf"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+" for mark in (",", f"[{_SPACE}]"))
# Digits without a sign: thousands may be separated by commas or by single spaces.
_NUMBER = rf"(?:{_GROUPED}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_CHANGES = (
    # numbers, magnitudes and fractions
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty"
    " sixty seventy eighty ninety hundred hundreds thousand thousands million millions billion"
    " billions trillion trillions dozen dozens k mn mln mio bn half halves third thirds quarter"
    " fourths fifth fifths tenth tenths hundredth hundredths thousandth thousandths twice double"
    # operators, alternatives, ranges and approximations
    " plus minus negative squared cubed multiplied divided root sqrt factorial modulo mod pi"
    " infinity inf nan or either neither nor not never maybe perhaps possibly versus vs than least"
    " most between approximately approx roughly about around nearly almost"
)
# Words that change the value of an adjacent number.
CHANGES_VALUE = frozenset(_CHANGES.split())

# --------------------------------------------------------------------------------------- one number
_WORD = re.compile(f"{_LETTER}+")
# Text without digits and operators.
_PLAIN = rf"""(?:{_LETTER}|[\s,:'"’‘“”—()\[\]%°]|\.(?![0-9])|(?<={_LETTER})[-/!?])*+"""
_ONE_NUMBER = re.compile(
    # A label, which ends before the sign: "Answer:", "x =", words.
    rf"{_PLAIN}(?:=\s*)?(?<![^\s:=\"'“‘])(?P<sign>[{SIGNS}]?)(?P<digits>{_NUMBER})"
    # A unit. A single letter is a factor (12x), except for the article and units.
    rf"(?!\s*(?![amgLlsh]){_LETTER}(?!{_LETTER}))(?:[-/](?={_LETTER}{{2}}))?{_PLAIN}"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ])(?=[0-9]{3}(?![0-9]))")
_ESCAPES = re.compile(rf"(?<=[{SIGNS}])\\?[$€£¥₹](?=[.0-9])|\\(?=[$%])")
_MARKUP = re.compile(
    r"<[|/]?[A-Za-z_]{1,32}\|?>"  # <answer>, </answer>, <|im_end|>
    r"|\\(?:boxed|fbox|text|textbf|mathrm|mathbf|quad)(?![A-Za-z])"
    r"|\\[()\[\],;:! ]|[*`_{}$€£¥₹]"
)
_STATEMENT = re.compile(r"\D*\d.*?(?=\n[^\S\n]*\n|\Z)", re.DOTALL)


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
    # Markup becomes a line break, which separates the digits on its two sides.
    text = _MARKUP.sub("\n", _ESCAPES.sub("", _THOUSANDS.sub("", text)))
    match = _ONE_NUMBER.fullmatch(text)
    if match is None or CHANGES_VALUE & {word.lower() for word in _WORD.findall(text)}:
        return None
    return spell_number(match["digits"], match["sign"])


def final_statement(response: str) -> str | None:
    """Return the text from the last ``####`` before a number to the end of the number's paragraph.

    None if there is no such text. Paragraphs without a number are included, so that the number may
    be below a heading.
    """
    matches = map(_STATEMENT.match, reversed(re.split("#{4,}", response)[1:]))
    return next((match[0] for match in matches if match), None)


# -------------------------------------------------------------------------------------------- boxes
# Largest length of a box in characters. math-verify takes too long for longer ones.
LONGEST_BOX = 1000
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNREAD = re.compile(  # a percent sign, or the full stop of an answer: 7.
    r"\\?%|\\(?:text|mathrm|mbox)\s*\{\s*per ?cent\s*\}|\bper ?cent\b|(?<=[0-9])\.(?=\s*(?:\}|\Z))"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|hbox)\s*\{([^{}]*)\}")
_RELATION = re.compile(
    r"\\(?:approx|sim|simeq|cong|equiv|neq?|not|lor|vee|land|wedge|to|(?:left|right)arrow|implies"
    r"|iff)(?![A-Za-z])|[|≈≠≡→⇒∨∧]",
    re.IGNORECASE,
)


def boxed_answers(text: str) -> list[str]:
    """Return the contents of each outermost ``\\boxed{}`` or ``\\fbox{}``.

    ``\\boxed 7`` is a box as well. A box without its end, or with more than ``LONGEST_BOX``
    characters, has the content "", which equals no answer.
    """
    contents: list[str] = []
    position = 0
    while box := _BOX.search(text, position):
        start = position = box.end()
        content = text[start : start + 1]  # LaTeX boxes the next token
        if content == "{":
            content, position, depth = "", len(text), 0
            for brace in _BRACE.finditer(text, start):
                depth += {"{": 1, "}": -1}.get(brace[0], 0)
                if depth == 0:
                    content, position = text[start + 1 : brace.start()], brace.end()
                    break
        contents.append(content if len(content) <= LONGEST_BOX else "")
    return contents


def plain_latex(text: str) -> str:
    """Remove percent signs, which count as units, and characters that math-verify misreads."""
    return _THOUSANDS.sub("", _UNREAD.sub(" ", text)).replace("~", " ").replace("\u2212", "-")


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
    words = {word.lower() for word in _WORD.findall(re.sub(r"\\[A-Za-z]+", " ", latex))}
    words = {word for word in words & CHANGES_VALUE if len(word) > 1}
    return words | {match[0] for match in _RELATION.finditer(latex)}
