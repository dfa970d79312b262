"""The key/value cache: preallocated, one slot per application of the schedule; policies let slots share their tensors.

Shapes: B rows, H key/value heads, P positions, L new positions, K head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hrmlm.errors import UserError
from hrmlm.models.cache_policy import FULL, CachePolicy


@dataclass(frozen=True)
class Placement:
    """Where the new tokens of a call stand: worked out once per call, used by all its applications.

    positions_BL: on the CPU; end: number of positions that any new token may see. index_L: where all rows write the
    same positions, these (on the device); otherwise rows_B1 and index_BL say who writes where.
    """

    positions_BL: Tensor
    end: int
    index_L: Tensor | None = None
    rows_B1: Tensor | None = None
    index_BL: Tensor | None = None

    @classmethod
    def of(cls, positions_BL: Tensor, device: torch.device | str, rows_B: Tensor | None = None) -> "Placement":
        """Of these positions; rows_B: which rows of the cache they belong to (None: all, in order)."""
        end = int(positions_BL[:, -1].max()) + 1
        if rows_B is None and bool((positions_BL[:, 0] == positions_BL[0, 0]).all()):
            return cls(positions_BL, end, index_L=positions_BL[0].to(device))
        rows_B = torch.arange(len(positions_BL)) if rows_B is None else rows_B
        return cls(positions_BL, end, rows_B1=rows_B[:, None].to(device), index_BL=positions_BL.to(device))


class KVCache:
    """Keys and values of every application for up to `max_length` positions of each row.

    Rows may hold different numbers of tokens. A row's tokens always stand at positions 0, 1, 2, … whatever its
    neighbours hold (right padding), so rows do not influence each other's positions. What lies behind a row's length is
    never read: attention lets a query see only positions up to its own.
    """

    def __init__(
        self,
        n_slots: int,
        batch_size: int,
        n_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        policy: CachePolicy = FULL,
        cycle_slots: tuple[int, int] | None = None,
    ) -> None:
        """policy: which slots keep their own keys and values; cycle_slots: see LanguageModel.cycle_slots."""
        self.policy = policy
        self.layout = policy.layout(n_slots, cycle_slots)

        # Zeros, not empty memory: a masked value is multiplied by weight 0, and 0 · NaN would be NaN. One tensor per
        # set: a compiled step that writes to a part of a larger tensor would copy all of it.
        def stored() -> list[Tensor]:
            shape = (batch_size, n_kv_heads, max_length, head_dim)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.layout.n_stored)]

        self.max_length = max_length
        self.keys: list[Tensor] = stored()
        self.values: list[Tensor] = stored()
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long)  # on the CPU: it steers Python code

    @property
    def n_slots(self) -> int:
        """Number of applications it has room for."""
        return len(self.layout.storage)

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def reserve(self, n_new: int) -> Tensor:
        """Positions (B, L) at which the next `n_new` tokens of each row will stand.

        Raises: UserError if they do not fit.
        """
        needed = int(self.lengths_B.max()) + n_new
        if needed > self.max_length:
            raise UserError(f"the cache has room for {self.max_length} positions and {needed} are needed")
        return self.lengths_B[:, None] + torch.arange(n_new)

    def append(self, slot: int, place: Placement, k_BHLK: Tensor, v_BHLK: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, or not, by the policy; return what the slot reads, up to the last new position,
        (B, H, P, K) each."""
        stored = self.layout.storage[slot]
        keys_BHPK, values_BHPK = self.keys[stored], self.values[stored]
        if self.layout.writes[slot]:  # else an earlier cycle of this call has stored what this one reads
            self._store(keys_BHPK, place, k_BHLK)
            self._store(values_BHPK, place, v_BHLK)
        if place.rows_B1 is not None and len(place.rows_B1) < len(keys_BHPK):  # some rows only
            rows_B = place.rows_B1[:, 0]
            return keys_BHPK[rows_B, :, : place.end], values_BHPK[rows_B, :, : place.end]
        return keys_BHPK[:, :, : place.end], values_BHPK[:, :, : place.end]

    @staticmethod
    def _store(stored_BHPK: Tensor, place: Placement, new_BHLK: Tensor) -> None:
        new_BHLK = new_BHLK.to(stored_BHPK.dtype)
        if place.index_L is not None:
            stored_BHPK.index_copy_(2, place.index_L, new_BHLK)
        else:
            assert place.rows_B1 is not None
            stored_BHPK[place.rows_B1, :, place.index_BL] = new_BHLK.transpose(1, 2)

    def carry(self, positions_BL: Tensor, first_slot: int, stride: int, steps_BL: Tensor) -> None:
        """Copy keys and values of each position's last executed step to the slots of the steps it did not execute.

        Step s (from 1) owns the slots first_slot + (s − 1)·stride to first_slot + s·stride − 1, up to the last slot.
        Only where every slot keeps its own: with other policies positions do not stop early.
        """
        if not self.policy.is_exact:
            return
        for row, (positions, steps) in enumerate(zip(positions_BL.tolist(), steps_BL.tolist(), strict=True)):
            for done in set(steps):
                stopped = [position for position, step in zip(positions, steps, strict=True) if step == done]
                places = stopped[0] if len(stopped) == 1 else stopped  # one position is a view, without index tensors
                source = first_slot + (done - 1) * stride
                for slot in range(source + stride, self.n_slots):
                    kept = source + (slot - source) % stride
                    for tensors in (self.keys, self.values):
                        tensors[slot][row, :, places] = tensors[kept][row, :, places]

    def crop(self, lengths_B: Tensor | int) -> None:
        """Forget what stands behind these lengths; rows that are shorter stay as they are.

        Raises: UserError for a length below 0.
        """
        lengths_B = torch.as_tensor(lengths_B, dtype=torch.long)
        if bool((lengths_B < 0).any()):
            raise UserError(f"a cache cannot be cropped to {int(lengths_B.min())} tokens; give a length from 0 on")
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)

    def select(self, rows: list[int] | Tensor) -> None:
        """Keep only these rows, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        on_device = rows.to(self.keys[0].device)
        for tensors in (self.keys, self.values):
            for stored, tensor in enumerate(tensors):  # one by one: never two copies of the whole cache
                tensors[stored] = tensor[on_device]
        self.lengths_B = self.lengths_B[rows]
