"""Training speed of the hierarchical model, of a Transformer with the same FLOPs, and of transformers' `hrm_text`.

A step is forward, backward, gradient clipping and AdamW on random tokens without padding. All contenders and a set of
plain matrix products take turns in every round, so that what else the machine does hits them alike. FLOPs are counted
by the rule of `hrmlm.evaluation.cost`, for `hrm_text` from the shapes of its own modules.

    PYTHONPATH=src python benchmarks/train_throughput.py --d-model 512 --length 256 --threads 2

Prints a card for people; the last line is JSON for programs. Without the library transformers, `hrm_text` is skipped.
"""

import json
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import hrmlm
from common import parser_of, told_in_one_line
from hrmlm.data.batch import Batch
from hrmlm.errors import UserError
from hrmlm.evaluation.cost import cost, cost_of
from hrmlm.evaluation.timing import Timing, interleaved
from hrmlm.models import build_model

PRODUCTS = "matrix products"


@dataclass(frozen=True)
class Options:
    """Settings of a run. gradient_window: None is the whole depth."""

    d_model: int
    length: int
    batch_size: int
    vocab_size: int
    cycles: int
    fast_steps: int
    gradient_window: int | None
    threads: int
    device: str
    precision: str
    iterations: int
    warmup: int
    seed: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.length

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(1, self.d_model // 64)


@dataclass(frozen=True)
class Contender:
    """Something to time. flops: of one call; tokens: None for what does not read any."""

    name: str
    step: Callable[[], object]
    flops: float
    tokens: int | None = None
    parameters: int | None = None
    applications: int | None = None


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark. Mistakes end it with one line and exit code 2."""
    options = parse(arguments)
    with told_in_one_line():
        report(options, *run(options))


def parse(arguments: list[str] | None) -> Options:
    """Options from the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--d-model", type=int, default=512, help="width of all models")
    add("--length", type=int, default=256, help="tokens per sequence")
    add("--batch-size", type=int, default=4, help="sequences per step")
    add("--vocab-size", type=int, default=8192)
    add("--cycles", type=int, default=2, help="N, cycles of the hierarchical models")
    add("--fast-steps", type=int, default=2, help="T, fast steps per cycle")
    add("--gradient-window", type=int, help="K, last fast steps inside the graph (default: all)")
    add("--threads", type=int, default=2)
    add("--device", default="cpu", help="cpu or cuda")
    add("--precision", choices=["float32", "bfloat16"], default="float32", help="bfloat16: by autocast")
    add("--iterations", type=int, default=12, help="rounds, the warm-up included")
    add("--warmup", type=int, default=2, help="first rounds, not counted")
    add("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args(arguments)))


def run(options: Options) -> tuple[list[Contender], dict[str, Timing]]:
    """Build the contenders and time them in interleaved rounds."""
    if not 0 <= options.warmup < options.iterations:
        raise UserError(f"{options.iterations} iterations with a warm-up of {options.warmup} leave nothing to measure")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    contenders = [products(options), house(options, hrm_settings(options)), house(options, same_flops(options))]
    if (other := hrm_text(options)) is not None:
        contenders.append(other)
    timings = interleaved(
        {contender.name: contender.step for contender in contenders},
        iterations=options.iterations,
        warmup=options.warmup,
        device=options.device,
    )
    return contenders, timings


def hrm_settings(options: Options) -> dict[str, Any]:
    """The hierarchical model."""
    return {
        "family": "hrm_lm",
        "vocab_size": options.vocab_size,
        "context": options.length,
        "d_model": options.d_model,
        "n_heads": options.heads,
        "n_cycles": options.cycles,
        "fast_steps": options.fast_steps,
        "gradient_window": options.gradient_window,
    }


def same_flops(options: Options) -> dict[str, Any]:
    """A Transformer of the same width and, by its number of layers and then its hidden size, as many training FLOPs."""
    target = cost_of(hrm_settings(options)).training_flops_per_token
    common = {key: hrm_settings(options)[key] for key in ("vocab_size", "context", "d_model", "n_heads")}

    def flops(n_layers: int, hidden: int) -> float:
        return cost_of(
            {**common, "family": "transformer", "n_layers": n_layers, "hidden": hidden}
        ).training_flops_per_token

    hidden = 4 * options.d_model
    per_layer = flops(2, hidden) - flops(1, hidden)
    n_layers = max(1, round((target - flops(1, hidden)) / per_layer) + 1)
    per_unit = (flops(n_layers, hidden) - flops(n_layers, hidden // 2)) / (hidden - hidden // 2)
    hidden += 8 * round((target - flops(n_layers, hidden)) / per_unit / 8)  # multiples of 8 suit the kernels
    return {**common, "family": "transformer", "n_layers": n_layers, "hidden": max(8, hidden)}


def house(options: Options, settings: dict[str, Any]) -> Contender:
    """A model of this library."""
    model = build_model(settings).to(options.device).train()
    inputs, targets = tokens(options)
    batch = Batch(inputs, targets)

    def losses() -> Any:
        for part in model.losses(batch):
            yield part.objective / batch.n_targets

    costs = cost(model, options.length)
    return Contender(
        settings["family"],
        training_step(options, model, losses),
        options.tokens * costs.training_flops_per_token,
        options.tokens,
        costs.parameters,
        costs.applications,
    )


def hrm_text(options: Options) -> Contender | None:
    """transformers' model of the same widths, cycles and steps, causal, one layer per stack; None if it is missing."""
    try:
        from transformers import HrmTextConfig, HrmTextForCausalLM
    except ImportError:
        print("hrm_text skipped: needs transformers >= 5.24 (pip install transformers)")
        return None
    in_graph = fast_steps_in_graph(options)
    config = HrmTextConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.d_model,
        intermediate_size=4 * options.d_model,
        num_hidden_layers=1,
        num_attention_heads=options.heads,
        head_dim=options.d_model // options.heads,
        max_position_embeddings=options.length,
        H_cycles=options.cycles,
        L_cycles=options.fast_steps,
        L_bp_cycles=in_graph,
        prefix_lm=False,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = HrmTextForCausalLM(config).to(options.device).train()
    inputs, targets = tokens(options)

    def losses() -> Any:
        logits = model(input_ids=inputs, use_cache=False).logits
        yield F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Contender(
        "hrm_text (transformers)",
        training_step(options, model, losses),
        options.tokens * hrm_text_flops(options, model, in_graph),
        options.tokens,
        sum(parameter.numel() for parameter in model.parameters()),
        options.cycles * (options.fast_steps + 1),
    )


def fast_steps_in_graph(options: Options) -> list[int]:
    """Fast steps inside the gradient window, per cycle: the last ones of each."""
    total = options.cycles * options.fast_steps
    before = total - (options.gradient_window or total)
    return [
        min(options.fast_steps, max(0, cycle * options.fast_steps - before)) for cycle in range(1, options.cycles + 1)
    ]


def hrm_text_flops(options: Options, model: Any, in_graph: list[int]) -> float:
    """Training FLOPs per token by the rule of `cost`. Its slow steps are always inside the graph."""

    def weights(module: nn.Module) -> int:
        return sum(part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))

    attention = 2 * 2.0 * options.d_model * (options.length + 1) / 2
    fast, slow = (2.0 * weights(stack) + attention for stack in (model.model.L_module, model.model.H_module))
    total_fast = options.cycles * options.fast_steps
    head = 2.0 * options.d_model * options.vocab_size
    return fast * (total_fast + 2 * sum(in_graph)) + 3 * slow * options.cycles + 3 * head


def products(options: Options) -> Contender:
    """Forward and backward products of the four matrices of a block, into memory that is there already."""
    D = options.d_model
    dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
    sets = []
    for n_in, n_out in ((D, 3 * D), (D, D), (D, 8 * D), (4 * D, D)):
        x, w, g = (
            torch.randn(shape, device=options.device, dtype=dtype)
            for shape in ((options.tokens, n_in), (n_out, n_in), (options.tokens, n_out))
        )
        sets.append((x, w, g, torch.empty_like(x), torch.empty_like(w), torch.empty_like(g)))
    repeats = 3  # long enough to time, shorter than the steps of the models

    def step() -> None:
        for _ in range(repeats):
            for x, w, g, grad_x, grad_w, y in sets:
                torch.mm(x, w.t(), out=y)
                torch.mm(g, w, out=grad_x)
                torch.mm(g.t(), x, out=grad_w)

    return Contender(PRODUCTS, step, repeats * 3 * 2.0 * options.tokens * 16 * D * D)


def tokens(options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and the tokens after them, (B, L) each; no padding."""
    generator = torch.Generator().manual_seed(options.seed)
    stream = torch.randint(options.vocab_size, (options.batch_size, options.length + 1), generator=generator)
    stream = stream.to(options.device)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def training_step(options: Options, model: nn.Module, losses: Callable[[], Any]) -> Callable[[], None]:
    """Forward and backward of each loss, then clipping and AdamW: the same for every model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        parts = iter(losses())
        while True:
            with autocast(options):
                loss = next(parts, None)
            if loss is None:
                break
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def autocast(options: Options) -> AbstractContextManager[Any]:
    """Of the precision asked for."""
    if options.precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(options.device).type, torch.bfloat16)


def report(options: Options, contenders: list[Contender], timings: dict[str, Timing]) -> None:
    """Print the card and the line of JSON."""
    reference = contenders[0]
    rows: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        timing = timings[contender.name]
        share = contender.flops / reference.flops / timing.ratio(timings[PRODUCTS])
        rows[contender.name] = {
            "tokens_per_second": contender.tokens / timing.median if contender.tokens else None,
            "flops_per_second": contender.flops / timing.median,
            "share_of_matrix_products": share,
            "milliseconds": 1000 * timing.median,
            "spread": timing.spread,
            "flops_per_step": contender.flops,
            "parameters": contender.parameters,
            "applications": contender.applications,
        }
    result = {"options": asdict(options), "machine": machine(options), "rows": rows, **ratios(contenders, timings)}
    card(options, result)
    print(json.dumps(result))


def ratios(contenders: list[Contender], timings: dict[str, Timing]) -> dict[str, float]:
    """FLOPs per second of the hierarchical model divided by those of each other model, within rounds."""
    first = contenders[1]
    return {
        f"{first.name} / {other.name}": first.flops / other.flops * timings[other.name].ratio(timings[first.name])
        for other in contenders[2:]
    }


def machine(options: Options) -> dict[str, str]:
    """What it ran on."""
    cuda = torch.device(options.device).type == "cuda"
    name = torch.cuda.get_device_name(options.device) if cuda else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "hrmlm": hrmlm.__version__}


def card(options: Options, result: dict[str, Any]) -> None:
    """The table for people."""
    console = Console()
    counted = options.iterations - options.warmup
    table = Table(title="Full training steps", title_justify="left")
    for column in ("", "tokens/s", "GFLOP/s", "of products", "ms/step", "spread", "GFLOP/step", "params"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in result["rows"].items():
        table.add_row(
            name,
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['flops_per_second'] / 1e9:,.1f}",
            f"{row['share_of_matrix_products']:.2f}",
            f"{row['milliseconds']:,.1f}",
            f"{row['spread']:.0%}",
            f"{row['flops_per_step'] / 1e9:,.1f}",
            f"{row['parameters'] / 1e6:,.1f} M" if row["parameters"] else "",
        )
    console.print(table)
    for key, value in result.items():
        if " / " in key:
            console.print(f"{key}: {value:.2f} times the FLOP/s")
    window = options.gradient_window or "all"
    console.print(
        f"D {options.d_model}, {options.batch_size} x {options.length} tokens, none of them padding; N x T = "
        f"{options.cycles} x {options.fast_steps}, window {window}; {options.precision}, {options.threads} threads, "
        f"{result['machine']['device']}, torch {torch.__version__}; medians of {counted} interleaved rounds after "
        f"{options.warmup} to warm up; spread = (slowest - fastest) / median."
    )


if __name__ == "__main__":
    main()
