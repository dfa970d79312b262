"""Which cycles' keys and values a cache keeps: small named policies. Only `full` is exact; the others save memory.

Cycles of shared weights ask for the same kind of keys again and again, so some cycles can read those of others: with
fewer sets kept, the cache is smaller, and the model computes something else than it was trained for. What runs once per
token, before or after the cycles, keeps its keys and values in any case.

- `full`: every cycle its own.
- `first`: only those of the first cycle are stored; later cycles read them, their own position's included.
- `every:K`: cycles 0, K, 2K, … are stored (counted from 0); cycle i reads those of cycle K·⌊i/K⌋.
- `last`: one set for all cycles, which each overwrites: a position sees its own newest keys, and of earlier positions
  those of the last cycle that they ran.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hrmlm.config import nearest
from hrmlm.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Where each key/value slot of a schedule is kept: `storage` numbers the tensors that exist, `writes` says whether
    the slot stores its keys there or only reads what stands there."""

    storage: tuple[int, ...]
    writes: tuple[bool, ...]

    @property
    def n_stored(self) -> int:
        """Number of tensors of keys (and as many of values)."""
        return 1 + max(self.storage)


class CachePolicy(ABC):
    """Whose keys and values each cycle reads, and who stores them. Cycles are counted from 0, over all passes."""

    is_exact = False
    is_sequential = False
    """Whether tokens must be fed one at a time, as what a position reads depends on how far earlier ones have come."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As on the command line."""

    @abstractmethod
    def source(self, cycle: int) -> int:
        """The cycle whose storage this one reads."""

    def writes(self, cycle: int) -> bool:
        """Whether a cycle stores its own keys and values."""
        return self.source(cycle) == cycle

    def layout(self, n_slots: int, cycle_slots: tuple[int, int] | None) -> Layout:
        """The places of `n_slots` slots. cycle_slots: see LanguageModel.cycle_slots; what lies before runs once."""
        first, stride = cycle_slots or (n_slots, 1)
        numbers: dict[tuple[int, int], int] = {}
        storage, writes = [], []
        for slot in range(n_slots):
            cycle, offset = divmod(slot - first, stride)
            key = (-1, slot) if slot < first else (self.source(cycle), offset)
            storage.append(numbers.setdefault(key, len(numbers)))
            writes.append(slot < first or self.writes(cycle))
        return Layout(tuple(storage), tuple(writes))


class Full(CachePolicy):
    """Every cycle keeps its own keys and values: decoding is exact."""

    is_exact = True
    name = "full"

    def source(self, cycle: int) -> int:
        """See CachePolicy."""
        return cycle


class First(CachePolicy):
    """Only the first cycle stores keys and values; all read those."""

    name = "first"

    def source(self, cycle: int) -> int:
        """See CachePolicy."""
        return 0


class Last(CachePolicy):
    """One set, overwritten by every cycle: earlier positions show their last cycle."""

    is_sequential = True
    name = "last"

    def source(self, cycle: int) -> int:
        """See CachePolicy."""
        return 0

    def writes(self, cycle: int) -> bool:
        """See CachePolicy."""
        return True


@dataclass(frozen=True)
class Every(CachePolicy):
    """Cycles 0, k, 2k, … store keys and values; those in between read the newest that are stored."""

    k: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"every:{self.k}"

    def source(self, cycle: int) -> int:
        """See CachePolicy."""
        return cycle - cycle % self.k


FULL = Full()
POLICIES: dict[str, CachePolicy] = {policy.name: policy for policy in (FULL, First(), Last())}


def parse_cache_policy(text: str) -> CachePolicy:
    """The policy of a name such as "full", "first", "last" or "every:2". Raises: UserError."""
    if text in POLICIES:
        return POLICIES[text]
    name, colon, number = text.partition(":")
    if name != "every" or not colon:
        raise UserError(f"unknown cache policy {text!r}, {nearest(text, [*POLICIES, 'every:K'])}")
    if not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) < 10**8:
        raise UserError(f"cache policy {text!r}: K in every:K is a whole number of cycles from 1 on, such as every:2")
    return Every(int(number))
