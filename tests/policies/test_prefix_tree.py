"""Distinct prefixes of rows."""

from __future__ import annotations

import torch

from embodied_ppo.policies.prefix_tree import prefix_tree


def test_tree_by_hand() -> None:
    # Rows 0 and 2 begin with 5, 6; row 1 begins with 5. The last token of row 1 is not requested,
    # and its last requested one differs from those of the other rows.
    ids = torch.tensor([[5, 6, 7], [5, 8, 7], [5, 6, 9]])
    tree = prefix_tree(ids, torch.tensor([[1, 2], [0, 1], [1, 2]]))
    # In lexicographic order: 5 6 7 | . . 9 | . 8 starts the nodes 5, 6, 7, 9, 8.
    assert ids.flatten()[tree.token_index].tolist() == [5, 6, 7, 9, 8]
    assert tree.token_index.tolist() == [0, 1, 2, 8, 4]
    assert tree.position.tolist() == [0, 1, 2, 2, 1]
    node = tree.token_node.view(3, 3)
    assert node[0].tolist() == [0, 1, 2]
    assert node[1, :2].tolist() == [0, 4]
    assert node[2].tolist() == [0, 1, 3]
    assert tree.query[tree.query_index].view(3, 2).tolist() == [[1, 2], [0, 4], [1, 3]]
    # Nodes 0 .. 4 are requested first at these of the flattened places.
    assert tree.query.tolist() == [0, 1, 2, 3, 4]
    assert tree.query_token.tolist() == [2, 0, 1, 5, 3]


def test_nodes_are_the_distinct_prefixes() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, (40, 7), generator=generator)
    place = torch.randint(7, (40, 3), generator=generator)
    tree = prefix_tree(ids, place)
    last = place.amax(1).tolist()
    rows = [tuple(row[: n + 1]) for row, n in zip(ids.tolist(), last, strict=True)]
    prefixes = [row[: n + 1] for row in rows for n in range(len(row))]
    assert len(tree.token_index) == len(set(prefixes)) < len(prefixes)
    # Equal prefixes have one node, and different ones different nodes.
    nodes = [tree.token_node[7 * i + n].item() for i, r in enumerate(rows) for n in range(len(r))]
    assert len(set(zip(prefixes, nodes, strict=True))) == len(set(nodes)) == len(set(prefixes))
    assert torch.equal(tree.token_node[tree.token_index], torch.arange(len(tree.token_index)))
    assert torch.equal(
        tree.query[tree.query_index], tree.token_node.view(40, 7).gather(1, place).flatten()
    )
    assert torch.equal(tree.query_index[tree.query_token], torch.arange(len(tree.query)))
