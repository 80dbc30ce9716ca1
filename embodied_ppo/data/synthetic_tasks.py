"""Language tasks that need nothing from outside: generated problems, the demonstrator whose mistakes a policy begins
with, and a character tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from embodied_ppo.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

VOCABULARY = "_^$0123456789+-*=;#() ,."
"""Character i is token i; the first three are padding, beginning and end."""
PAD, BOS, EOS = 0, 1, 2
SPLIT_SEED = 20240117
"""Which problems are held out: the same for every run."""

Part: TypeAlias = Literal["train", "held_out"]
Forgets: TypeAlias = Callable[[], bool]
"""Asked before a step of addition: whether its carries are forgotten."""


# -------------------------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class Problem:
    """``operands`` are what ``prompt`` adds; ``answer`` is what a grader compares with."""

    prompt: str
    answer: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A family of problems.

    response_length  tokens of the longest right response, the end included
    forget           how often the demonstrator forgets, unless told otherwise
    train, held_out  how many problems
    draw             operands of ``train + held_out`` different problems, always the same
    write            the response to operands, of someone who forgets as told
    read             the answer in a response; None: there is none
    form             what a response looks like
    """

    name: str
    response_length: int
    forget: float
    train: int
    held_out: int
    draw: Callable[[int], list[tuple[int, ...]]]
    write: Callable[[tuple[int, ...], Forgets], str]
    read: Callable[[str], str | None]
    form: re.Pattern[str]

    def problems(self, part: Part) -> list[Problem]:
        """Those to train with, or those held out: disjoint, and the same whatever a run's seed is."""
        every = self.draw(self.train + self.held_out)
        operands = every[self.held_out :] if part == "train" else every[: self.held_out]
        return [Problem("+".join(f"{x:02d}" for x in o) + "=", self._answer(o), o) for o in operands]

    def respond(self, problem: Problem) -> str:
        """The right response, without the end."""
        return self.write(problem.operands, _never)

    def _answer(self, operands: tuple[int, ...]) -> str:
        answer = self.read(self.write(operands, _never))
        assert answer is not None
        return answer


def _never() -> bool:
    return False


def _sum(a: int, b: int, *, forget: bool) -> int:
    """a + b, or with every carry forgotten: each digit's sum modulo 10."""
    return sum((a // p + b // p) % 10 * p for p in (1, 10, 100)) if forget else a + b


def _pairs(count: int) -> list[tuple[int, ...]]:
    pairs: list[tuple[int, ...]] = [(a, b) for a in range(100) for b in range(100)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs[:count]


def _twos_and_threes(count: int) -> list[tuple[int, ...]]:
    """About a third of them twos: there are only 8,100."""
    rng = random.Random(SPLIT_SEED)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(rng.randrange(10, 100) for _ in range(rng.choice((2, 3))))] = None
    operands = list(found)
    rng.shuffle(operands)  # the last ones drawn have fewer twos
    return operands


def _three_digits(operands: tuple[int, ...], forgets: Forgets) -> str:
    a, b = operands
    return f"{_sum(a, b, forget=forgets()):03d}"[::-1]


def _running_sums(operands: tuple[int, ...], forgets: Forgets) -> str:
    total, sums = operands[0], []
    for x in operands[1:]:
        total = _sum(total, x, forget=forgets())
        sums.append(str(total)[::-1])
    return f"{';'.join(sums)}#{total}"


def _after_mark(response: str) -> str | None:
    _, mark, answer = response.rpartition("#")
    return answer if mark else None


_TASKS = (
    # 57+68=  ->  521: the sum as three digits, the least significant first. All 10,000 problems.
    Task("arithmetic", 4, 0.7, 9_000, 1_000, _pairs, _three_digits, str, re.compile("[0-9]{3}")),
    # 57+68+90=  ->  521;512#215: sums so far, the least significant digit first, then the last one as people write it.
    Task(
        "scratchpad", 12, 0.6, 20_000, 1_000, _twos_and_threes, _running_sums, _after_mark, re.compile("[^#]*#[0-9]+")
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}


def grade(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """A grader (see ``grading``) of both tasks: 1 if the response's answer is the true one, character by character.

    arithmetic: the response is the answer; scratchpad: what stands after the last ``#``. Raises ValueError for another
    ``data_source``.
    """
    if data_source not in TASKS:
        raise ValueError(f"data_source = {data_source!r} is none of {', '.join(TASKS)}")
    task = TASKS[data_source]
    answer = task.read(solution_str)
    right = answer == ground_truth
    return {"score": float(right), "acc": right, "pred": answer, "format": bool(task.form.fullmatch(solution_str))}


@dataclass(frozen=True)
class TaskGrader:
    """``grade`` for the task of this name, whatever the data source is called; worker processes can unpickle it."""

    task: str

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> dict[str, Any]:
        return grade(self.task, solution_str, ground_truth, extra_info)


# ------------------------------------------------------------------------------------------------------ demonstrations
def demonstrations(
    task: Task, problems: Sequence[Problem], count: int, *, seed: int, forget: float | None = None
) -> list[tuple[str, str]]:
    """(prompt, response without the end) of ``count`` problems, drawn with replacement.

    Carries are forgotten with probability ``forget`` (None: the task's): in arithmetic all of a problem's, in
    scratchpad all of one sum's, independently.
    """
    chance = task.forget if forget is None else forget
    rng = random.Random(seed)
    return [(p.prompt, task.write(p.operands, lambda: rng.random() < chance)) for p in rng.choices(problems, k=count)]


def preferences(task: Task, problems: Sequence[Problem], count: int, *, seed: int) -> list[tuple[str, str, str]]:
    """(prompt, right response, wrong response) of ``count`` problems, drawn with replacement.

    Of the wrong ones 1 in 10 is unfinished; half of the others forget carries, where there are any, and the rest have
    another digit somewhere in their answer.
    """
    rng = random.Random(seed)
    return [(p.prompt, task.respond(p), _wrong(task, p, task.respond(p), rng)) for p in rng.choices(problems, k=count)]


def _wrong(task: Task, problem: Problem, right: str, rng: random.Random) -> str:
    if rng.random() < 0.1:
        return right[: rng.randrange(1, len(right))]
    if rng.random() < 0.5:
        forgetful = task.write(problem.operands, lambda: rng.random() < task.forget)
        if forgetful != right:
            return forgetful
    at = rng.randrange(len(right) - len(problem.answer), len(right))  # the answer is the last of a response
    return right[:at] + rng.choice([c for c in "0123456789" if c != right[at]]) + right[at + 1 :]


# -------------------------------------------------------------------------------------------------------------- tokens
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of VOCABULARY; adds none by itself. It refuses any other character (an Exception)."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"mode=reasoning needs transformers ({error}): pip install 'embodied-ppo[language]'"
        ) from error
    words: Any = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    pad, bos, eos = VOCABULARY[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


def encode(texts: Sequence[str], tok: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """The tokens of each text and no others. Raises ConfigError where ``tok``, of characters, lacks one."""
    different = list(dict.fromkeys(texts))
    if lacking := sorted(set("".join(different)) - set(tok.get_vocab())):
        raise ConfigError(f"the tokenizer has no token for {', '.join(map(repr, lacking))}")
    rows: Any = tok(different, add_special_tokens=False)["input_ids"]
    ids = dict(zip(different, map(tuple, rows), strict=True))
    return [ids[text] for text in texts]
