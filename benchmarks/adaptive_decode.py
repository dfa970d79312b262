"""Speed of decoding with learned depth: cached against recomputed, and time against the steps truly executed.

A model of a preset with random weights, packed for decoding, continues a random text of `--length` tokens. In every
round, in turn: one new token with the cache at each of several depths (forced, so that exactly these steps run), and
one new token by recomputing the whole context at depth 1. From the depths below the largest follow the time of what
runs once and of one outer step, by a straight line; it predicts the largest depth.

    PYTHONPATH=src python benchmarks/adaptive_decode.py --threads 1

Prints a card for people; the last line is JSON for programs.
"""

import copy
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import hrmlm
from common import parser_of, told_in_one_line
from hrmlm.errors import UserError
from hrmlm.evaluation.timing import Timing, interleaved
from hrmlm.inference.packing import packed
from hrmlm.models import LanguageModel

RECOMPUTED = "recomputed, 1 step"
TARGET_SHARE = 1 / 20
TARGET_LINEARITY = 1.15


@dataclass(frozen=True)
class Options:
    """Settings of a run."""

    preset: str
    length: int
    depths: list[int]
    threads: int
    device: str
    rounds: int
    warmup: int
    repeats: int
    seed: int


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark. Mistakes end it with one line and exit code 2."""
    with told_in_one_line():
        options = parse(arguments)
        timings = run(options)
        report(options, timings)


def parse(arguments: list[str] | None) -> Options:
    """Options from the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--preset", default="cosmicfish-82m", help="recipe of a model that learns its depth")
    add("--length", type=int, default=256, help="tokens of context, the new one included")
    add("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="steps truly executed per token")
    add("--threads", type=int, default=1)
    add("--device", default="cpu", help="cpu or cuda")
    add("--rounds", type=int, default=9, help="rounds, the warm-up included")
    add("--warmup", type=int, default=2, help="first rounds, not counted")
    add("--repeats", type=int, default=3, help="tokens decoded per measurement")
    add("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args(arguments)))


def run(options: Options) -> dict[str, Timing]:
    """Time everything in interleaved rounds; seconds per token."""
    if len(set(options.depths)) < 3 or min(options.depths) != 1:
        raise UserError("--depths needs 1 and at least two more: a line through fewer points predicts nothing")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = hrmlm.build(options.preset).to(options.device).eval()
    if not model.learns_depth:
        raise UserError(f"{options.preset} does not learn when to stop")
    tokens = torch.randint(model.config.n_predicted, (1, options.length), device=options.device)
    calls: dict[str, Callable[[], object]] = {
        f"cached, {depth} step{'s' * (depth > 1)}": decoder(model, tokens, depth, options.repeats)
        for depth in sorted(set(options.depths))
    }
    calls[RECOMPUTED] = partial(forward, copy.deepcopy(model), tokens)  # plain weights suit many rows
    with packed(model):
        timings = interleaved(calls, iterations=options.rounds, warmup=options.warmup, device=options.device)
    return {name: timing if name == RECOMPUTED else per(timing, options.repeats) for name, timing in timings.items()}


def decoder(model: LanguageModel, tokens: torch.Tensor, depth: int, repeats: int) -> Callable[[], object]:
    """A call that decodes the last token `repeats` times over, each time after the same cached context."""
    length = tokens.shape[1]
    cache = model.new_cache(1, length, depth=depth)
    with torch.no_grad():
        model(tokens[:, :-1], cache=cache, depth=depth, read_B=torch.tensor([length - 2]))

    @torch.no_grad()
    def decode() -> None:
        for _ in range(repeats):
            cache.crop(length - 1)
            output = model(tokens[:, -1:], cache=cache, depth=depth)
            assert output.steps_BL is not None
            assert int(output.steps_BL) == depth, "the steps that are timed are those that ran"

    return decode


@torch.no_grad()
def forward(model: LanguageModel, tokens: torch.Tensor) -> None:
    """One new token without a cache; the head reads the last position only."""
    model(tokens, depth=1, read_B=torch.tensor([tokens.shape[1] - 1]))


def per(timing: Timing, repeats: int) -> Timing:
    """Seconds of one of `repeats` tokens."""
    return Timing(tuple(seconds / repeats for seconds in timing.seconds))


def line(depths: list[int], seconds: list[float]) -> tuple[float, float]:
    """Seconds of what runs once per token, and of one outer step: least squares."""
    mean_depth, mean = statistics.mean(depths), statistics.mean(seconds)
    slope = sum((d - mean_depth) * (s - mean) for d, s in zip(depths, seconds, strict=True))
    slope /= sum((d - mean_depth) ** 2 for d in depths)
    return mean - slope * mean_depth, slope


def summary(options: Options, timings: dict[str, Timing]) -> dict[str, float]:
    """What the targets are about; ratios are medians over rounds, so that slow moments hit both sides alike."""
    depths = sorted(set(options.depths))
    cached = [timing for name, timing in timings.items() if name != RECOMPUTED]
    lines = [line(depths[:-1], [t.seconds[i] for t in cached[:-1]]) for i in range(len(cached[0].seconds))]
    most = depths[-1]
    ratios = [cached[-1].seconds[i] / (once + step * most) for i, (once, step) in enumerate(lines)]
    return {
        "cached_share_of_recomputed": cached[0].ratio(timings[RECOMPUTED]),
        "seconds_once": statistics.median(once for once, _ in lines),
        "seconds_per_step": statistics.median(step for _, step in lines),
        "most_steps_against_prediction": statistics.median(ratios),
    }


def report(options: Options, timings: dict[str, Timing]) -> None:
    """Print the card and the line of JSON."""
    rows = {name: {"milliseconds": 1000 * t.median, "spread": t.spread} for name, t in timings.items()}
    result = summary(options, timings)
    cuda = torch.device(options.device).type == "cuda"
    device = torch.cuda.get_device_name(options.device) if cuda else platform.processor() or platform.machine()
    console, table = Console(), Table(title=f"One token of {options.preset}", title_justify="left")
    for column in ("", "ms/token", "spread"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(name, f"{row['milliseconds']:,.1f}", f"{row['spread']:.0%}")
    console.print(table)
    share, linear = result["cached_share_of_recomputed"], result["most_steps_against_prediction"]
    console.print(f"cached / recomputed at 1 step: 1/{1 / share:.1f} (target: at most 1/{1 / TARGET_SHARE:.0f})")
    console.print(
        f"{1000 * result['seconds_once']:.1f} ms once per token and {1000 * result['seconds_per_step']:.1f} ms per "
        f"outer step predict {max(options.depths)} steps; measured / predicted: {linear:.2f} "
        f"(target: at most {TARGET_LINEARITY})"
    )
    counted = options.rounds - options.warmup
    console.print(
        f"context {options.length}, float32, random weights, {options.threads} threads, {device}, torch "
        f"{torch.__version__}; medians of {counted} interleaved rounds after {options.warmup} to warm up, "
        f"{options.repeats} tokens each; spread = (slowest - fastest) / median."
    )
    machine = {"device": device, "torch": torch.__version__, "hrmlm": hrmlm.__version__}
    print(json.dumps({"options": asdict(options), "machine": machine, "rows": rows, **result}))


if __name__ == "__main__":
    main()
