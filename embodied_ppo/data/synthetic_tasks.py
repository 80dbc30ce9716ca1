"""Language tasks that need no external data.

Generated problems, imperfect demonstrations, and a character tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies.checkpoint_files import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Character i is token i; the first three are padding, beginning and end of sequence.
VOCABULARY = "_^$0123456789+-*=;#() ,."
PAD, BOS, EOS = 0, 1, 2
# Seed of the split into training and held-out problems, the same for every run.
SPLIT_SEED = 20240117

Part: TypeAlias = Literal["train", "held_out"]
# Called before each addition; returns whether its carries are forgotten.
ForgetCarries: TypeAlias = Callable[[], bool]


# -------------------------------------------------------------------------------------------- tasks
class Problem(NamedTuple):
    """One problem.

    Attributes:
        prompt: Text of the problem.
        answer: Correct answer, which a grader compares with.
        operands: Numbers that the prompt adds.
    """

    prompt: str
    answer: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """Family of problems.

    Attributes:
        name: Name of the task.
        response_length: Tokens of the longest correct response, including the end token.
        forget: Probability that the demonstrator forgets carries.
        train: Number of training problems.
        held_out: Number of held-out problems.
        draw: Returns the operands of ``train + held_out`` distinct problems, the same in every run.
        write: Returns the response to operands. Its second argument decides whether carries are
            forgotten.
        read: Returns the answer in a response, None if there is none.
        form: Pattern of a well-formed response.
    """

    name: str
    response_length: int
    forget: float
    train: int
    held_out: int
    draw: Callable[[int], list[tuple[int, ...]]]
    write: Callable[[tuple[int, ...], ForgetCarries], str]
    read: Callable[[str], str | None]
    form: re.Pattern[str]

    def problems(self, part: Part) -> list[Problem]:
        """Return the training or the held-out problems.

        The two sets are disjoint and do not depend on the run's seed.
        """
        pool = self.draw(self.train + self.held_out)
        operands = pool[self.held_out :] if part == "train" else pool[: self.held_out]
        return [self._problem(o) for o in operands]

    def _problem(self, operands: tuple[int, ...]) -> Problem:
        """Return the problem with given operands."""
        answer = self.read(self.write(operands, lambda: False))  # no carry is forgotten
        assert answer is not None
        return Problem("+".join(f"{x:02d}" for x in operands) + "=", answer, operands)


def _sum(a: int, b: int, *, forget: bool) -> int:
    """Return a + b. With forgotten carries each digit is the sum of two digits modulo 10."""
    return sum((a // p + b // p) % 10 * p for p in (1, 10, 100)) if forget else a + b


def _pairs(count: int) -> list[tuple[int, ...]]:
    """Return ``count`` distinct pairs of numbers below 100."""
    pairs: list[tuple[int, ...]] = [*product(range(100), repeat=2)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs[:count]


def _twos_and_threes(count: int) -> list[tuple[int, ...]]:
    """Return ``count`` distinct tuples of two or three numbers.

    About a third are pairs, because only 8,100 pairs exist.
    """
    rng = random.Random(SPLIT_SEED)
    distinct: dict[tuple[int, ...], None] = {}  # an ordered set
    while len(distinct) < count:
        distinct[tuple(rng.randrange(10, 100) for _ in range(rng.choice((2, 3))))] = None
    operands = list(distinct)
    rng.shuffle(operands)  # new pairs become rarer during the draw
    return operands


def _three_digits(operands: tuple[int, ...], forget: ForgetCarries) -> str:
    """Return the sum as three digits, the least significant first."""
    a, b = operands
    return f"{_sum(a, b, forget=forget()):03d}"[::-1]


def _running_sums(operands: tuple[int, ...], forget: ForgetCarries) -> str:
    """Return all partial sums, the least significant digit first, then ``#`` and the total."""
    total, sums = operands[0], []
    for x in operands[1:]:
        total = _sum(total, x, forget=forget())
        sums.append(str(total)[::-1])
    return f"{';'.join(sums)}#{total}"


def _after_mark(response: str) -> str | None:
    """Return the text after the last ``#``."""
    _, mark, answer = response.rpartition("#")
    return answer if mark else None


_TASKS = (
    # 57+68=  ->  521: the sum as three digits, the least significant first; all 10,000 problems.
    Task("arithmetic", 4, 0.7, 9_000, 1_000, _pairs, _three_digits, str, re.compile("[0-9]{3}")),
    # 57+68+90=  ->  521;512#215: partial sums, the least significant digit first, then the total,
    # the most significant digit first.
    Task(
        *("scratchpad", 12, 0.575, 20_000, 1_000, _twos_and_threes, _running_sums, _after_mark),
        re.compile("[^#]*#[0-9]+"),
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}


def grade(task: str, *, solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """Grade a response of a task as 1 if its answer is identical to the correct one.

    In arithmetic the response is the answer. In scratchpad it is the text after the last ``#``.
    """
    answer = TASKS[task].read(solution_str)
    correct, form = answer == ground_truth, bool(TASKS[task].form.fullmatch(solution_str))
    return {"score": float(correct), "acc": correct, "pred": answer, "format": form}


# ----------------------------------------------------------------------------------- demonstrations
def demonstrations(
    task: Task, problems: Sequence[Problem], count: int, *, seed: int
) -> list[tuple[str, str]]:
    """Return (prompt, response) of ``count`` problems, drawn with replacement.

    The responses have no end token. In arithmetic the carries of a problem are forgotten together,
    in scratchpad those of each sum independently.

    Args:
        task: The task.
        problems: Problems to draw from.
        count: Number of demonstrations.
        seed: Seed of the draw and of the forgotten carries.
    """
    rng = random.Random(seed)
    return [
        (p.prompt, task.write(p.operands, lambda: rng.random() < task.forget))
        for p in rng.choices(problems, k=count)
    ]


# ------------------------------------------------------------------------------------------- tokens
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of VOCABULARY, which adds no special tokens.

    It raises an Exception for any other character.
    """
    transformers = import_transformers("mode=reasoning", extra="language")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words: Any = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), VOCABULARY, strict=False))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, clean_up_tokenization_spaces=False, **names
    )


def encode(texts: Sequence[str], tok: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Return the tokens of each text, without special tokens.

    Raises:
        ConfigError: The character tokenizer ``tok`` lacks a character.
    """
    distinct = list(dict.fromkeys(texts))
    if missing := sorted(set("".join(distinct)) - set(tok.get_vocab())):
        raise ConfigError(f"the tokenizer has no token for {', '.join(map(repr, missing))}")
    rows: Any = tok(distinct, add_special_tokens=False)["input_ids"]
    ids = dict(zip(distinct, map(tuple, rows), strict=True))
    return [ids[text] for text in texts]
