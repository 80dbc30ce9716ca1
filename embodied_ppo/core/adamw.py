"""AdamW without torch's compiler front end, whose import takes two seconds of CPU time."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Adam, Optimizer


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that does not import ``torch._dynamo``.

    Torch wraps these methods so that ``torch.compile`` does not trace them, and the first call of a
    wrapper imports the tracer. Nothing here is traced: compiled code has its own step.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(Adam.step))
