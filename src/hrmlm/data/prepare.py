"""`hrmlm prepare`: text in, a directory of token ids out. See docs/prepare.md for the format and its guarantees."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hrmlm import __version__
from hrmlm.data.encode import SplitWriter, in_pieces
from hrmlm.data.formats import Part, ReadOptions
from hrmlm.data.meta import Meta, SplitMeta, SplitRule, TokenizerMeta, dtype_for
from hrmlm.data.progress import byte_bar
from hrmlm.data.scan import Scan, choose_valid, count_shared, scan
from hrmlm.data.sources import Source, open_source
from hrmlm.data.tokenizer import MAX_VOCAB, ByteTokenizer, Tokenizer
from hrmlm.errors import UserError
from hrmlm.files import atomic_directory, refuse_existing

_TRAINING_PIECE = 1 << 14  # the tokenizers library takes 256 texts at a time when it trains


def prepare(
    sources: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 8192,
    valid_fraction: float = 0.05,
    valid: Sequence[str] | None = None,
    test: Sequence[str] | None = None,
    field: str = "text",
    separator: str | None = None,
    seed: int = 0,
    shard_tokens: int | None = None,
    progress: bool = False,
) -> Meta:
    """Tokenize `sources` into the new directory `out` and return what its meta.json says.

    sources, valid, test: see `hrmlm.data.sources.ACCEPTED`. tokenizer: "bpe" trains one of `vocab_size` ids on the
    training split, "bytes" takes bytes as they are, anything else is the path of a tokenizer.json. valid_fraction: part
    of the bytes kept for validation where no `valid` is given. field: key or column of the text. separator: cuts text
    files into documents. seed: decides the split. shard_tokens: ids per file (None: one file per split).

    Memory: a few blocks of text and 24 bytes per document, whatever the size of the corpus.
    Raises: UserError for anything wrong with the input; then, as after a kill, `out` does not exist.
    """
    out = Path(out)
    refuse_existing(out)
    if not sources:
        raise UserError("no source given")
    if not 0 < valid_fraction < 1:
        raise UserError(f"valid fraction {valid_fraction} must lie between 0 and 1, both excluded")
    if separator == "":
        raise UserError("the separator is empty; leave it out to take each text file as one document")
    if shard_tokens is not None and shard_tokens < 1:
        raise UserError(f"{shard_tokens} tokens per file is too few; leave --shard-tokens out for one file per split")
    if tokenizer == "bpe" and vocab_size < 257:
        raise UserError(f"vocabulary size {vocab_size} is too small: 256 bytes and the end mark need at least 257")
    if tokenizer == "bpe" and vocab_size > MAX_VOCAB:
        raise UserError(f"vocabulary size {vocab_size} is too large: at most {MAX_VOCAB:,}")
    ready = None if tokenizer == "bpe" else _load_tokenizer(tokenizer)
    options = ReadOptions(field, separator)
    with atomic_directory(out) as partial:
        spool = partial / "spool"
        spool.mkdir()
        given = {"train": sources, "valid": valid or [], "test": test or []}
        opened = {name: [open_source(text, options, spool) for text in texts] for name, texts in given.items()}
        plan = _plan(opened, valid_fraction, seed, progress)
        used = ready or _train(plan, vocab_size, progress)
        splits = _encode(plan, used, partial, shard_tokens, progress)
        shutil.rmtree(spool)
        used.save(partial)
        warnings = [*_warnings(plan, splits), *([] if ready else _vocab_warning(used, vocab_size))]
        meta = Meta(
            hrmlm=__version__,
            dtype=dtype_for(used.vocab_size),
            vocab_size=used.vocab_size,
            end_of_text=used.end_of_text,
            tokenizer=_tokenizer_meta(used, trained=ready is None),
            field=field,
            separator=separator,
            sources=tuple(item for found in plan.scans.values() for item in found.sources),
            split_rule=plan.rule,
            splits=splits,
            warnings=tuple(warnings),
        ).sealed()
        meta.write(partial)
    return meta


@dataclass(frozen=True)
class _Plan:
    """What to read and where it goes. valid_N: documents of "train" that go to "valid" (None: files were given)."""

    sources: dict[str, list[Source]]
    scans: dict[str, Scan]
    valid_N: np.ndarray | None
    rule: SplitRule

    def documents(self) -> Iterator[tuple[str, Iterator[Part]]]:
        """Split and parts, for stretches of documents of the same split."""
        for name, sources in self.sources.items():
            parts = (part for source in sources for part in source.parts())
            if name == "train" and self.valid_N is not None:
                yield from ((("valid" if valid else "train"), document) for valid, document in self._divided(parts))
            else:
                yield name, parts

    def _divided(self, parts: Iterator[Part]) -> Iterator[tuple[bool, Iterator[Part]]]:
        assert self.valid_N is not None
        for valid in self.valid_N.tolist():
            yield valid, _one_document(parts)
        if next(parts, None) is not None:
            raise _changed()

    def expected(self) -> dict[str, tuple[int, int]]:
        """Documents and bytes of each split, by the first reading."""
        chosen = {name: np.ones(len(found.sizes_N), dtype=bool) for name, found in self.scans.items()}
        sizes = {name: found.sizes_N for name, found in self.scans.items()}
        if self.valid_N is not None:
            chosen |= {"train": ~self.valid_N, "valid": self.valid_N}
            sizes["valid"] = sizes["train"]
        return {
            name: (int(chosen[name].sum()), int(sizes[name][chosen[name]].sum()))
            for name in ("train", "valid", "test")
            if name in sizes
        }


def _one_document(parts: Iterator[Part]) -> Iterator[Part]:
    for text, last in parts:
        yield text, last
        if last:
            return
    raise _changed()


def _changed() -> UserError:
    return UserError("the sources changed while they were read; run the command again when nothing writes to them")


def _load_tokenizer(given: str) -> Tokenizer:
    if given == "bytes":
        return Tokenizer.bytes()
    if not Path(given).exists():
        raise UserError(f"tokenizer {given!r} is neither `bpe` nor `bytes` nor the path of a tokenizer.json")
    return Tokenizer.load(given)


def _plan(sources: dict[str, list[Source]], valid_fraction: float, seed: int, progress: bool) -> _Plan:
    """Read everything once and decide the splits."""
    divided = not sources["valid"]
    sources = {name: opened for name, opened in sources.items() if opened}
    with byte_bar("reading", None, progress) as advance:
        scans = {
            name: scan(opened, None if divided and name == "train" else name, seed, advance)
            for name, opened in sources.items()
        }
    for name, found in scans.items():
        if not len(found.sizes_N):
            raise UserError(f"the sources for {name} hold no text")
    if divided:
        rule = SplitRule(
            rule="distinct documents by hash, until the bytes suffice", valid_fraction=valid_fraction, seed=seed
        )
        return _Plan(sources, scans, choose_valid(scans["train"], valid_fraction), rule)
    return _Plan(sources, scans, None, SplitRule(rule="sources given for each split", valid_fraction=None, seed=None))


def _train(plan: _Plan, vocab_size: int, progress: bool) -> Tokenizer:
    """A tokenizer of the documents of the training split."""
    with byte_bar("training the tokenizer", plan.expected()["train"][1], progress) as advance:
        return Tokenizer.train(_training_texts(plan, advance), vocab_size)


def _training_texts(plan: _Plan, advance: Callable[[int], None]) -> Iterator[str]:
    for name, parts in plan.documents():
        for text, _ in in_pieces(parts, True, _TRAINING_PIECE):
            if name == "train" and text:
                advance(len(text))
                yield text


def _encode(
    plan: _Plan, tokenizer: Tokenizer, directory: Path, shard_tokens: int | None, progress: bool
) -> dict[str, SplitMeta]:
    """Write the .bin files of every split."""
    expected = plan.expected()
    with byte_bar("encoding", sum(size for _, size in expected.values()), progress) as advance, ExitStack() as stack:
        writers = {name: SplitWriter(directory, name, tokenizer, advance, shard_tokens) for name in expected}
        for writer in writers.values():
            stack.enter_context(writer)
        for name, parts in plan.documents():
            for text, last in in_pieces(parts, tokenizer.cuts_safely):
                writers[name].add(text, last)
    for name, writer in writers.items():
        if (writer.documents, writer.bytes) != expected[name]:
            raise _changed()
    return {name: writer.meta(_shared(plan, name)) for name, writer in writers.items()}


def _shared(plan: _Plan, name: str) -> int:
    """Documents of a given split that are in the training split too."""
    if name == "train" or name not in plan.scans:
        return 0
    train = plan.scans["train"]
    if plan.valid_N is not None:
        train = Scan(train.digests_N2[~plan.valid_N], train.sizes_N[~plan.valid_N], ())
    return count_shared(plan.scans[name], train)


def _warnings(plan: _Plan, splits: dict[str, SplitMeta]) -> list[str]:
    found = [
        f"{split.shared_with_train} of {split.documents} documents of {name} also stand in train"
        for name, split in splits.items()
        if split.shared_with_train
    ]
    fraction = plan.rule.valid_fraction
    if fraction is not None:
        actual = splits["valid"].bytes / (splits["valid"].bytes + splits["train"].bytes)
        if not fraction / 2 <= actual <= fraction * 2:
            found.append(f"valid holds {actual:.1%} of the bytes instead of {fraction:.1%}: documents are not divided")
    files = [path.resolve() for sources in plan.sources.values() for source in sources for path, _ in source.files]
    if len(set(files)) < len(files):
        found.append(f"{len(files) - len(set(files))} files are named more than once among the sources")
    return found


def _vocab_warning(tokenizer: Tokenizer, asked: int) -> list[str]:
    if tokenizer.vocab_size == asked:
        return []
    return [f"the training text gives only {tokenizer.vocab_size} ids instead of {asked}"]


def _tokenizer_meta(tokenizer: Tokenizer, trained: bool) -> TokenizerMeta:
    return TokenizerMeta(
        kind="bytes" if isinstance(tokenizer, ByteTokenizer) else "bpe",
        fingerprint=tokenizer.fingerprint,
        trained=trained,
        end_mark_added=tokenizer.end_mark_added,
    )
