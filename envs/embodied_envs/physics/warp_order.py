"""Contacts and constraint rows of mujoco_warp in an order that does not depend on a GPU's schedule.

On a GPU, threads place contacts and rows as they come, and sums follow these places. The bits
CONTACTS and CONSTRAINT of mujoco_warp's option ``deterministic`` have no effect yet (3.17), so that
the callbacks of this module sort both. Its bit ATOMICS sets the order of the other sums.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import mujoco
import torch
import warp as wp
from torch import Tensor

# Arrays with an entry for each row, in all models or with a dense or a sparse J.
ROWS = ("type", "id", "pos", "margin", "D", "vel", "aref", "frictionloss", "Jqvel", "J")
ROWS += ("J_rownnz", "J_rowadr")


def _tensors(arrays: Any) -> dict[str, Tensor]:
    """Return views of the arrays of a dataclass that are not empty."""
    named = ((field.name, getattr(arrays, field.name)) for field in fields(arrays))
    return {name: wp.to_torch(array) for name, array in named if array.size}


def _order(key: Tensor, count: Tensor) -> Tensor:
    """Return the order of the first ``count`` entries by their keys; the others stay behind."""
    place = torch.arange(key.shape[-1], device=key.device)
    return key.masked_fill(place >= count, torch.iinfo(key.dtype).max).argsort(stable=True)


def sort_contacts(m: Any, d: Any) -> None:
    """Sort contacts by world, geoms, and number of the contact of these geoms.

    This is the callback ``contactfilter``, after the contacts have been found.
    """
    contact = _tensors(d.contact)
    key = contact["worldid"].long()
    for x in (*contact["geom"].T, contact["geomcollisionid"]):
        key = key * max(m.ngeom, 1024) + x
    order = _order(key, wp.to_torch(d.nacon))
    for x in contact.values():
        x.copy_(x[order])


def sort_rows(m: Any, d: Any) -> None:
    """Sort the rows of each world by the kind of constraint and its index (of a contact: place).

    This is the callback ``control``, between the computation of the rows and the solver.
    """
    rows, address = _tensors(d.efc), wp.to_torch(d.contact.efc_address)
    key, index = rows["type"].long() << 8, rows["id"].long()
    if m.neq:  # mujoco_warp expects rows of kind connect before those of kind weld
        kind = wp.to_torch(m.eq_type).long()[index.clamp(0, m.neq - 1)]
        key += kind * (rows["type"] == int(mujoco.mjtConstraint.mjCNSTR_EQUALITY))
    # Rows of one constraint have equal keys, and follow each other already.
    order = _order((key << 32) + index, wp.to_torch(d.nefc)[:, None])
    place = order.argsort(1)
    n, njmax = order.shape
    world = torch.arange(n, device=order.device)[:, None]
    for name in rows.keys() & ROWS:
        if (x := rows[name]).shape[1] >= njmax:  # not a sparse J
            x[:, :njmax] = x[world, order]
    moved = place[wp.to_torch(d.contact.worldid).long()[:, None], address.long().clamp(min=0)]
    address.copy_(torch.where(address < 0, address, moved))
    if "jtdaj_adr" in rows:  # blocks of a sparse J: first row, and number of rows
        first = place.gather(1, rows["jtdaj_adr"].long().clamp(0, njmax - 1))
        blocks = _order(first, rows["jtdaj_nblock"][:, None])
        for name, x in (("jtdaj_adr", first), ("jtdaj_nrow", rows["jtdaj_nrow"])):
            rows[name].copy_(x.gather(1, blocks))
