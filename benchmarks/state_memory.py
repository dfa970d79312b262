"""Memory of a process that generates without an end from a model that carries a state of constant size.

The text goes on from its state in calls of up to 500 tokens, and simply goes on where the model drew an end mark. At
each of `--marks` tokens: bytes of the state, and resident memory of the process.

    PYTHONPATH=src python benchmarks/state_memory.py runs/wikitext2-memory-hrm --marks 100 5000 10000 20000

Prints a table for people; the last line is JSON for programs.
"""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import hrmlm
from common import parser_of, told_in_one_line
from hrmlm.errors import UserError
from hrmlm.inference.packing import packed
from hrmlm.inference.rows import GenerationOptions
from hrmlm.inference.states import ContinuedText, TextState

STRETCH = 500


def main(arguments: list[str] | None = None) -> None:
    """Run the measurement. Mistakes end it with one line and exit code 2."""
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", help="checkpoint or run directory")
    parser.add_argument("--marks", type=int, nargs="+", default=[100, 1000, 5000, 20000], help="numbers of new tokens")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with told_in_one_line():
        rows = run(options.checkpoint, sorted(set(options.marks)), options.temperature, options.seed)
    table = Table(title=f"State and process, {options.checkpoint}", title_justify="left")
    for column in ("tokens", "state, bytes", "process, MiB", "tokens/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,.0f}",
            f"{row['state_bytes']:,.0f}",
            f"{row['resident_mib']:.1f}",
            f"{row['tokens_per_second']:.0f}",
        )
    Console().print(table)
    print(json.dumps({"options": vars(options), "rows": rows, "hrmlm": hrmlm.__version__}))


def run(checkpoint: str, marks: list[int], temperature: float, seed: int) -> list[dict[str, float]]:
    """One row per mark. Raises: UserError for marks below 1, or a model without a state of constant size."""
    if marks[0] < 1:
        raise UserError(f"--marks {marks[0]}: give numbers of tokens from 1 on")
    model, tokenizer = hrmlm.load(checkpoint), hrmlm.load_tokenizer(checkpoint)
    text = TextState.new(model)
    rows: list[dict[str, float]] = []
    done, start = 0, time.perf_counter()
    with packed(model):
        for mark in marks:
            while done < mark:
                wanted = min(STRETCH, mark - done)
                settings = GenerationOptions(temperature=temperature, seed=seed + done, max_new_tokens=wanted)
                for _ in ContinuedText(model, tokenizer, "", settings, text).run():
                    done += 1
            rate = done / (time.perf_counter() - start)
            state_bytes = sum(tensor.nbytes for tensor in text.state.tensors().values())
            rows.append(
                {
                    "tokens": done,
                    "state_bytes": state_bytes,
                    "resident_mib": resident_mib(),
                    "tokens_per_second": rate,
                }
            )
    return rows


def resident_mib() -> float:
    """Resident memory of this process (Linux)."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


if __name__ == "__main__":
    main()
