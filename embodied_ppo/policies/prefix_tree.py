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
        token_index: int64 [U], index of a token of each node in the flattened [B·L].
        position: int64 [U], position of that token in its row.
        token_node: int64 [B·L], node of each token; arbitrary after the last requested position of
            a row.
        query: int64 [P], nodes at the requested positions.
        query_token: int64 [P], index of each of them in the flattened [B·R].
        query_index: int64 [B·R], index in ``query`` of each requested position.
    """

    token_index: Tensor
    position: Tensor
    token_node: Tensor
    query: Tensor
    query_token: Tensor
    query_index: Tensor


def prefix_tree(ids: Tensor, positions: Tensor) -> PrefixTree:
    """Return the tree of rows up to the last requested position of each. Reads them on the host.

    Args:
        ids: Rows of tokens, int64 [B, L].
        positions: Requested positions in each row, int64 [B, R].
    """
    width = ids.shape[1]
    columns = torch.arange(width, device=ids.device)
    inside = columns <= positions.amax(1, keepdim=True)  # [B, L]
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
    requested = node.gather(1, positions).flatten()
    query, at = requested.unique(return_inverse=True)
    first = torch.full_like(query, len(at))
    query_token = first.scatter_reduce(0, at, torch.arange(len(at), device=ids.device), "amin")
    return PrefixTree(token, position, node.flatten(), query, query_token, at)
