"""Tokens that rows have in common, so that a forward pass computes each of them once.

The hidden state of a token depends on the tokens before it only. Rows with equal first tokens, such
as the responses to one prompt or prompts with one beginning, have equal hidden states there. The
distinct prefixes of all rows are the nodes of a tree.

B rows, L tokens of a row, R response tokens, U nodes, P nodes at which results are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Distinct prefixes of the rows of ids [B, L].

    Attributes:
        token: int64 [U], place of a token of each node in the flattened [B·L].
        position: int64 [U], place in its row.
        node: int64 [B·L], node of each token; arbitrary after the last requested place of a row.
        query: int64 [P], nodes at the requested places.
        query_token: int64 [P], place of each of them in the flattened [B·R].
        at: int64 [B·R], index in ``query`` of each requested place.
    """

    token: Tensor
    position: Tensor
    node: Tensor
    query: Tensor
    query_token: Tensor
    at: Tensor


def prefix_tree(ids: Tensor, place: Tensor) -> PrefixTree:
    """Return the tree of rows int64 [B, L] up to their last ``place`` int64 [B, R].

    Reads the rows on the host.
    """
    width = ids.shape[1]
    columns = torch.arange(width, device=ids.device)
    inside = columns <= place.amax(1, keepdim=True)  # [B, L]
    ids = torch.where(inside, ids, -1)
    rows = ids.tolist()
    order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=ids.device)
    # Rows with a common prefix are adjacent in this order. A token starts a node where its row
    # differs from the row before it up to this token.
    ordered = ids[order]
    starts = torch.ones_like(inside)
    starts[1:] = (ordered[1:] != ordered[:-1]).cumsum(1) > 0
    starts &= inside[order]
    number = starts.flatten().cumsum(0).view_as(starts) - 1
    # The newest node of each column so far; numbers grow with the rows.
    ordered_node = torch.where(starts, number, 0).cummax(0).values
    node = torch.empty_like(ids)
    node[order] = ordered_node
    position = columns.expand_as(starts)[starts]  # [U]
    token = (order.unsqueeze(1) * width).expand_as(starts)[starts] + position
    requested = node.gather(1, place).flatten()
    query, at = requested.unique(return_inverse=True)
    first = torch.full_like(query, len(at))
    query_token = first.scatter_reduce(0, at, torch.arange(len(at), device=ids.device), "amin")
    return PrefixTree(token, position, node.flatten(), query, query_token, at)
